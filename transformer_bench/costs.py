"""What a plan costs: the bytes that each device sends in a step, and those that it holds; computed, not measured.

Sums and gathers are counted as a ring has them (Patarasuk and Yuan, 2009), in which each device sends the least: of W
devices, (W - 1) / W of an array to gather it or to sum it and keep a part, and twice that to sum it and keep all. What
is sent of single numbers, as of the loss and of the norm, is not counted, nor the padding of what does not divide.
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
PASSES = {ALL_GATHER: 1, REDUCE_SCATTER: 1, ALL_REDUCE: 2}  # around the ring


@dataclass(frozen=True)
class Batch:
    """The sizes of a batch: rows, source length, target length."""

    rows: int
    source: int
    target: int


@dataclass(frozen=True)
class Collective:
    """Arrays of one kind that devices sum or gather in a step.

    Attributes:
        kind: ``all-gather``, ``reduce-scatter`` or ``all-reduce``.
        what: ``gradient``, ``parameters`` or ``activations``.
        axis: Of the plan; the devices along it take part.
        devices: How many these are.
        numbers: The elements of all arrays, each as it is where it is whole.
    """

    kind: str
    what: str
    axis: str
    devices: int
    numbers: int

    @property
    def sent(self) -> float:
        """How many numbers each device sends."""
        return PASSES[self.kind] * (self.devices - 1) / self.devices * self.numbers


def collectives(plan: Plan, config: TransformerConfig, batch: Batch) -> list[Collective]:
    """Return what the devices of a plan sum and gather in a step on one slice.

    ``data`` sums the gradient. ``fsdp`` gathers the parameters, once for each pass, and sums the gradient where its
    part is kept; then ``data`` sums this part alone. ``tensor`` sums what leaves attention and the feed-forward
    network, and in the backward pass the gradient of each input of a divided product.
    """
    own = sum(_numbers(plan, config))
    activations = config.d_model * sum(_sums(config, _share(plan, batch)))
    found = (
        Collective(ALL_GATHER, "parameters", "fsdp", plan.fsdp, 2 * own),
        Collective(REDUCE_SCATTER, "gradient", "fsdp", plan.fsdp, own),
        Collective(ALL_REDUCE, "gradient", "data", plan.data, own // plan.fsdp),
        Collective(ALL_REDUCE, "activations", "tensor", plan.tensor, activations),
    )
    return [each for each in found if each.devices > 1]


def sent(plan: Plan, config: TransformerConfig, batch: Batch, itemsize: int = 4) -> dict[str, float]:
    """Return the bytes that a device sends in a step, along each axis of the plan."""
    found = collectives(plan, config, batch)
    return {axis: itemsize * sum(each.sent for each in found if each.axis == axis) for axis in AXES}


def held(plan: Plan, config: TransformerConfig, batch: Batch, itemsize: int = 4) -> dict[str, int]:
    """Return the bytes that a device holds in a step.

    Of activations, these are the operands of all products, which the backward pass needs again: the least. Attention
    weights are not among them, which a fused kernel never stores.
    """
    own = sum(
        size // (plan.fsdp if fsdp_axis(name, shape, plan.fsdp) is not None else 1)
        for (name, shape), size in zip(parameter_shapes(config).items(), _numbers(plan, config), strict=True)
    )
    numbers = own, own, 2 * own, sum(_operands(plan, config, _share(plan, batch)))
    return {what: itemsize * number for what, number in zip(HELD, numbers, strict=True)}


def _numbers(plan: Plan, config: TransformerConfig) -> Iterator[int]:
    """Yield the size of each parameter where ``tensor`` has divided it."""
    for name, shape in parameter_shapes(config).items():
        yield math.prod(shape) // (plan.tensor if tensor_axis(name) is not None else 1)


def _share(plan: Plan, batch: Batch) -> Batch:
    return Batch(-(-batch.rows // plan.shares), batch.source, batch.target)


def _sums(config: TransformerConfig, share: Batch) -> Iterator[int]:
    """Yield the positions that are summed, of d_model numbers each: forward, and backward one for each kernel."""
    source, target = share.rows * share.source, share.rows * share.target
    for _ in range(config.num_encoder_layers):
        yield 2 * source  # what attention and the feed-forward network return
        yield 4 * source  # the gradients of the inputs of query, key, value and inner
    for layer in range(config.num_decoder_layers):
        attentions = 1 + config.has_self_attention(layer)
        yield (attentions + 1) * target
        yield (3 * (attentions - 1) + 2) * target  # query, key and value of itself; query of the source, and inner
        yield 2 * source  # key and value of the source


def _operands(plan: Plan, config: TransformerConfig, share: Batch) -> Iterator[int]:
    """Yield the numbers of the operands of each layer's products that are no parameters, and of the logits."""
    source, target = share.rows * share.source, share.rows * share.target

    def attention(sizes, queries, keys):
        """Return the input of each side, unless it is one, and query, key, value and what is attended to."""
        heads = sizes.num_heads // plan.tensor
        return heads * (queries * (sizes.d_k + sizes.d_v) + keys * (sizes.d_k + sizes.d_v)) + queries * config.d_model

    def feed_forward(sizes, positions):
        return positions * (config.d_model + sizes.d_ff // plan.tensor)

    for _ in range(config.num_encoder_layers):
        yield attention(config, source, source) + feed_forward(config, source)
    yield source * config.d_model  # the memory, from which all layers of the decoder take keys and values
    for layer in range(config.num_decoder_layers):
        if config.has_self_attention(layer):
            yield attention(config.in_decoder, target, target)
        yield attention(config.in_decoder, target, source) + feed_forward(config.in_decoder, target)
    yield target * (config.d_model + config.target_vocab_size)
