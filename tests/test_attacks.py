"""Attacks on the `AGREE` verdict: each attack gets its expected verdict."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from pathlib import Path
from threading import Barrier

import pytest
from attacks import table
from attacks.attack import Attack
from attacks.options import TESTS
from attacks.words import FAILS, TOLERATED

FEW = 1
DOCUMENT = Path(__file__).parent.parent / "docs" / "reference" / "attacks.md"


@pytest.fixture(autouse=True)
def _attacks_can_be_imported(monkeypatch):
    """Let new processes import the attacks in the same way as a user's port."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))


def test_attack_modules_can_be_imported():
    (outcome,) = table.trials([attack for attack in table.table() if attack.name == "CrashesAtTheEnd"])
    assert "No module named" not in outcome.said


def _title(attack: Attack) -> str:
    return f"{attack.family}/{attack.name}"


def _every_attack() -> list:
    """Return all attacks; without ``--all``, only the first few of each family and expected verdict run."""
    parameters, seen = [], Counter()
    for attack in table.table():
        seen[attack.family, attack.expected] += 1
        repeats = seen[attack.family, attack.expected] > FEW
        marks = [pytest.mark.only("torch")] * ("torch" in attack.needs) + [pytest.mark.extended("attacks")] * repeats
        parameters.append(pytest.param(attack, marks=marks, id=_title(attack)))
    return parameters


@pytest.mark.parametrize("attack", _every_attack())
def test_attack_produces_the_expected_outcome(attack):
    (outcome,) = table.trials([attack])
    assert outcome.is_as_expected, outcome


def test_attacks_have_unique_names_and_descriptions():
    attacks = table.table()
    assert len(attacks) > 60
    assert max(Counter(map(_title, attacks)).values()) == 1
    assert all(attack.what.endswith(".") and "\n" not in attack.what and "|" not in attack.what for attack in attacks)


def test_some_attacks_of_each_family_are_expected_to_fail_and_some_to_be_tolerated():
    expected = {(attack.family, attack.expected) for attack in table.table()}
    assert expected >= {(family, word) for family in table.FAMILIES for word in (FAILS, TOLERATED)}


def test_trials_run_only_the_given_attacks():
    chosen = [attack for attack in table.table() if attack.name in ("OneNan", "ReadOnly", "CallsExit", "NoManifest")]
    outcomes = list(table.trials(chosen))
    names = [outcome.name for outcome in outcomes]
    assert names == ["OneNan", "ReadOnly", "OneNan", "NoManifest", "CallsExit", "OneNan"]  # in three families
    assert all(outcome.is_as_expected for outcome in outcomes)


def test_concurrent_trials_restore_warning_filters(monkeypatch):
    before, both, seen = list(warnings.filters), Barrier(2, timeout=20.0), []

    def run_all(jobs, timeout):
        if both.wait() > 0:  # ensure that the first thread finishes first
            time.sleep(0.2)
        seen.append(warnings.filters[0])
        return iter(())

    monkeypatch.setattr(table, "run_all", run_all)
    monkeypatch.setattr(table, "processors", lambda: 2)
    list(table.trials([attack for attack in table.table() if attack.name in ("CallsExit", "Crashes")]))
    assert seen == [("ignore", None, Warning, None, 0)] * 2
    assert warnings.filters == before


def test_trial_pool_size_matches_cpu_affinity(monkeypatch):
    pool, sizes = table.ThreadPoolExecutor, []
    monkeypatch.setattr(table, "ThreadPoolExecutor", lambda size: sizes.append(size) or pool(size))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    assert list(table.trials([])) == []
    assert sizes == [3]


def test_unexpected_attack_outcome_is_reported():
    sound = next(attack for attack in table.table() if attack.name == "ReadOnly")
    wrong = Attack(sound.name, sound.what, FAILS, sound.family, sound.inject, stages=sound.stages)
    (outcome,) = table.trials([wrong])
    assert (outcome.expected, outcome.got, outcome.is_as_expected) == (FAILS, TOLERATED, False)


def test_documented_attack_table_is_complete():
    text = table.markdown()
    assert all(f"| `{attack.name}` | {attack.what} | {attack.expected} |" in text for attack in table.table())
    assert text.strip() in DOCUMENT.read_text("utf-8")
