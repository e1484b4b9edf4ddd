"""Tests of a port: one for each case and dtype, one for the exported weights in each dtype, and a known-answer test.

The port and the reference run in the same process as the tests. The known-answer test runs last, and verifies that the
reference still computes correct values in this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformer_parity.engine.findings import AGREES, SKIPPED, Finding
from transformer_parity.engine.outputs import LOAD, OUTPUT
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.engine.verdict import WORDS
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.check import known_answer
from transformer_parity.transformer.check.known_numbers import check_reference
from transformer_parity.transformer.compare.comparator import Comparator
from transformer_parity.transformer.compare.reference import Reference
from transformer_parity.transformer.compare.runner import run_cases
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.registry import STAGES

WEIGHTS = "weights"  # name of the test that checks whether the port exports the weights that it loaded
KNOWN_ANSWER = "known_answer"  # name of the test that checks the reference


class PortDisagreementError(Exception):
    """A port doesn't agree with the reference. The message identifies the first tap that fails."""


@dataclass(frozen=True)
class PortTest:
    """One comparison of a port with the reference.

    Attributes:
        name: Name of the test.
        title: Name of the port, unique among the tested ports.
        port: The port.
        case: Case that the port runs.
        dtype: Working dtype.
        reference: Object that computes the expected values, shared by all comparisons in a process.
        of_weights: True to compare only the weights that the port exports.
    """

    name: str
    title: str
    port: PluginPort
    case: Case
    dtype: str
    reference: Reference
    of_weights: bool = False

    @property
    def stage(self) -> str:
        """Stage of the test, or an empty string if the test compares the weights."""
        return "" if self.of_weights else self.case.stage

    def findings(self) -> list[Finding]:
        """Run the case and compare the results with the reference."""
        setting = Placements((self.dtype,))
        comparator = Comparator(self.port.name, setting, self.reference)
        for outputs in run_cases([self.case], self.port, [setting.placement(self.dtype)], lambda doing: None):
            found = comparator.compare(self.case, outputs)
            if self.of_weights:  # the first finding is about the weights
                return list(islice(found, 1))
            return [finding for finding in found if finding.path != LOAD]  # a separate test covers the weights
        return []


@dataclass(frozen=True)
class KnownAnswer:
    """Test whether the reference computes the same values in this process as in a new process.

    Attributes:
        name: Name of the test.
        title: Name of the port.
        cases: The port's cases.
    """

    name: str
    title: str
    cases: tuple[Case, ...]

    def check(self) -> None:
        """Compare the main cases.

        Raises:
            PortDisagreementError: If the reference computes different values in this process than in a new process.
        """
        if why := known_answer.changed(self.cases):
            raise PortDisagreementError(
                f"FAILED {self.title} known answer: {why}\n"
                "The comparisons in this process are invalid, because a function of NumPy or of the reference was "
                "replaced."
            )


Test = PortTest | KnownAnswer


def check(findings: Sequence[Finding]) -> str:
    """Return the reason why nothing was compared, or an empty string if there was at least one comparison.

    Raises:
        PortDisagreementError: If a comparison failed.
    """
    if failing := [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]:
        raise PortDisagreementError(_describe(failing, len(findings)))
    if any(finding.verdict == AGREES for finding in findings):
        return ""
    return "; ".join(dict.fromkeys(finding.detail for finding in findings)) or "nothing was compared"


def find_tests(references: Sequence[str], stages: Sequence[str] = tuple(STAGES)) -> list[Test]:
    """Return the tests for the given ports and stages.

    Raises:
        ValueError: If a port can't be imported, its config is invalid, or there is nothing to compare.
    """
    try:
        check_reference()
    except UsageError as error:
        raise ValueError(str(error)) from error
    ports = [_import(reference) for reference in references]
    names = Counter(port.name for port in ports)
    known = Reference()
    titles = [port.name if names[port.name] == 1 else port.reference for port in ports]
    return [test for title, port in zip(titles, ports, strict=True) for test in _tests(title, port, stages, known)]


def _import(reference: str) -> PluginPort:
    try:
        return PluginPort(reference)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"port {reference!r} cannot be imported: {type(error).__name__}: {error}") from error


def _tests(title: str, port: PluginPort, stages: Sequence[str], known: Reference) -> Iterator[Test]:
    dtypes = [dtype for dtype in ALL_DTYPES if dtype in port.kind.dtypes]
    if not dtypes:
        raise ValueError(f"port {title} must support at least one of {', '.join(ALL_DTYPES)}: got {port.kind.dtypes!r}")
    try:
        cases = port_cases(port_config(port), stages)
    except (TypeError, ValueError) as error:
        raise ValueError(f"port {title} has no valid config: {error}") from error
    for dtype in dtypes:
        due = [case for case in cases if dtype in case.dtypes]
        for case in due[:1]:
            yield PortTest(f"{title}-{dtype}-{WEIGHTS}", title, port, case, dtype, known, of_weights=True)
        for case in due:
            yield PortTest(f"{title}-{dtype}-{case.name}", title, port, case, dtype, known)
    yield KnownAnswer(f"{title}-{KNOWN_ANSWER}", title, tuple(cases))


def _describe(failing: Sequence[Finding], number: int) -> str:
    """Return a message about the first failed comparison, because this failure may have caused the later failures."""
    first = failing[0]
    where = first.tap + (" without taps" if first.path == "fast" and first.tap == OUTPUT else "")
    place = f"{first.case} {where}".rstrip()
    others = f"\n{len(failing)} of {number} comparisons fail." if number > 1 else ""
    return f"{WORDS[first.verdict]} {first.backend} {first.dtype} {place}: {first.words}{others}"
