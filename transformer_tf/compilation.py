"""Tracing of searches and training steps, so that each function is traced only once for all sizes.

XLA compiles the steps of a search for each shape. Models with ``fast=False``, and all models in a
``quick_compilation`` context, run eagerly instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, proxy

import keras
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
from transformer_tf.weights import check_variables

# Traced functions of each model, for the lifetime of the model. The functions aren't stored in attributes of the model,
# because Keras saves and copies attributes.
_TRACED: WeakKeyDictionary[Transformer, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()


def check_call(name: str, model: Any) -> None:
    """Raise a TypeError unless the model is a ``Transformer``, and a RuntimeError in a ``tf.function``."""
    check_type("model", model, Transformer)
    if not tf.executing_eagerly():
        raise RuntimeError(f"{name} must be called outside of tf.function")


def check_scope(name: str) -> None:
    """Raise a RuntimeError in a ``keras.StatelessScope``.

    Traced functions and the optimizer would ignore the values that the scope gives to variables.
    """
    if keras.src.backend.in_stateless_scope():
        raise RuntimeError(
            f"{name} must be called outside of keras.StatelessScope; assign the values to the model's variables instead"
        )


def padded(
    model: Transformer, source_ids: Int[ndarray, "B S"], source_mask: Bool[ndarray, "B S"], plan: SearchPlan
) -> tuple[Int[ndarray, "rows capacity"], Bool[ndarray, "rows capacity"], SearchPlan]:
    """Return the source and the plan, padded at the end so that XLA compiles for only a few sizes.

    XLA takes seconds to compile a step for a new size, but the compiled step is much faster than the uncompiled one.
    """

    def round_up(length: int) -> int:
        return max(32, power_of_two(length))

    return pad_search(source_ids, source_mask, plan, model.config.max_positions, round_up)


def call_traced(
    function: Callable[..., Any], model: Transformer, *args: Any, by_xla: bool = False, **constants: Any
) -> Any:
    """Call a function of a model. The function is traced once for all sizes of tensors, and again if constants change.

    Args:
        function: Function that takes the model, the arguments, and the constants.
        model: Model, which is passed as the first argument.
        args: Tensors or numbers.
        by_xla: If True, the function is compiled using XLA, once per shape.
        constants: Keyword arguments that are constants in the trace.
    """
    with placed(model.device):
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        # Don't trace in a StatelessScope. A new trace would store the scope's values as constants, and an existing
        # trace would ignore them.
        if compiles_quickly() or not model.fast or keras.src.backend.in_stateless_scope():
            return function(model, *args, **constants)
        traced = _TRACED.setdefault(model, {})
        # The types distinguish greedy search, sampling, and beam search.
        key = function, *constants.values(), *map(type, args), len(tf.nest.flatten(args)), *_layer_keys(model)
        if key not in traced:
            of_model = partial(function, proxy(model), **constants)  # a proxy doesn't keep the model alive
            signature = tf.nest.map_structure(lambda x: tf.TensorSpec([None] * x.shape.rank, x.dtype), args)
            traced[key] = tf.function(of_model, signature, autograph=False, jit_compile=by_xla)
        return traced[key](*args)


def call_on_devices(trainer: Any, function: Callable[..., Any], part: Any, *numbers: Any, by_xla: bool = False) -> Any:
    """Call a function of a trainer. On a mesh, each device calls it with its shard of the batch.

    TensorFlow traces the function once for all lengths, and again if the frozen parameters, the settings, or attributes
    of layers change.

    Args:
        trainer: Trainer.
        function: Method of the trainer.
        part: Leading positional arguments of the function. On a mesh, the first axis of each array is the device axis.
        numbers: Remaining arguments of the function. These arguments and the result are the same on all devices.
        by_xla: If True, the function is compiled using XLA, once per shape.

    Raises:
        ValueError: If the model's trainable variables have changed since the trainer was created.
        RuntimeError: If the function is called in a ``keras.StatelessScope``.
    """
    check_scope("a Trainer")
    check_variables(trainer.model, trainer._variables)
    if trainer.mesh is None and (compiles_quickly() or not (trainer.model.fast or by_xla)):
        return function(*part, *numbers)
    trained = (name for name, variable in trainer._variables.items() if variable.trainable)
    key = function.__name__, trainer.settings, trainer.model.trainable, *trained, *_layer_keys(trainer.model)
    if key not in trainer._traced:
        trainer._traced[key] = _traced(trainer, function, (part, *numbers), by_xla)
    return trainer._traced[key](part, *numbers)


def _layer_keys(model):
    """Yield a key for each layer. The key changes if a trace would use an outdated variable or attribute of the layer.

    The key contains the identities of variables, because Keras replaces some variables when it adds others, for example
    for LoRA.
    """
    for layer in model._flatten_layers():
        held, variables = vars(layer), (*layer._trainable_variables, *layer._non_trainable_variables)
        yield layer.dtype_policy.name, held.get("activation"), held.get("rate"), id(layer), *map(id, variables)


def _traced(trainer, function, arguments, by_xla):
    signature = [tf.nest.map_structure(_any_length, argument) for argument in arguments]
    mesh = trainer.mesh

    def whole(part, *numbers):
        return function(*part, *numbers)

    def on_device(parts, *numbers):
        shard = tf.distribute.get_replica_context().replica_id_in_sync_group
        with own_rows(shard, trainer.plan.shards) if trainer.dropout == "global" else nullcontext():
            return whole(tf.nest.map_structure(lambda x: x[shard], parts), *numbers)

    def on_mesh(*arguments):
        return mesh.experimental_local_results(mesh.run(on_device, arguments))[0]

    return tf.function(whole if mesh is None else on_mesh, signature, autograph=False, jit_compile=by_xla or None)


def _any_length(array):
    """Return a ``TensorSpec`` for an array.

    If the array contains IDs, the spec allows any number of rows and any length. Otherwise, it allows only arrays of
    the same shape.
    """
    sizes = list(np.shape(array))
    is_ids = array.dtype == np.int32
    return tf.TensorSpec([*sizes[:-2], None, None] if is_ids else sizes, array.dtype)
