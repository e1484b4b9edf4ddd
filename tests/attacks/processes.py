"""Attacks by ports that end their process, print, or modify the functions that the comparison uses."""

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

from attacks.attack import Sound, attack, inject
from attacks.words import INCOMPLETE, REFUSED, TOLERATED
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.cases.inputs import padded_ids
from transformer_spec.config import TransformerConfig

HANGS = 5.0  # seconds without a message after which a process is stopped


def few_cases(config: TransformerConfig) -> list[Case]:
    """Return a batch and a single sentence, which suffice to observe the process."""
    rng = np.random.default_rng(0)
    sides = (("source_ids", config.source_vocab_size, [6, 4, 1]), ("target_ids", config.target_vocab_size, [5, 5, 2]))
    ids = {name: padded_ids(rng, size, config.pad_id, lengths, max(lengths)) for name, size, lengths in sides}
    batches = {"batch": ids, "sentence": {name: array[:1] for name, array in ids.items()}}
    return [Case(f"full/{name}", "full model", config, "", inputs) for name, inputs in batches.items()]


FEW: dict[str, Any] = {"stages": (ACTIVATIONS,), "cases": few_cases}


def separate(expected: str) -> Callable[..., Any]:
    """Return a decorator that adds a port in a separate process."""
    return attack(expected, separate=True, **FEW)


def before_a_sentence(name: str, what: str, act: Callable[[], Any], **options: Any) -> None:
    """Add a port that calls ``act`` in its forward pass if the batch contains one sentence."""

    def forward(self: Sound, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
        if len(source_ids) == 1:
            act()
        return Sound.forward(self, source_ids, target_ids, tap)

    inject(__name__, name, INCOMPLETE, what, {"forward": forward}, **{"separate": True, **FEW, **options})


def at_load(name: str, what: str, act: Callable[[], Any], expected: str = TOLERATED) -> None:
    """Add a port that calls ``act`` after it builds a model."""

    def load(self: Sound, config: Any, weights: Any, dtype: str) -> None:
        Sound.load(self, config, weights, dtype)
        act()

    inject(__name__, name, expected, what, {"load": load}, separate=True, **FEW)


# Exceptions, and the end of the process.


def raises(error: BaseException) -> None:
    """Raise an error."""
    raise error


class WordlessError(Exception):
    """An error whose message can't be printed."""

    def __str__(self) -> str:
        raise ValueError("no words")


def recurse() -> None:
    """Call this function recursively without end."""
    recurse()


def fork_and_die() -> None:
    """End the process, but leave a child that keeps its pipes open."""
    if os.fork() == 0:
        time.sleep(4.0 * HANGS)
    os._exit(0)


here = partial(before_a_sentence, separate=False)
here("RaisesInOneCase", "The forward pass raises an error in one case.", lambda: raises(RuntimeError("no")))
here(
    "RaisesWithoutWords",
    "The forward pass raises an exception whose message can't be printed.",
    lambda: raises(WordlessError()),
)
here("RaisesStopIteration", "The forward pass raises StopIteration, which ends a generator.", lambda: next(iter(())))
here("RaisesRecursionError", "The forward pass calls itself recursively without end.", recurse)
before_a_sentence(
    "RaisesKeyboardInterrupt",
    "The forward pass raises KeyboardInterrupt, which isn't a subclass of Exception.",
    lambda: raises(KeyboardInterrupt()),
)
before_a_sentence("CallsExit", "The forward pass calls sys.exit(0).", lambda: sys.exit(0))
before_a_sentence("EndsTheProcess", "The forward pass ends the process with exit code 0.", lambda: os._exit(0))
before_a_sentence("Crashes", "The forward pass reads from an invalid address.", lambda: ctypes.string_at(0))
before_a_sentence("Hangs", "The forward pass never returns.", lambda: time.sleep(10.0 * HANGS), timeout=HANGS)
before_a_sentence(
    "ForksAndDies",
    "The port's process ends, but its child process keeps the pipes open. parity must detect this immediately.",
    fork_and_die,
    timeout=2.0 * HANGS,
    says="exit code 0",
)
at_load(
    "CrashesAtTheEnd",
    "The process crashes at exit, after all comparisons, as frameworks sometimes do.",
    lambda: atexit.register(os.abort),
)


@attack(INCOMPLETE, **FEW)
class RaisesInFloat32(Sound):
    """The port declares float32 but raises an error when it builds the model in float32."""

    def load(self, config, weights, dtype):
        if dtype == "float32":
            raise RuntimeError("no float32")
        super().load(config, weights, dtype)


@separate(TOLERATED)
class ForksAndWaits(Sound):
    """A forked child process computes the logits and returns them through a pipe."""

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


# Output and open files.


def print_pickles() -> None:
    """Print pickled objects and bytes that aren't valid text."""
    sys.stdout.buffer.write(pickle.dumps({"verdict": "agrees"}) + b"\x80\x00\xff")
    os.write(1, pickle.dumps([0.0]) + b"\xff\xfe")


def close_streams() -> None:
    """Close standard input, output and error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


at_load("PrintsPickles", "The port prints pickled objects to standard output.", print_pickles)
at_load("ClosesStandardStreams", "The port closes standard input, output, and error.", close_streams)
at_load(
    "ClosesEveryFile",
    "The port closes every open file descriptor, as a daemon does.",
    lambda: os.closerange(3, 256),
    expected=INCOMPLETE,
)


# Functions that the comparison uses.


def slightly_wrong(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return square roots that are wrong in the fourth digit."""
    return np.power(x, 0.5, *args, **kwargs) * 1.0003


def norm_without_mean(norm: Any, x: ndarray) -> ndarray:
    """Return the result of a norm that doesn't subtract the mean."""
    return x / (np.square(x).mean(-1, keepdims=True) + 1e-6) ** 0.5 * norm.scale + norm.bias


def edit_reference() -> None:
    """Replace both versions of the reference's layer norm, the formula and the fast one."""
    from reference_numpy import fast, layers

    layers.LayerNorm.__call__ = fast.FastLayerNorm.__call__ = norm_without_mean  # type: ignore[method-assign]


def no_distance() -> None:
    """Replace NumPy functions so that every norm is zero and every value is finite."""
    for place, name, function in (
        (np.linalg, "norm", lambda *args, **kwargs: 0.0),
        (np, "broadcast_arrays", lambda first, second: (second, second)),
        (np, "isfinite", lambda x: np.ones(np.shape(x), bool)),
    ):
        setattr(place, name, function)


at_load(
    "ExpReplaced",
    "The port replaces np.exp with np.exp2.",
    lambda: setattr(np, "exp", np.exp2),
    expected=REFUSED,
)
at_load(
    "SqrtReplaced",
    "The port replaces np.sqrt with a function that is wrong in the fourth digit.",
    lambda: setattr(np, "sqrt", slightly_wrong),
    expected=REFUSED,
)
at_load(
    "ReferenceEdited",
    "The port replaces the reference's own layer norm.",
    edit_reference,
    expected=REFUSED,
)


@separate(REFUSED)
class DistanceReplaced(Sound):
    """The port replaces NumPy's functions norm and isfinite. Its logits are doubled and contain a NaN."""

    def forward(self, source_ids, target_ids, tap):
        logits = 2.0 * super().forward(source_ids, target_ids, tap)
        logits[0, 0, 0] = np.nan
        no_distance()
        return logits


def change_globals() -> None:
    """Change process-wide settings that don't affect results."""
    np.random.seed(0)
    random.seed(0)
    os.chdir(tempfile.gettempdir())
    os.environ.clear()
    locale.setlocale(locale.LC_ALL, "C")
    np.set_printoptions(precision=1, floatmode="fixed")
    sys.setrecursionlimit(400)
    gc.disable()


def stay() -> None:
    """Start a thread that runs for one second."""
    threading.Thread(target=time.sleep, args=(1.0,)).start()


at_load("WarningsAreErrors", "The port turns warnings into exceptions.", lambda: warnings.simplefilter("error"))
at_load(
    "GlobalsChanged",
    "The port changes the seeds, working directory, environment, locale, print options, and recursion limit.",
    change_globals,
)
at_load(
    "RoundsUpwards",
    "The port sets the processor's rounding mode to upward, which affects all computations in the process.",
    lambda: ctypes.CDLL(None).fesetround(0x800),
    expected=REFUSED,
)
at_load("ThreadLeftRunning", "A thread keeps running for one second after the last call.", stay)


@separate(TOLERATED)
class ErrorsRaise(Sound):
    """Outside the forward pass, NumPy raises an error for every overflow, underflow, or invalid operation."""

    def forward(self, source_ids, target_ids, tap):
        with np.errstate(all="ignore"):
            logits = super().forward(source_ids, target_ids, tap)
        np.seterr(all="raise")
        return logits
