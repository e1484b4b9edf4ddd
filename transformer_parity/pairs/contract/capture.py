"""Read and replace the outputs of all layers of a model, without changes to its code.

Each function takes a model of one framework and a tap::

    with capture.torch(model, tap):
        logits = model(ids)

When a submodule returns, its output is passed to ``tap`` under the submodule's path in the model, for example
``encoder.layers.0.attention``, and the model continues with the tap's result. The output of the model itself isn't
passed to ``tap``, because ``forward`` returns it.

- If the output is a tuple, list, dict, or dataclass, each of its floating-point and integer arrays has a name, such as
  ``lstm.0`` or ``encoder.last_hidden_state``. All other values stay unchanged.
- If a submodule is called more than once in a ``with`` block, its later outputs are named ``path#1``, ``path#2``, and
  so on. A submodule with more than one path is named by the first path.
- Compiled code can't be read, so layers inside ``jax.jit``, ``jax.lax.scan``, or ``mlx.core.compile`` are skipped. If
  no layer can be read, a ValueError is raised.
- Inside ``jax.vmap``, the tap receives the arrays of the entire batch. The mapped axis is the first axis.
- A layer may change its output in place later, so a tap that stores an array must copy it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from itertools import count
from typing import Any

from numpy import ndarray

from transformer_parity.pairs.contract import onnx_graph
from transformer_parity.pairs.contract.implementation import Arrays, Tap

ARRAYS = {"numpy": "ndarray", "torch": "Tensor", "jax": "Array", "tensorflow": "Tensor", "mlx.core": "array"}
NUMBER = re.compile(r"(?<![a-z])(b?float|u?int)\d")  # in the name of a dtype, such as torch.bfloat16


class _Capture:
    """The names and the state of one ``with`` block.

    Args:
        tap: Tap that receives the outputs of the submodules.
        modules: Function that returns the model and its submodules with their paths.
        compilers: Transformations that the error message mentions, because layers inside them can't be read.
    """

    def __init__(self, tap: Tap, modules: Callable[[], Iterable[tuple[str, Any]]], compilers: str) -> None:
        self.tap, self.modules, self.compilers = tap, modules, compilers
        self.paths = {id(module): (path, module) for path, module in modules()}
        loaded = {name: sys.modules.get(name) for name in ARRAYS}
        self.arrays = tuple(getattr(loaded[name], kind) for name, kind in ARRAYS.items() if loaded[name])
        self.names: Counter[str] = Counter()
        self.is_called = self.is_compiled = False

    def returned(self, module: Any, output: Any) -> Any:
        """Return the output of a call, with the arrays that the tap replaced."""
        if id(module) not in self.paths:  # the model may have created the submodule in its first call
            self.paths = {id(module): (path, module) for path, module in self.modules()}
        path, _ = self.paths.get(id(module), (None, None))
        if path is None:  # a submodule of a different model
            return output
        self.is_called = True
        return self.show(path, output) if path else output

    def show(self, name: str, value: Any) -> Any:
        """Pass all arrays of an output to the tap. Return an output of the same type that contains the results."""
        if isinstance(value, self.arrays):
            return self.show_array(name, value) if NUMBER.search(str(value.dtype)) else value
        items = _items(value)
        used = {key: self.show(f"{name}.{key}", item) for key, item in items.items()}
        return value if all(used[key] is item for key, item in items.items()) else _rebuilt(value, used)

    def show_array(self, name: str, value: Any) -> Any:
        """Pass an array to the tap and return the result, or return the array if compiled code computes it."""
        if type(value).__name__ == "BatchTracer":  # inside jax.vmap; the rule of a function receives the batch
            identity = import_module("jax").custom_batching.custom_vmap(lambda array: array)
            identity.def_vmap(lambda size, is_mapped, batch: (self.show_array(name, batch), True))
            return identity(value)
        if _is_compiled(value):
            self.is_compiled = True
            return value
        number = self.names[name]
        self.names[name] += 1
        tap = getattr(self.tap, "capture", self.tap)  # distinguishes layers from taps in the code of the user
        return tap(f"{name}#{number}" if number else name, value)

    def finish(self) -> None:
        """Raise a ValueError if no layer was read because compiled code ran."""
        if not self.names and (self.is_compiled or not self.is_called):
            raise ValueError(
                "the outputs of the model's layers could not be read: call the model in the with block, and call it "
                f"without {self.compilers}"
            )


def _items(value: Any) -> Mapping[Any, Any]:
    """Return the elements of a tuple, list, dict, or dataclass by key, and an empty dict for all other values."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple | list):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def _rebuilt(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a tuple, list, dict, or dataclass with different elements."""
    if isinstance(value, tuple):
        return getattr(type(value), "_make", type(value))(items.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(items)  # type: ignore[call-arg]
    used = copy.copy(value)
    for key, item in items.items():
        if isinstance(value, list | Mapping):
            used[key] = item
        else:
            object.__setattr__(used, key, item)  # the dataclass may be frozen
    return used


def _is_compiled(value: Any) -> bool:
    """Return whether an array has no values yet, because a function is being traced for compilation."""
    jax, tensorflow, mlx = map(sys.modules.get, ("jax", "tensorflow", "mlx.core"))
    if jax and isinstance(value, jax.core.Tracer):
        return True
    if tensorflow and isinstance(value, tensorflow.Tensor):
        return tensorflow.is_symbolic_tensor(value)
    if mlx and isinstance(value, mlx.array):
        try:
            mlx.eval(value)
        except ValueError:  # the only sign of mlx.core.compile and mlx.core.vmap
            return True
    return getattr(value, "is_meta", False)


def _modules(model: Any, kind: type, children: Callable[[Any], Mapping[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the paths of all modules in a model. The path of the model is empty."""
    seen = set()

    def visit(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        is_module = isinstance(value, kind)
        if id(value) in seen or not (is_module or isinstance(value, Mapping | list | tuple)):
            return
        seen.add(id(value))
        if is_module:
            yield path, value
        for key, item in (children(value) if is_module else _items(value)).items():
            yield from visit(f"{path}.{key}" if path else str(key), item)

    return visit("", model)


_lock = threading.Lock()
_settings: list[ExitStack] = []  # the global settings of PyTorch before each running capture
_patched: dict[type, tuple[Any, list[_Capture]]] = {}  # the original __call__ of a class, and who reads its results


def _owner(kind: type) -> type | None:
    """Return the class that defines the ``__call__`` of a class."""
    return next((base for base in kind.__mro__ if "__call__" in vars(base)), None)


def _patch(owner: type) -> None:
    """Replace the ``__call__`` of a class with a function that shows the results to all captures of the class."""
    original = vars(owner)["__call__"]
    captures: list[_Capture] = []

    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original.__get__(self, type(self))(*args, **kwargs)
        if _owner(type(self)) is owner:  # otherwise, a subclass called super().__call__
            for capture in tuple(captures):
                output = capture.returned(self, output)
        return output

    _patched[owner] = original, captures
    owner.__call__ = call  # type: ignore[method-assign]


def _unpatch(owner: type, capture: _Capture) -> None:
    """Remove a capture from a class. Restore the original ``__call__`` after the last capture."""
    with _lock:
        original, captures = _patched[owner]
        captures.remove(capture)
        if not captures:
            del _patched[owner]
            owner.__call__ = original  # type: ignore[method-assign]


@contextmanager
def _calls(model: Any, tap: Tap, kind: type, children: Callable[[Any], Mapping], compilers: str) -> Iterator[None]:
    """Capture the calls of all modules in a model, in a framework that has no hooks."""
    capture = _Capture(tap, lambda: _modules(model, kind, children), compilers)
    kinds = {kind, *(type(module) for _, module in capture.paths.values())}
    with ExitStack() as undo:
        for owner in {owner for kind in kinds if (owner := _owner(kind))}:
            with _lock:
                if owner not in _patched:
                    _patch(owner)
                _patched[owner][1].append(capture)
            undo.callback(_unpatch, owner, capture)
        yield
        capture.finish()


def _library(name: str, model: Any, kind: str = "Module") -> Any:
    """Import a framework. Raise a TypeError unless the model is an instance of its class for modules."""
    library = import_module(name)
    if not isinstance(model, getattr(library, kind)):
        raise TypeError(f"model must be a {name}.{kind}: got {type(model).__name__}")
    return library


@contextmanager
def torch(model: Any, tap: Tap) -> Iterator[None]:
    """Capture the outputs of the submodules of a PyTorch model.

    Models compiled by ``torch.compile`` run without compilation. ``torch.nn.TransformerEncoder`` runs without its fast
    path, which doesn't call its submodules.

    Raises:
        TypeError: If the model isn't a ``torch.nn.Module``.
        ValueError: If the model contains TorchScript, or if it isn't called.
    """
    _library("torch.nn", model)
    torch = sys.modules["torch"]
    modules = {path: module for path, module in model.named_modules() if not hasattr(module, "_orig_mod")}
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules.values()):
        raise ValueError("the submodules of a TorchScript model can't be read: pass the original model")
    paths = [(re.sub(r"(^|\.)_orig_mod(?=\.|$)", "", path).lstrip("."), module) for path, module in modules.items()]
    capture = _Capture(tap, lambda: paths, "torch.jit")
    with ExitStack() as undo:
        for module in modules.values():
            handle = module.register_forward_hook(lambda module, args, output: capture.returned(module, output))
            undo.callback(handle.remove)
        settings = ExitStack()
        settings.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:  # torch.compile imports it
            settings.enter_context(torch.compiler.set_stance("force_eager"))
        _settings.append(settings)
        undo.callback(lambda: _settings.pop().close())  # the newest settings, even if this block isn't the newest
        yield
        capture.finish()


def nnx(model: Any, tap: Tap) -> AbstractContextManager[None]:
    """Capture the outputs of the submodules of a Flax NNX model.

    Transformations such as ``nnx.jit`` and ``nnx.vmap`` copy the modules, so the submodules inside them can't be read.
    ``jax.vmap`` doesn't copy them.

    Raises:
        TypeError: If the model isn't an ``nnx.Module``.
        ValueError: If all layers run in compiled code, or if the model isn't called.
    """
    return _calls(model, tap, _library("flax.nnx", model).Module, vars, "nnx.jit, jax.jit, and nnx.vmap")


def equinox(model: Any, tap: Tap) -> AbstractContextManager[None]:
    """Capture the outputs of the submodules of an Equinox model.

    If you call the model as ``jax.vmap(model)(batch)``, the tap receives the arrays of the entire batch. Don't use
    ``eqx.filter_vmap``, because it copies the modules, so the submodules inside it can't be read.

    Raises:
        TypeError: If the model isn't an ``equinox.Module``.
        ValueError: If all layers run in compiled code, or if the model isn't called.
    """
    return _calls(model, tap, _library("equinox", model).Module, vars, "jax.jit, eqx.filter_jit, and eqx.filter_vmap")


def mlx(model: Any, tap: Tap) -> AbstractContextManager[None]:
    """Capture the outputs of the submodules of an MLX model.

    Raises:
        TypeError: If the model isn't an ``mlx.nn.Module``.
        ValueError: If all layers run in compiled code, or if the model isn't called.
    """
    return _calls(model, tap, _library("mlx.nn", model).Module, dict, "mlx.core.compile and mlx.core.vmap")


def keras(model: Any, tap: Tap) -> AbstractContextManager[None]:
    """Capture the outputs of the layers of a Keras model, with any backend.

    In functional and sequential models, a layer's path contains the names of the layers. In all other layers, it
    contains attributes. Keras numbers layers without a name across all models, so names such as ``dense_7`` are
    renumbered in every model: ``dense``, ``dense_1``, and so on.

    Raises:
        TypeError: If the model isn't a ``keras.Layer``.
        ValueError: If all layers run in compiled code, such as ``predict``, or if the model isn't called.
    """
    library, backend = _library("keras", model, "Layer"), import_module("keras.src.backend")
    empty = library.Model(name="empty")
    empty.layer = library.layers.Identity(name="layer")
    internal = vars(empty).keys() - {"layer"}  # attributes that Keras adds, such as lists of all sublayers

    def children(layer: Any) -> Mapping[str, Any]:
        if isinstance(layer, library.Sequential | library.Function):
            return _layers_by_name(layer.layers)
        if isinstance(layer, library.layers.RNN):  # how often the cell is called depends on the backend
            return {}
        attributes = vars(layer) | vars(layer).get("_modules", {})  # in the PyTorch backend, a layer is a torch module
        return {name: value for name, value in attributes.items() if name not in internal}

    def with_mask(name: str, value: Any) -> Any:
        used = tap(name, value)
        if used is not value and (mask := backend.get_keras_mask(value)) is not None:
            backend.set_keras_mask(used, mask)  # the next layer reads the mask of its input
        return used

    return _calls(model, with_mask, library.Layer, children, "predict, tf.function, and jax.jit")


def _layers_by_name(layers: Iterable[Any]) -> dict[str, Any]:
    """Return the layers of a Keras model by name. Automatic names are numbered in the order of the layers."""
    snake_case = import_module("keras.src.utils.naming").to_snake_case
    bases = [(layer, snake_case(type(layer).__name__)) for layer in layers]
    automatic = [(layer, base) for layer, base in bases if re.fullmatch(rf"{base}(_\d+)?", layer.name)]
    found = {layer.name: layer for layer, base in bases if (layer, base) not in automatic}
    for layer, base in automatic:
        names = (f"{base}_{number}" if number else base for number in count())
        found[next(name for name in names if name not in found)] = layer
    return found


@contextmanager
def linen(module: Any, tap: Tap) -> Iterator[None]:
    """Capture the outputs of the submodules of a Flax Linen module.

    The paths are the paths of the parameters, such as ``encoder.Dense_0``. Call ``module.apply`` in the ``with`` block,
    or pass a bound module and call it. Calls of ``module.init`` are ignored.

    Raises:
        TypeError: If the module isn't a ``flax.linen.Module``.
        ValueError: If all layers run in compiled code, or if the module isn't called.
    """
    library = _library("flax.linen", module)
    capture, models = _Capture(tap, lambda: (), "jax.jit"), [module]
    calls: list[tuple[Any, bool]] = [(None, False)]  # the path of each running call, and whether to show the results
    clone, previous = module.clone, {name: value for name, value in vars(module).items() if name == "clone"}

    def cloned(*args: Any, **kwargs: Any) -> Any:  # apply and bind call the methods of a clone
        models.append(clone(*args, **kwargs))
        return models[-1]

    def intercept(function: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        caller, path = context.module, context.module.path
        while isinstance(caller.parent, library.Module):
            caller = caller.parent
        # Inside a lifted transformation, such as nn.vmap, a module is a clone without a parent, but with a path.
        is_shown = any(caller is model for model in models) or (calls[-1][1] and path != ())
        is_call = context.method_name == "__call__" and path not in dict(calls)  # not a call of super().__call__
        calls.append((path if is_call else None, is_shown))
        try:
            output = function(*args, **kwargs)
        finally:
            calls.pop()
        if not is_shown or context.module.is_initializing():
            return output
        capture.is_called = True
        return capture.show(".".join(path), output) if path and is_call else output

    vars(module)["clone"] = cloned
    try:
        with library.intercept_methods(intercept):
            yield
        capture.finish()
    finally:
        del vars(module)["clone"]
        vars(module).update(previous)


def onnx(model: Any, inputs: Arrays, tap: Tap) -> dict[str, ndarray]:
    """Run an ONNX model with ONNX Runtime on the CPU, and return its outputs by name.

    ``tap`` is called for every floating-point and integer tensor of the graph, in the order of the nodes and under the
    names in the graph, except constants, outputs that no node reads, and the tensors in subgraphs and functions. Graph
    optimizations are disabled.

    If the tap has an attribute ``replacements``, a dict of arrays by tensor name, the model runs once, with these
    arrays. Without this attribute, the model is rerun each time the tap returns a different array.

    Args:
        model: Path of an ONNX file, or a ``ModelProto``. The size of the model must be less than 2 GiB.
        inputs: Inputs of the model by name.
        tap: Tap that receives NumPy arrays.
    """
    return onnx_graph.run(model, inputs, tap)
