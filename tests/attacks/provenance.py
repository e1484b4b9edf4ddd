"""Attacks through copies of packages, search paths, cached bytecode, and tests that don't run."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from attacks.attack import PLACES, Attack
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
CONSOLE = ["-P", "-m", "transformer_parity"]  # like the console script, without the current directory
MODULE = ["-m", "transformer_parity"]
PYTEST = ["-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
CHECK = ["check", "--port", "mine:Mine", "--stage", "activations"]
TESTED = ["--parity-port=mine:Mine", "--parity-stage=activations"]
TORCH = ["check", "--backends", "torch", "--stage", "activations", "--dtype", "float64", "--sentences", "0"]
SCALED = "centered / sigma * scale + bias"
NORM = ("functional.py", f"return {SCALED}", f"return 1.01 * ({SCALED})")
SOUND = """
from attacks.attack import Sound
class Mine(Sound):
    def forward(self, source_ids, target_ids, tap):
        return 1.00 * super().forward(source_ids, target_ids, tap)
"""
WRONG = SOUND.replace("1.00", "1.01")
USER = """
from {package} import Transformer
from attacks.attack import Sound
class Mine(Sound):
    def load(self, config, weights, dtype):
        self.config, self.model = config, Transformer.from_weights(config, weights, dtype)
"""
OWN = """
from reference_numpy import Transformer as Sound
class Transformer(Sound):
    def __call__(self, *arguments, **options):
        return 1.01 * super().__call__(*arguments, **options)
"""
IN_TORCH = """
import torch, transformer_torch
from transformer_parity.plugin import Port
class Mine(Port):
    def load(self, config, weights, dtype):
        self.model = transformer_torch.Transformer.from_weights(config, weights, dtype, "cpu")
    def forward(self, source_ids, target_ids, tap):
        return self.model(torch.tensor(source_ids), torch.tensor(target_ids)).detach().numpy()
"""
PLACED: list[Attack] = []


def run(
    prepare: Callable[[Path], None], *arguments: str, path: tuple[str, ...] = (), variables: Mapping[str, str] = {}
) -> tuple[int, str]:
    """Prepare a directory, run Python there, and return the exit code and the output.

    Args:
        prepare: Function that writes files into the directory.
        arguments: Arguments of Python.
        path: Subdirectories to add to ``PYTHONPATH``.
        variables: Additional environment variables.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(os.path.realpath(name))
        prepare(directory)
        entries = [*(str(directory / entry) for entry in path), str(TESTS), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, entries)), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            cwd=directory,
            env={**environment, **variables},
        )
        return done.returncode, f"{done.stderr}\n{done.stdout}".replace(str(directory), "")


def written(**files: str) -> Callable[[Path], None]:
    """Return a function that writes each module into a file."""

    def prepare(directory: Path) -> None:
        for name, text in files.items():
            (directory / f"{name}.py").write_text(text)

    return prepare


def copied(package: str, *edit: str, into: str = "", **files: str) -> Callable[[Path], None]:
    """Return a function that copies one of our packages, edits a module of the copy, and writes modules."""

    def prepare(directory: Path) -> None:
        copy = directory / into / package
        shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if edit:
            name, old, new = edit
            text = (copy / name).read_text("utf-8")
            if old not in text:
                raise ValueError(f"{package}/{name} must hold {old!r}")
            (copy / name).write_text(text.replace(old, new), "utf-8")
        written(**files)(directory)

    return prepare


def stale(mode: py_compile.PycInvalidationMode) -> Callable[[Path], None]:
    """Return a function that writes a wrong port next to bytecode of a correct port of the same size and time."""

    def prepare(directory: Path) -> None:
        module = directory / "mine.py"
        module.write_text(SOUND)
        os.utime(module, (1e9, 1e9))
        py_compile.compile(str(module), invalidation_mode=mode)
        module.write_text(WRONG)
        os.utime(module, (1e9, 1e9))

    return prepare


def add(
    name: str, what: str, expected: str, run: Callable[[], tuple[int, str]], says: str = "", **options: Any
) -> None:
    """Add an attack to the table."""
    PLACED.append(Attack(name, what, expected, PLACES, run, says, separate=True, **options))


NEEDS_TORCH: dict[str, Any] = {"needs": ("torch",)}
NEEDS_PYTEST: dict[str, Any] = {"needs": ("pytest",)}
LOGITS = (
    "transformer.py",
    'return tap("logits", self.output_proj(x))',
    'return tap("logits", 1.01 * self.output_proj(x))',
)
add(
    "PackageCopied",
    "An edited copy of transformer_torch is next to a port that imports it.",
    FAILS,
    partial(run, copied("transformer_torch", *LOGITS, mine=IN_TORCH), *CONSOLE, *CHECK),
    "transformer_torch was loaded from /transformer_torch/__init__.py instead of the installed",
    **NEEDS_TORCH,
)
add(
    "PackageCopiedForModule",
    "An edited copy of transformer_torch is next to a port, and python -m starts the check.",
    FAILS,
    partial(run, copied("transformer_torch", *LOGITS, mine=IN_TORCH), *MODULE, *CHECK),
    "transformer_torch was loaded from /transformer_torch/__init__.py instead of the installed",
    **NEEDS_TORCH,
)
add(
    "PackageCopiedForPytest",
    "An edited copy of transformer_torch is next to a port that pytest compares.",
    FAILS,
    partial(run, copied("transformer_torch", *LOGITS, mine=IN_TORCH), *PYTEST, *TESTED),
    "transformer_torch was loaded from /transformer_torch/__init__.py instead of the installed",
    needs=("torch", "pytest"),
)
add(
    "PackageCopiedForBackend",
    "An edited copy of transformer_torch is in the current directory, and the check uses --backends torch.",
    FAILS,
    partial(run, copied("transformer_torch", *LOGITS), *CONSOLE, *TORCH),
    "transformer_torch was loaded from /transformer_torch/__init__.py instead of the installed",
    **NEEDS_TORCH,
)
add(
    "PackageCopiedUnedited",
    "An unedited copy of transformer_torch is next to a port that imports it.",
    TOLERATED,
    partial(run, copied("transformer_torch", mine=IN_TORCH), *CONSOLE, *CHECK),
    "transformer_torch was loaded from /transformer_torch/__init__.py instead of the installed",
    **NEEDS_TORCH,
)
for suffix, start in (("", CONSOLE), ("ForModule", MODULE)):
    how = "python -m" if suffix else "the console script"
    add(
        f"PackageOfThatName{suffix}",
        f"A user's package is named transformer_jax, and {how} starts the check.",
        FAILS,
        partial(run, written(mine=USER.format(package="transformer_jax"), transformer_jax=OWN), *start, *CHECK),
        "transformer_jax was loaded from /transformer_jax.py instead of the installed",
    )
    add(
        f"ReferenceCopied{suffix}",
        f"An edited copy of the reference is next to a port that imports it, and {how} starts the check.",
        INCOMPLETE,
        partial(run, copied("reference_numpy", *NORM, mine=USER.format(package="reference_numpy")), *start, *CHECK),
        "/reference_numpy is a different reference_numpy from",
    )
add(
    "ReferenceCopiedForPytest",
    "An edited copy of the reference is next to a port that pytest compares.",
    REFUSED,
    partial(run, copied("reference_numpy", *NORM, mine=USER.format(package="reference_numpy")), *PYTEST, *TESTED),
    "/reference_numpy is a different reference_numpy from",
    **NEEDS_PYTEST,
)
add(
    "ReferenceCopiedUnedited",
    "An unedited copy of the reference is next to a port that imports it.",
    TOLERATED,
    partial(run, copied("reference_numpy", mine=USER.format(package="reference_numpy")), *CONSOLE, *CHECK),
)
add(
    "ReferenceOnThePath",
    "An edited copy of the reference is in PYTHONPATH, and the port has the same bug.",
    INCOMPLETE,
    partial(
        run,
        copied("reference_numpy", *NORM, into="old", mine=USER.format(package="reference_numpy")),
        *CONSOLE,
        *CHECK,
        path=("old",),
    ),
    "/old/reference_numpy is a different reference_numpy from",
)
add(
    "ReferenceOnThePathOfThePort",
    "A port adds the directory of an edited reference to sys.path and imports this reference.",
    INCOMPLETE,
    partial(
        run,
        copied(
            "reference_numpy",
            *NORM,
            into="vendor",
            mine="import sys; sys.path.insert(0, 'vendor')\n" + USER.format(package="reference_numpy"),
        ),
        *CONSOLE,
        *CHECK,
    ),
    "vendor/reference_numpy is a different reference_numpy from",
)
add(
    "FactsOnThePath",
    "An edited copy of transformer_spec is in PYTHONPATH.",
    INCOMPLETE,
    partial(
        run,
        copied("transformer_spec", "search.py", "all types of search", "every type of search", into="old", mine=SOUND),
        *CONSOLE,
        *CHECK,
        path=("old",),
    ),
    "/old/transformer_spec is a different transformer_spec from",
)
add(
    "GoldenFromAnotherReference",
    "parity golden runs with an edited copy of the reference in PYTHONPATH.",
    INCOMPLETE,
    partial(run, copied("reference_numpy", *NORM, into="old"), *CONSOLE, "golden", "--out", "truth", path=("old",)),
    "/old/reference_numpy is a different reference_numpy from",
)
PATCHED = (
    "import reference_numpy.layers as layers\n"
    "norm = layers.layer_norm\n"
    "layers.layer_norm = lambda *inputs, **options: 1.01 * norm(*inputs, **options)\n"
)
add(
    "ReferencePatchedAtStart",
    "sitecustomize replaces the reference's layer norm in every process.",
    INCOMPLETE,
    partial(run, written(sitecustomize=PATCHED, mine=SOUND), *CONSOLE, *CHECK, path=("",)),
    "the reference has been modified: logits",
)
add(
    "ReferenceImportedAtStart",
    "sitecustomize imports an edited copy of the reference in every process.",
    INCOMPLETE,
    partial(
        run,
        copied(
            "reference_numpy",
            *NORM,
            into="old",
            sitecustomize="import sys; sys.path.insert(0, 'old'); import reference_numpy; del sys.path[0]",
            mine=USER.format(package="reference_numpy"),
        ),
        *CONSOLE,
        *CHECK,
        path=("",),
    ),
    "old/reference_numpy is a different reference_numpy from",
)
for mode, name, what in (
    (py_compile.PycInvalidationMode.TIMESTAMP, "OldBytecode", "and the recorded size and time match the source"),
    (
        py_compile.PycInvalidationMode.UNCHECKED_HASH,
        "UncheckedBytecode",
        "and Python doesn't compare it with the source",
    ),
):
    add(
        name,
        f"A wrong port has cached bytecode from a correct port, {what}.",
        FAILS,
        partial(run, stale(mode), *CONSOLE, *CHECK),
    )
    add(
        f"{name}ForPytest",
        f"pytest compares a wrong port that has cached bytecode from a correct port, {what}.",
        FAILS,
        partial(run, stale(mode), *PYTEST, *TESTED),
        **NEEDS_PYTEST,
    )


def through_pytest(name: str, what: str, ini: str = "", conftest: str = "", port: str = WRONG, more: str = "") -> None:
    """Add an attack through pytest, by default on a port with wrong logits."""

    def prepare(directory: Path) -> None:
        written(mine=port, conftest=conftest)(directory)
        (directory / "pytest.ini").write_text(f"[pytest]\naddopts = {ini}\n")

    add(name, what, REFUSED, partial(run, prepare, *PYTEST, *TESTED, *more.split()), "INCOMPLETE: ", **NEEDS_PYTEST)


REPORT = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        {change}
    return report
"""
COLLECTED = """
import pytest
def pytest_collection_modifyitems(items):
    {change}
"""
LAST = COLLECTED.format(change="items[:] = items[-1:]")
through_pytest(
    "DeselectedByAddopts", "addopts contains -k, which deselects the tests of a wrong port.", "-k 'not full'"
)
through_pytest(
    "DeselectedByOption", "The command line contains -k, which deselects the tests of a wrong port.", more="-k known"
)
through_pytest(
    "DeselectedByName",
    "addopts contains --deselect, which deselects the tests of a wrong port.",
    "--deselect parity::Mine-float",
)
through_pytest("OnlyCollected", "addopts contains --collect-only.", "--collect-only")
through_pytest("OnlySetUp", "addopts contains --setup-plan, so no test runs.", "--setup-plan")
through_pytest("DeselectedByConftest", "A conftest file removes the tests of a wrong port.", conftest=LAST)
through_pytest(
    "SkippedByMarker",
    "A conftest file marks the tests of a wrong port as skipped.",
    conftest=COLLECTED.format(change="[item.add_marker(pytest.mark.skip) for item in items]"),
)
through_pytest(
    "SkippedBySetup",
    "A conftest file skips the tests of a wrong port before they run.",
    conftest="import pytest\ndef pytest_runtest_setup(item):\n    pytest.skip('later')\n",
)
through_pytest(
    "ExpectedByMarker",
    "A conftest file marks the tests of a wrong port as expected to fail.",
    conftest=COLLECTED.format(change="[item.add_marker(pytest.mark.xfail) for item in items]"),
)
through_pytest(
    "FailuresSkipped",
    "A conftest file turns failures into skips.",
    conftest=REPORT.format(change="report.outcome, report.longrepr = 'skipped', ('mine.py', 1, 'Skipped: flaky')"),
)
through_pytest(
    "FailuresExpected",
    "A conftest file turns failures into expected failures.",
    conftest=REPORT.format(change="report.outcome, report.wasxfail = 'skipped', 'known'"),
)
through_pytest(
    "FailuresPassed",
    "A conftest file turns failures into passes.",
    conftest=REPORT.format(change="report.outcome = 'passed'"),
)
through_pytest(
    "FailuresSwallowed",
    "A conftest file suppresses the exceptions of tests.",
    conftest="import pytest\n@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_call():\n"
    "    try:\n        yield\n    except Exception:\n        pass\n",
)
through_pytest(
    "StatusReplaced",
    "A conftest file removes the tests of a wrong port and sets the exit status of pytest to 0.",
    conftest=f"{LAST}\ndef pytest_sessionfinish(session):\n    session.exitstatus = 0\n",
)
through_pytest(
    "SkippedByThePort",
    "A port with wrong logits calls pytest.skip().",
    port=WRONG.replace("        return 1.01", "        import pytest; pytest.skip('later')\n        return 1.01"),
)
