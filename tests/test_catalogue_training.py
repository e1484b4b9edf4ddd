"""A mistake in the NumPy reference computes what the same mistake computes in a port: in training and in search."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.mistakes import search, training
from transformer_parity.transformer.mistakes.catalogue import SEARCH, TRAINING
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.selftest.planted_ports import planted
from transformer_parity.transformer.stages.run import tensors
from transformer_parity.transformer.stages.training import training_error

ALIKE = 1e-9  # what rounding leaves between two backends in float64 is far less, what a mistake changes is far more


def of_both(mistakes):
    return [pytest.param(mistake, id=mistake.name) for mistake in mistakes if {"numpy", "torch"} <= set(mistake.edits)]


OF_BOTH = of_both(mistake for part in TRAINING.values() for mistake in part)


def load(port, case):
    return port.load(case.config, case.load_weights(), Placement("float64"))


def trained(port, case):
    """Return what a gradient, or two steps of training, show."""
    return tensors(load(port, case), replace(case, snapshots=(1, 2)))


@cache
def well_trained(case):
    return trained(PORTS["numpy"], training.CASES.get(case, training.GRADIENTS))


@pytest.mark.only("torch")
@pytest.mark.parametrize("mistake", OF_BOTH)
def test_mistake_of_training_is_the_same_in_numpy(mistake):
    seen = {}
    for backend in ("numpy", "torch"):
        seen[backend] = trained(planted(mistake, backend), training.CASES.get(mistake.case, training.GRADIENTS))
    assert seen["numpy"].keys() == seen["torch"].keys()
    apart = {name: training_error(name, seen["torch"], seen["numpy"]) for name in seen["numpy"]}
    assert {name: error for name, error in apart.items() if not error <= ALIKE} == {}
    right = well_trained(mistake.case)
    assert max(training_error(name, seen["numpy"], right) for name in right) > ALIKE


def decoded(port, case):
    """Return the logits of one position after another where the case asks for them; tokens and scores."""
    loaded, source_ids = load(port, case), case.inputs["source_ids"]
    stepwise = case.search.beam_size is None
    logits = loaded.decode_stepwise(source_ids, case.inputs["target_ids"]) if stepwise else np.zeros(0)
    found = loaded.search(source_ids, case.search)
    return found.nbest_ids, logits, found.nbest_scores


def differ(one, other):
    (ids, *numbers), (other_ids, *other_numbers) = one, other
    if not np.array_equal(ids, other_ids):
        return True
    return any(
        a.shape != b.shape or not relative_error(a, b) <= ALIKE for a, b in zip(numbers, other_numbers, strict=True)
    )


@pytest.mark.only("torch")
@pytest.mark.parametrize("mistake", of_both(SEARCH))
def test_mistake_of_search_is_the_same_in_numpy(mistake):
    case, seen = search.CASES[mistake.case], {}
    for backend in ("numpy", "torch"):
        seen[backend] = decoded(planted(mistake, backend), case)
    assert not differ(seen["torch"], seen["numpy"])
    assert differ(seen["numpy"], decoded(PORTS["numpy"], case))


def test_every_mistake_is_one_of_numpy_too():
    mistakes = [*SEARCH, *(mistake for part in TRAINING.values() for mistake in part)]
    assert [mistake.name for mistake in mistakes if "numpy" not in mistake.edits] == []
