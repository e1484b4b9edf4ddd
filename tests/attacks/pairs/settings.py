"""Attacks through the options of ``parity pair``, the arguments of ``assert_parity``, and maps of names."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from attacks.attack import Attack
from attacks.pairs import methods
from attacks.pairs.run import BASE, RESULT, attack, environment, parity, settings
from attacks.words import FAILS, INCOMPLETE, TOLERATED

PAIR = f"pair BASE:Original BASE:Port --json {RESULT}"
WRONG = f"pair BASE:Original {methods.__file__}:PrintsAgree --json {RESULT}"
ASSERT = "assert base.Original(), base.Port()"
TABLE = f"""
# Options.
Everything: A correct port is compared by the command, in all dtypes and stages.
    agrees: pair BASE:Original BASE:FullPort
OneSeed: Only one batch is compared.
    agrees: {PAIR} --seeds 1
NoSeeds: No batch is compared.
    incomplete: {PAIR} --seeds 0
NegativeSeeds: The number of batches is negative.
    incomplete: {PAIR} --seeds -3
UnknownStage: A stage is misspelled, and the output file contains the result of an earlier run.
    incomplete: {PAIR} --stage forwards
EmptyStage: The list of stages is empty.
    incomplete: {PAIR} --stage ,
UndeclaredDtype: The port doesn't declare the requested dtype.
    incomplete: {PAIR} --dtype bfloat16 => doesn't run in bfloat16
SameClassTwice: The original is compared with itself.
    incomplete: pair BASE:Original BASE:Original => must be different classes
MissingClass: The file doesn't define the port.
    incomplete: pair BASE:Original BASE:Prot => has no 'Prot'
MissingFile: The file of the port doesn't exist.
    incomplete: pair BASE:Original absent.py:Port => there is no file
NotAnImplementation: The port is an ordinary object.
    incomplete: pair BASE:Original BASE:SIZES => must be a subclass
MissingNames: The map of names doesn't exist.
    incomplete: {PAIR} --names BASE:absent => has no 'absent'
MissingNamesFile: The file with the map of names doesn't exist.
    incomplete: {PAIR} --names absent.toml => absent.toml
MissingInterpreter: The Python interpreter of the port doesn't exist.
    incomplete: {PAIR} --isolate port=/absent/python => cannot be started
OtherProgram: The Python interpreter of the port is a program that does nothing.
    incomplete: {PAIR} --isolate port=/bin/true => exit code 0
EndlessText: The Python interpreter of the port is a program that prints text without end.
    incomplete: {PAIR} --isolate port=/usr/bin/yes
UnknownSide: An interpreter is specified for an implementation that doesn't exist.
    incomplete: {PAIR} --isolate prot={sys.executable}
StaleAfterFailure: A wrong port is compared, and the output file contains the result of an earlier run.
    fails: {WRONG}

# Arguments of assert_parity.
Assertion: The assertion compares a correct port.
    agrees: {ASSERT}
AssertionOfAWrongPort: The assertion compares a wrong port that prints a verdict.
    fails: assert base.Original(), methods.PrintsAgree()
AssertionWithoutBatches: The assertion compares no batches.
    incomplete: {ASSERT}, seeds=0 => seeds must be at least 1
AssertionWithoutDtypes: The assertion compares in no dtypes.
    incomplete: {ASSERT}, dtypes=() => dtypes must be some of
AssertionWithoutStages: The assertion compares no stages.
    incomplete: {ASSERT}, stages=() => stages must be some of
MisspelledStage: One of the two requested stages is misspelled.
    incomplete: base.Original(), base.FullPort(), stages=("forward", "gradient") => stages must be some of
DtypesAsText: The argument for the dtypes is a string.
    incomplete: {ASSERT}, dtypes="float32" => dtypes must be some of
MisspelledSide: An interpreter is specified for an implementation that doesn't exist.
    incomplete: {ASSERT}, interpreters={{"prot": "python"}} => interpreters must be some of
Classes: The assertion compares classes instead of instances.
    incomplete: assert base.Original, base.Port => two instances
NoInstances: The assertion compares None with None.
    incomplete: assert None, None => two instances
SameInstance: The assertion compares an instance with itself.
    incomplete: assert *[base.Original()] * 2 => run the same code

# Maps of names.
EmptyMap: The map of names is empty.
    agrees: {ASSERT}, names={{}}
ManyToOne: The map assigns one tap of the port to both taps of the original.
    fails: {ASSERT}, names={{"hidden": "mean"}}
OutputsInTheMap: The map assigns an output to a tap.
    fails: {ASSERT}, names={{"logits": "hidden"}} => the original has no such tap
UnknownTaps: The map contains only taps that don't exist.
    fails: {ASSERT}, names={{"a.{{i}}": "b.{{i}}", "x": "y"}} => no such tap
NumbersInTheMap: The map contains numbers instead of names.
    incomplete: {ASSERT}, names={{1: 2}} => must map strings
EmptyBraces: The map contains empty braces.
    incomplete: {ASSERT}, names={{"hidden": "{{}}"}} => must map strings
SameNumberTwice: The map uses a number twice in a pattern.
    incomplete: {ASSERT}, names={{"{{i}}{{i}}": "x"}} => uses a number twice
NestedMap: The map contains a map.
    incomplete: {ASSERT}, names={{"hidden": {{"a": "b"}}}}
NoAxisString: The axis string is not valid.
    incomplete: {ASSERT}, names={{"hidden": ["hidden", "b l -> h"]}} => axis string
AxesThatDoNotFit: The axis string has too few axes for the tap of a correct port, whose shape is correct.
    fails: {ASSERT}, names={{"hidden": ["hidden", "b l -> l b"]}} => don't fit
WrongAxes: The axis string exchanges axes that the port doesn't exchange.
    fails: {ASSERT}, names={{"hidden": ["hidden", "b l h -> l b h"]}}
""".replace("incomplete: base.", "incomplete: assert base.")


def _interrupted() -> tuple[int, str]:
    """Press Ctrl-C while a port runs, and return the exit code and the output."""
    with tempfile.TemporaryDirectory() as directory:
        sides = [f"{BASE}:Original", f"{methods.__file__}:Hangs"]
        command = [sys.executable, "-m", "transformer_parity", "pair", *sides]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, env=environment()
        ) as process:
            time.sleep(4.0)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[0]
    return process.returncode, " / ".join(said.splitlines())


def _names(text: str) -> tuple[int, str]:
    """Compare a correct port with a map in a .toml file."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "names.toml").write_text(text)
        return parity("pair", f"{BASE}:Original", f"{BASE}:Port", "--names", "names.toml", directory=directory)


ATTACKS: list[Attack] = [
    *settings(TABLE),
    attack("Interrupted", "The user presses Ctrl-C while the port runs.", INCOMPLETE, _interrupted, "interrupted"),
    attack("BrokenNamesFile", "The map of names is not a TOML file.", INCOMPLETE, partial(_names, "hidden =")),
    attack("NamesFile", "A map in a .toml file is correct.", TOLERATED, partial(_names, '"hidden" = "hidden"')),
    attack("WrongNamesFile", "A map assigns a tap to a different one.", FAILS, partial(_names, '"hidden" = "mean"')),
]
