"""The cases as tests of a port: one per case and dtype, and one per dtype of the weights that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from transformer_parity.cases.case import ALL_DTYPES, Case
from transformer_parity.cases.for_ports import port_cases, port_config
from transformer_parity.compare.comparator import compare
from transformer_parity.compare.findings import Finding, Setting
from transformer_parity.compare.verdict import AGREES, SKIPPED, WORDS
from transformer_parity.ports.user import PluginPort

WEIGHTS = "weights"  # the test that they come back as they were given


class DisagreementError(Exception):
    """A port does not agree; the message names the first tap that fails."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of a port with the reference."""

    name: str
    port: PluginPort
    case: Case
    dtype: str
    of_weights: bool = False

    def run(self) -> str:
        """Compare, and return why nothing was compared; empty if something was.

        Raises:
            DisagreementError: Something differs.
        """
        found = compare([self.case], self.port, Setting((self.dtype,)))
        if self.of_weights:  # the first finding
            findings = list(islice(found, 1))
        else:  # which are not part of the case
            findings = [finding for finding in found if finding.path != "load"]
        if failing := [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)]:
            raise DisagreementError(_describe(failing, len(findings)))
        if any(finding.verdict == AGREES for finding in findings):
            return ""
        return "; ".join(dict.fromkeys(finding.detail for finding in findings)) or "nothing was compared"


def find_tests(references: Sequence[str]) -> list[Comparison]:
    """Return the tests of some ports.

    Raises:
        ValueError: A port cannot be imported, its conventions make no sense, or there is nothing to compare.
    """
    ports = [_import(reference) for reference in references]
    names = Counter(port.name for port in ports)
    return [test for port in ports for test in _tests(port.name if names[port.name] == 1 else port.reference, port)]


def _import(reference: str) -> PluginPort:
    try:
        return PluginPort(reference)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"port {reference!r} cannot be imported: {type(error).__name__}: {error}") from error


def _tests(title: str, port: PluginPort) -> Iterator[Comparison]:
    dtypes = [dtype for dtype in ALL_DTYPES if dtype in port.kind.dtypes]
    if not dtypes:
        raise ValueError(f"port {title} must have dtypes among {', '.join(ALL_DTYPES)}: got {port.kind.dtypes!r}")
    try:
        cases = port_cases(port_config(port))
    except (TypeError, ValueError) as error:
        raise ValueError(f"port {title} has no valid config: {error}") from error
    for dtype in dtypes:
        for case in cases:
            if dtype in case.dtypes:
                if case is cases[0]:
                    yield Comparison(f"{title}-{dtype}-{WEIGHTS}", port, case, dtype, of_weights=True)
                yield Comparison(f"{title}-{dtype}-{case.name}", port, case, dtype)


def _describe(failing: Sequence[Finding], number: int) -> str:
    """Return where the first difference is: later ones may be inherited from it."""
    first = failing[0]
    place = f"{first.case} {first.tap}{' on the fast path' if first.path == 'fast' else ''}"
    detail = first.detail or f"error {first.error:.1e}, {first.share:.3g} times its tolerance of {first.tolerance:.1e}"
    others = f"\n{len(failing)} of {number} comparisons fail." if number > 1 else ""
    return f"{WORDS[first.verdict]} {first.backend} {first.dtype} {place}: {detail}{others}"
