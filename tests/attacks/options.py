"""Attacks through the options of `parity check` and of the pytest plug-in, and through what a port is called."""

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
RESULT = "result.json"  # of an earlier run, which agreed
TESTS = Path(__file__).parents[1]  # from which a command imports this package


def attacks(table: str) -> Iterator[Attack]:
    """Yield the attacks of a text: two lines for each, its name and what it does, what is expected and the options.

    Behind ``=>`` stands what has to be said.
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
        yield Attack(name, what, expected, attack.OPTIONS, run, says, alone=True, needs=needs)


def _run(module: str, *arguments: str) -> tuple[int, str]:
    """Run a command and return its exit code and what it prints; AGREE beside another code is no such code.

    So is AGREE in a result of an earlier run.
    """
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, RESULT)
        result.write_text("AGREE")
        found = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
        )
        if found.returncode and RESULT in arguments and result.exists() and "AGREE" in result.read_text():
            return 0, f"the exit code is {found.returncode}, and {RESULT} says AGREE"
    lines = [line.strip() for line in (*found.stderr.splitlines(), *found.stdout.splitlines()) if line.strip()]
    if found.returncode and any(line.startswith("AGREE") for line in lines):
        return 0, f"the exit code is {found.returncode}, and a line begins with AGREE"
    return found.returncode, " / ".join(lines[-3:])


class WrongNamesake(Sound):
    """A wrong port of the name of a sound one."""

    name = "Sound"

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return logits if logits.dtype == np.float64 else np.float32(1.01) * logits  # which is quickly diagnosed


class WrongReference(WrongNamesake):
    """A wrong port of the name of the reference."""

    name = "numpy"


class ByItself(Sound):
    """A sound port that trains in each process by itself, on the whole batch."""

    def distribute(self, plan):
        pass

    def parameters_per_device(self):
        return [sum(array.size for array in self.export_weights().values())]


class Nameless(Sound):
    """A sound port with an empty name."""

    name = ""


class Markup(Sound):
    """A sound port whose name is markup of a table."""

    name = "[/bold] [red]x[/] [link=file:///]"


class WrongMarkup(WrongNamesake):
    """A wrong port whose name is markup of a table, and which raises some."""

    name = Markup.name

    def forward(self, source_ids, target_ids, tap):
        if len(source_ids) == 1:
            raise ValueError("[/bold] what is this?")
        return super().forward(source_ids, target_ids, tap)


class Escapes(WrongNamesake):
    """A wrong port whose name clears the screen and prints a verdict."""

    name = "x\x1b[2J\x1b[H\nAGREE  1 port, 9 cases, 1,049 comparisons.\n\x1b[8m"


TABLE = f"""
# What is asked for.
Everything: A sound port is compared on everything.
    agrees: --port {SOUND}
OneStage: One stage of a sound port is asked for.
    agrees: --port {SOUND} --stage decode
OneStageInFloat32: The activations of a sound port are asked for in float32.
    agrees: --port {SOUND} --stage activations --dtype float32
GradientsInFloat32: Gradients are asked for in float32, and there are none.
    incomplete: --port {SOUND} --dtype float32 --stage gradients
GradientsInFloat32Too: Gradients and activations are asked for in float32, and there are no gradients.
    incomplete: --port {SOUND} --dtype float32 --stage activations,gradients
EverythingInFloat32: float32 is asked for, and every stage by default: three have no case in float32.
    incomplete: --port {SOUND} --dtype float32 => 3 requested but not compared
UndeclaredDtype: A dtype is asked for that the port does not declare.
    incomplete: --port {SOUND} --dtype bfloat16 --stage activations
SearchOfNone: Searches are asked for of a port without generate(): only its weights come back.
    incomplete: --port {OFFERS}:NoGenerate --stage decode
GradientsOfNone: Gradients are asked for of a port without gradients(): only its weights come back.
    incomplete: --port {OFFERS}:NoGradients --stage gradients
ActivationsOfNone: Activations are asked for of a port that offers its weights only.
    incomplete: --port {OFFERS}:WeightsOnly --stage activations
TestsOfNone: The tests of a port that offers its weights only are run by pytest.
    fails or incomplete: --parity-port={OFFERS}:WeightsOnly
TestsOfFloat32: The tests of a port that declares float32 alone are run by pytest.
    fails or incomplete: --parity-port={OFFERS}:Float32Only
ReferenceAlone: Only the fast NumPy code is compared, with the formulas.
    agrees: --backends numpy --stage activations --dtype float64 --sentences 0
StepsOfAPreset: Steps of a preset are asked for beside its activations, and there are none.
    incomplete: --backends torch --preset marian --stage activations,steps --dtype float64 --sentences 0
GradientsInBfloat16: Gradients of a preset are asked for in bfloat16 beside its activations, and there are none.
    incomplete: --backends torch --preset marian --stage activations,gradients --dtype bfloat16 --sentences 0

# Several devices.
ByThemselves: Each of two processes trains by itself on the whole batch, so that all numbers are right.
    fails: --port {SELF}:ByItself --parallel data=2
NothingDivided: Each of four processes does so, and the plan divides parameters too.
    fails: --port {SELF}:ByItself --parallel fsdp=2,tensor=2

# Results of an earlier run, which agreed.
StaleAfterUsageError: An option is misspelled, and the result of an earlier run lies under the name of the new one.
    incomplete: --port {SOUND} --json {RESULT} --stagee activations
StaleAfterMissingModule: The port cannot be imported, and there is a result of an earlier run.
    incomplete: --port absent:Port --json {RESULT}
StaleForTwoOptions: Two options name the same file, and there is a result of an earlier run.
    incomplete: --port {SOUND} --html {RESULT} --json {RESULT}
StaleAfterDivergence: A wrong port is compared, and there is a result of an earlier run.
    fails: --port {SELF}:WrongNamesake --stage activations --json {RESULT}

# Which port.
UnknownPort: A port cannot be imported, beside a sound one.
    incomplete: --port {SOUND} --port transformer_parity.absent:Port --stage activations
UnknownInterpreter: A port is to be run by an interpreter that does not exist.
    incomplete: --port {SOUND} --isolate {SOUND}=/absent/python
TwoOfOneName: A sound and a wrong port have the same name.
    fails: --port {SOUND} --port {SELF}:WrongNamesake --stage activations
NameOfTheReference: A wrong port has the name of the reference.
    fails: --port {SELF}:WrongReference --stage activations
NoName: The name of a sound port is empty.
    agrees: --port {SELF}:Nameless --stage activations => Nameless
Markup: The name of a sound port is markup.
    agrees: --port {SELF}:Markup --stage activations
WrongMarkup: The name of a wrong port, and what it raises, are markup.
    fails or incomplete: --port {SELF}:WrongMarkup --stage activations
Escapes: The name of a wrong port clears the screen and prints a verdict.
    fails: --port {SELF}:Escapes --stage activations
"""
OPTIONS = list(attacks(TABLE))
