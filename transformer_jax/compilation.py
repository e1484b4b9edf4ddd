"""Compilation of searches and training steps. Models with the same structure share compiled code.

Compiled code takes the arrays of a model as arguments and treats everything else about the model as constants.
Therefore, a second trainer for a model with the same structure doesn't compile anything.
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
from transformer_jax.fast import attend_by_blocks
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

BUCKET = 32  # tokens; lengths in a search are rounded up to a multiple of this number


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator like ``jax.jit``. Each call of a decorated function uses the current ``compiler_options``."""

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
) -> tuple[Int[ndarray, "rows capacity"], Bool[ndarray, "rows capacity"], SearchPlan]:
    """Return the source and the plan, padded at the end so that XLA compiles for only a few sizes."""

    def round_up(length: int) -> int:
        return -(-length // BUCKET) * BUCKET

    return pad_search(source_ids, source_mask, plan, model.config.max_positions, round_up)


# Compiled functions take a flat dict of arrays, not the model. For three layers, this method takes 3 ms per call to
# split and merge the model. jax.jit with nnx.split takes 12 ms. nnx.jit takes 18 ms, or 54 ms if it also splits the
# moments.


def parameters_of(model: Transformer) -> Arrays:
    """Return the array of every parameter, keyed by canonical name."""
    # Read the raw value, because get_value takes 12% of a small step.
    return {name: parameter_of(model, name).get_raw_value() for name in parameter_shapes(model.config)}


def put_parameters(model: Transformer, parameters: Arrays) -> None:
    """Set the arrays of all parameters. The arrays may be traced."""
    for name, array in parameters.items():
        parameter_of(model, name).set_raw_value(array)


@dataclass(frozen=True)
class Structure:
    """A model without its arrays: everything that compiled code depends on, except for shapes."""

    graph: nnx.GraphDef
    state: nnx.State = field(compare=False)  # shapes and dtypes, which the graph determines
    config: TransformerConfig
    mesh: Mesh | None  # devices over which the arrays are sharded

    @classmethod
    def of(cls, model: Transformer, mesh: Mesh | None = None) -> Structure:
        """Return the structure of a model."""
        graph, state = nnx.split(model)
        # This gives the same result as jax.eval_shape, which would take as long as nnx.split.
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        return cls(graph, shapes, model.config, mesh)

    def build(self, parameters: Arrays) -> Transformer:
        """Return a model in inference mode with the given arrays, which may be traced."""
        model = nnx.merge(self.graph, self.state, copy=True)
        put_parameters(model, constrain(parameters, self.mesh, gathered=True))
        if self.mesh is not None:  # attend_by_blocks loops over the heads, but a mesh may shard them
            for _, module in nnx.iter_modules(model):
                if isinstance(module, MultiHeadAttention) and module.attend is attend_by_blocks:
                    module.attend = scaled_dot_product_attention
        model.eval()
        return model


def compile_quickly(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Compile a function with few optimizations, because it is called only once or twice per model."""
    with quick_compilation():
        return compile_once(function, *constants)


def compile_once(function: Callable[..., Any], *constants: Any) -> Callable[..., Any]:
    """Compile a function of arrays. Its first arguments are the given constants."""
    return _compile(function, constants, tuple(compiler_options().items()))


def compile_step(
    function: Callable[..., Any], structure: Structure, settings: TrainingConfig, platform: str
) -> Callable[..., Any]:
    """Compile a training step that returns the optimizer, the parameters, and the reported values."""
    options = compiler_options()
    if settings.activation_checkpointing and platform == "cpu":
        # On a CPU, this XLA pass removes the barriers of nnx.remat before the order of operations is fixed. XLA would
        # then recompute a layer immediately and keep all of its activations.
        options["xla_disable_hlo_passes"] = "cse_barrier_expander"
    return _compile_step(function, structure, settings, tuple(options.items()))


@lru_cache(maxsize=16)
def _compile(function, constants, options):
    return jax.jit(partial(function, *constants), compiler_options=dict(options))


@lru_cache(maxsize=8)
def _compile_step(function, structure, settings, options):
    # The results have the same shardings as the arguments, so that the step is compiled only once.
    kept: Any = shardings(structure.config, structure.mesh)
    results = None if kept is None else (Adam(kept, kept, settings), kept, None)
    # Donate the old moments, which only the trainer uses. Don't donate the parameters, which a clone of the model may
    # share.
    return jax.jit(
        partial(function, structure, settings),
        donate_argnames="optimizer",
        compiler_options=dict(options),
        out_shardings=results,
    )
