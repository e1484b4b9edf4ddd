"""Add statements to a diagnosis. They describe a difference and are sorted by the strength of their evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.comparison import Arrays
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.localization import Evidence
from transformer_parity.engine.signatures import SAME, narrowed
from transformer_parity.engine.tensors import given
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS, Case
from transformer_parity.transformer.diagnose.diagnosis import EXACT, LIKELY, UNKNOWN, Diagnosis
from transformer_parity.transformer.diagnose.evidence.differing import Differing
from transformer_parity.transformer.diagnose.evidence.exchanged import exchanged_gradients
from transformer_parity.transformer.diagnose.evidence.operands import of_operands
from transformer_parity.transformer.diagnose.evidence.patterns import among_cases, not_finite, patterns
from transformer_parity.transformer.diagnose.evidence.signatures import places, signatures

# Advice for users, if the difference is a convention.
IN_PORT = "fix the port or, if this change is intentional, declare it: overrides = {!r}"
IN_FILES = (
    "fix the port or, if this change is intentional, regenerate A with this convention, which `parity golden` stores "
    "in "
    "the manifest: `parity golden --for module:Class --out A`, where the class sets overrides = {!r}"
)
FAR = {"float64": SAME, "float32": 1e-5}  # larger relative errors are not rounding errors


def within_stage(found: Diagnosis, case: Case) -> Diagnosis:
    """If a diagnosis of a case in the ``gradients`` stage is exact, add "in gradients" to its sentence.

    The port may also differ from the reference in training, which the case doesn't test.
    """
    if found.confidence != EXACT or case.stage != GRADIENTS:
        return found
    return replace(found, sentence=f"in gradients, {found.sentence}")


def of_names(found: Diagnosis, detail: str) -> Diagnosis:
    """If ``detail`` isn't empty, add a statement that the port returned different tensors than it declared.

    ``detail`` describes the wrong names or the wrong order of these tensors.
    """
    if not detail:
        return found
    promise = f"the port returned different tensors than it declared: {detail}"
    if found.confidence == EXACT:
        return replace(found, signatures=(promise, *found.signatures))
    return replace(found, sentence=f"{promise}. In addition, {found.sentence}")


def of_error(evidence: Evidence, case: Case) -> list[str]:
    """Return statements about the error of the first wrong block."""
    name, dtype = evidence.blame.introduced[0], evidence.blame.dtype
    if name not in evidence.isolated or name not in evidence.wanted:
        return []
    weights = given(case.load_weights(), dtype)
    config = case.config.in_decoder if "decoder." in name else case.config
    batch = case if name.startswith("of ") else None
    parts = _sentences(case, evidence.isolated[name], evidence.wanted[name])
    for isolated, wanted in (
        reversed(parts) if name.endswith(".weights") else parts
    ):  # statements about attention weights count keys, so compare all sentences first
        if found := signatures(isolated, wanted, config, weights, FAR[dtype], batch):
            # Padding can change gradients in other ways, so this statement covers only sentences without padding.
            is_part = len(isolated) < len(evidence.isolated[name])
            part = f"{_at(name)}, in sentences without padding"
            is_told = [is_part and (name.startswith("at ") or words[0].isdigit()) for words in found]
            return [f"{part if told else _at(name)}, {words}" for told, words in zip(is_told, found, strict=True)]
    return []


def of_operand(evidence: Evidence, case: Case) -> list[str]:
    """Return a statement about a wrong operand of the first wrong block, or [] if no operand explains the error."""
    name = evidence.blame.introduced[0]
    if name not in evidence.isolated or name not in evidence.wanted:
        return []
    weights = given(case.load_weights(), evidence.blame.dtype)
    found = of_operands(name, evidence.isolated, evidence.wanted, weights, case.config)
    return [f"{_at(name)}, {found}"] if found else []


def of_rounding(evidence: Evidence, case: Case) -> list[str]:
    """If the first wrong block has only the precision of a narrower dtype, return a statement about this dtype."""
    name = evidence.blame.introduced[0]
    if name not in evidence.isolated or name not in evidence.wanted:
        return []
    pairs = _sentences(case, evidence.isolated[name], evidence.wanted[name])
    found = next(filter(None, (narrowed(isolated, wanted) for isolated, wanted in pairs)), "")
    return [f"{_at(name)}, {found}"] if found else []


def _sentences(case: Case, isolated: ndarray, wanted: ndarray) -> list[tuple[ndarray, ndarray]]:
    """Return two pairs ``(isolated, wanted)``: one without the padded sentences, and one with all sentences.

    If none or all of the sentences are padded, the function returns only the pair with all sentences.
    """
    ids = [array for name, array in case.inputs.items() if name in ("source_ids", "target_ids")]
    whole = np.all([(array != case.config.pad_id).all(1) for array in ids], 0) if ids else np.zeros(0, bool)
    if isolated.shape != wanted.shape or wanted.shape[:1] != whole.shape or not whole.any() or whole.all():
        return [(isolated, wanted)]
    return [(isolated[whole], wanted[whole]), (isolated, wanted)]


def of_tensors(
    found: Diagnosis,
    differing: Differing,
    findings: Sequence[Finding],
    others: Sequence[tuple[Case, Arrays | None]],
    measured: Callable[[Diagnosis], Diagnosis],
) -> Diagnosis:
    """Add statements about the differing tensors to a diagnosis that isn't exact.

    Args:
        found: The diagnosis.
        differing: The tensors of the case, and the names of the tensors that differ from the reference.
        findings: Findings about the stage of the case.
        others: Other cases of the same model. Each case is paired with the port's tensors, or with None if the port
            agrees with the reference in this case.
        measured: Function that adds statements based on reruns or measurements, such as the factor by which the first
            training step is too large. These statements are more specific than ``patterns``, so they come first.
    """
    if nowhere := not_finite(differing):
        found = replace(found, sentence=nowhere, confidence=LIKELY)
    if names := exchanged_gradients(differing):
        return replace(found, sentence=names, confidence=LIKELY)
    if differing.case.stage == ACTIVATIONS:  # ``of_place`` adds more specific statements
        return found
    return with_first(measured(found), [*patterns(differing), *among_cases(findings, differing.case, others)])


def of_place(
    found: Diagnosis,
    evidence: Evidence,
    case: Case,
    errors: Sequence[str],
    differing: Differing | None,
    findings: Sequence[Finding],
    others: Sequence[tuple[Case, Arrays | None]],
) -> Diagnosis:
    """Add statements about the first wrong block, unless a candidate already explains the difference.

    ``errors`` contains statements about the error of this block. The other arguments are the same as in ``of_tensors``.
    """
    if not evidence.blame.introduced or found.confidence == EXACT or found.candidates:
        return found
    found = with_statements(found, errors, evidence)
    if case.stage != ACTIVATIONS or differing is None:
        return found
    # A pattern in activations can have many causes, so it is added to a diagnosis but never becomes the main sentence.
    return replace(found, signatures=(*found.signatures, *patterns(differing), *among_cases(findings, case, others)))


def with_statements(found: Diagnosis, statements: Sequence[str], evidence: Evidence) -> Diagnosis:
    """Add statements to a diagnosis, followed by a list of the wrong sentences, heads, and positions.

    If the cause is unknown, the first element of ``statements`` becomes the main sentence of the diagnosis. The list of
    wrong sentences, heads, and positions never becomes the main sentence.
    """
    found = with_first(found, statements, evidence.blame.dtype)
    return replace(found, signatures=(*found.signatures, *wrong_places(evidence)))


def wrong_places(evidence: Evidence | None) -> list[str]:
    """Return which sentences, heads, and positions are wrong in the first wrong block.

    For example, if all heads are wrong, the result doesn't mention heads.
    """
    if evidence is None or not evidence.blame.introduced:
        return []
    name, far = evidence.blame.introduced[0], FAR[evidence.blame.dtype]
    if name not in evidence.isolated or name not in evidence.wanted:
        return []
    return [f"{_at(name)}, {words}" for words in places(evidence.isolated[name], evidence.wanted[name], far)]


def _at(name: str) -> str:
    """Return a prefix for a statement, which names the tap or the gradient that the statement describes."""
    return f"in the gradient {name}" if name.startswith(("at ", "of ")) else f"at {name}"


def if_it_is_meant(found: Diagnosis, remedy: str) -> Diagnosis:
    """If the diagnosis is a convention, add advice on how to declare the convention in the port."""
    return replace(found, signatures=(remedy.format(found.config), *found.signatures)) if found.config else found


def with_first(found: Diagnosis, statements: Sequence[str], dtype: str = "float64") -> Diagnosis:
    """Add statements to a diagnosis.

    If the cause is unknown, the first statement becomes the main sentence of the diagnosis.
    """
    if found.confidence == UNKNOWN and statements:
        first, *rest = statements
        closer = [found.sentence.partition(". ")[2]] if ". With " in found.sentence else []
        sentence = f"no known bug matches; {first}"
        if dtype == "float32":
            sentence = f"{first}: if float64 agrees, only precision is lost"
        found, statements = replace(found, sentence=sentence, confidence=LIKELY), [*rest, *closer]
    return replace(found, signatures=(*found.signatures, *statements))
