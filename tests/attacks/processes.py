"""Attacks through what a port does to its process: ends it, prints, or alters what the comparison computes with."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import atexit
import ctypes
import gc
import locale
import os
import pickle
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import INCOMPLETE, REFUSED, TOLERATED, Sound, attack, plant
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.cases.inputs import padded_ids
from transformer_spec.config import TransformerConfig

HANGS = 5.0  # seconds after which a process that does nothing is ended


def few_cases(config: TransformerConfig) -> list[Case]:
    """Return a batch and a single sentence, which show whatever becomes of the process."""
    rng = np.random.default_rng(0)
    sides = (("source_ids", config.source_vocab_size, [6, 4, 1]), ("target_ids", config.target_vocab_size, [5, 5, 2]))
    ids = {name: padded_ids(rng, size, config.pad_id, lengths, max(lengths)) for name, size, lengths in sides}
    batches = {"batch": ids, "sentence": {name: array[:1] for name, array in ids.items()}}
    return [Case(f"full/{name}", "full model", config, "", inputs) for name, inputs in batches.items()]


FEW: dict[str, Any] = {"stages": (ACTIVATIONS,), "cases": few_cases}


def alone(expected: str) -> Callable[..., Any]:
    """Return a decorator that adds a port in a process of its own."""
    return attack(expected, alone=True, **FEW)


def before_a_sentence(name: str, what: str, act: Callable[[], Any], **options: Any) -> None:
    """Plant a port that does something in its forward pass when a batch holds a single sentence."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
        if len(source_ids) == 1:
            act()
        return Sound.forward(self, source_ids, target_ids, tap)

    plant(__name__, name, INCOMPLETE, what, {"forward": forward}, **{"alone": True, **FEW, **options})


def at_load(name: str, what: str, act: Callable[[], Any], expected: str = TOLERATED) -> None:
    """Plant a port that does something when a model is built."""

    def load(self: Sound, config: Any, weights: Any, dtype: str) -> None:
        Sound.load(self, config, weights, dtype)
        act()

    plant(__name__, name, expected, what, {"load": load}, alone=True, **FEW)


# Exceptions, and the end of the process.


def raises(error: BaseException) -> None:
    """Raise an error."""
    raise error


class WordlessError(Exception):
    """An error whose message cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


def recurse() -> None:
    """Call itself."""
    recurse()


def fork_and_die() -> None:
    """End the process, and leave a child that holds its pipes open."""
    if os.fork() == 0:
        time.sleep(4.0 * HANGS)
    os._exit(0)


here = partial(before_a_sentence, alone=False)
here("RaisesInOneCase", "The forward pass raises in one case.", lambda: raises(RuntimeError("no")))
here("RaisesWithoutWords", "It raises what cannot be printed.", lambda: raises(WordlessError()))
here("RaisesStopIteration", "It raises StopIteration, which ends a generator.", lambda: next(iter(())))
here("RaisesRecursionError", "It calls itself without end.", recurse)
before_a_sentence(
    "RaisesKeyboardInterrupt",
    "It raises KeyboardInterrupt, which is no Exception.",
    lambda: raises(KeyboardInterrupt()),
)
before_a_sentence("CallsExit", "It calls sys.exit(0).", lambda: sys.exit(0))
before_a_sentence("EndsTheProcess", "It ends the process with exit code 0.", lambda: os._exit(0))
before_a_sentence("Crashes", "It reads memory that it must not.", lambda: ctypes.string_at(0))
before_a_sentence("Hangs", "It does not end.", lambda: time.sleep(10.0 * HANGS), timeout=HANGS)
before_a_sentence(
    "ForksAndDies",
    "It ends the process, and leaves a child that holds its pipes open: to be noticed at once.",
    fork_and_die,
    timeout=2.0 * HANGS,
    says="exit code 0",
)
at_load(
    "CrashesAtTheEnd",
    "The process crashes at its exit, when everything has been compared, as frameworks do.",
    lambda: atexit.register(os.abort),
)


@attack(INCOMPLETE, **FEW)
class RaisesInFloat32(Sound):
    """The model cannot be built in float32, although that dtype is declared."""

    def load(self, config, weights, dtype):
        if dtype == "float32":
            raise RuntimeError("no float32")
        super().load(config, weights, dtype)


@alone(TOLERATED)
class ForksAndWaits(Sound):
    """The logits are computed by a forked child, and come back through a pipe."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        ours, theirs = os.pipe()
        if child := os.fork():
            os.close(theirs)
            with os.fdopen(ours, "rb") as pipe:
                logits = pickle.load(pipe)
            os.waitpid(child, 0)
            return logits
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(super().forward(source_ids, target_ids, tap), pipe)
        os._exit(0)


# What is printed, and open files.


def print_pickles() -> None:
    """Print pickled objects, and bytes that are no text."""
    sys.stdout.buffer.write(pickle.dumps({"verdict": "agrees"}) + b"\x80\x00\xff")
    os.write(1, pickle.dumps([0.0]) + b"\xff\xfe")


def close_streams() -> None:
    """Close standard input, output and error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


at_load("PrintsPickles", "Pickled objects are printed to standard output.", print_pickles)
at_load("ClosesStandardStreams", "Standard input, output and error are closed.", close_streams)
at_load(
    "ClosesEveryFile", "Every open file is closed, as by a daemon.", lambda: os.closerange(3, 256), expected=INCOMPLETE
)


# What the comparison computes with.


def slightly_wrong(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return square roots that are wrong in the fourth digit."""
    return np.power(x, 0.5, *args, **kwargs) * 1.0003


def norm_without_mean(norm: Any, x: ndarray) -> ndarray:
    """Return the result of a norm that does not subtract the mean."""
    return x / (np.square(x).mean(-1, keepdims=True) + 1e-6) ** 0.5 * norm.scale + norm.bias


def edit_reference() -> None:
    """Replace the layer norm of the reference, the formula and the fast version."""
    from reference_numpy import fast, layers

    layers.LayerNorm.__call__ = fast.FastLayerNorm.__call__ = norm_without_mean  # type: ignore[method-assign]


def no_distance() -> None:
    """Let every distance be zero, and everything finite."""
    for place, name, function in (
        (np.linalg, "norm", lambda *args, **kwargs: 0.0),
        (np, "broadcast_arrays", lambda first, second: (second, second)),
        (np, "isfinite", lambda x: np.ones(np.shape(x), bool)),
    ):
        setattr(place, name, function)


at_load(
    "ExpReplaced",
    "np.exp is replaced by a function that computes powers of 2.",
    lambda: setattr(np, "exp", np.exp2),
    expected=REFUSED,
)
at_load(
    "SqrtReplaced",
    "np.sqrt is replaced by a function that is wrong in the fourth digit.",
    lambda: setattr(np, "sqrt", slightly_wrong),
    expected=REFUSED,
)
at_load(
    "ReferenceEdited",
    "The port is made from the reference by replacing the layer norm of the reference itself.",
    edit_reference,
    expected=REFUSED,
)


@alone(REFUSED)
class DistanceReplaced(Sound):
    """NumPy's functions for distances and finite numbers are replaced; the logits are twice as large and hold a NaN."""

    def forward(self, source_ids, target_ids, tap):
        logits = 2.0 * super().forward(source_ids, target_ids, tap)
        logits[0, 0, 0] = np.nan
        no_distance()
        return logits


def change_globals() -> None:
    """Change what belongs to the whole process, and to nothing that is computed."""
    np.random.seed(0)
    random.seed(0)
    os.chdir(tempfile.gettempdir())
    os.environ.clear()
    locale.setlocale(locale.LC_ALL, "C")
    np.set_printoptions(precision=1, floatmode="fixed")
    sys.setrecursionlimit(400)
    gc.disable()


def stay() -> None:
    """Leave a thread that goes on for a second."""
    threading.Thread(target=time.sleep, args=(1.0,)).start()


at_load("WarningsAreErrors", "Warnings become exceptions.", lambda: warnings.simplefilter("error"))
at_load(
    "GlobalsChanged",
    "Seeds, folder, environment, locale, print options, recursion limit and garbage collection change.",
    change_globals,
)
at_load(
    "RoundsUpwards",
    "The processor is switched to rounding upwards, for whatever the process computes.",
    lambda: ctypes.CDLL(None).fesetround(0x800),
    expected=REFUSED,
)
at_load("ThreadLeftRunning", "A thread goes on for a second after the last call.", stay)


@alone(TOLERATED)
class ErrorsRaise(Sound):
    """NumPy raises at every overflow, underflow and invalid operation outside of the forward pass."""

    def forward(self, source_ids, target_ids, tap):
        with np.errstate(all="ignore"):
            logits = super().forward(source_ids, target_ids, tap)
        np.seterr(all="raise")
        return logits
