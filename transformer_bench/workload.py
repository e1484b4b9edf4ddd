"""The workloads of ``parity bench``: the model, the sentences, and the matrix multiplications."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.matmuls import Matmul
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
        "base": (512, 6, 8, 2048, 37_000),  # the paper's base model
        "big": (1024, 6, 16, 4096, 37_000),  # the paper's big model
    }.items()
}
SEED: Final = 2017
NEVER = -1e4  # a bias that prevents a token from being generated


@dataclass(frozen=True)
class Work:
    """A batch of sentences for a model of a given size.

    The model uses the conventions of the ``marian`` preset, so that peers can run exactly the same workload.

    Attributes:
        size: One of ``SIZES``.
        batch: The number of sentences, B.
        source: The length of the longest source sentence in tokens, S. Shorter sentences are padded.
        target: The length of the longest target sentence in tokens, T.
        layers: The number of layers in each stack (encoder and decoder); None to use the default for ``size``.
        vocabulary: The size of the source and target vocabularies, V; None to use the default for ``size``.
        dtype: The dtype of parameters and computation.
        device: ``cpu`` or ``gpu``.
    """

    task: ClassVar[str]
    what: ClassVar[str]  # name of the verified values in the output, such as "Losses"
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
        """The config of the model."""
        sizes = dict(SIZES[self.size])
        if self.layers is not None:
            sizes |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), self.layers)
        if self.vocabulary is not None:
            sizes |= dict.fromkeys(("source_vocab_size", "target_vocab_size"), self.vocabulary)
        longest = max(512, self.source, self.target)
        return TransformerConfig.preset("marian", **sizes, max_length=longest, dropout=self.dropout_rates)

    @property
    def weights_dtype(self) -> str:
        """The dtype of the parameters."""
        return self.dtype

    @property
    def agreement(self) -> str:
        """The criterion for agreement, as a verb phrase that completes a sentence about the results."""
        return "agree with the float64 reference"

    @property
    def dropout_rates(self) -> DropoutRates:
        """The dropout rates in training."""
        return DropoutRates()

    @cached_property
    def source_ids(self) -> ndarray:
        """The source sentences [B, S], with lengths between S / 2 and S."""
        return self._sentences(SEED, self.config.source_vocab_size, self.source)

    @cached_property
    def target_ids(self) -> ndarray:
        """The decoder input [B, T]: BOS followed by target tokens. Including BOS, each row has T / 2 to T tokens."""
        ids = self._sentences(SEED + 1, self.config.target_vocab_size, self.target)
        ids[:, 0] = self.config.bos_id
        return ids

    def _sentences(self, seed: int, vocabulary: int, longest: int) -> ndarray:
        lengths = np.linspace(longest, -(-longest // 2), self.batch).round().astype(int).tolist()
        return padded_ids(np.random.default_rng(seed), vocabulary, self.config.pad_id, lengths, longest)

    def weights(self) -> dict[str, ndarray]:
        """Return random weights. Biases and the signs of scales are random, too, so that every parameter has an effect.

        With the scales of ``init_weights``, a model with tied embeddings would repeat its last input token. Scales with
        random signs prevent such repetitions.
        """
        rng = np.random.default_rng(SEED)
        weights = ref.init_weights(self.config, SEED)
        for name, array in weights.items():
            if name.endswith(".scale"):
                weights[name] = array * rng.choice(np.array([-1.0, 1.0], np.float32), array.shape)
            elif name.endswith(".bias"):
                weights[name] = rng.normal(0.0, 0.1, array.shape).astype(np.float32)
            elif name.endswith("_attention.output_proj.kernel"):
                # With larger weights, every output would only repeat the tokens that it attends to.
                weights[name] = array / 2.0
        return weights

    def matmuls(self) -> Iterator[Matmul]:
        """Yield all matmuls in the order in which ``reference_numpy`` runs them."""
        yield from self.encoder_matmuls()
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

    def encoder_matmuls(self) -> Iterator[Matmul]:
        """Yield the matmuls of the encoder."""
        words = self.batch * self.source
        for layer in (f"encoder.layers.{i}" for i in range(self.config.num_encoder_layers)):
            yield from self._project(words, f"{layer}.self_attention", "query", "key", "value", "output")
            yield from self._attend(self.batch, self.source, self.source, f"{layer}.self_attention")
            yield from self._feed_forward(words, layer)

    def _project(self, positions: int, block: str, *names: str) -> Iterator[Matmul]:
        for name in names:
            kernel = f"{block}.{name}_proj.kernel"
            d_in, d_out = self._shapes[kernel]
            yield Matmul((positions, d_in), (d_in, d_out), kernel)

    def _attend(self, rows: int, queries: int, length: int, block: str) -> Iterator[Matmul]:
        sizes = self.config.in_decoder if block.startswith("decoder.") else self.config
        of = (rows, sizes.num_heads)
        yield Matmul((*of, queries, sizes.d_k), (*of, sizes.d_k, length), f"{block}.key", "right")
        yield Matmul((*of, queries, length), (*of, length, sizes.d_v), f"{block}.value")

    def _feed_forward(self, positions: int, layer: str) -> Iterator[Matmul]:
        yield from self._project(positions, f"{layer}.feed_forward", "inner", "output")

    def _logits(self, positions: int) -> Matmul:
        config = self.config
        shape = (config.d_model, config.target_vocab_size)
        return Matmul((positions, config.d_model), shape, "target_embedding.table", "right")

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return ref.parameter_shapes(self.config)

    @cached_property
    def operations(self) -> int:
        """The number of additions and multiplications in all matmuls. Other operations are ignored."""
        return sum(matmul.operations for matmul in self.matmuls())

    @property
    def produced(self) -> int:
        """The number of target positions, including padding."""
        return self.batch * self.target

    @property
    def title(self) -> str:
        """A short description of the workload."""
        raise NotImplementedError

    @property
    def details(self) -> str:
        """The model sizes, and other settings that are missing from the title."""
        config = self.config
        place = "" if self.device == "cpu" else f" on a {self.device}"
        return (
            f"d_model {config.d_model}, {config.num_encoder_layers}+{config.num_decoder_layers} layers, "
            f"{config.num_heads} heads, d_ff {config.d_ff}, vocabulary {config.target_vocab_size:,}, "
            f"{self.dtype}{place}"
        )


@dataclass(frozen=True)
class ForwardWork(Work):
    """Compute the logits of all target positions in inference mode."""

    task = "forward"
    what = "Logits"

    @property
    def title(self) -> str:
        """A short description of the workload."""
        return f"forward, {self.size}: {self.batch} sentences, {self.source} source and {self.target} target positions"


@dataclass(frozen=True)
class TrainWork(Work):
    """Run training steps on one batch: forward pass, backward pass, and Adam update.

    Without dropout, the loss of every step is compared with the reference. With dropout, every implementation drops
    different elements, so only the magnitude of the loss is verified.

    Attributes:
        dtype: The dtype of the computation. The weights are always float32.
        dropout: The dropout rate for embeddings and for sublayer outputs before the residual connection. The paper
            applies dropout only there.
        activation_checkpointing: Whether to recompute activations in the backward pass. Peers don't support this
            option.
    """

    task = "train"
    what = "Losses"
    dropout: float = 0.0
    activation_checkpointing: bool = False

    @property
    def weights_dtype(self) -> str:
        """The dtype of the parameters."""
        return "float32"

    @property
    def agreement(self) -> str:
        """The criterion for agreement, as a verb phrase that completes a sentence about the results."""
        if self.dropout:
            return (
                f"are within {POLICY['bench']['loss_with_dropout']:.0%} of the reference, which drops different "
                "elements"
            )
        return super().agreement

    @property
    def dropout_rates(self) -> DropoutRates:
        """The dropout rates in training."""
        return DropoutRates(embedding=self.dropout, residual=self.dropout)

    @cached_property
    def labels(self) -> ndarray:
        """The labels [B, T]: the decoder input shifted by one position, followed by EOS."""
        ids, config = self.target_ids, self.config
        labels = np.full_like(ids, config.pad_id)
        for row, length in enumerate((ids[:, 1:] != config.pad_id).sum(1)):
            labels[row, :length] = ids[row, 1 : length + 1]
            labels[row, length] = config.eos_id
        return labels

    @property
    def settings(self) -> TrainingConfig:
        """The training settings. The learning rate is so high that an incorrect update noticeably changes the loss."""
        return TrainingConfig(
            learning_rate_factor=0.01,
            warmup_steps=1,
            mixed_bfloat16=self.dtype == "bfloat16",
            activation_checkpointing=self.activation_checkpointing,
        )

    def matmuls(self) -> Iterator[Matmul]:
        """Yield all matmuls of the forward pass, followed by all matmuls of the backward pass."""
        forward = list(super().matmuls())
        yield from forward
        for matmul in reversed(forward):
            yield from matmul.backward()

    @property
    def title(self) -> str:
        """A short description of the workload."""
        return (
            f"train step, {self.size}: {self.batch} sentences, {self.source} source and {self.target} target positions"
        )

    @property
    def details(self) -> str:
        """The model sizes, and other settings that are missing from the title."""
        how = f"dropout {self.dropout:g}" if self.dropout else "no dropout"
        return f"{super().details}; {how}" + (", activation checkpointing" if self.activation_checkpointing else "")


@dataclass(frozen=True)
class DecodeWork(Work):
    """Translate sentences, generating exactly ``target`` tokens for each of them.

    Attributes:
        beam_size: The number of beams, K; None for greedy search.
    """

    task = "decode"
    what = "Tokens and scores"
    source: int = 32
    beam_size: int | None = None

    @cached_property
    def search(self) -> Search:
        """The search settings. The length penalty has no effect, because all hypotheses have the same length."""
        return Search(self.beam_size, max_length=self.target, length_penalty_kind="power")

    def weights(self) -> dict[str, ndarray]:
        """Return random weights for which translations differ from each other and have the maximum length.

        The model never generates EOS or padding, so searches don't have to exclude them.
        """
        weights = super().weights()
        weights["output_proj.bias"][[self.config.pad_id, self.config.eos_id]] = NEVER
        return weights

    def matmuls(self) -> Iterator[Matmul]:
        """Yield all matmuls of a search with a cache."""
        config, beam = self.config, self.beam_size or 1
        rows = self.batch * beam
        layers = [f"decoder.layers.{i}" for i in range(config.num_decoder_layers)]
        yield from self.encoder_matmuls()
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
        """A short description of the workload."""
        how = "greedy search" if self.beam_size is None else f"beam search with {self.beam_size} beams"
        return f"decode, {self.size}: {how}, {self.target} tokens for each of {self.batch} sentences"

    @property
    def details(self) -> str:
        """The model sizes, and other settings that are missing from the title."""
        return f"{super().details}; sources of up to {self.source} tokens"
