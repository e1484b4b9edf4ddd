"""The process that runs one implementation. It compares nothing."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_parity.engine.exceptions import described
from transformer_parity.engine.processes.messages import Broken, Parent
from transformer_parity.engine.processes.start import ROOT
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.contract.arrays import Taps, shown, to_numpy, use_dtype
from transformer_parity.pairs.contract.implementation import Implementation
from transformer_parity.pairs.contract.source import MissingNameError
from transformer_parity.pairs.run.messages import LOGITS, Call, Declaration, Import, Load, Raised, Ran

OPTIONAL = ("init_weights", "inputs", "gradients", "next_logits", "next_logits_cached")
REQUIRED = ("load", "forward")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
MOST_LETTERS = 600  # maximum length of a message
FRAMEWORKS = (
    *("torch", "jax", "flax", "tensorflow", "keras", "mlx.core", "equinox", "onnxruntime"),
    *("transformers", "keras_hub", "mlx_lm"),
)


def work(parent: Parent) -> None:
    """Answer the requests of the parent process until it sends no more."""
    prepare_environment()
    try:
        runner = Runner(parent.receive())
        parent.send(runner.imported)
    except Exception as error:
        parent.send(Broken(_said(error), is_usage=True))
        return
    while True:
        try:
            request = parent.receive()
        except EOFError:
            return
        parent.send(runner.answer(request))


class Runner:
    """One implementation and the models that were created from it."""

    def __init__(self, request: Import) -> None:
        self._instance = request.instance
        found = request.source.load()
        self._kind = found if isinstance(found, type) else type(found)
        if not issubclass(self._kind, Implementation):
            raise ValueError(
                f"{request.source} must be a subclass of transformer_parity.pair.Implementation: got {found!r}"
            )
        for name in REQUIRED:
            if name not in (methods := _methods(self._kind)):
                raise ValueError(f"{request.source} must define {name}()")
        self.imported = Declaration(
            dtypes=_words(self._kind.dtypes),
            methods=frozenset(methods),
            fixed_weights=_words(self._kind.fixed_weights),
            code=[_place(getattr(self._kind, name)) for name in REQUIRED],
            versions=_versions(),
            names=_names(request),
        )
        self._models: dict[str, tuple[Implementation, str]] = {}
        self._caches: dict[str, Any] = {}

    def answer(self, request: Load | Call) -> Ran | Raised:
        """Run a request, and return its result or a description of the exception that it raised."""
        try:
            return self._load(request) if isinstance(request, Load) else self._call(request)
        except Exception as error:
            return Raised(_said(error))

    def _new(self) -> Implementation:
        if not self._instance:
            return self._kind()
        model: Implementation = object.__new__(self._kind)
        vars(model).update(pickle.loads(self._instance))
        return model

    def _load(self, request: Load) -> Ran:
        self._models.pop(request.key, None)
        use_dtype(request.dtype)
        model = self._new()
        model.load(request.weights, request.dtype)
        self._models[request.key] = (model, request.dtype)
        return Ran(versions=_versions())

    def _call(self, request: Call) -> Ran:
        model, dtype = self._models[request.key] if request.key else (self._new(), "float32")
        use_dtype(dtype)
        # An implementation may change the dicts that it receives, but not the arrays in them.
        arguments: list[Any] = [dict(value) if isinstance(value, Mapping) else value for value in request.arguments]
        method, taps, before = request.method, Taps(request.given), _copies(arguments)
        if method == "forward":
            arguments.append(taps)
        if method == "next_logits_cached":
            first = not arguments[1].shape[1]
            cache = None if first else self._caches.get(request.key)
            logits, self._caches[request.key] = model.next_logits_cached(arguments[0], arguments[1], cache)
            outputs = {LOGITS: to_numpy(logits)}
        else:
            found = getattr(model, method)(*arguments)
            outputs = {LOGITS: to_numpy(found)} if method == "next_logits" else shown(found, f"{method}()")
        return Ran(outputs, taps.values, frozenset(taps.captured), _modified(before, request.arguments))


def _words(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _copies(arguments: list[Any]) -> Tensors:
    arrays = {name: value for entry in arguments if isinstance(entry, Mapping) for name, value in entry.items()}
    return {name: np.array(value) for name, value in arrays.items()}


def _modified(before: Tensors, arguments: Any) -> tuple[str, ...]:
    arrays = {name: value for entry in arguments if isinstance(entry, Mapping) for name, value in entry.items()}
    return tuple(name for name, value in before.items() if value.tobytes() != arrays[name].tobytes())


def _methods(kind: type[Implementation]) -> list[str]:
    return [name for name in (*REQUIRED, *OPTIONAL) if getattr(kind, name) is not getattr(Implementation, name)]


def _names(request: Import) -> Mapping[str, Any]:
    if request.names is None:
        return {}
    try:
        found = request.names.load()
    except MissingNameError:
        if request.needs_names:
            raise
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{request.names} must be a dict: got {type(found).__name__}")
    return dict(found)


def _place(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _versions() -> dict[str, str]:
    loaded = {name: sys.modules[name] for name in FRAMEWORKS if name in sys.modules}
    found = {name: str(getattr(module, "__version__", "")) for name, module in loaded.items()}
    return {"python": sys.version.split()[0], "numpy": np.__version__, **found}


def _said(error: Exception) -> str:
    """Return the message of an exception and its place, without colors and without the middle of a long message."""
    text = COLORS.sub("", described(error, [Path(ROOT, "transformer_parity")]))
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS // 2]} ... {text[-MOST_LETTERS // 2 :]}"
