"""A model based on ``torch.nn.Transformer`` with tied embeddings. It runs eagerly or via ``torch.compile``."""

# ruff: noqa: D102  methods are documented in Peer

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from reference_numpy.masks import target_padding_mask
from transformer_bench.peers.conventions import Peer
from transformer_spec.search import SearchResult
from transformer_spec.training_config import TrainingConfig

LAYER_NAMES = {
    "self_attention_norm.": "norm1.",
    "cross_attention_norm.": "norm2.",
    "feed_forward.inner_proj.": "linear1.",
    "feed_forward.output_proj.": "linear2.",
    "scale": "weight",
    "kernel": "weight",
}
LAST_NORM = {"encoder": "norm2.", "decoder": "norm3."}


class TorchPeer(Peer):
    """A base class for PyTorch models. ``_build`` sets ``_model`` and, for training, ``_optimizer``."""

    _model: Any
    _optimizer: Any

    def forward(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        import torch

        self._model.train(False)
        with torch.inference_mode():
            return self._logits(source_ids, target_ids)

    def _logits(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        raise NotImplementedError

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Any:
        raise NotImplementedError

    def _train(self, rate: float, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._model.train()
        loss = self._loss(source_ids, target_ids, labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


@dataclass
class TorchNN(TorchPeer):
    """A model based on ``torch.nn.TransformerEncoderLayer`` and ``torch.nn.TransformerDecoderLayer``."""

    compiled: bool
    modules: ClassVar[tuple[str, ...]] = ("torch",)

    @property
    def name(self) -> str:  # type: ignore[override]
        return "torch.nn compiled" if self.compiled else "torch.nn"

    def prepare(self) -> dict[str, str]:
        import torch

        return {"version": torch.__version__, "device": "cpu", "threads": str(torch.get_num_threads())}

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        import torch

        self._model = model = _translator(config).to(getattr(torch, dtype))
        model.load_state_dict({name: torch.tensor(array) for name, array in torch_state(weights).items()})

        def loss_of(labels, *inputs):
            return torch.nn.functional.cross_entropy(
                model(*inputs).flatten(0, 1),
                labels.flatten(),
                ignore_index=config.pad_id,
                label_smoothing=config.label_smoothing,
            )

        self._compute, self._loss_of = model, loss_of
        if self.compiled:  # also compile the loss, because its input, the logits, is large
            self._compute, self._loss_of = torch.compile(model), torch.compile(loss_of)
        if training is not None:
            self._optimizer = adam(model.parameters(), training)

    def _logits(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        return self._compute(*self._inputs(source_ids, target_ids))

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Any:
        import torch

        return self._loss_of(torch.from_numpy(labels), *self._inputs(source_ids, target_ids))

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        raise NotImplementedError("torch.nn.Transformer has no cache")

    def _inputs(self, source_ids, target_ids):
        """Return the source and target IDs and their padding masks, in which True marks positions to ignore."""
        import torch

        is_padding = source_ids == self._config.pad_id, ~target_padding_mask(target_ids, self._config.pad_id)
        return tuple(map(torch.from_numpy, (source_ids, target_ids, *is_padding)))


def adam(parameters: Iterable[Any], training: TrainingConfig) -> Any:
    """Return an Adam optimizer that has already allocated its moments.

    By default, ``torch.optim.Adam`` allocates the moments during the first step. This function allocates them before
    the first step, as the other implementations do, so that the measured increases in memory are comparable.
    """
    import torch

    betas = training.beta1, training.beta2
    optimizer = torch.optim.Adam(parameters, betas=betas, eps=training.epsilon, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


def torch_state(weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    """Return the state dict of ``_translator``'s model. Kernels are [out, in], and query, key, and value are fused."""
    state = {
        "embedding.weight": weights["source_embedding.table"],
        "output.weight": weights["source_embedding.table"],
        "output.bias": weights["output_proj.bias"],
    }
    for name, array in weights.items():
        stack = name.partition(".")[0]
        if ".layers." not in name:
            continue
        if "_attention." not in name:
            theirs = name.replace("feed_forward_norm.", LAST_NORM[stack])
            for old, new in LAYER_NAMES.items():
                theirs = theirs.replace(old, new)
            state[f"transformer.{theirs}"] = array.T
        elif ".query_proj." in name:
            ours, kind = name.split(".query_proj.")
            block = "self_attn" if ours.endswith("self_attention") else "multihead_attn"
            theirs = f"transformer.{ours.rpartition('.')[0]}.{block}"
            parts = [weights[f"{ours}.{part}_proj.{kind}"].T for part in ("query", "key", "value")]
            kind_of_theirs = "weight" if kind == "kernel" else "bias"
            state[f"{theirs}.in_proj_{kind_of_theirs}"] = np.concatenate(parts)
            state[f"{theirs}.out_proj.{kind_of_theirs}"] = weights[f"{ours}.output_proj.{kind}"].T
    return state


def _translator(config):
    """Return the model with random weights."""
    import torch
    from torch import nn

    class TorchTranslator(nn.Module):
        """``nn.Transformer`` without final norms. Its inputs and output share one embedding matrix."""

        def __init__(self):
            super().__init__()
            sizes = (config.d_model, config.num_heads)
            layer = {
                "dim_feedforward": config.d_ff,
                "dropout": config.dropout.residual,
                "activation": nn.functional.silu,
                "layer_norm_eps": config.layer_norm_epsilon,
                "batch_first": True,
            }
            self.transformer = nn.Transformer(
                *sizes,
                batch_first=True,
                custom_encoder=nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(*sizes, **layer),
                    config.num_encoder_layers,
                    enable_nested_tensor=False,  # nested tensors require a different activation
                ),
                custom_decoder=nn.TransformerDecoder(
                    nn.TransformerDecoderLayer(*sizes, **layer), config.num_decoder_layers
                ),
            )
            for module in self.transformer.modules():  # the layers use one rate for all dropout sites
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
                elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                    module.dropout.p = 0.0
            self.embedding = nn.Embedding(config.target_vocab_size, config.d_model)
            self.output = nn.Linear(config.d_model, config.target_vocab_size)
            self.output.weight = self.embedding.weight
            self.dropout = nn.Dropout(config.dropout.embedding)
            positions = sinusoidal_encoding(config.max_length, config.d_model, config.position_layout)
            self.positions = nn.Buffer(torch.tensor(positions), persistent=False)
            future = nn.Transformer.generate_square_subsequent_mask(config.max_length)
            self.future = nn.Buffer(future.isinf(), persistent=False)  # True marks positions to ignore

        def embed(self, ids):
            x = self.embedding(ids) * config.d_model**0.5 + self.positions[: ids.shape[1]]
            return self.dropout(x)

        def forward(self, source, target, is_source_padding, is_target_padding):
            length = target.shape[1]
            states = self.transformer(
                self.embed(source),
                self.embed(target),
                tgt_mask=self.future[:length, :length],
                src_key_padding_mask=is_source_padding,
                tgt_key_padding_mask=is_target_padding,
                memory_key_padding_mask=is_source_padding,
                tgt_is_causal=True,
            )
            return self.output(states)

    return TorchTranslator()
