"""The checker, checked: known mistakes of training are planted one at a time, and each is caught and located."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import mutants_training
import pytest
import test_dropout
from conftest import Backend
from mutants import ALL, Mistake, planted
from mutants_training import CASES, CATALOGUE, CONTROLS, MISBEHAVIOUR, retrained

from reference_numpy.taps import no_tap
from transformer_parity import observe
from transformer_parity.compare import AGREES, DIVERGES, Finding, Setting, compare


def in_every_port(mistakes: list[Mistake]) -> list:
    return [
        pytest.param(name, mistake, id=f"{name}-{mistake.name}", marks=pytest.mark.only(name))
        for name in ALL
        for mistake in mistakes
        if name in mistake.edits
    ]


def plant(name: str, mistake: Mistake, folder) -> Any:
    """Return a context with the port that has the mistake."""
    in_the_model = any(module != "training" for module, _, _ in mistake.edits[name])
    return planted(mistake, name, folder) if in_the_model else retrained(mistake, name)


def run(name: str, mistake: Mistake, folder) -> list[Finding]:
    """Compare a port that has the mistake with the reference, and return what does not agree."""
    case = CASES.get(mistake.case, mutants_training.GRADIENTS)
    with plant(name, mistake, folder) as port, interpreted(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "SNAPSHOTS", (1,) if mistake.at.startswith("step 1") else (1, 2))
        findings = list(compare([case], port, Setting(("float64",))))
    assert len(findings) > 1
    return [finding for finding in findings if finding.verdict != AGREES]


@contextmanager
def interpreted(name: str) -> Iterator[None]:
    """Run one operation at a time: compiling takes longer, and for every mistake anew.

    Only the model of JAX is compiled, once for all mistakes that are not in it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name == "jax":
            import jax

            from transformer_jax import Transformer

            patch.setattr(Transformer, "__call__", compiled_call())
            patch.setattr(jax, "jit", lambda function, **_: function)
            patch.setattr(jax.lax, "scan", loop)
        if name == "tf":
            import tensorflow as tf

            tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            if name == "tf":
                tf.config.run_functions_eagerly(False)


@cache
def compiled_call() -> Callable[..., Any]:
    """Return the call of JAX's model, compiled where nobody listens to its taps."""
    import jax
    from flax import nnx

    from transformer_jax import Transformer

    call = Transformer.__call__
    compiled = jax.jit(lambda graph, state, *ids: call(nnx.merge(graph, state), *ids), static_argnums=0)

    def call_compiled(self: Any, source_ids: Any, target_ids: Any, tap: Any = no_tap) -> Any:
        if tap is not no_tap:
            return call(self, source_ids, target_ids, tap=tap)
        config = self.config
        for module in (self, self.source_position, self.target_position):
            module.config = mutants_training.GRADIENTS.config  # other smoothing is no reason to compile once more
        parts = nnx.split(self)
        self.config = config
        return compiled(*parts, source_ids, target_ids)

    return call_compiled


def loop(function: Callable[..., Any], carry: Any, inputs: Any) -> tuple[Any, None]:
    """Do what jax.lax.scan does, one step after another."""
    import jax

    for i in range(len(jax.tree.leaves(inputs)[0])):
        carry, _ = function(carry, jax.tree.map(lambda array: array[i], inputs))  # noqa: B023  called at once
    return carry, None


@pytest.mark.parametrize(("name", "mistake"), in_every_port([m for part in CATALOGUE.values() for m in part]))
def test_mistake_is_caught_and_located(name, mistake, tmp_path):
    failures = run(name, mistake, tmp_path)
    assert failures, "not caught"
    if failures[0].tap == observe.WHOLE:  # which says that something is wrong, not where
        del failures[0]
    assert (failures[0].tap, failures[0].verdict) == (mistake.at, DIVERGES), failures[0].detail


@pytest.mark.parametrize(("name", "control"), in_every_port(CONTROLS))
def test_equivalent_mathematics_raises_no_alarm(name, control, tmp_path):
    assert run(name, control, tmp_path) == []


@pytest.mark.parametrize(("name", "mistake"), in_every_port(MISBEHAVIOUR))
def test_misbehaviour_is_caught_by_its_check(name, mistake, tmp_path):
    check, *arguments = mistake.check
    with plant(name, Mistake(mistake.name, "", mistake.edits), tmp_path) as port:
        backend = Backend(name, port.import_package())
        compiled = nullcontext() if check == "check_mixed_precision" else test_dropout.interpreted(backend)
        with compiled, pytest.raises(AssertionError, match=re.escape(mistake.complaint)):
            getattr(test_dropout, check)(backend, *arguments)


def test_every_part_of_training_is_spoilt_in_every_port():
    for part, mistakes in CATALOGUE.items():
        assert {name for mistake in mistakes for name in mistake.edits} == {*ALL}, part
