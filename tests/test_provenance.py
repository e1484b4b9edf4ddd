"""Ports are loaded from source files, frameworks from cached bytecode, and the reference from the checker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from attacks.provenance import CHECK, CONSOLE, NORM, OWN, PYTEST, TESTED, USER, copied, run, stale, written

from transformer_parity.engine.processes import provenance
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.check import known_numbers

ROOT = Path(__file__).parents[1]


def python(directory: Path, code: str, path: tuple[str, ...] = ()) -> str:
    """Run code in a directory after importing the provenance module, and return the output."""
    prepared = "import sys\nfrom transformer_parity.engine.processes import provenance\n"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    command = [sys.executable, "-P", "-c", prepared + code]
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaders(directory: Path, port: str, modules: str, path: tuple[str, ...] = ()) -> str:
    """Return the loader types of the given modules."""
    names = f"[type(__import__(name).__spec__.loader).__name__ for name in {modules.split()}]"
    return python(directory, f"provenance.import_port({port!r})\nprint(*{names})", path)


def test_port_is_loaded_from_source_but_installed_packages_are_not(tmp_path):
    (tmp_path / "mine.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("")
    found = loaders(tmp_path, "mine", "mine helper safetensors numpy queue transformer_spec")
    assert found == "FromSource FromSource SourceFileLoader SourceFileLoader SourceFileLoader SourceFileLoader"
    assert not (tmp_path / "__pycache__").exists()


def test_installed_port_is_loaded_from_source(tmp_path):
    assert loaders(tmp_path, "safetensors.numpy", "safetensors") == "FromSource"


@pytest.mark.parametrize("is_current", [False, True])
def test_directories_of_installers_keep_cached_bytecode(tmp_path, is_current):
    packages = tmp_path / "packages"
    (packages / "one-1.0.dist-info").mkdir(parents=True)
    (packages / "one.py").write_text("")
    found = loaders(packages if is_current else tmp_path, "mine", "one", (str(packages),))
    assert found == ("FromSource" if is_current else "SourceFileLoader")


def test_current_directory_comes_first_in_the_import_path(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("")
    path = (str(tmp_path / "second"), str(tmp_path / "first"))
    code = "provenance.import_port('mine')\nprint(__import__('mine').__file__)"
    assert python(tmp_path / "first", code, path) == str(tmp_path / "first" / "mine.py")


def test_namespace_package_named_like_the_reference_is_ignored(tmp_path):
    (tmp_path / "reference_numpy").mkdir()
    assert provenance.other_reference([str(tmp_path)]) == ""


def test_copy_of_the_reference_is_compared_with_its_source(tmp_path):
    copied("reference_numpy")(tmp_path)
    assert provenance.other_reference([str(tmp_path)]) == ""
    (tmp_path / "reference_numpy" / "more.py").write_text("")
    assert provenance.other_reference([str(tmp_path)]).startswith(f"{tmp_path}/reference_numpy is a different ")


def test_loaded_copy_of_the_reference_is_rejected_even_if_identical(tmp_path):
    copied("transformer_spec", into="old")(tmp_path)
    code = "import transformer_spec\nprint(provenance.other_reference())"
    assert python(tmp_path, code, (str(tmp_path / "old"),)).startswith(
        f"{tmp_path}/old/transformer_spec is a different"
    )


def test_first_file_of_each_package_is_described():
    files = {"transformer_jax": "/a/__init__.py", "transformer_jax.masks": "/a/masks.py", "transformer_tf.own": "/b.py"}
    environment = {"version": "1", **{f"file of {name}": file for name, file in files.items()}}
    assert provenance.described_elsewhere(environment) == [
        "transformer_jax was loaded from /a/__init__.py instead of the installed transformer_jax",
        "transformer_tf.own was loaded from /b.py instead of the installed transformer_tf",
    ]
    assert provenance.files_elsewhere() == {}


def test_reference_computes_the_known_answers():
    known_numbers.check_reference()


@pytest.mark.parametrize("name", list(known_numbers.KNOWN))
def test_modified_reference_raises_usage_error(name, monkeypatch):
    changed = tuple(1.0001 * number for number in known_numbers.KNOWN[name])
    monkeypatch.setattr(known_numbers, "KNOWN", {**known_numbers.KNOWN, name: changed})
    with pytest.raises(UsageError, match=f"the reference has been modified: {name} of a small model"):
        known_numbers.check_reference()


def test_result_lists_the_file_of_every_module(tmp_path):
    result = tmp_path / "result.json"
    prepare = written(mine=USER.format(package="transformer_jax"), transformer_jax=OWN)
    run(prepare, *CONSOLE, *CHECK, "--dtype", "float64", "--json", str(result))
    environment = json.loads(result.read_text())["environment"]["Mine"]
    assert environment["file of transformer_jax"].endswith("/transformer_jax.py")


def test_port_imported_by_conftest_ignores_cached_bytecode():
    def prepare(directory: Path) -> None:
        stale(PycInvalidationMode.TIMESTAMP)(directory)
        (directory / "conftest.py").write_text("import mine")

    code, _ = run(prepare, *PYTEST, *TESTED)
    assert code == 1


def test_port_imported_early_from_stale_bytecode_is_rejected():
    def prepare(directory: Path) -> None:
        stale(PycInvalidationMode.TIMESTAMP)(directory)
        (directory / "sitecustomize.py").write_text("import mine")

    code, said = run(prepare, *CONSOLE, *CHECK, path=("",))
    assert (code, "/mine.py was imported from cached bytecode of an earlier version; delete " in said) == (3, True), (
        said
    )


def test_compare_and_selftest_reject_an_edited_reference():
    for arguments in (["compare", "a", "b"], ["selftest"], ["check-distributed"], ["check", "--backends", "numpy"]):
        code, said = run(copied("reference_numpy", *NORM), *CONSOLE, *arguments)
        assert (code, "is a different reference_numpy from" in said) == (3, True), said
