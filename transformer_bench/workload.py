"""The work of ``parity bench``: the model, the sentences, and the matrix products that it comes down to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.matrix_products import Product
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.inputs import padded_ids
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

SIZES: dict[str, dict[str, int]] = {
    name: {
        **dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary),
        "d_model": d_model,
        "num_heads": heads,
        "d_ff": d_ff,
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), layers),
    }
    for name, (d_model, layers, heads, d_ff, vocabulary) in {
        "tiny": (128, 2, 4, 512, 1_000),
        "small": (256, 3, 8, 1024, 8_000),
        "base": (512, 6, 8, 2048, 37_000),  # the paper's, and
        "big": (1024, 6, 16, 4096, 37_000),
    }.items()
}
SEED: Final = 2017
NEVER = -1e4  # a bias that no other logit makes up for


@dataclass(frozen=True)
class Work:
    """A batch of sentences for a model of a certain size.

    The conventions are those of ``marian``, so that other implementations can do exactly the same work.

    Attributes:
        size: One of ``SIZES``.
        batch: How many sentences, B.
        source: The tokens of the longest source sentence, S; others are padded.
        target: The tokens of the longest target sentence, T.
        layers: How many layers encoder and decoder have each; None is as many as the size says.
        vocabulary: The tokens of source and target language, V; None is as many as the size says.
        dtype: The dtype of parameters and computation.
        device: ``cpu`` or ``gpu``.
    """

    task: ClassVar[str]
    what: ClassVar[str]  # is agreed on
    size: str = "small"
    batch: int = 8
    source: int = 64
    target: int = 64
    layers: int | None = None
    vocabulary: int | None = None
    dtype: str = "float32"
    device: str = "cpu"

    @cached_property
    def config(self) -> TransformerConfig:
        """The model."""
        sizes = dict(SIZES[self.size])
        if self.layers is not None:
            sizes |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), self.layers)
        if self.vocabulary is not None:
            sizes |= dict.fromkeys(("source_vocab_size", "target_vocab_size"), self.vocabulary)
        longest = max(512, self.source, self.target)
        return TransformerConfig.preset("marian", **sizes, max_length=longest, dropout=self.dropout_rates)

    @property
    def weights_dtype(self) -> str:
        """The dtype of parameters."""
        return self.dtype

    @property
    def agreement(self) -> str:
        """What it means that a result agrees."""
        return "agree with the float64 reference"

    @property
    def dropout_rates(self) -> DropoutRates:
        """What is dropped in training."""
        return DropoutRates()

    @cached_property
    def source_ids(self) -> ndarray:
        """The source sentences [B, S], of S down to S / 2 tokens."""
        return self._sentences(SEED, self.config.source_vocab_size, self.source)

    @cached_property
    def target_ids(self) -> ndarray:
        """What the decoder reads [B, T]: the start symbol, and T - 1 down to T / 2 tokens."""
        ids = self._sentences(SEED + 1, self.config.target_vocab_size, self.target)
        ids[:, 0] = self.config.bos_id
        return ids

    def _sentences(self, seed: int, vocabulary: int, longest: int) -> ndarray:
        lengths = np.linspace(longest, -(-longest // 2), self.batch).round().astype(int).tolist()
        return padded_ids(np.random.default_rng(seed), vocabulary, self.config.pad_id, lengths, longest)

    def weights(self) -> dict[str, ndarray]:
        """Return random weights with which every parameter matters: scales of random sign, and biases.

        Freshly initialised, a model whose embeddings are tied repeats what it has just read: scales of random sign
        make it move on.
        """
        rng = np.random.default_rng(SEED)
        weights = ref.init_weights(self.config, SEED)
        for name, array in weights.items():
            if name.endswith(".scale"):
                weights[name] = array * rng.choice(np.array([-1.0, 1.0], np.float32), array.shape)
            elif name.endswith(".bias"):
                weights[name] = rng.normal(0.0, 0.1, array.shape).astype(np.float32)
            elif name.endswith("_attention.output_proj.kernel"):
                weights[name] = array / 2.0  # or all sentences would repeat what they attend to
        return weights

    def products(self) -> Iterator[Product]:
        """Yield every matrix product, in order, as ``reference_numpy`` takes them."""
        yield from self.encoder_products()
        config, positions = self.config, self.batch * self.target
        for i, layer in enumerate(f"decoder.layers.{i}" for i in range(config.num_decoder_layers)):
            if config.has_self_attention(i):
                yield from self._project(positions, f"{layer}.self_attention", "query", "key", "value", "output")
                yield from self._attend(self.batch, self.target, self.target, f"{layer}.self_attention")
            yield from self._project(positions, f"{layer}.cross_attention", "query", "output")
            yield from self._project(self.batch * self.source, f"{layer}.cross_attention", "key", "value")
            yield from self._attend(self.batch, self.target, self.source, f"{layer}.cross_attention")
            yield from self._feed_forward(positions, layer)
        yield self._logits(positions)

    def encoder_products(self) -> Iterator[Product]:
        """Yield the products of the encoder."""
        words = self.batch * self.source
        for layer in (f"encoder.layers.{i}" for i in range(self.config.num_encoder_layers)):
            yield from self._project(words, f"{layer}.self_attention", "query", "key", "value", "output")
            yield from self._attend(self.batch, self.source, self.source, f"{layer}.self_attention")
            yield from self._feed_forward(words, layer)

    def _project(self, positions: int, block: str, *names: str) -> Iterator[Product]:
        for name in names:
            kernel = f"{block}.{name}_proj.kernel"
            d_in, d_out = self._shapes[kernel]
            yield Product((positions, d_in), (d_in, d_out), kernel)

    def _attend(self, rows: int, queries: int, length: int, block: str) -> Iterator[Product]:
        sizes = self.config.in_decoder if block.startswith("decoder.") else self.config
        of = (rows, sizes.num_heads)
        yield Product((*of, queries, sizes.d_k), (*of, sizes.d_k, length), f"{block}.key", "right")
        yield Product((*of, queries, length), (*of, length, sizes.d_v), f"{block}.value")

    def _feed_forward(self, positions: int, layer: str) -> Iterator[Product]:
        yield from self._project(positions, f"{layer}.feed_forward", "inner", "output")

    def _logits(self, positions: int) -> Product:
        config = self.config
        shape = (config.d_model, config.target_vocab_size)
        return Product((positions, config.d_model), shape, "target_embedding.table", "right")

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return ref.parameter_shapes(self.config)

    @cached_property
    def operations(self) -> int:
        """The additions and multiplications of all matrix products; the rest is not counted."""
        return sum(product.operations for product in self.products())

    @property
    def produced(self) -> int:
        """How many target positions are computed, padding included."""
        return self.batch * self.target

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        raise NotImplementedError

    @property
    def details(self) -> str:
        """The sizes behind the title."""
        config = self.config
        place = "" if self.device == "cpu" else f" on a {self.device}"
        return (
            f"d_model {config.d_model}, {config.num_encoder_layers}+{config.num_decoder_layers} layers, "
            f"{config.num_heads} heads, d_ff {config.d_ff}, vocabulary {config.target_vocab_size:,}, "
            f"{self.dtype}{place}"
        )


@dataclass(frozen=True)
class ForwardWork(Work):
    """Logits of every target position, in inference mode."""

    task = "forward"
    what = "Logits"

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        return f"forward, {self.size}: {self.batch} sentences, {self.source} source and {self.target} target positions"


@dataclass(frozen=True)
class TrainWork(Work):
    """Steps of Adam on one batch: forward, backward and update.

    Without dropout by default: then every step's loss is the reference's. With it, every package drops other elements,
    and only the size of a loss can be verified.

    Attributes:
        dtype: That of the computation; the weights are in float32 also where it is bfloat16.
        dropout: The rate at the paper's two sites, embeddings and residuals.
        activation_checkpointing: Compute layers again in the backward pass, to save memory; ours only.
    """

    task = "train"
    what = "Losses"
    dropout: float = 0.0
    activation_checkpointing: bool = False

    @property
    def weights_dtype(self) -> str:
        """The dtype of parameters."""
        return "float32"

    @property
    def agreement(self) -> str:
        """What it means that a result agrees."""
        if self.dropout:
            return (
                f"are within {POLICY['bench']['loss_with_dropout']:.0%} of the reference's, which drops other elements"
            )
        return super().agreement

    @property
    def dropout_rates(self) -> DropoutRates:
        """What is dropped in training."""
        return DropoutRates(embedding=self.dropout, residual=self.dropout)

    @cached_property
    def labels(self) -> ndarray:
        """The labels [B, T]: the decoder's input, one position on, and the end symbol."""
        ids, config = self.target_ids, self.config
        labels = np.full_like(ids, config.pad_id)
        for row, length in enumerate((ids[:, 1:] != config.pad_id).sum(1)):
            labels[row, :length] = ids[row, 1 : length + 1]
            labels[row, length] = config.eos_id
        return labels

    @property
    def settings(self) -> TrainingConfig:
        """How to train: so fast that a wrong gradient or update shows in the next loss."""
        return TrainingConfig(
            learning_rate_factor=0.01,
            warmup_steps=1,
            mixed_bfloat16=self.dtype == "bfloat16",
            activation_checkpointing=self.activation_checkpointing,
        )

    def products(self) -> Iterator[Product]:
        """Yield every matrix product, forward and then backward."""
        forward = list(super().products())
        yield from forward
        for product in reversed(forward):
            yield from product.backward()

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        return (
            f"train step, {self.size}: {self.batch} sentences, {self.source} source and {self.target} target positions"
        )

    @property
    def details(self) -> str:
        """The sizes behind the title."""
        how = f"dropout {self.dropout:g}" if self.dropout else "no dropout"
        return f"{super().details}; {how}" + (", activation checkpointing" if self.activation_checkpointing else "")


@dataclass(frozen=True)
class DecodeWork(Work):
    """Sentences to translate, each into the same number of tokens: ``target`` of them.

    Attributes:
        beam_size: How many hypotheses are kept, K; None is greedy search.
    """

    task = "decode"
    what = "Tokens and scores"
    source: int = 32
    beam_size: int | None = None

    @cached_property
    def search(self) -> Search:
        """How to search. The length penalty is Hugging Face's; at equal lengths it changes no ranking."""
        return Search(self.beam_size, max_length=self.target, length_penalty_kind="power")

    def weights(self) -> dict[str, ndarray]:
        """Return random weights with which sentences vary, and go on until they are cut off.

        Neither the end symbol nor padding can be generated, so no search has to exclude them.
        """
        weights = super().weights()
        weights["output_proj.bias"][[self.config.pad_id, self.config.eos_id]] = NEVER
        return weights

    def products(self) -> Iterator[Product]:
        """Yield every matrix product of the search with a cache."""
        config, beam = self.config, self.beam_size or 1
        rows = self.batch * beam
        layers = [f"decoder.layers.{i}" for i in range(config.num_decoder_layers)]
        yield from self.encoder_products()
        for layer in layers:
            yield from self._project(self.batch * self.source, f"{layer}.cross_attention", "key", "value")
        for length in range(1, self.target + 1):
            for i, layer in enumerate(layers):
                if config.has_self_attention(i):
                    yield from self._project(rows, f"{layer}.self_attention", "query", "key", "value", "output")
                    yield from self._attend(rows, 1, length, f"{layer}.self_attention")
                yield from self._project(rows, f"{layer}.cross_attention", "query", "output")
                yield from self._attend(self.batch, beam, self.source, f"{layer}.cross_attention")
                yield from self._feed_forward(rows, layer)
            yield self._logits(rows)

    @property
    def title(self) -> str:
        """What is done, in a few words."""
        how = "greedy search" if self.beam_size is None else f"beam search with {self.beam_size} hypotheses"
        return f"decode, {self.size}: {how}, {self.target} tokens for each of {self.batch} sentences"

    @property
    def details(self) -> str:
        """The sizes behind the title."""
        return f"{super().details}; sources of up to {self.source} tokens"
