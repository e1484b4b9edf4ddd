"""Every known bug is detected, located, and identified in every port, as in the table that `parity selftest` prints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from result_schema import read_document

from transformer_parity.cli.main import main
from transformer_parity.engine.findings import DIVERGES, Finding
from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.transformer.bugs import catalog
from transformer_parity.transformer.bugs.bug import ALL, Bug, instead
from transformer_parity.transformer.selftest import trials

DIAGNOSED = ("full/padded", "steps", "decode/ends_apart_beam")  # in other cases, the first diagnosis takes 5 to 20 s


def every() -> list:
    """Return each bug in each port, with the extended bugs marked.

    In PyTorch, diagnosed bugs are extended if their case is not in ``DIAGNOSED``, except the first bug of each part. In
    JAX and TensorFlow, only the first bug of each part is in the default tier, and only if it isn't diagnosed or is in
    the part ``mask``.
    """
    parameters = []
    for name in ALL:
        for part, bugs in catalog.parts().items():
            of_port = [bug for bug in bugs if name in bug.edits]
            for bug in of_port:
                marks = [pytest.mark.only(name)]
                diagnosed = trials.has_a_name(bug, name)
                if name == "torch":
                    repeats = bug is not of_port[0] and diagnosed and bug.case not in DIAGNOSED
                else:
                    repeats = bug is not of_port[0] or (diagnosed and part != "mask")
                if repeats:
                    marks.append(pytest.mark.extended("bugs"))
                identity = f"{name}-{part}-{bug.name}-{bug.case}"
                parameters.append(pytest.param(name, part, bug, id=identity, marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "part", "bug"), every())
def test_bug_is_detected_located_and_identified(name, part, bug):
    trial = trials.try_out(name, part, bug)
    assert trial.caught, "not caught"
    assert trial.located, trial.said
    assert trial.named is not False, trial.said


def test_bug_names_are_unique_and_most_bugs_can_be_named():
    bugs = [(bug.name, bug.case) for part in catalog.parts().values() for bug in part]
    assert len(set(bugs)) == len(bugs) > 190
    nameless = {
        name: [m.name for part in catalog.parts().values() for m in part if not trials.has_a_name(m, name)]
        for name in ALL
    }
    assert max(map(len, nameless.values())) < 50, nameless
    only_there = {name: set(nameless[name]) - set(nameless["torch"]) for name in ("jax", "tf")}
    by_length = {"positions one too low", "source padding not masked"}
    assert only_there == {"jax": by_length, "tf": by_length}


def test_figures_on_the_site_match_the_catalog():
    """Compare only the totals, because the tests above check each bug.

    After changing the catalog, run `parity selftest --json FILE` and docs/results/keep.py.
    """
    kept = json.loads((Path(__file__).parent.parent / "docs" / "results" / "selftest.json").read_text("utf-8"))
    expected = []
    for part, bugs in catalog.parts().items():
        places = [(bug, name) for name in ALL for bug in bugs if name in bug.edits]
        injected, named = len(places), sum(trials.has_a_name(*place) for place in places)
        expected.append({"part": part, **dict.fromkeys(("injected", "caught", "located"), injected)})
        expected[-1] |= dict.fromkeys(("named", "nameable"), named)
    assert kept["parts"] == expected
    assert kept["together"] == {name: sum(row[name] for row in expected) for name in kept["together"]}


def finding(tap, verdict=DIVERGES, detail=""):
    return Finding("torch", "float64", "", "", "taps", tap, 1.0, 0.0, verdict, detail)


def test_difference_at_the_wrong_location_does_not_locate_a_bug():
    bug = Bug("a bug", "logits")
    assert trials.where_it_is([finding("logits"), finding("output")], bug)
    assert not trials.where_it_is([finding("encoder.output"), finding("logits")], bug)
    announced = Bug("another", "", announced="missing logits")
    assert trials.where_it_is([finding("names", detail="missing logits")], announced)
    assert not trials.where_it_is([finding("names", detail="missing logits"), finding("output")], announced)
    assert not trials.where_it_is([finding("names", detail="unexpected logits")], announced)


@pytest.mark.only("torch")
def test_equivalent_change_is_not_reported_as_a_bug():
    nothing = Bug("nothing", "logits", instead("attention", "math.sqrt(d_k)", "d_k**0.5"))
    trial = trials.try_out("torch", "attention", nothing)
    assert (trial.caught, trial.located, trial.named) == (False, False, None)


@pytest.mark.only("torch")
def test_selftest_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "selftest.json"
    assert main(["selftest", "--backends", "torch", "--part", "feed-forward", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "feed-forward" in printed
    assert "AGREE  7 of 7 bugs injected: 7 caught, 7 located, 7 of 7 named" in printed
    result = read_document(path, "selftest")["result"]
    assert [trial["named"] for trial in result["trials"]] == [True] * 7


WORKERS = """
import os, time
from transformer_parity.transformer.selftest.trials import Trial

def dies(parent):
    parent.receive()
    backend, part = parent.receive()
    parent.send(Trial(backend, part, "the first", True, True, True, ""))
    print("out of memory", flush=True)
    os._exit(9)

def sleeps(parent):
    time.sleep(600)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Return a function that lets the processes run one of the functions above."""
    (tmp_path / "workers.py").write_text(WORKERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return lambda name: monkeypatch.setattr(trials, "WORK", f"workers:{name}")


@pytest.mark.only("torch")
def test_trials_completed_before_a_process_died_are_kept(work, tmp_path, capsys):
    work("dies")
    path = tmp_path / "selftest.json"
    assert main(["selftest", "--backends", "torch", "--part", "feed-forward", "--json", str(path)]) == 3
    printed = capsys.readouterr().out
    said = "the process ended with exit code 9 at torch: feed-forward: out of memory"
    assert f"not all bugs could be tried: {said}\n" in printed
    assert "INCOMPLETE  1 of 7 bugs injected: 1 caught, 1 located, 1 of 1 named" in printed
    written = json.loads(path.read_text())
    assert written["exit_code"] == 3
    assert [trial["bug"] for trial in written["result"]["trials"]] == ["the first"]


def test_silent_trial_process_times_out(work):
    work("sleeps")
    with pytest.raises(
        ChildEndedError, match=r"^no progress for 1 s at torch: feed-forward: the process printed nothing$"
    ):
        list(trials.all_trials(["torch"], ["feed-forward"], timeout=1.0))


@pytest.mark.parametrize(("gibibytes", "jobs", "count"), [(100, 60, 3), (100, 2, 2), (6, 60, 2), (1, 60, 1)])
def test_number_of_processes_is_limited_by_cpus_and_memory(gibibytes, jobs, count, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=gibibytes * 2**30))
    assert trials.number_of_processes(jobs) == count
