"""Base classes that let Keras save, copy, and build layers, and load them without random initialization."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow import Tensor

from transformer_spec.checks import check_attention_mask, check_type
from transformer_spec.config import TransformerConfig

_LOADING: ContextVar[bool] = ContextVar("loading", default=False)


@contextmanager
def loading() -> Iterator[keras.StatelessScope]:
    """Within this context, create parameters as zeros, because weights are loaded afterwards.

    Keras creates the variables when the context ends. The yielded scope contains the values that were assigned to the
    variables.
    """
    before = _LOADING.set(True)
    try:
        # The scope creates variables when it exits. Creating them in each layer's name scope would take 4x longer.
        with keras.StatelessScope() as scope:
            yield scope
    finally:
        _LOADING.reset(before)


def initial(initializer: Any) -> Any:
    """Return the initializer of a parameter, or zeros in a ``loading`` context."""
    return "zeros" if _LOADING.get() else initializer


def seed_states(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the states of all random generators in a layer and its inner layers.

    For example, dropout and noise layers contain random generators.
    """
    return [generator.state for inner in layer._flatten_layers() for generator in inner._seed_generators]


@contextmanager
def seeded(layer: keras.layers.Layer, seeds: Iterable[Any]) -> Iterator[keras.StatelessScope]:
    """Within this context, random generators start from the given seeds, and no variable changes.

    Args:
        layer: Layer that is called within the context.
        seeds: Values of the random generators' states.

    Raises:
        ValueError: If the layer changed a variable that isn't the state of a random generator, or added a loss.
    """
    states = seed_states(layer)
    with keras.StatelessScope(zip(states, seeds, strict=True), collect_losses=True) as scope:
        yield scope
    check_losses(scope.losses)
    if changed := scope.state_mapping.keys() - set(map(id, states)):
        paths = [variable.path for variable in layer.variables if id(variable) in changed]
        raise ValueError(
            f"{paths[0] if paths else 'the global random generator'} changes when the model is called, and a Trainer "
            "does not store the change; freeze its layer, pass a keras.random.SeedGenerator that is an attribute of "
            "the layer, or train with compile and fit instead"
        )


def check_losses(losses: Sequence[Any]) -> None:
    """Raise a ValueError if a layer added a loss, because ``Trainer`` and ``gradients`` use only the cross-entropy."""
    if losses:
        raise ValueError(
            "the model adds a loss (add_loss or activity_regularizer) to the cross-entropy; remove the loss, or train "
            "with compile and fit instead"
        )


def attention_mask_for(memory: Any, attention_mask: Any = None, mask: Any = None) -> Any:
    """Combine an attention mask with the Keras mask that marks padding in the memory.

    Args:
        memory: Tensor [B, M, d_model]. ``Embedding(mask_zero=True)``, for example, attaches a mask to its output.
        attention_mask: Boolean mask that broadcasts to [B, H, L, M], or None.
        mask: Boolean mask [B, M]. If None, the mask that Keras has attached to the memory is used.

    Raises:
        TypeError: If ``attention_mask`` is not boolean.
        ValueError: If ``mask`` doesn't have two axes, or ``attention_mask`` doesn't broadcast to the memory.
    """
    mask = getattr(memory, "_keras_mask", None) if mask is None else mask
    if mask is None:
        return attention_mask
    if len(mask.shape) != 2:
        raise ValueError(
            f"mask must have shape [batch, length]: got {tuple(mask.shape)}; pass masks of other shapes as "
            "attention_mask"
        )
    if attention_mask is None:
        return mask[:, None, None, :]
    check_attention_mask(
        tuple(attention_mask.shape), attention_mask.dtype.name, (mask.shape[0], None, None), (None, None, mask.shape[1])
    )
    return attention_mask & mask[:, None, None, :]


class Configured:
    """Base class that lets Keras save, copy, and rebuild an object from the arguments of its constructor."""

    _signature: ClassVar[inspect.Signature]  # signature of the constructor
    _given: dict[str, Any]
    # Names of constructor arguments or config fields, keyed by the attribute that stores the current value.
    _attributes: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the class with Keras under its package and name."""
        super().__init_subclass__(**kwargs)
        cls._signature = inspect.signature(cls.__init__)
        keras.saving.register_keras_serializable(cls.__module__.partition(".")[0])(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Store the arguments. Keras itself stores them only if they are basic types, such as numbers.

        Raises:
            TypeError: If the config is not a ``TransformerConfig``, or the dtype is a ``DTypePolicyMap``.
            RuntimeError: If the Keras backend is not TensorFlow.
        """
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(f"KERAS_BACKEND must be tensorflow for transformer_tf: got {keras.backend.backend()}")
        layer = super().__new__(cls, *args, **kwargs)
        given = cls._signature.bind(layer, *args, **kwargs).arguments
        if "config" in given:
            check_type("config", given["config"], TransformerConfig)
            if isinstance(given.get("dtype", keras.config.dtype_policy()), keras.dtype_policies.DTypePolicyMap):
                raise TypeError(
                    "dtype must be one policy for all layers: got a DTypePolicyMap; pass its default policy instead"
                )
        own = {name: value for name, value in given.items() if name not in ("self", "kwargs")}
        vars(layer)["_given"] = {**own, **given.get("kwargs", {})}  # bypass setattr, so that Keras doesn't save it
        return layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the layer, but omit options with the value None.

        ``training=None`` would override the mode of the outer layer.
        """
        return super().__call__(*args, **{name: value for name, value in options.items() if value is not None})  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments for ``from_config``, which Keras saves with the weights."""
        changed = {argument: getattr(self, attribute) for attribute, argument in self._attributes.items()}
        given = {
            name: value.replace(**changed).to_dict()
            if isinstance(value, TransformerConfig)
            else keras.saving.serialize_keras_object(changed.get(name, value))
            for name, value in self._given.items()
        }
        return {**given, **keras.layers.Layer.get_config(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create a layer from the result of ``get_config``.

        Args:
            config: Serialized arguments of the constructor.
            custom_objects: Additional classes that Keras may need, keyed by name, or None.
        """
        given = {name: keras.saving.deserialize_keras_object(value, custom_objects) for name, value in config.items()}
        if "config" in given:
            given["config"] = TransformerConfig.from_dict(given["config"])
        return cls(**given)


class Block(Configured, keras.layers.Layer):
    """Base class of layers that create their variables in the constructor.

    Otherwise, Keras would call the layer with symbolic tensors to build it, and every tap would receive these symbolic
    tensors too.

    Args:
        dtype: Dtype or dtype policy of the layer. If None, the global Keras policy is used.
        kwargs: Additional arguments of ``keras.layers.Layer``, such as ``name``.
    """

    def __init__(self, dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(dtype=dtype, **kwargs)
        self.built = True
        self.supports_masking = True  # the output has the Keras mask of the first input

    def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Let ``tf.train.Checkpoint`` find the layers of a stack. By default, it ignores lists of Keras layers."""
        layers = {f"layers.{i}": layer for i, layer in enumerate(getattr(self, "layers", ()))}
        return {**super()._trackable_children(*args, **options), **layers}

    def recomputed(self, *inputs: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        """Call the layer, store only its inputs and the bias, and recompute the layer in the backward pass.

        Pass the training mode and all masks as options. During the recomputation, the mode of the outer call isn't
        available, and ``tf.recompute_grad`` supports only floating-point inputs.
        """
        # The recomputation must sample the same dropout masks as the call. Therefore, both start from the states that
        # the random generators had before the call. With Keras' RematScope, the recomputation would sample different
        # masks.
        states = seed_states(self)
        seeds = [state.value for state in states]
        later: list[Any] = []

        def call(*given: Tensor) -> Tensor:
            with seeded(self, seeds) as scope:
                added = None if bias is None else given[-1]  # tf.recompute_grad differentiates only its arguments
                outputs = self(*given[: len(inputs)], bias=added, **options)
            later[:] = map(scope.get_current_value, states)
            return outputs

        outputs = tf.recompute_grad(call)(*inputs, *([] if bias is None else [bias]))
        for state, seed in zip(states, later, strict=True):
            state.assign(seed)
        return outputs
