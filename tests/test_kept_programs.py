"""Programs compiled by JAX and TensorFlow are cached for later runs, unless the user or the system prevents it."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from transformer_parity.engine.system.kept_programs import (
    AGE,
    JAX_SWITCH,
    SWITCH,
    TENSORFLOW_DIRECTORY,
    TENSORFLOW_SWITCH,
    keep_programs,
    kept_by_tensorflow,
)
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.check.processes import run_all
from transformer_parity.transformer.ports.protocol import Placements


def test_compiled_programs_are_stored_in_the_user_cache(tmp_path):
    kept = keep_programs({"XDG_CACHE_HOME": str(tmp_path)})
    directory = tmp_path / "transformer-parity"
    assert kept[JAX_SWITCH].startswith(f"{directory}{os.sep}jax-")
    assert kept == keep_programs({SWITCH: str(tmp_path), "XDG_CACHE_HOME": "/another"})
    if os.name == "posix":
        # Cached programs are executed, so only the user may write them.
        assert stat.S_IMODE(os.stat(kept[JAX_SWITCH]).st_mode) == 0o700


@pytest.mark.parametrize("environment", [{SWITCH: ""}, {JAX_SWITCH: "/mine"}, {JAX_SWITCH: ""}])
def test_compilation_cache_respects_user_settings(tmp_path, environment):
    assert keep_programs({"XDG_CACHE_HOME": str(tmp_path), **environment}) == {}
    assert list(tmp_path.iterdir()) == []


def test_compilation_cache_is_disabled_without_a_usable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    assert keep_programs({SWITCH: str(tmp_path / "file")}) == {}


def test_cached_programs_older_than_a_month_are_removed(tmp_path):
    directory = keep_programs({SWITCH: str(tmp_path)})[JAX_SWITCH]
    for name, age in (("old", AGE + 60.0), ("new", AGE - 60.0)):
        with open(os.path.join(directory, name), "w"):
            os.utime(os.path.join(directory, name), (time.time() - age,) * 2)
    keep_programs({SWITCH: str(tmp_path)})
    assert os.listdir(directory) == ["new"]


@pytest.fixture
def of_tensorflow(monkeypatch):
    """A function that returns the directory in which a TensorFlow version caches programs, or None."""

    def directory(environment, version="2.21.0", meanwhile=lambda directory: None):
        monkeypatch.delenv(TENSORFLOW_SWITCH, raising=False)
        about = SimpleNamespace(VERSION=version, GIT_VERSION="g", COMPILER_VERSION="c")
        monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(version=about))
        with kept_by_tensorflow(environment):
            flags = os.environ.get(TENSORFLOW_SWITCH)
            found = flags and flags.partition(f"{TENSORFLOW_DIRECTORY}=")[2]
            meanwhile(found)
        return found

    return directory


def test_each_version_of_tensorflow_has_its_own_cache(tmp_path, of_tensorflow):
    environment = {SWITCH: str(tmp_path)}
    first, second = of_tensorflow(environment), of_tensorflow(environment, "2.22.0")
    assert {first, second} == {str(path) for path in (tmp_path / "transformer-parity").iterdir()}
    assert first != second


def test_tensorflow_finds_only_complete_programs_in_the_cache(tmp_path, of_tensorflow):
    def compile_three(directory):
        for name in ("whole", "broken", "without"):
            (tmp_path / directory / f"{name}.pb").write_bytes(b"program" * 100)

    environment, found = {SWITCH: str(tmp_path)}, []
    directory = tmp_path / of_tensorflow(environment, meanwhile=compile_three)
    (directory / "broken.pb").write_bytes(b"program" * 99)
    (directory / "without.pb.sha256").unlink()  # simulates an interrupted run
    of_tensorflow(environment, meanwhile=lambda directory: found.extend((tmp_path / directory).glob("*.pb")))
    assert [path.name for path in found] == ["whole.pb"]


def test_other_tensorflow_flags_are_preserved(tmp_path, of_tensorflow):
    seen = []
    environment = {SWITCH: str(tmp_path), TENSORFLOW_SWITCH: "--tf_xla_auto_jit=0"}
    of_tensorflow(environment, meanwhile=lambda _: seen.append(os.environ[TENSORFLOW_SWITCH].split()[0]))
    assert seen == ["--tf_xla_auto_jit=0"]


@pytest.mark.parametrize("environment", [{SWITCH: ""}, {TENSORFLOW_SWITCH: f"{TENSORFLOW_DIRECTORY}=/mine"}])
def test_tensorflow_cache_respects_user_settings(tmp_path, of_tensorflow, environment):
    assert of_tensorflow({"XDG_CACHE_HOME": str(tmp_path), **environment}) is None


def test_tensorflow_cache_is_disabled_on_a_full_disk(tmp_path, of_tensorflow, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: SimpleNamespace(free=2**20))
    assert of_tensorflow({SWITCH: str(tmp_path)}) is None


@pytest.mark.only("jax", "tf")
@pytest.mark.extended("compilation caches", "tf")
def test_second_run_compiles_nothing(tmp_path, monkeypatch, backend):
    dtype, pattern, fewest = ("float64", "*-cache", 4) if backend.name == "jax" else ("float32", "*.pb", 2)
    monkeypatch.setenv(SWITCH, str(tmp_path))
    monkeypatch.delenv(JAX_SWITCH, raising=False)
    cases = tuple(case for case in standard_cases() if case.name in ("attention/padding", "feed_forward/relu"))

    def programs():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob(pattern)}

    def verdicts():
        port = CheckedPort(PortJob(backend.name, Placements((dtype,))), cases)
        for _ in run_all([port]):
            pass
        return Counter(finding.verdict for finding in port.findings)

    first = verdicts()
    kept = programs()
    assert len(kept) >= fewest
    assert verdicts() == first
    assert programs() == kept
    broken = max(kept, key=lambda path: path.stat().st_size)
    broken.write_bytes(broken.read_bytes()[:100])  # simulates an incomplete write
    assert verdicts() == first
