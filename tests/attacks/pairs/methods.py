"""Ports that try to get the verdict AGREE through their methods, declarations, processes, and further stages."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import gc
import os
import signal
import sys
import time

import numpy as np

from attacks.pairs.base import FullPort, Port, V
from attacks.pairs.outputs import Altered
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED

FULL = "--seeds 2 --dtype float64"


# Methods.
class ChangesTheInputs(Port):
    """The port overwrites one of its inputs."""

    expected, says = FAILS, "modifies its input"

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        inputs["ids"][:] = 0
        return found


class RemovesTheInputs(Port):
    """The port removes the inputs from the dict that it receives, which is harmless."""

    expected = TOLERATED

    def forward(self, inputs, tap):
        return super().forward({name: inputs.pop(name) for name in list(inputs)}, tap)


class ChangesTheWeights(Port):
    """The port doubles a weight in each call."""

    expected = FAILS

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        self.w["output.kernel"] *= 2.0
        return found


class NoDtypes(Port):
    """The port declares no dtypes."""

    expected, dtypes, says = INCOMPLETE, (), "dtypes"


class UnknownDtype(Port):
    """The port declares an unknown dtype."""

    expected, dtypes, says = INCOMPLETE, ("float32", "float128"), "float128"


class DtypeAsText(Port):
    """The port declares its dtype as a string instead of a tuple."""

    expected, dtypes = TOLERATED, "float32"


class Float16Only(Port):
    """The port declares only float16, in which the original also runs."""

    expected, dtypes, says = TOLERATED, ("float16",), "was not compared in float64"


# The process.
class Exits(Port):
    """The process of the port ends with exit code 0."""

    expected, says = INCOMPLETE, "exit code 0"

    def forward(self, inputs, tap):
        os._exit(0)


class ExitsAtImport(Port):
    """The process of the port ends when it creates the model."""

    expected = INCOMPLETE

    def __init__(self):
        raise SystemExit(0)


class Interrupts(Port):
    """The port raises a KeyboardInterrupt."""

    expected = INCOMPLETE

    def forward(self, inputs, tap):
        raise KeyboardInterrupt


class Crashes(Port):
    """The process of the port crashes in the last call."""

    expected, says = INCOMPLETE, "SIGSEGV"

    def forward(self, inputs, tap):
        found = super().forward(inputs, tap)
        if self.dtype == "float32":
            os.kill(os.getpid(), signal.SIGSEGV)
        return found


class Hangs(Port):
    """The port never returns."""

    expected, options, says = INCOMPLETE, "--timeout 2", "no progress for 2 s"

    def forward(self, inputs, tap):
        while True:
            time.sleep(1.0)


class WritesToEveryDescriptor(Altered):
    """The port has wrong logits and writes text and zeros to every open file descriptor."""

    expected = REFUSED

    def alter(self, logits):
        for number in range(1, 64):
            try:
                os.write(number, b"AGREE\n" + bytes(64))
            except OSError:
                continue
        return logits * 2


class PrintsAgree(Altered):
    """The port has wrong logits and prints a verdict."""

    expected = FAILS

    def alter(self, logits):
        print("\nAGREE  1 port", flush=True)
        os.system("echo; echo AGREE")
        return logits * 2


class Forks(Altered):
    """The port forks, and both processes continue with wrong logits."""

    expected = FAILS

    def alter(self, logits):
        os.fork()
        return logits * 2


class PatchesTheComparison(Altered):
    """In its process, a wrong port patches NumPy and the functions that compare tensors."""

    expected = FAILS

    def alter(self, logits):
        import transformer_parity.engine.verdict as verdict
        import transformer_parity.pairs.compare as compare

        np.array_equal = np.allclose = lambda *arrays, **options: True
        np.linalg.norm = lambda *arrays, **options: 0.0
        verdict.decide = lambda *arguments, **options: "agrees"
        compare.difference = lambda *arguments: 0.0
        sys.modules["json"] = None
        return logits * 2


class ImportsTheWorker(Altered):
    """A wrong port searches its process for the arrays of the original."""

    expected = FAILS

    def alter(self, logits):
        known = [one for one in gc.get_objects() if isinstance(one, np.ndarray) and one.shape == logits.shape]
        return known[0].astype(logits.dtype) if known and known[0] is not logits else logits * 2


# Stages.
class Gradients(FullPort):
    """A port with altered gradients."""

    options = f"{FULL} --stage gradients"

    def alter(self, found):
        """Return altered gradients."""
        return found

    def gradients(self, inputs):
        """Return the altered gradients."""
        return self.alter(super().gradients(inputs))


def gradients(name, what, alter, expected=FAILS, **attributes):
    """Add a port with altered gradients."""
    methods = {"alter": lambda self, found: alter(found), "__module__": __name__, "__doc__": what}
    globals()[name] = type(name, (Gradients,), methods | {"expected": expected} | attributes)


gradients("GradientsOfTheLossOnly", "The port returns the loss, but no gradients.", lambda g: {"loss": g["loss"]})
gradients("GradientsOfZero", "All gradients are zero.", lambda g: {name: 0 * x for name, x in g.items()})
gradients("GradientsOfNan", "One gradient contains NaN.", lambda g: g | {"scale": g["scale"] * np.nan})
gradients("GradientExtra", "The port returns one more gradient.", lambda g: g | {"extra": g["scale"]})
gradients(
    "GradientMissing", "The gradient of one weight is missing.", lambda g: {n: x for n, x in g.items() if n != "scale"}
)


class GradientsAreWeights(Gradients):
    """The port returns its weights instead of the gradients."""

    expected = FAILS

    def alter(self, found):
        return {**found, **self.w}


class NoGradients(Port):
    """Gradients are requested, but the port doesn't support them."""

    expected, options, says = INCOMPLETE, "--stage forward,gradients", "must define gradients()"


class LogitsOfAllPositions(FullPort):
    """The logits of a decoding step have the shape [B, L, V]."""

    expected, options, says = INCOMPLETE, f"{FULL} --stage decode", "must have the shape"

    def next_logits(self, inputs, prefix):
        return super().next_logits(inputs, prefix)[:, None]


class LogitsOfTheFirstStep(FullPort):
    """Every decoding step returns the logits of the first step."""

    expected, options = FAILS, f"{FULL} --stage decode"

    def next_logits(self, inputs, prefix):
        return super().next_logits(inputs, prefix[:, :0])


class OneHotLogits(FullPort):
    """The logits of a decoding step are one-hot vectors of the correct token."""

    expected, options = FAILS, f"{FULL} --stage decode"

    def next_logits(self, inputs, prefix):
        logits = super().next_logits(inputs, prefix)
        return np.eye(V, dtype=logits.dtype)[logits.argmax(-1)]


class CacheIgnored(FullPort):
    """The port ignores the cache and runs the model on all tokens, which is correct but slow."""

    expected, options = TOLERATED, f"{FULL} --stage 'decode,cached decode'"

    def next_logits_cached(self, inputs, prefix, cache):
        return self.next_logits(inputs, prefix), None


class CacheForgets(FullPort):
    """The cache contains only the inputs, so each step sees only its own token and the inputs."""

    expected, options = FAILS, f"{FULL} --stage 'decode,cached decode'"

    def next_logits_cached(self, inputs, prefix, cache):
        return self.next_logits(inputs, prefix[:, -1:]), None
