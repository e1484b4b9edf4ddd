"""The table of attacks. Each attack runs through a user's entry point and must get its expected verdict."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec

from attacks import calls, offers, options, processes, provenance, stages, truths, unread, values
from attacks.attack import FILES, OPTIONS, PAIRS, PLACES, PORT, PORTS, Attack
from attacks.pairs import files, methods, originals, outputs, run, settings
from attacks.words import FAILS, INCOMPLETE, TOLERATED
from transformer_parity.engine.findings import AGREES, SKIPPED, Finding, failure
from transformer_parity.engine.system.machine import processors
from transformer_parity.engine.verdict import Verdict
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.check.processes import run_all
from transformer_parity.transformer.check.selection import Selection
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.stages.registry import STAGES

VERDICTS = {0: TOLERATED, 1: FAILS, 2: FAILS, 3: INCOMPLETE}  # by exit code
PARTS = [module.__name__ for module in (values, unread, calls, offers, stages, processes)]
FAMILIES = {
    PORT: "Attacks through ports",
    FILES: "Attacks through golden vectors",
    OPTIONS: "Attacks through options",
    PLACES: "Attacks through copied code, cached bytecode and skipped tests",
    PAIRS: "Attacks through pairs",
}


@dataclass(frozen=True)
class Outcome:
    """The result of an attack.

    Attributes:
        family: How the attack reaches the comparison.
        name: The name of the attack.
        expected: The expected verdict.
        got: The actual verdict.
        is_as_expected: Whether the verdict and the output are the expected ones.
        said: The first finding that isn't an agreement, or the last lines of the output.
    """

    family: str
    name: str
    expected: str
    got: str
    is_as_expected: bool
    said: str

    to_dict = asdict  # return the fields as a dict


def table() -> tuple[Attack, ...]:
    """Return every attack."""
    ports = sorted(PORTS, key=lambda attack: PARTS.index(attack.inject.partition(":")[0]))
    pairs = (*run.classes(outputs), *run.classes(methods), *run.classes(originals, are_originals=True))
    pairs = (*pairs, *settings.ATTACKS, *files.ATTACKS)
    return (*ports, *truths.DIRECTORIES, *options.OPTIONS, *provenance.PLACED, *pairs)


def possible() -> list[Attack]:
    """Return every attack whose required modules are installed."""
    return [attack for attack in table() if all(find_spec(module) for module in attack.needs)]


def trials(attacks: Iterable[Attack] | None = None) -> Iterator[Outcome]:
    """Run the given attacks, by default all possible ones. Attacks in separate processes run in parallel."""
    chosen = possible() if attacks is None else list(attacks)
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(processors()) as pool,
    ):  # all threads share the warning filters, so the context encloses all threads
        warnings.simplefilter("ignore")  # attacks cause overflows
        futures = [pool.submit(run_attack, attack) for attack in chosen if attack.separate]
        try:
            yield from (run_attack(attack) for attack in chosen if not attack.separate)
            yield from (future.result() for future in futures)
        finally:
            pool.shutdown(cancel_futures=True)


def run_attack(attack: Attack) -> Outcome:
    """Run one attack and return its result."""
    code, found = _run_port(attack) if attack.family == PORT else attack.inject()
    said = found if isinstance(found, str) else _first(found)
    got = VERDICTS.get(code, f"exit code {code}")
    return Outcome(attack.family, attack.name, attack.expected, got, attack.expects(got, said), said)


def _run_port(attack: Attack) -> tuple[int, list[Finding]]:
    """Compare a port as `parity check --port` does, in a separate process if the attack needs one."""
    stages = attack.stages if set(attack.stages) != set(STAGES) else None
    selection = Selection(backends=(), ports=(attack.inject,), stages=stages)
    findings: list[Finding] = []
    try:
        port = PluginPort(attack.inject)
        cases = (attack.cases or partial(port_cases, stages=attack.stages))(port_config(port))
        if attack.separate:
            checked = CheckedPort(PortJob(attack.inject, selection.setting), cases, attack.stages)
            for _ in run_all([checked], timeout=attack.timeout):
                pass
            findings += checked.findings
        else:
            findings += compare(cases, port, selection.setting)
        asked = [selection.asked(port.name, cases, port.kind.dtypes)]
    except Exception as error:  # like a port's process, report the error as a failed comparison
        findings.append(failure(attack.name, f"{type(error).__name__}: {error}"))
        asked = []
    return Verdict.of(findings, asked).exit_code, findings


def _first(findings: Sequence[Finding]) -> str:
    """Return the first finding that isn't an agreement, or the reasons why comparisons were skipped."""
    for finding in findings:
        if finding.verdict not in (AGREES, SKIPPED):
            detail = finding.detail or f"error {finding.error:.1e}, {finding.ratio:.3g} times what is allowed"
            place = " ".join(filter(None, (finding.verdict, finding.dtype, finding.case, finding.tap)))
            return f"{place}: {detail}"
    return "; ".join(dict.fromkeys(finding.detail for finding in findings if finding.verdict == SKIPPED))


def markdown() -> str:
    """Return the tables of docs/reference/attacks.md."""
    lines = []
    for family, title in FAMILIES.items():
        attacks = [attack for attack in table() if attack.family == family]
        lines += [f"## {title}", "", "| attack | what it does | expected |", "|---|---|---|"]
        lines += [f"| `{attack.name}` | {attack.what} | {attack.expected} |" for attack in attacks]
        lines.append("")
    return "\n".join(lines)
