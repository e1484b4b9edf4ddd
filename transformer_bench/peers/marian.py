"""Hugging Face's MarianMTModel in PyTorch, called the way its users call it."""

# ruff: noqa: D102  methods are documented in Peer

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy import ndarray

from reference_numpy.masks import target_padding_mask
from transformer_bench.peers.torch_nn import TorchPeer, adam
from transformer_spec.config import TransformerConfig
from transformer_spec.search import SearchResult, search_result
from transformer_spec.training_config import TrainingConfig

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


@dataclass
class Marian(TorchPeer):
    """Hugging Face's MarianMTModel."""

    name: str = "marian"
    modules: ClassVar[tuple[str, ...]] = ("torch", "transformers")

    def prepare(self) -> dict[str, str]:
        import torch
        import transformers

        return {
            "version": f"{transformers.__version__}, torch {torch.__version__}",
            "device": "cpu",
            "threads": str(torch.get_num_threads()),
        }

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        import torch

        if config.dropout.embedding != config.dropout.residual:
            raise ValueError(f"embeddings and residuals must have the same dropout rate: got {config.dropout}")
        self._model = marian_model(config, weights, dtype)
        if training is not None:
            bias = self._model.final_logits_bias
            del self._model.final_logits_bias  # Marian doesn't train this bias, but other implementations do
            self._model.final_logits_bias = torch.nn.Parameter(bias)
            self._optimizer = adam([x for x in self._model.parameters() if x.requires_grad], training)

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(
            self._logits(source_ids, target_ids).flatten(0, 1),
            torch.from_numpy(labels).flatten(),
            ignore_index=self._config.pad_id,
            label_smoothing=self._config.label_smoothing,
        )

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        # The scores are computed from the logits that are returned with the tokens.
        import torch
        from transformers import GenerationConfig

        config = self._config
        self._model.train(False)
        found = self._model.generate(
            input_ids=torch.from_numpy(source_ids),
            attention_mask=torch.from_numpy(source_ids != config.pad_id).long(),
            generation_config=GenerationConfig(
                max_new_tokens=tokens,
                decoder_start_token_id=config.bos_id,
                pad_token_id=config.pad_id,
                eos_token_id=config.eos_id,
                bad_words_ids=[[config.pad_id]],  # same setting as in the published checkpoints
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
        ids = found.sequences[:, 1:]  # excludes BOS
        steps = zip(found.logits, ids.T, strict=True)
        chosen = torch.stack([logits.log_softmax(-1).gather(1, said[:, None])[:, 0] for logits, said in steps], 1)
        scores = torch.where(ids == config.pad_id, 0.0, chosen).sum(1, keepdim=True)
        return search_result(ids[:, None].numpy(), scores.numpy(), config.pad_id)

    def _logits(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        import torch

        pad_id = self._config.pad_id
        return self._model(
            input_ids=torch.from_numpy(source_ids),
            attention_mask=torch.from_numpy(source_ids != pad_id),
            decoder_input_ids=torch.from_numpy(target_ids),
            decoder_attention_mask=torch.from_numpy(target_padding_mask(target_ids, pad_id)),
            use_cache=False,
        ).logits


def marian_model(config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str = "float32") -> Any:
    """Return Hugging Face's model with the given weights. The model computes the positional encodings itself."""
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
            forced_eos_token_id=None,  # the default would force EOS at the maximum length
            scale_embedding=True,
            activation_function="swish",
            dropout=config.dropout.residual,
            attention_dropout=0.0,
            activation_dropout=0.0,
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
    missing, unexpected = model.to(getattr(torch, dtype)).load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in state.items()}, strict=False
    )
    if unexpected or not all(name.endswith("embed_positions.weight") for name in missing):
        raise RuntimeError(
            f"this release of transformers has missing or unexpected weights: {[*missing, *unexpected][:3]}"
        )
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # the padding token is also BOS, so its embedding must be trained
    return model
