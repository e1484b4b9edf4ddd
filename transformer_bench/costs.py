"""The theoretical costs of a parallelism plan: how many bytes each device stores, and how many it sends per step.

The computation assumes ring algorithms (Patarasuk and Yuan, 2009), which minimize the bytes that each device sends.
In an all-gather or a reduce-scatter over W devices, each device sends (W - 1) / W of the array. In an all-reduce, each
device sends twice as many bytes as in a reduce-scatter. The computation ignores scalars, such as the loss and the
gradient norm. It also ignores the padding that is added to arrays that can't be divided equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes
from transformer_spec.parallel_plan import AXES, Plan, fsdp_axis, tensor_axis

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
HELD = ("parameters", "gradient", "moments", "activations")
PASSES = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}  # number of passes around the ring


@dataclass(frozen=True)
class Batch:
    """The size of a batch: number of rows, source length, and target length."""

    rows: int
    source: int
    target: int


@dataclass(frozen=True)
class Collective:
    """All collective operations of one kind in a step.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter``, or ``all-reduce``.
        what: ``gradient``, ``parameters``, or ``activations``.
        axis: The axis of the plan along which devices communicate.
        devices: The number of devices along this axis.
        numbers: The total number of elements in the full arrays.
    """

    kind: str
    what: str
    axis: str
    devices: int
    numbers: int

    @property
    def sent(self) -> float:
        """The number of elements that each device sends."""
        return PASSES[self.kind] * (self.devices - 1) / self.devices * self.numbers


def collectives(plan: Plan, config: TransformerConfig, batch: Batch) -> list[Collective]:
    """Return the collective operations of a step on one micro-batch.

    ``data`` all-reduces the gradient. ``fsdp`` gathers the parameters in the forward pass and in the backward pass, and
    reduce-scatters the gradient. With ``fsdp``, ``data`` all-reduces only the local shard of the gradient. ``tensor``
    all-reduces the outputs of attention and of the feed-forward network. In the backward pass, it also all-reduces the
    gradients with respect to the inputs of sharded matmuls.
    """
    own = sum(_numbers(plan, config))
    activations = config.d_model * sum(_sums(config, _shard(plan, batch)))
    found = (
        Collective(ALL_GATHER, "parameters", "fsdp", plan.fsdp, 2 * own),
        Collective(REDUCE_SCATTER, "gradient", "fsdp", plan.fsdp, own),
        Collective(ALL_REDUCE, "gradient", "data", plan.data, own // plan.fsdp),
        Collective(ALL_REDUCE, "activations", "tensor", plan.tensor, activations),
    )
    return [each for each in found if each.devices > 1]


def sent(plan: Plan, config: TransformerConfig, batch: Batch, itemsize: int = 4) -> dict[str, float]:
    """Return the number of bytes that a device sends in a step along each axis of the plan."""
    found = collectives(plan, config, batch)
    return {axis: itemsize * sum(each.sent for each in found if each.axis == axis) for axis in AXES}


def held(plan: Plan, config: TransformerConfig, batch: Batch, itemsize: int = 4) -> dict[str, int]:
    """Return the number of bytes that a device stores in a step.

    The activations include only the operands of matmuls. The backward pass requires all of these operands, so their
    total size is a lower bound on the memory for activations. Attention weights are excluded, because a fused kernel
    never stores them.
    """
    own = sum(
        size // (plan.fsdp if fsdp_axis(name, shape, plan.fsdp) is not None else 1)
        for (name, shape), size in zip(parameter_shapes(config).items(), _numbers(plan, config), strict=True)
    )
    numbers = own, own, 2 * own, sum(_operands(plan, config, _shard(plan, batch)))
    return {what: itemsize * number for what, number in zip(HELD, numbers, strict=True)}


def _numbers(plan: Plan, config: TransformerConfig) -> Iterator[int]:
    """Yield the number of elements in each parameter after tensor parallelism has sharded it."""
    for name, shape in parameter_shapes(config).items():
        yield math.prod(shape) // (plan.tensor if tensor_axis(name) is not None else 1)


def _shard(plan: Plan, batch: Batch) -> Batch:
    return Batch(-(-batch.rows // plan.shards), batch.source, batch.target)


def _sums(config: TransformerConfig, shard: Batch) -> Iterator[int]:
    """Yield how many vectors of size d_model are summed in the all-reduces of tensor parallelism.

    A single number may be the total for multiple all-reduces.
    """
    source, target = shard.rows * shard.source, shard.rows * shard.target
    for _ in range(config.num_encoder_layers):
        yield 2 * source  # the outputs of attention and the feed-forward network
        # The input gradients of the query, key, value, and inner projections, and of the gate if there is one.
        yield (4 + config.gated_feed_forward) * source
    for layer in range(config.num_decoder_layers):
        attentions = 1 + config.has_self_attention(layer)
        yield (attentions + 1) * target
        # The input gradients of five projections: the query, key, and value projections in self-attention, the query
        # projection in cross-attention, and the inner projection of the feed-forward network. A gate has one more.
        yield (3 * (attentions - 1) + 2 + config.gated_feed_forward) * target
        yield 2 * source  # the input gradients of key and value in cross-attention


def _operands(plan: Plan, config: TransformerConfig, shard: Batch) -> Iterator[int]:
    """Yield the number of elements of the logits and of each matmul operand that isn't a parameter.

    A single number may be the total for multiple arrays.
    """
    source, target = shard.rows * shard.source, shard.rows * shard.target

    def attention(sizes, queries, keys):
        """Return the number of elements in five arrays: the query-side input, queries, keys, values, and context."""
        heads = sizes.num_heads // plan.tensor
        return heads * (queries * (sizes.d_k + sizes.d_v) + keys * (sizes.d_k + sizes.d_v)) + queries * config.d_model

    def feed_forward(sizes, positions):
        return positions * (config.d_model + sizes.d_ff // plan.tensor)

    for _ in range(config.num_encoder_layers):
        yield attention(config, source, source) + feed_forward(config, source)
    yield source * config.d_model  # the encoder memory, from which all decoder layers compute keys and values
    for layer in range(config.num_decoder_layers):
        if config.has_self_attention(layer):
            yield attention(config.in_decoder, target, target)
        yield attention(config.in_decoder, target, source) + feed_forward(config.in_decoder, target)
    yield target * (config.d_model + config.target_vocab_size)
