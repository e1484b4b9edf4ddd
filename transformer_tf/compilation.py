"""Tracing what a search and a trainer compute, once for all sizes. XLA compiles the steps of a search for each shape.

A model with ``fast=False`` and every model within ``quick_compilation`` compute one operation after another instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import numpy as np
import tensorflow as tf
from numpy import ndarray

from transformer_spec.checks import check_type
from transformer_spec.search import SearchPlan
from transformer_spec.search_padding import pad_search, power_of_two
from transformer_spec.shapes import Bool, Int
from transformer_tf.layers import own_rows
from transformer_tf.runtime import compiles_quickly, placed
from transformer_tf.transformer import Transformer

# Everything that has been traced for a model, as long as the model lives. Keras saves and copies attributes of a model.
_TRACED: WeakKeyDictionary[Transformer, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()


def check_call(name: str, model: Any) -> None:
    """Raise TypeError unless a model is a Transformer, RuntimeError in a ``tf.function``."""
    check_type("model", model, Transformer)
    if not tf.executing_eagerly():
        raise RuntimeError(f"{name} needs values: call it outside of tf.function")


def padded(
    model: Transformer, source_ids: Int[ndarray, "B S"], source_mask: Bool[ndarray, "B S"], plan: SearchPlan
) -> tuple[Int[ndarray, "rows room"], Bool[ndarray, "rows room"], SearchPlan]:
    """Return source and plan with padding at the end, so that XLA compiles for few sizes.

    XLA needs seconds to compile a size, and a compiled step takes a fraction of the time.
    """

    def round_up(length: int) -> int:
        return max(32, power_of_two(length))

    return pad_search(source_ids, source_mask, plan, model.config.max_positions, round_up)


def call_traced(
    function: Callable[..., Any], model: Transformer, *args: Any, by_xla: bool = False, **constants: Any
) -> Any:
    """Call a function of a model, traced once for tensors and numbers of all sizes, and again for other constants.

    If ``by_xla`` is set, XLA compiles it for each shape.
    """
    with placed(model.device):
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        if compiles_quickly() or not model.fast:
            return function(model, *args, **constants)
        traced = _TRACED.setdefault(model, {})
        # Among the types is the kind of search. When Keras adds variables, for LoRA for example, it replaces others.
        key = function, *constants.values(), *map(type, args), len(tf.nest.flatten(args)), *map(id, model.variables)
        if key not in traced:
            of_model = partial(function, proxy(model), **constants)  # a model would live as long as its functions
            signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None] * x.shape.rank, x.dtype), args)
            traced[key] = tf.function(of_model, signature, autograph=False, jit_compile=by_xla)
        return traced[key](*args)


def call_on_devices(trainer: Any, function: Callable[..., Any], part: Any, *numbers: Any, by_xla: bool = False) -> Any:
    """Call a function of a trainer; on a mesh, each device calls it for its share.

    TensorFlow traces it once for all lengths, and again if different parameters are frozen or settings change.

    Args:
        trainer: The trainer.
        function: One of its methods.
        part: Its first arguments, which a mesh divides; their first axis is the share.
        numbers: Its other arguments. They and the result are the same on all devices.
        by_xla: Whether XLA compiles the function, for each shape.
    """
    if trainer.mesh is None and (compiles_quickly() or not (trainer.model.fast or by_xla)):
        return function(*part, *numbers)
    trained = (name for name, variable in trainer._variables.items() if variable.trainable)
    key = function.__name__, trainer.settings, *trained
    if key not in trainer._traced:
        trainer._traced[key] = _traced(trainer, function, (part, *numbers), by_xla)
    return trainer._traced[key](part, *numbers)


def _traced(trainer, function, arguments, by_xla):
    signature = [tf.nest.map_structure(_any_length, argument) for argument in arguments]
    mesh = trainer.mesh

    def whole(part, *numbers):
        return function(*part, *numbers)

    def on_device(parts, *numbers):
        share = tf.distribute.get_replica_context().replica_id_in_sync_group
        with own_rows(share, trainer.plan.shares) if trainer.dropout == "global" else nullcontext():
            return whole(tf.nest.map_structure(lambda x: x[share], parts), *numbers)

    def on_mesh(*arguments):
        return mesh.experimental_local_results(mesh.run(on_device, arguments))[0]

    return tf.function(whole if mesh is None else on_mesh, signature, autograph=False, jit_compile=by_xla or None)


def _any_length(array):
    """Return the specification of an array: ids have any number of rows and any length, others their shape."""
    sizes = list(np.shape(array))
    is_ids = array.dtype == np.int32
    return tf.TensorSpec([*sizes[:-2], None, None] if is_ids else sizes, array.dtype)
