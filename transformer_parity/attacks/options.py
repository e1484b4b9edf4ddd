"""Attacks through the options of `parity check` and of the pytest plug-in, and through what a port is called."""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: D102  what a method does is said by its class

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial

import numpy as np

from transformer_parity.attacks import attack
from transformer_parity.attacks.attack import FAILS, INCOMPLETE, REFUSED, TOLERATED, Attack, Sound

SOUND, OFFERS, SELF = f"{attack.__name__}:Sound", "transformer_parity.attacks.offers", __name__
CHECK = ["transformer_parity", "check"]
PYTEST = ["pytest", "-p", "no:cacheprovider", "-q"]
OPTIONS: list[Attack] = []


def command(name: str, expected: str, what: str, options: str, says: str = "", *, torch: bool = False) -> None:
    """Add an attack through the command line."""
    module, *arguments = [*(PYTEST if "--parity-port" in options else CHECK), *options.split()]
    needs = (("torch",) if torch else ()) + (("pytest",) if module == "pytest" else ())
    run = partial(_run, module, *arguments)
    OPTIONS.append(Attack(name, what, expected, attack.OPTIONS, run, says, alone=True, needs=needs))


def _run(module: str, *arguments: str) -> tuple[int, str]:
    """Run a command and return its exit code and what it prints; AGREE beside another code is no such code."""
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
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


# What is asked for.
command("Everything", TOLERATED, "A sound port is compared on everything.", f"--port {SOUND}")
command("OneStage", TOLERATED, "One stage of a sound port is asked for.", f"--port {SOUND} --stage decode")
command(
    "OneStageInFloat32",
    TOLERATED,
    "The activations of a sound port are asked for in float32.",
    f"--port {SOUND} --stage activations --dtype float32",
)
command(
    "GradientsInFloat32",
    INCOMPLETE,
    "Gradients are asked for in float32, and there are none.",
    f"--port {SOUND} --dtype float32 --stage gradients",
)
command(
    "GradientsInFloat32Too",
    INCOMPLETE,
    "Gradients and activations are asked for in float32, and there are no gradients.",
    f"--port {SOUND} --dtype float32 --stage activations,gradients",
)
command(
    "EverythingInFloat32",
    INCOMPLETE,
    "float32 is asked for, and every stage by default: three have no case in float32.",
    f"--port {SOUND} --dtype float32",
    "3 asked for and not compared",
)
command(
    "UndeclaredDtype",
    INCOMPLETE,
    "A dtype is asked for that the port does not declare.",
    f"--port {SOUND} --dtype bfloat16 --stage activations",
)
command(
    "SearchOfNone",
    INCOMPLETE,
    "Searches are asked for of a port without generate(): only its weights come back.",
    f"--port {OFFERS}:NoGenerate --stage decode",
)
command(
    "GradientsOfNone",
    INCOMPLETE,
    "Gradients are asked for of a port without gradients(): only its weights come back.",
    f"--port {OFFERS}:NoGradients --stage gradients",
)
command(
    "ActivationsOfNone",
    INCOMPLETE,
    "Activations are asked for of a port that offers its weights only.",
    f"--port {OFFERS}:WeightsOnly --stage activations",
)
command(
    "TestsOfNone",
    REFUSED,
    "The tests of a port that offers its weights only are run by pytest.",
    f"--parity-port={OFFERS}:WeightsOnly",
)
command(
    "TestsOfFloat32",
    REFUSED,
    "The tests of a port that declares float32 alone are run by pytest.",
    f"--parity-port={OFFERS}:Float32Only",
)
command("ReferenceAlone", INCOMPLETE, "The reference is compared with nothing.", "--backends numpy")
command(
    "StepsOfAPreset",
    INCOMPLETE,
    "Steps of a preset are asked for beside its activations, and there are none.",
    "--backends torch --preset marian --stage activations,steps --dtype float64 --only cases",
    torch=True,
)
command(
    "GradientsInBfloat16",
    INCOMPLETE,
    "Gradients of a preset are asked for in bfloat16 beside its activations, and there are none.",
    "--backends torch --preset marian --stage activations,gradients --dtype bfloat16 --only cases",
    torch=True,
)


# Which port.
command(
    "UnknownPort",
    INCOMPLETE,
    "A port cannot be imported, beside a sound one.",
    f"--port {SOUND} --port transformer_parity.absent:Port --stage activations",
)
command(
    "UnknownInterpreter",
    INCOMPLETE,
    "A port is to be run by an interpreter that does not exist.",
    f"--port {SOUND} --isolate {SOUND}=/absent/python",
)
command(
    "TwoOfOneName",
    FAILS,
    "A sound and a wrong port have the same name.",
    f"--port {SOUND} --port {SELF}:WrongNamesake --stage activations",
)
command(
    "NameOfTheReference",
    FAILS,
    "A wrong port has the name of the reference.",
    f"--port {SELF}:WrongReference --stage activations",
)
command(
    "NoName", TOLERATED, "The name of a sound port is empty.", f"--port {SELF}:Nameless --stage activations", "Nameless"
)
command("Markup", TOLERATED, "The name of a sound port is markup.", f"--port {SELF}:Markup --stage activations")
command(
    "WrongMarkup",
    REFUSED,
    "The name of a wrong port, and what it raises, are markup.",
    f"--port {SELF}:WrongMarkup --stage activations",
)
command(
    "Escapes",
    FAILS,
    "The name of a wrong port clears the screen and prints a verdict.",
    f"--port {SELF}:Escapes --stage activations",
)
