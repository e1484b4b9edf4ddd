"""Who takes part in ``parity bench decode``. Each runs in a process of its own, and imports there what it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import SearchResult
from transformer_parity.bench import DTYPE, SEED, DecodeWork
from transformer_parity.decoding import Decoded
from transformer_parity.ports import PORTS, MissingFrameworkError
from transformer_parity.race import Contestant


@dataclass
class Package:
    """One of our four packages, searching the way its users do."""

    name: str
    has_result: ClassVar[bool] = True

    def check_installed(self) -> None:
        """Raise MissingFrameworkError unless the framework can be found."""
        PORTS[self.name].check_installed()

    def prepare(self) -> dict[str, str]:
        """Import the package and its framework."""
        self.package = PORTS[self.name].import_package()
        return self.package.describe()

    def load(self, work: DecodeWork, weights: Path) -> None:
        """Load the model."""
        model = self.package.load_transformer(weights, DTYPE)
        self._search = partial(work.search.search, self.package, model, work.source_ids)

    def run(self) -> SearchResult:
        """Search."""
        return self._search()

    def result(self, found: SearchResult) -> SearchResult:
        """Return what was found."""
        return found

    def show(self) -> Decoded:
        """Search again, and keep every step."""
        return Decoded.by(self._search)


@dataclass
class Products:
    """The matrix products of the search through NumPy, and nothing else: what ``reference_numpy`` cannot beat."""

    name: str = "products"
    has_result: ClassVar[bool] = False

    def check_installed(self) -> None:
        """NumPy is."""

    def prepare(self) -> dict[str, str]:
        """Return NumPy's version and its matrix library."""
        return ref.describe()

    def load(self, work: DecodeWork, weights: Path) -> None:
        """Lay out operands of random numbers: what is of one name, such as a growing cache, in one place."""
        products, rng = list(work.products()), np.random.default_rng(SEED)
        sizes: dict[str, tuple[int, ...]] = {}
        for product in products:
            sizes[product.operand] = tuple(map(max, product.right, sizes.get(product.operand, product.right)))
        right: dict[str, ndarray] = {}
        for name, (*outer, inner, columns) in sizes.items():
            if name.endswith((".key", ".table")):  # which the reference takes transposed
                right[name] = rng.standard_normal((*outer, columns, inner), DTYPE).mT
            else:
                right[name] = rng.standard_normal((*outer, inner, columns), DTYPE)
        left = {shape: rng.standard_normal(shape, DTYPE) for shape in {product.left for product in products}}
        self._pairs = [
            (left[product.left], right[product.operand][..., : product.right[-2], : product.right[-1]])
            for product in products
        ]

    def run(self) -> None:
        """Take all products."""
        for left, right in self._pairs:
            left @ right

    def result(self, found: None) -> None:
        """Return nothing: there is no result."""

    def show(self) -> Decoded:
        """There is nothing to show."""
        raise NotImplementedError("only matrix products")


@dataclass
class Marian:
    """Hugging Face's MarianMTModel in PyTorch, generating the way its users do."""

    name: str = "marian"
    has_result: ClassVar[bool] = True

    def check_installed(self) -> None:
        """Raise MissingFrameworkError unless transformers and torch can be found."""
        for module in ("torch", "transformers"):
            if importlib.util.find_spec(module) is None:
                raise MissingFrameworkError(
                    f"--peers needs {module}, which is not installed: pip install {module}, or leave out --peers"
                )

    def prepare(self) -> dict[str, str]:
        """Import transformers."""
        import torch
        import transformers

        return {
            "version": f"{transformers.__version__}, torch {torch.__version__}",
            "device": "cpu",
            "threads": str(torch.get_num_threads()),
        }

    def load(self, work: DecodeWork, weights: Path) -> None:
        """Build the model, and say what is to be generated."""
        import torch
        from transformers import GenerationConfig

        config, arrays = ref.load_weights(weights)
        settings = GenerationConfig(
            max_new_tokens=work.tokens,
            num_beams=work.beam_size or 1,
            length_penalty=work.search.length_penalty,
            early_stopping="never" if work.beam_size else False,  # that is: as early as is exact, as ours do
            decoder_start_token_id=config.bos_id,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            return_dict_in_generate=True,
            output_scores=work.beam_size is not None,  # with them come the scores of hypotheses
        )
        self._search = partial(
            marian_model(config, arrays).generate,
            input_ids=torch.from_numpy(work.source_ids),
            attention_mask=torch.from_numpy((work.source_ids != config.pad_id).astype(np.int64)),
            generation_config=settings,
        )
        self._scores: dict[bytes, ndarray] = {}  # of greedy search, by its tokens

    def run(self) -> Any:
        """Generate."""
        return self._search()

    def result(self, found: Any) -> SearchResult:
        """Return tokens and scores. Greedy search returns none: the same tokens are generated again, with logits."""
        ids = found.sequences[:, 1:]  # without the start symbol
        if found.get("sequences_scores") is not None:
            return SearchResult(ids[:, None].numpy(), found.sequences_scores[:, None].numpy())
        key = ids.numpy().tobytes()
        if key not in self._scores:
            again = self._search(output_logits=True)
            if not again.sequences[:, 1:].equal(ids):
                raise RuntimeError("it generates something else the second time")
            steps = zip(again.logits, ids.T, strict=True)
            chosen = [logits.log_softmax(-1).gather(1, tokens[:, None]) for logits, tokens in steps]  # [B, 1] each
            self._scores[key] = sum(chosen).numpy()
        return SearchResult(ids[:, None].numpy(), self._scores[key])

    def show(self) -> Decoded:
        """Its steps are its own affair."""
        raise NotImplementedError("MarianMTModel does not show its beams, so what differs cannot be judged")


HUGGING_FACE_NAMES = {
    "self_attention.": "self_attn.",
    "cross_attention.": "encoder_attn.",
    "self_attention_norm.": "self_attn_layer_norm.",
    "cross_attention_norm.": "encoder_attn_layer_norm.",
    "feed_forward_norm.": "final_layer_norm.",
    "feed_forward.inner_proj.": "fc1.",
    "feed_forward.output_proj.": "fc2.",
    "query_proj.": "q_proj.",
    "key_proj.": "k_proj.",
    "value_proj.": "v_proj.",
    "output_proj.": "out_proj.",
    "scale": "weight",
    "kernel": "weight",
}


def marian_model(config: TransformerConfig, weights: Mapping[str, ndarray]) -> Any:
    """Return Hugging Face's model with the weights of a ``marian`` preset; it has its own table of positions."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    model = MarianMTModel(
        MarianConfig(
            vocab_size=config.target_vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_position_embeddings=config.max_length,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            decoder_start_token_id=config.bos_id,
            forced_eos_token_id=None,  # by default, it ends at the maximum length whatever the model says
            scale_embedding=True,
            activation_function="swish",
        )
    ).eval()
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    state = {f"{table}.weight": weights["source_embedding.table"] for table in tables}
    state["final_logits_bias"] = weights["output_proj.bias"][None]
    for name, array in weights.items():
        if ".layers." in name:
            theirs = name
            for old, new in HUGGING_FACE_NAMES.items():
                theirs = theirs.replace(old, new)
            state[f"model.{theirs}"] = array.T if name.endswith("kernel") else array
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in state.items()}, strict=False
    )
    if unexpected or not all(name.endswith("embed_positions.weight") for name in missing):
        raise RuntimeError(f"this release of transformers has other weights: {[*missing, *unexpected][:3]}")
    return model


DECODERS: dict[str, Contestant] = {name: Package(name) for name in PORTS}
DECODE_PEERS: dict[str, Contestant] = {contestant.name: contestant for contestant in (Marian(), Products())}
