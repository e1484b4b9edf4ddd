"""Attacks through the options of `parity check` and of the pytest plug-in, and through the names of ports."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from attacks import attack
from attacks.attack import Attack, Sound

SOUND, OFFERS, SELF = f"{attack.__name__}:Sound", "attacks.offers", __name__
CHECK, DISTRIBUTED = ["transformer_parity", "check"], ["transformer_parity", "check-distributed"]
PYTEST = ["pytest", "-p", "no:cacheprovider", "-q"]
RESULT = "result.json"  # result of an earlier run, which agreed
TESTS = Path(__file__).parents[1]  # the directory from which commands import this package


def attacks(table: str) -> Iterator[Attack]:
    """Yield the attacks in a text.

    Each attack has two lines: its name and description, then its expected verdict and the options of the command.
    The options may be followed by ``=>`` and a text that the output must contain.
    """
    lines = [line.strip() for line in table.splitlines() if line.strip() and not line.startswith("#")]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        name, what = first.split(": ", 1)
        expected, options = second.split(": ", 1)
        options, _, says = options.partition(" => ")
        command = PYTEST if "--parity-port" in options else DISTRIBUTED if "--parallel" in options else CHECK
        module, *arguments = [*command, *options.split()]
        needs = (("torch",) if "--backends torch" in options else ()) + (("pytest",) if module == "pytest" else ())
        run = partial(_run, module, *arguments)
        yield Attack(name, what, expected, attack.OPTIONS, run, says, separate=True, needs=needs)


def _run(module: str, *arguments: str) -> tuple[int, str]:
    """Run a command and return its exit code and output.

    Return 0 if the command fails but prints AGREE, or leaves AGREE in the result of an earlier run.
    """
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, RESULT)
        result.write_text("AGREE")
        found = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path},
        )
        if found.returncode and RESULT in arguments and result.exists() and "AGREE" in result.read_text():
            return 0, f"the exit code is {found.returncode}, and {RESULT} says AGREE"
    lines = [line.strip() for line in (*found.stderr.splitlines(), *found.stdout.splitlines()) if line.strip()]
    if found.returncode and any(line.startswith("AGREE") for line in lines):
        return 0, f"the exit code is {found.returncode}, and a line begins with AGREE"
    return found.returncode, " / ".join(lines[-3:])


class WrongNamesake(Sound):
    """A wrong port with the name of a correct port."""

    name = "Sound"

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return logits if logits.dtype == np.float64 else np.float32(1.01) * logits  # a factor is diagnosed quickly


class WrongReference(WrongNamesake):
    """A wrong port with the name of the reference."""

    name = "numpy"


class ByItself(Sound):
    """A port whose processes train on the full batch without communication."""

    def distribute(self, plan):
        pass

    def parameters_per_device(self):
        return [sum(array.size for array in self.export_weights().values())]


class Nameless(Sound):
    """A correct port with an empty name."""

    name = ""


class Markup(Sound):
    """A correct port whose name contains the markup of a table."""

    name = "[/bold] [red]x[/] [link=file:///]"


class WrongMarkup(WrongNamesake):
    """A wrong port whose name and error message contain markup."""

    name = Markup.name

    def forward(self, source_ids, target_ids, tap):
        if len(source_ids) == 1:
            raise ValueError("[/bold] what is this?")
        return super().forward(source_ids, target_ids, tap)


class Escapes(WrongNamesake):
    """A wrong port whose name clears the screen and prints a verdict."""

    name = "x\x1b[2J\x1b[H\nAGREE  1 port, 9 cases, 1,049 comparisons.\n\x1b[8m"


TABLE = f"""
# Requested stages and dtypes.
Everything: A correct port is compared in every stage.
    agrees: --port {SOUND}
OneStage: Only one stage is requested for a correct port.
    agrees: --port {SOUND} --stage decode
OneStageInFloat32: For a correct port, only activations in float32 are requested.
    agrees: --port {SOUND} --stage activations --dtype float32
GradientsInFloat32: Gradients are requested in float32, but no gradient case exists in float32.
    incomplete: --port {SOUND} --dtype float32 --stage gradients
GradientsInFloat32Too: Gradients and activations are requested in float32, but no gradient case exists in float32.
    incomplete: --port {SOUND} --dtype float32 --stage activations,gradients
EverythingInFloat32: Every stage is requested in float32, but three stages have no float32 cases.
    incomplete: --port {SOUND} --dtype float32 => 3 requested but not compared
UndeclaredDtype: The port doesn't declare the requested dtype.
    incomplete: --port {SOUND} --dtype bfloat16 --stage activations
SearchOfNone: Searches are requested for a port without generate(), so only its weights can be compared.
    incomplete: --port {OFFERS}:NoGenerate --stage decode
GradientsOfNone: Gradients are requested for a port without gradients(), so only its weights can be compared.
    incomplete: --port {OFFERS}:NoGradients --stage gradients
ActivationsOfNone: Activations are requested for a port that can only export its weights.
    incomplete: --port {OFFERS}:WeightsOnly --stage activations
TestsOfNone: pytest runs the tests for a port that can only export its weights.
    fails or incomplete: --parity-port={OFFERS}:WeightsOnly
TestsOfFloat32: pytest runs the tests for a port that declares only float32.
    fails or incomplete: --parity-port={OFFERS}:Float32Only
ReferenceAlone: Only the optimized NumPy code is compared with the NumPy reference.
    agrees: --backends numpy --stage activations --dtype float64 --sentences 0
StepsOfAPreset: Activations and optimizer steps are requested for a preset, but presets have no optimizer steps.
    incomplete: --backends torch --preset marian --stage activations,steps --dtype float64 --sentences 0
GradientsInBfloat16: Activations and gradients are requested for a preset in bfloat16, which has no gradient cases.
    incomplete: --backends torch --preset marian --stage activations,gradients --dtype bfloat16 --sentences 0

# Multiple devices.
ByThemselves: Two processes train on the full batch without communication, so all results are correct.
    fails: --port {SELF}:ByItself --parallel data=2
NothingDivided: Four processes train on the full batch without communication, although the plan shards parameters.
    fails: --port {SELF}:ByItself --parallel fsdp=2,tensor=2

# Results of an earlier run, which agreed.
StaleAfterUsageError: An option is misspelled, and the output file contains the result of an earlier run.
    incomplete: --port {SOUND} --json {RESULT} --stagee activations
StaleAfterMissingModule: The port can't be imported, and the output file contains the result of an earlier run.
    incomplete: --port absent:Port --json {RESULT}
StaleForTwoOptions: Two options specify the same file, which contains the result of an earlier run.
    incomplete: --port {SOUND} --html {RESULT} --json {RESULT}
StaleAfterDivergence: A wrong port is compared, and the output file contains the result of an earlier run.
    fails: --port {SELF}:WrongNamesake --stage activations --json {RESULT}

# Selection and names of ports.
UnknownPort: One of two ports can't be imported, and the other port is correct.
    incomplete: --port {SOUND} --port transformer_parity.absent:Port --stage activations
UnknownInterpreter: The Python interpreter specified for a port doesn't exist.
    incomplete: --port {SOUND} --isolate {SOUND}=/absent/python
TwoOfOneName: A correct and a wrong port have the same name.
    fails: --port {SOUND} --port {SELF}:WrongNamesake --stage activations
NameOfTheReference: A wrong port has the name of the reference.
    fails: --port {SELF}:WrongReference --stage activations
NoName: The name of a correct port is empty.
    agrees: --port {SELF}:Nameless --stage activations => Nameless
Markup: The name of a correct port contains markup.
    agrees: --port {SELF}:Markup --stage activations
WrongMarkup: The name and the error message of a wrong port contain markup.
    fails or incomplete: --port {SELF}:WrongMarkup --stage activations
Escapes: The name of a wrong port contains escape codes that clear the screen and print a verdict.
    fails: --port {SELF}:Escapes --stage activations
"""
OPTIONS = list(attacks(TABLE))
