"""The ``steps`` stage: takes 20 optimizer steps, and compares the losses, gradient norms, weights, and moments.

Some cases call ``forward``, ``gradients``, and ``generate`` between two steps. These methods must use the current
weights and must not affect later steps. These cases call each method after two different steps, because the first call
may cache a value that the second call then reuses. One case starts training a second time, which must reset the moments
and the step number. In one case, which only the packages run, the trainer also evaluates a batch, returns a gradient,
and restores the state that it had after step 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import DIVERGES, Finding
from transformer_parity.engine.outputs import FAST, MissingAbilityError, Outputs
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import STEPS, Case
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.padding import Read
from transformer_parity.transformer.stages.rates import rounded_rates, scheduled
from transformer_parity.transformer.stages.stage import PathTensors, Way
from transformer_parity.transformer.stages.training_stage import LOSS, TrainingStage, is_noise
from transformer_spec.search import Search
from transformer_spec.training_config import Gradients

SNAPSHOTS = (1, 5, 20)  # steps after which weights and moments are compared; float32 runs omit the last step
LIMIT = 12  # maximum length of the hypotheses, in tokens, when a case calls ``generate`` between two steps


class StepStage(TrainingStage):
    """Compares the loss and gradient norm of every step, and the weights and moments after the steps in ``SNAPSHOTS``.

    If ``Case.snapshots`` is not empty, it specifies the steps instead of ``SNAPSHOTS``.
    """

    name = STEPS
    component = "optimizer steps"
    path = FAST
    has_baseline = False
    trains = True
    reproduces = 1e-10
    optional: ClassVar[Mapping[str, str]] = {
        "* norm of the gradient": "norms of the gradient",
        "* moment *": "moments",
        "* weight *": "weights",
        "* logits": "logits between two steps",
        "* gradient between steps": "gradients between two steps",
        "* tokens": "tokens between two steps",
    }

    def run(self, case: Case, loaded: LoadedPort, outputs: Outputs) -> Iterator[Way]:
        """Yield a single run: the training steps."""
        snapshots = case.snapshots or SNAPSHOTS
        last = snapshots[-1] if outputs.dtype == "float64" else snapshots[-2]
        yield FAST, lambda: train(case, loaded, range(1, last + 1), snapshots)

    def compare(self, shown: PathTensors) -> Iterator[Finding]:
        """Compare the tensors. If any tensor diverges, also compare with a reference with rounded learning rates."""
        findings = list(super().compare(shown))
        wrong = {finding.tap for finding in findings if finding.verdict == DIVERGES}
        # The first loss is computed before the first update, so it doesn't depend on the learning rates.
        if shown.author.dtype == "float64" and wrong and f"step 1 {LOSS}" not in wrong:
            findings = self._with_rounded_rates(shown) or findings
        yield from findings

    def compare_tensors(self, names: Sequence[str], shown: PathTensors) -> Iterator[Finding]:
        """Yield a finding for each tensor.

        If tokens are wrong, the finding includes the number of sentences with wrong tokens.
        """
        for finding in super().compare_tensors(names, shown):
            is_wrong = finding.tap.endswith(" tokens") and finding.verdict == DIVERGES and not finding.detail
            yield replace(finding, detail=_different_tokens(finding.tap, shown)) if is_wrong else finding

    def _with_rounded_rates(self, shown: PathTensors) -> list[Finding]:
        """Compare the tensors with a reference that rounds its learning rates to float32.

        If all tensors agree with this reference, return the findings. Otherwise, return an empty list.
        """
        case, truth = shown.case, shown.expected.tensors

        def run(other: Case) -> Tensors:
            return self.expected(
                other, DEFINITION.load(case.config, case.load_weights(), Placement("float64")), "float64"
            )

        if any(
            self.problem(name, shown.tensors[name], truth[name], "float64") for name in truth if name in shown.tensors
        ):
            return []
        for factors in rounded_rates(case, shown.tensors, truth, run, (case.snapshots or SNAPSHOTS)[-1]):
            trained = run(scheduled(case, factors))
            tensors = Read.of(case, trained).combine(shown.tensors, trained)
            expected = replace(shown.expected, tensors=trained)
            findings = list(super().compare(replace(shown, tensors=tensors, expected=expected)))
            if all(finding.verdict != DIVERGES for finding in findings):
                return findings
        return []

    def left_out(
        self, case: Case, tensors: Collection[str], hidden: Sequence[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the tensors that the port doesn't return, with the reasons."""
        for patterns, why in super().left_out(case, tensors, hidden):
            if case.calls or "between two steps" not in why:
                yield patterns, why

    def tolerances(self, truth: Arrays, baseline: Arrays, placement: Placement) -> dict[str, float]:
        """Return the fixed tolerance of each tensor."""
        return {name: tolerance(name, placement.dtype) for name in truth}


def train(case: Case, loaded: Any, steps: Sequence[int], snapshots: Sequence[int]) -> Tensors:
    """Train a model, and return all losses as well as the weights and moments after the steps in ``snapshots``.

    The weights don't include key biases. Their values don't affect any output, and their gradients consist only of
    rounding errors (see ``training_error``), which Adam scales up to full steps.
    """
    batches = shifted(case.inputs, case.rows)
    trainer = loaded.trainer(case.training)
    found = {}
    for step in steps:
        batch = batches[step % len(batches)]
        if step == case.unlabeled:
            batch = {**batch, "labels": np.full_like(batch["labels"], case.config.pad_id)}
        if case.restart and step == case.restart + 1:
            trainer = loaded.trainer(case.training)
        result = trainer.train_step(**batch)
        found[f"step {step} {LOSS}"] = np.asarray(float(result.loss))
        if result.gradient_norm is not None:
            found[f"step {step} norm of the gradient"] = np.asarray(float(result.gradient_norm))
        if step in snapshots:
            state = trainer.export_state()
            for what, tensors in (
                ("first moment", state.first_moment if state else {}),
                ("second moment", state.second_moment if state else {}),
                ("weight", _weights(loaded)),
            ):
                found |= {
                    f"step {step} {what} {name}": tensor
                    for name, tensor in tensors.items()
                    if what != "weight" or not is_noise(name)
                }
        if step in case.calls:
            found |= {f"step {step} {name}": tensor for name, tensor in other_calls(case, loaded)}
        if case.rewind and step == 1:
            first_state = trainer.export_state()
        if step == case.rewind:
            found |= {f"step {step} {name}": tensor for name, tensor in _trainer_calls(loaded, trainer, batch)}
            trainer.load_state(first_state)
    return found


def _different_tokens(name: str, shown: PathTensors) -> str:
    """Return a phrase that gives the number of sentences whose tokens differ and the first differing position."""
    differ = shown.tensors[name] != shown.expected.tensors[name]  # [B, L]
    first = int(differ.any(0).argmax()) + 1
    return f"{int(differ.any(1).sum())} of {len(differ)} sentences have different tokens, starting at token {first}"


def other_calls(case: Case, loaded: Any) -> Iterator[tuple[str, ndarray]]:
    """Yield the results of ``forward``, ``gradients``, and ``generate``, and skip methods that the port doesn't define.

    The gradients of all parameters, except key biases, are concatenated into one tensor. The tokens are padded to a
    fixed shape and returned as floats.
    """
    source_ids, target_ids = case.inputs["source_ids"], case.inputs["target_ids"]
    with suppress(MissingAbilityError):
        yield "logits", loaded.run("", {"source_ids": source_ids, "target_ids": target_ids}, taps=False).output
    with suppress(MissingAbilityError):
        yield "gradient between steps", _as_vector(loaded.gradients(case.inputs))
    with suppress(MissingAbilityError):
        tokens = np.full((len(source_ids), LIMIT), float(case.config.pad_id))
        ids = loaded.search(source_ids, Search(max_length=LIMIT)).nbest_ids[:, 0]
        tokens[:, : ids.shape[1]] = ids
        yield "tokens", tokens


def _trainer_calls(loaded: Any, trainer: Any, batch: Arrays) -> Iterator[tuple[str, ndarray]]:
    """Yield the results of the trainer methods that the four packages define and user ports don't."""
    with loaded.quickly():
        loss, tokens = trainer.evaluate(**batch)
        gradient = trainer.gradient(**batch)
    yield "evaluation", np.array([float(loss), float(tokens)])
    yield "gradient of the trainer", np.append(gradient.loss, _as_vector(gradient))


def _as_vector(gradient: Gradients) -> ndarray:
    """Concatenate the gradients of all parameters, except key biases, into one vector."""
    names = sorted(name for name in gradient.parameters if not is_noise(name))
    return np.concatenate([np.ravel(gradient.parameters[name]) for name in names])


def shifted(inputs: Arrays, rows: Sequence[int] = ()) -> list[dict[str, ndarray]]:
    """Return a different batch for each step by rotating the source sentences relative to the targets.

    Args:
        inputs: The full batch.
        rows: Number of rows in each batch, repeated cyclically. If empty, each batch contains all rows.
    """
    size = len(inputs["source_ids"])
    turned = [{**inputs, "source_ids": np.roll(inputs["source_ids"], shift, axis=0)} for shift in range(size)]
    taken = [rows[number % len(rows)] if rows else size for number in range(size)]
    return [{name: array[:n] for name, array in batch.items()} for n, batch in zip(taken, turned, strict=True)]


def _weights(loaded: Any) -> Mapping[str, ndarray]:
    try:
        return loaded.export()
    except MissingAbilityError:  # the port doesn't export weights, so only the losses are compared
        return {}


def tolerance(name: str, dtype: str) -> float:
    """Return the maximum allowed error of a tensor.

    The tolerances are fixed, because later steps amplify rounding errors so much that a baseline would be meaningless.
    """
    return POLICY[STEPS][dtype]["loss" if name.endswith(LOSS) else "tensor"]
