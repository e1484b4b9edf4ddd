"""Names and shapes of all parameters and taps.

The name of each parameter is its attribute path, which is the same in the models of all packages. A ``kernel`` has
shape [in, out]. In the kernels of the query, key, and value projections, each head occupies a contiguous range of the
last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from transformer_spec.checks import check_choice, check_integer, check_type, check_unmasked, some
from transformer_spec.config import TransformerConfig
from transformer_spec.training_config import TrainingState

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
# For each part of the model, the prefixes of the parameter names.
PARTS = {"encoder": ("source_", "encoder."), "decoder": ("target_", "decoder.", "output_proj.")}
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@runtime_checkable
class Model(Protocol):
    """A Transformer, Encoder, or Decoder from any package. The name of each parameter is its attribute path."""

    config: TransformerConfig
    part: str | None


def find(model: Any, path: str) -> Any:
    """Return the attribute of a model at a dotted path. Raise a ValueError if the attribute doesn't exist."""

    def step(owner: Any, key: str) -> Any:
        return owner[int(key)] if key.isdecimal() else getattr(owner, key)

    try:
        return reduce(step, path.split("."), model)
    except (AttributeError, IndexError) as error:
        raise ValueError(f"the model has no {path}, which its config requires") from error


def parameter_shapes(config: TransformerConfig, part: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every stored parameter, in the order of Figure 1.

    A tied matrix is listed only once, by the name that files use for it.

    Args:
        config: Model configuration.
        part: If ``encoder`` or ``decoder``, return only the parameters of this part, including a shared embedding
            matrix. If None, return all parameters.

    Raises:
        TypeError: If ``config`` is not a ``TransformerConfig``.
        ValueError: If the part is unknown.
    """
    check_type("config", config, TransformerConfig)
    if part is None:
        return dict(_parameters(config))
    check_choice("part", part, tuple(PARTS))
    other = "num_decoder_layers" if part == "encoder" else "num_encoder_layers"
    begins = (*PARTS[part], *(["source_embedding."] if config.shares_embedding else []))
    shapes = _parameters(config.replace(**{other: 2}))  # the result doesn't depend on this depth
    return {name: shape for name, shape in shapes if name.startswith(begins)}


def tap_shapes(
    config: TransformerConfig, batch: int, source_length: int, target_length: int
) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tap of the full model in inference mode, in the order in which taps fire.

    Args:
        config: Model configuration.
        batch: Number of sequences.
        source_length: Length of the source sequences in tokens.
        target_length: Length of the target sequences in tokens.

    Raises:
        TypeError: If ``config`` is not a ``TransformerConfig``.
    """
    check_type("config", config, TransformerConfig)
    return dict(_taps(config, batch, source_length, target_length))


def count_parameters(config: TransformerConfig) -> int:
    """Return the number of parameters in the model. A tied matrix is counted once.

    Args:
        config: Model configuration.

    Raises:
        TypeError: If ``config`` is not a ``TransformerConfig``.
    """
    check_type("config", config, TransformerConfig)
    depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
    shapes = parameter_shapes(config.replace(**{f"num_{stack}_layers": min(n, 2) for stack, n in depths.items()}))
    # All layers from index 1 on have the same shapes, so the shapes at index 1 are multiplied by the number of layers.
    return sum(
        math.prod(shape) * (depths[name.partition(".")[0]] - 1 if ".layers.1." in name else 1)
        for name, shape in shapes.items()
    )


def check_weights(
    config: TransformerConfig, weights: Mapping[str, np.ndarray], what: str = "weights", part: str | None = None
) -> None:
    """Check that weights match the config.

    Args:
        config: Model configuration.
        weights: Arrays, keyed by canonical name.
        what: Name of the weights in the error message.
        part: If ``encoder`` or ``decoder``, check only the parameters of this part, and ignore the other part. If
            None, check all parameters.

    Raises:
        TypeError: If a tensor doesn't have a floating-point dtype, or an argument has the wrong type.
        ValueError: If tensors are missing, unexpected, or not finite, or have the wrong shape. The message lists the
            names of these tensors.
    """
    check_type("config", config, TransformerConfig)
    if not isinstance(weights, Mapping):
        got = type(weights).__name__
        raise TypeError(f"{what} must be a mapping of names to arrays, as returned by export_weights(): got {got}")
    layers = sum(getattr(config, f"num_{stack}_layers") for stack in PARTS if part in (None, stack))
    if layers > len(weights):  # fail early, because listing the names of a corrupt config could take too long
        raise ValueError(f"{what} contain {len(weights)} tensors, too few for the config's {layers} layers")
    shapes = parameter_shapes(config, part)
    others = () if part is None else tuple(start for stack in PARTS if stack != part for start in PARTS[stack])
    unknown = [name for name in weights if name not in shapes and not name.startswith(others)]
    if unknown and shapes.keys().isdisjoint(weights):
        raise ValueError(
            f"{what} must have canonical names: got {some(unknown)}; the methods of a model and of a trainer return "
            "these names, and `parity import` converts checkpoints of other programs"
        )
    problems = [f"missing {name} {list(shape)}" for name, shape in shapes.items() if name not in weights]
    problems += [f"unexpected {name} {list(np.shape(weights[name]))}" for name in unknown]
    for name, shape in shapes.items():
        if name in weights and tuple(np.shape(weights[name])) != shape:
            problems.append(f"{name} must have shape {list(shape)}: got {list(np.shape(weights[name]))}")
    if problems:
        raise ValueError(f"{what} do not fit the config: {some(problems)}")
    for name in shapes:
        check_unmasked(name, weights[name])
        array = np.asarray(weights[name])
        if array.dtype.name not in FLOAT_DTYPES:
            raise TypeError(f"dtype of {name} must be one of {', '.join(FLOAT_DTYPES)}: got {array.dtype.name}")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite: got {int((~np.isfinite(array)).sum())} NaN or infinite values")


def check_training_state(config: TransformerConfig, state: TrainingState, dtype: str | None = None) -> None:
    """Check that a state belongs to a training run of this model.

    Args:
        config: Model configuration.
        state: State to check.
        dtype: Dtype to which the moments must be convertible. If None, this check is skipped.

    Raises:
        TypeError: If step or seed is not an integer, or a moment doesn't have a floating-point dtype.
        ValueError: If the step or the seed is negative, if a moment is missing, is unexpected, is not finite, has the
            wrong shape, or overflows ``dtype``, or if a second moment is negative.
    """
    check_type("state", state, TrainingState)
    check_integer("step", state.step, minimum=0)
    check_integer("seed", state.seed, minimum=0)
    check_weights(config, state.first_moment, "first moments")
    check_weights(config, state.second_moment, "second moments")
    for name, array in state.second_moment.items():
        if (np.asarray(array) < 0).any():
            raise ValueError(f"the second moment of {name} must not be negative: got {np.min(array)}")
    if dtype is not None:  # trainers run this check before they change their state
        for moments in (state.first_moment, state.second_moment):
            for name, array in moments.items():
                rounded(name, array, dtype)


def check_float_dtype(dtype: DTypeLike, choices: Sequence[str] = FLOAT_DTYPES) -> str:
    """Return the name of a dtype, which can have any form that NumPy accepts.

    Raises:
        ValueError: If the name is not in ``choices``.
    """
    name: Any = dtype
    if dtype is not None:  # np.dtype(None) would be float64
        with suppress(TypeError, ValueError):  # not a dtype of NumPy
            name = np.dtype(dtype).name
    check_choice("dtype", name, choices)
    return name


def rounded(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """Return a C-contiguous copy of an array, converted to ``dtype``.

    Raises:
        ValueError: If a finite value overflows ``dtype``.
    """
    with np.errstate(over="ignore", under="ignore"):
        copy = np.array(array, dtype=dtype, order="C")
    if not np.isfinite(copy).all():
        raise ValueError(f"{name} overflows {dtype}: the array's largest magnitude is {np.abs(array).max()}")
    return copy


def _parameters(config: TransformerConfig) -> Shapes:
    d_model = config.d_model
    yield "source_embedding.table", (config.source_vocab_size, d_model)
    if not config.shares_embedding:
        yield "target_embedding.table", (config.target_vocab_size, d_model)
    if config.position_encoding == "learned":
        yield "source_position.table", (config.max_length, d_model)
        yield "target_position.table", (config.max_length, d_model)
    if config.embedding_norm:
        yield from _norm("source_embedding_norm", config)
        yield from _norm("target_embedding_norm", config)
    for stack, sizes, layers in _stacks(config):
        if config.position_encoding == "relative":
            yield f"{stack}.relative_bias.table", (config.relative_buckets, sizes.num_heads)
        for i, sublayers in enumerate(layers):
            for sublayer in sublayers:
                path = f"{stack}.layers.{i}.{sublayer}"
                yield from _feed_forward(path, sizes) if sublayer == "feed_forward" else _attention(path, sizes)
                yield from _norm(f"{path}_norm", config)
        if config.final_norm:
            yield from _norm(f"{stack}.final_norm", config)
    if not config.ties_output:
        yield "output_proj.kernel", (d_model, config.target_vocab_size)
    if config.output_bias:
        yield "output_proj.bias", (config.target_vocab_size,)


def _stacks(config: TransformerConfig) -> Iterator[tuple[str, TransformerConfig, list[tuple[str, ...]]]]:
    """For each stack, yield its name, the config for its layers, and the names of the sublayers in each layer."""
    yield "encoder", config, [("self_attention", "feed_forward")] * config.num_encoder_layers
    layers: list[tuple[str, ...]] = [("self_attention", "cross_attention", "feed_forward")] * config.num_decoder_layers
    if config.skip_first_self_attention:
        layers[0] = layers[0][1:]
    yield "decoder", config.in_decoder, layers


def _linear(path: str, d_in: int, d_out: int, bias: bool) -> Shapes:
    yield f"{path}.kernel", (d_in, d_out)
    if bias:
        yield f"{path}.bias", (d_out,)


def _attention(path: str, config: TransformerConfig) -> Shapes:
    keys, values = config.num_heads * config.d_k, config.num_heads * config.d_v
    yield from _linear(f"{path}.query_proj", config.d_model, keys, config.attention_bias)
    yield from _linear(f"{path}.key_proj", config.d_model, keys, config.attention_bias)
    yield from _linear(f"{path}.value_proj", config.d_model, values, config.attention_bias)
    yield from _linear(f"{path}.output_proj", values, config.d_model, config.attention_bias)


def _feed_forward(path: str, config: TransformerConfig) -> Shapes:
    if config.gated_feed_forward:
        yield from _linear(f"{path}.gate_proj", config.d_model, config.d_ff, config.feed_forward_bias)
    yield from _linear(f"{path}.inner_proj", config.d_model, config.d_ff, config.feed_forward_bias)
    yield from _linear(f"{path}.output_proj", config.d_ff, config.d_model, config.feed_forward_bias)


def _norm(path: str, config: TransformerConfig) -> Shapes:
    yield f"{path}.scale", (config.d_model,)
    if config.layer_norm_kind != "rms":
        yield f"{path}.bias", (config.d_model,)


def _taps(config: TransformerConfig, batch: int, source_length: int, target_length: int) -> Shapes:
    lengths = {"encoder": source_length, "decoder": target_length}
    for (stack, sizes, layers), side in zip(_stacks(config), ("source", "target"), strict=True):
        length = lengths[stack]
        yield f"{side}_embedding.output", (batch, length, config.d_model)
        if config.position_encoding == "relative":
            yield f"{stack}.relative_bias.output", (1, sizes.num_heads, length, length)
        for i, sublayers in enumerate(layers):
            for sublayer in sublayers:
                path = f"{stack}.layers.{i}.{sublayer}"
                norm = (f"{path}_norm.output", (batch, length, config.d_model))
                if config.norm_order == "pre":
                    yield norm
                if sublayer == "feed_forward":
                    if config.gated_feed_forward:
                        yield f"{path}.gate", (batch, length, sizes.d_ff)
                    yield f"{path}.inner", (batch, length, sizes.d_ff)
                    yield f"{path}.output", (batch, length, config.d_model)
                else:
                    memory_length = source_length if sublayer == "cross_attention" else length
                    yield from _attention_taps(path, sizes, batch, length, memory_length)
                if config.norm_order == "post":
                    yield norm
            yield f"{stack}.layers.{i}.output", (batch, length, config.d_model)
        yield f"{stack}.output", (batch, length, config.d_model)
    yield "logits", (batch, target_length, config.target_vocab_size)


def _attention_taps(path: str, config: TransformerConfig, batch: int, length: int, memory_length: int) -> Shapes:
    heads = config.num_heads
    yield f"{path}.query", (batch, heads, length, config.d_k)
    yield f"{path}.key", (batch, heads, memory_length, config.d_k)
    yield f"{path}.value", (batch, heads, memory_length, config.d_v)
    yield f"{path}.scores", (batch, heads, length, memory_length)
    yield f"{path}.weights", (batch, heads, length, memory_length)
    yield f"{path}.context", (batch, heads, length, config.d_v)
    yield f"{path}.output", (batch, length, config.d_model)
