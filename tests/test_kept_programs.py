"""What JAX compiles is kept for the next run, where that is wanted and possible."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter

import pytest

from transformer_parity.cases.standard import standard_cases
from transformer_parity.check.kept_programs import AGE, JAX_SWITCH, SWITCH, keep_programs
from transformer_parity.check.one_port import Job
from transformer_parity.check.processes import run_all
from transformer_parity.compare.findings import Setting


def test_programs_are_kept_in_the_users_cache(tmp_path):
    kept = keep_programs({"XDG_CACHE_HOME": str(tmp_path)})
    folder = tmp_path / "transformer-parity"
    assert kept[JAX_SWITCH].startswith(f"{folder}{os.sep}jax-")
    assert kept == keep_programs({SWITCH: str(tmp_path), "XDG_CACHE_HOME": "/another"})
    if os.name == "posix":
        assert stat.S_IMODE(os.stat(kept[JAX_SWITCH]).st_mode) == 0o700  # what is loaded is run


@pytest.mark.parametrize("environment", [{SWITCH: ""}, {JAX_SWITCH: "/mine"}, {JAX_SWITCH: ""}])
def test_nothing_is_kept_against_the_users_wish(tmp_path, environment):
    assert keep_programs({"XDG_CACHE_HOME": str(tmp_path), **environment}) == {}
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_where_no_folder_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert keep_programs({SWITCH: str(tmp_path / "file")}) == {}


def test_what_has_not_been_compiled_for_a_month_is_removed(tmp_path):
    folder = keep_programs({SWITCH: str(tmp_path)})[JAX_SWITCH]
    for name, age in (("old", AGE + 60.0), ("new", AGE - 60.0)):
        with open(os.path.join(folder, name), "w"):
            os.utime(os.path.join(folder, name), (time.time() - age,) * 2)
    keep_programs({SWITCH: str(tmp_path)})
    assert os.listdir(folder) == ["new"]


@pytest.mark.only("jax")
def test_the_second_run_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(SWITCH, str(tmp_path))
    monkeypatch.delenv(JAX_SWITCH, raising=False)
    cases = tuple(case for case in standard_cases() if case.name in ("attention/padding", "feed_forward/relu"))
    job = Job("jax", Setting(("float64",)), cases)

    def programs():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*-cache")}

    def verdicts():
        return Counter(finding.verdict for message in run_all([job]) for finding in message.findings)

    first = verdicts()
    kept = programs()
    assert len(kept) > 3
    assert verdicts() == first
    assert programs() == kept
    broken = max(kept, key=lambda path: path.stat().st_size)
    broken.write_bytes(broken.read_bytes()[:100])  # half-written
    assert verdicts() == first
