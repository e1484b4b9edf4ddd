"""The standard cases: individual components, the stacks, the full model, all edge cases, and all presets.

All axes of a tensor have different sizes, so that swapped axes cause errors: B 4, S 9, T 7, H 3, d_k 8, d_v 10,
d_model 24, d_ff 40.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from reference_numpy.masks import causal_mask
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.transformer.cases.case import GRADIENTS, STEPS, Case, preset_config, tiny
from transformer_parity.transformer.cases.inputs import (
    BATCH,
    SOURCE,
    TARGET,
    generator,
    model_batches,
    normal_floats,
    padding_mask,
    token_ids,
    with_labels,
)
from transformer_parity.transformer.cases.searches import OTHER_DECODER, standard_searches
from transformer_parity.transformer.ports.package import ATTENTION, CROSS_ENTROPY
from transformer_spec.config import DropoutRates, TransformerConfig
from transformer_spec.presets import IMPLEMENTATIONS, PRESETS
from transformer_spec.training_config import TrainingConfig

EVERYWHERE = DropoutRates(embedding=0.1, attention=0.1, residual=0.1, feed_forward=0.1)  # must not affect any results
LONG = 5001  # number of positions; at the last positions, float32 angles are wrong in the fourth digit
QUERIES = 300  # number of queries per head; all packages process fewer queries at a time
FAR = 140  # largest distance of a query and a key, which is larger than the distances that T5 distinguishes
CHANNELS = 260  # number of channels per head in an attention case; larger than the query blocks of all packages
VOCABULARY = 33_000  # vocabulary size; the highest token IDs exceed the range of int16


def standard_cases() -> list[Case]:
    """Return all cases, starting with individual components. Cases with the same config are adjacent."""
    return [*_components(), *_full_models(), *map(preset_case, PRESETS), *_gradients(), *_steps(), *standard_searches()]


def preset_case(preset: str, *, thorough: bool = False) -> Case:
    """Return a case that runs a small version of a preset's model. ``thorough`` adds all dtypes and the fast path."""
    config = preset_config(preset)
    dtypes = ALL_DTYPES if thorough else ("float64", "float32")
    return Case(f"preset/{preset}", "presets", config, "", token_ids(config), fast=thorough, dtypes=dtypes)


def _components() -> Iterator[Case]:
    config = tiny(attention_bias=True, final_norm=True, layer_norm_epsilon=1e-5, dropout=EVERYWHERE)
    heads, d_model = config.num_heads, config.d_model
    x, memory = normal_floats("x", BATCH, TARGET, d_model), normal_floats("memory", BATCH, SOURCE, d_model)
    source_mask = padding_mask(SOURCE, 9, 5, 1, 8)[:, None, None, :]
    target_mask = causal_mask(TARGET) & padding_mask(TARGET, 7, 4, 1, 7)[:, None, None, :]
    holes = generator("holes").random((BATCH, heads, TARGET, SOURCE)) < 0.6
    holes[1, :, 3] = False  # this query may not attend to any key

    qkv = {
        "query": normal_floats("query", BATCH, heads, TARGET, config.d_k),
        "key": normal_floats("key", BATCH, heads, SOURCE, config.d_k),
        "value": normal_floats("value", BATCH, heads, SOURCE, config.d_v),
    }
    square = {"query": qkv["query"], "key": qkv["query"][::-1].copy(), "value": qkv["value"][:, :, :TARGET]}
    for name, inputs in {
        "no_mask": qkv,
        "padding": {**qkv, "mask": source_mask},
        "causal": {**square, "mask": target_mask},
        "fully_masked_row": {**qkv, "mask": holes},
        "nothing_allowed": {**qkv, "mask": np.zeros((1, 1, TARGET, SOURCE), bool)},
        "one_key": {**qkv, "key": qkv["key"][:, :, :1], "value": qkv["value"][:, :, :1]},
        "sharp": {**qkv, "query": 30.0 * qkv["query"]},
    }.items():
        yield Case(f"attention/{name}", "attention", config, ATTENTION, inputs)
    yield from _many_queries(config)
    yield _loss()

    for name, block, inputs in (
        ("self", "encoder.layers.0.self_attention", {"query": x, "memory": x}),
        ("cross", "decoder.layers.0.cross_attention", {"query": x, "memory": memory, "mask": source_mask}),
        ("fully_masked_row", "decoder.layers.1.cross_attention", {"query": x, "memory": memory, "mask": holes}),
    ):
        yield Case(f"multi_head_attention/{name}", "multi-head attention", config, block, inputs)

    yield Case("feed_forward/relu", "feed-forward", config, "encoder.layers.1.feed_forward", {"x": x})
    rows = x * np.array([3e-3, 1.0, 1.0, 1e3])[:, None, None] + np.array([0.0, 0.0, 1e3, 0.0])[:, None, None]
    rows[0, 0] = 0.25  # a constant row
    yield Case("layer_norm/standard", "layer norm", config, "encoder.layers.1.self_attention_norm", {"x": rows})
    yield Case("embedding/tokens", "embedding", config, "source_embedding", {"ids": token_ids(config)["source_ids"]})
    yield Case("embedding/positions", "embedding", config, "source_position", {"x": x})
    long = np.zeros((1, LONG, d_model))
    yield Case("embedding/long_positions", "embedding", config, "source_position", {"x": long})

    yield Case("encoder_layer/post", "encoder layer", config, "encoder.layers.1", {"x": memory, "mask": source_mask})
    masks = {"self_mask": target_mask, "cross_mask": source_mask}
    inputs = {"x": x, "memory": memory, **masks}
    yield Case("decoder_layer/post", "decoder layer", config, "decoder.layers.0", inputs)
    yield Case("encoder/final_norm", "encoder", config, "encoder", {"x": memory, "mask": source_mask})
    yield Case("decoder/final_norm", "decoder", config, "decoder", inputs)
    ids = token_ids(config)
    yield Case("encoder/encode", "encoder", config, "encode", {"source_ids": ids["source_ids"]})
    yield Case("decoder/decode", "decoder", config, "decode", {**ids, "memory": memory})
    once: dict[str, Any] = {"fast": False, "dtypes": ("float64", "float32")}  # the cases above cover the fast path
    yield Case("encoder/alone", "encoder", config, "Encoder", {"source_ids": ids["source_ids"]}, **once)
    given = {"target_ids": ids["target_ids"], "memory": memory, "source_mask": source_mask[:, 0, 0]}
    yield Case("decoder/alone", "decoder", config, "Decoder", given, **once)

    pre = tiny(norm_order="pre", layer_norm_kind="annotated", activation="gelu", position_layout="split")
    yield Case("encoder_layer/pre", "encoder layer", pre, "encoder.layers.0", {"x": memory, "mask": source_mask})
    yield Case("decoder_layer/pre", "decoder layer", pre, "decoder.layers.1", inputs)
    yield Case("feed_forward/gelu", "feed-forward", pre, "encoder.layers.1.feed_forward", {"x": x})
    yield Case("layer_norm/annotated", "layer norm", pre, "encoder.layers.1.self_attention_norm", {"x": rows[1:]})
    yield Case("embedding/split", "embedding", pre, "source_position", {"x": long})

    learned = tiny(position_encoding="learned", position_offset=2, activation="gelu_tanh", feed_forward_bias=False)
    yield Case("feed_forward/gelu_tanh", "feed-forward", learned, "encoder.layers.1.feed_forward", {"x": x})
    yield Case("embedding/learned", "embedding", learned, "target_position", {"x": x})

    t5 = tiny("t5_v1_1", relative_buckets=32, relative_max_distance=128)  # the buckets of all T5 models
    yield Case("feed_forward/gated", "feed-forward", t5, "encoder.layers.1.feed_forward", {"x": x})
    yield Case("layer_norm/rms", "layer norm", t5, "encoder.layers.1.self_attention_norm", {"x": rows[1:]})
    distance = {"distance": np.arange(-FAR, FAR + 1)[None]}
    for stack in ("encoder", "decoder"):
        yield Case(f"relative_bias/{stack}", "relative bias", t5, f"{stack}.relative_bias", distance)

    marian = tiny("marian_cpp", position_offset=3)
    yield Case("feed_forward/swish", "feed-forward", marian, "encoder.layers.1.feed_forward", {"x": x})
    yield Case("embedding/m_minus_1", "embedding", marian, "source_position", {"x": long})


def _many_queries(config: TransformerConfig) -> Iterator[Case]:
    """Yield attention cases with more queries than any package processes at a time, without and with a bias.

    The first case has few channels and a mask with one row per query. The second case has many channels and a mask with
    a single row for all queries. All heads use the same mask.
    """
    batch, heads, keys = 2, 2, 6
    for name, rows, d_k in (("many_queries", QUERIES, 4), ("many_padded_queries", 1, CHANNELS)):
        inputs = {
            "query": normal_floats("query", batch, heads, QUERIES, d_k),
            "key": normal_floats("key", batch, heads, keys, d_k),
            "value": normal_floats("value", batch, heads, keys, 5),
            "mask": generator("mask").random((batch, 1, rows, keys)) < 0.6,
        }
        dtypes = ("float64", "float32") if rows > 1 else ("float64",)
        yield Case(f"attention/{name}", "attention", config, ATTENTION, inputs, dtypes=dtypes)
        biased = {**inputs, "bias": normal_floats("bias", 1, heads, rows, keys)}
        yield Case(f"attention/{name}_with_bias", "attention", config, ATTENTION, biased, dtypes=("float64",))


def _loss() -> Case:
    """Return a loss case with logits that overflow a naive exp, and logits that bfloat16 can't sum accurately."""
    config = tiny()
    sizes = np.array([1.0, 3.0, 1000.0, 10.0])[:, None, None]
    inputs = {
        "logits": sizes * normal_floats("logits", BATCH, TARGET, config.target_vocab_size),
        "labels": with_labels(token_ids(config), config)["labels"],
    }
    dtypes = ("float64", "bfloat16")
    return Case("loss/large_logits", "loss", config, CROSS_ENTROPY, inputs, fast=False, dtypes=dtypes)


def _full_models() -> Iterator[Case]:
    config = tiny(dropout=EVERYWHERE)
    ids = token_ids(config)
    batches = model_batches(config)
    batches["given_masks"] = {
        **ids,
        "source_mask": generator("source").random((BATCH, SOURCE)) < 0.5,
        "target_mask": generator("target").random((BATCH, TARGET)) < 0.5,
    }
    same_attention = ("source_as_long_as_target", "one_token", "one_sentence")
    for name, inputs in batches.items():
        yield Case(f"full/{name}", "full model", config, "", inputs, fast=name not in same_attention)
    yield from _again(config)
    for name, changed in {
        "untied": tiny(tie_embeddings="none", target_vocab_size=41, output_bias=True, feed_forward_bias=False),
        "tied_target": tiny(tie_embeddings="target_output", target_vocab_size=41),
        "deeper_decoder": tiny(num_encoder_layers=1, num_decoder_layers=3, norm_order="pre", final_norm=True),
        "other_decoder": tiny(**OTHER_DECODER),
        "no_first_self_attention": tiny(skip_first_self_attention=True, norm_order="pre"),
    }.items():
        yield Case(f"full/{name}", "full model", changed, "", token_ids(changed), fast=name == "deeper_decoder")
    sizes: dict[str, Any] = {"d_model": 8, "num_heads": 2, "d_k": 3, "d_v": 5, "d_ff": 6}
    yield large_vocabulary(tiny(**sizes, num_encoder_layers=1, num_decoder_layers=1))


def _again(config: TransformerConfig) -> Iterator[Case]:
    """Yield cases with different batches, weights, and array types, but with the same shapes as earlier cases."""
    first = Case("full/padded", "full model", config, "", token_ids(config), dtypes=("float64",))
    other = {name: np.roll(array, 1, axis=0) for name, array in first.inputs.items()}
    one_token = {name: array[:, :1] for name, array in first.inputs.items()}
    as_int32 = {name: np.asfortranarray(array, np.int32) for name, array in first.inputs.items()}
    yield replace(first, name="full/other_padding", inputs=other, before=(first,))
    yield replace(first, name="full/of_two_models", before=(replace(first, seed=1),))
    yield replace(first, name="full/large", magnitude="large")
    # With a single key, rounding errors of large float32 scores don't affect the attention weights.
    exp_overflows = replace(first, magnitude="large", inputs=one_token, fast=False)
    yield replace(exp_overflows, name="full/large_one_token", dtypes=("float64", "float32"))
    yield replace(first, name="full/int32", inputs=as_int32, fast=False)


def large_vocabulary(config: TransformerConfig) -> Case:
    """Return a case with short sequences and a vocabulary that exceeds the range of int16."""
    config = config.replace(source_vocab_size=VOCABULARY, target_vocab_size=VOCABULARY)
    ids = {"source_ids": [[32_768, 5, VOCABULARY - 1]], "target_ids": [[config.bos_id, 32_900]]}
    inputs = {name: np.array(rows) for name, rows in ids.items()}
    dtypes = ("float64", "float32")
    return Case("full/large_vocabulary", "full model", config, "", inputs, fast=False, dtypes=dtypes)


def gradient_case(preset: str) -> Case:
    """Return a case that compares the gradients of a small model with a preset's conventions."""
    case = preset_case(preset)
    inputs = with_labels(case.inputs, case.config)
    return Case(f"gradients/{preset}", "gradients", case.config, "", inputs, dtypes=("float64",), stage=GRADIENTS)


def _gradients() -> Iterator[Case]:
    """Yield cases for the gradients of the full model.

    float32 cases use GELU, because rounding may move a pre-activation across the kink of ReLU.
    """
    config = tiny(activation="gelu", attention_bias=True, dropout=EVERYWHERE)
    ids = token_ids(config)
    empty_source = ids["source_ids"].copy()
    empty_source[1] = config.pad_id
    nothing = np.full_like(ids["target_ids"], config.pad_id)
    late_start = ids["target_ids"].copy()
    late_start[:, 0] = config.pad_id
    for name, inputs in {
        "padded": with_labels(ids, config),
        "source_all_padding": with_labels({**ids, "source_ids": empty_source}, config),
        "one_token": {name: array[:, :1] for name, array in with_labels(ids, config).items()},
        "no_label": {**ids, "labels": nothing},
        "starts_with_padding": with_labels({**ids, "target_ids": late_start}, config),
    }.items():
        dtypes = ("float64", "float32") if name in ("padded", "source_all_padding") else ("float64",)
        yield Case(f"gradients/{name}", "gradients", config, "", inputs, dtypes=dtypes, stage=GRADIENTS)
    inputs, dtypes = with_labels(ids, config), ("float64",)
    usual = Case("gradients/large", "gradients", config, "", inputs, dtypes=dtypes, stage=GRADIENTS)
    unlabeled = {**inputs, "labels": np.where(np.arange(BATCH)[:, None] == 1, config.pad_id, inputs["labels"])}
    yield replace(usual, inputs=unlabeled, magnitude="loud", before=(usual,))
    tied = tiny("annotated", tie_embeddings="target_output", target_vocab_size=41, activation="gelu_tanh")
    inputs = with_labels(token_ids(tied), tied)
    yield Case("gradients/tied_target", "gradients", tied, "", inputs, dtypes=("float64",), stage=GRADIENTS)
    other = tiny(**OTHER_DECODER, skip_first_self_attention=True, activation="gelu")
    inputs = with_labels(token_ids(other), other)
    yield Case("gradients/other_decoder", "gradients", other, "", inputs, dtypes=("float64",), stage=GRADIENTS)
    # The other models in Table 3 differ from the base model only in sizes and dropout rates. mT5 and ByT5 differ from
    # T5 v1.1 only in sizes. `--preset` compares these models.
    yield from map(gradient_case, ("paper_base", *(name for name in IMPLEMENTATIONS if name not in ("mt5", "byt5"))))


def _steps() -> Iterator[Case]:
    """Yield training runs of 20 steps with the compiled training step."""
    paper = tiny(attention_bias=True, activation="gelu")
    pre = tiny("annotated", label_smoothing=0.2, num_encoder_layers=1)
    paper_case = step_case("paper", paper, TrainingConfig(**SHORT))
    yield replace(paper_case, dtypes=("float64", "float32"), unlabeled=UNLABELED)
    clipped = TrainingConfig(
        **SHORT, cooldown_steps=10, clip_norm=0.5, accumulation_steps=2, activation_checkpointing=True
    )
    yield replace(step_case("pre", pre, clipped), calls=CALLS, unlabeled=UNLABELED, rewind=REWIND)


CALLS = 1, 5  # steps after which other methods are called
UNLABELED = 3  # step whose batch has no labels
REWIND = 10  # step after which the trainer loads the state of step 1 and continues to train
# The learning rate stays below 1.4e-3, because a larger one would amplify rounding errors.
SHORT: dict[str, Any] = {"learning_rate_factor": 0.02, "warmup_steps": 8, "total_steps": 20}


def step_case(name: str, config: TransformerConfig, settings: TrainingConfig) -> Case:
    """Return a case that trains the full model of a config for 20 steps without dropout."""
    config = config.replace(dropout=DropoutRates(embedding=0.0, residual=0.0))
    inputs = with_labels(token_ids(config), config)
    dtypes = ("float64",)
    return Case(f"steps/{name}", "optimizer steps", config, "", inputs, dtypes=dtypes, stage=STEPS, settings=settings)
