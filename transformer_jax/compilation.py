"""Compiling what a search and a trainer compute, once for all models of the same structure.

Compiled code takes the arrays of a model as arguments, and everything else about the model as constants. A second
trainer of the same kind of model compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, wraps
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from numpy import ndarray

from transformer_jax.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_jax.optimizer import Adam, Arrays
from transformer_jax.parallel import constrain, shardings
from transformer_jax.runtime import compiler_options, quick_compilation
from transformer_jax.transformer import Transformer
from transformer_jax.weights import parameter_of
from transformer_spec.config import TransformerConfig
from transformer_spec.names import parameter_shapes
from transformer_spec.search import SearchPlan
from transformer_spec.search_padding import pad_search
from transformer_spec.shapes import Bool, Int
from transformer_spec.training_config import TrainingConfig

BUCKET = 32  # tokens; the lengths of a search are rounded up to a multiple


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``jax.jit`` as a decorator whose functions compile with the ``compiler_options`` of the call."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def compile_with(*chosen: tuple[str, Any]) -> Callable[..., Any]:
            return jax.jit(function, compiler_options=dict(chosen), **options)

        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            return compile_with(*compiler_options().items())(*args, **named)

        return call

    return decorate


def padded(
    model: Transformer, source_ids: Int[ndarray, "B S"], source_mask: Bool[ndarray, "B S"], plan: SearchPlan
) -> tuple[Int[ndarray, "rows room"], Bool[ndarray, "rows room"], SearchPlan]:
    """Return source and plan with padding at the end, so that XLA compiles for few sizes."""

    def round_up(length: int) -> int:
        return -(-length // BUCKET) * BUCKET

    return pad_search(source_ids, source_mask, plan, model.config.max_positions, round_up)


# Parameters pass as a flat dict of arrays, not as the model. To take a model of three layers apart and to put it
# together, nnx.jit needs 18 ms per call (three times as long with the moments), jax.jit of nnx.split 12 ms, and this
# needs 3 ms.


def parameters_of(model: Transformer) -> Arrays:
    """Return every parameter's array by its canonical name."""
    # The raw value, because get_value takes an eighth of a small step.
    return {name: parameter_of(model, name).get_raw_value() for name in parameter_shapes(model.config)}


def put_parameters(model: Transformer, parameters: Arrays) -> None:
    """Let a model compute with these arrays, which may be traced."""
    for name, array in parameters.items():
        parameter_of(model, name).set_raw_value(array)


@dataclass(frozen=True)
class Structure:
    """A model without its arrays: all that compiled code depends on, except for shapes."""

    graph: nnx.GraphDef
    state: nnx.State = field(compare=False)  # shapes and dtypes, which follow from the graph
    config: TransformerConfig
    mesh: Mesh | None  # the devices that divide the arrays

    @classmethod
    def of(cls, model: Transformer, mesh: Mesh | None = None) -> Structure:
        """Return the structure of a model."""
        graph, state = nnx.split(model)
        # The same as from jax.eval_shape, which takes as long as nnx.split.
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        return cls(graph, shapes, model.config, mesh)

    def build(self, parameters: Arrays) -> Transformer:
        """Return a model in inference mode that computes with these arrays, which may be traced."""
        model = nnx.merge(self.graph, self.state, copy=True)
        put_parameters(model, constrain(parameters, self.mesh, gathered=True))
        if self.mesh is not None:  # whose devices share the heads, which blocks would compute one after another
            for _, module in nnx.iter_modules(model):
                if isinstance(module, MultiHeadAttention):
                    module.attend = scaled_dot_product_attention
        model.eval()
        return model


def compile_quickly(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Compile a function that is called once or twice for one model, so that compiling takes most of the time."""
    with quick_compilation():
        return compile_once(function, *constants)


def compile_once(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Compile a function of arrays, given the constants that precede them."""
    return _compile(function, constants, tuple(compiler_options().items()))


def compile_step(
    function: Callable[..., Any], structure: Structure, settings: TrainingConfig, platform: str
) -> Callable[..., Any]:
    """Compile a step, whose results are the optimizer, the parameters, and anything else."""
    options = compiler_options()
    if settings.activation_checkpointing and platform == "cpu":
        # When XLA compiles for a CPU, this pass removes nnx.remat's barriers before the order of computation is
        # settled. A layer would be recomputed at once, and all of it kept.
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    return _compile_step(function, structure, settings, tuple(options.items()))


@lru_cache(maxsize=16)
def _compile(function, constants, options):
    return jax.jit(partial(function, *constants), compiler_options=dict(options))


@lru_cache(maxsize=8)
def _compile_step(function, structure, settings, options):
    kept: Any = shardings(structure.config, structure.mesh)  # as the arguments: else the second step compiles again
    results = None if kept is None else (Adam(kept, kept, settings), kept, None)
    # The old moments, which only the trainer has, make room for the new ones; a clone may have the old parameters.
    return jax.jit(
        partial(function, structure, settings),
        donate_argnames="optimizer",
        compiler_options=dict(options),
        out_shardings=results,
    )
