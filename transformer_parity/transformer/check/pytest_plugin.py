"""``pytest --parity-port=module:Class``: the cases as tests of your own port, beside your own tests.

Loaded by every pytest of the environment, so it imports nothing until a port is given.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformer_parity.engine.findings import Finding
    from transformer_parity.transformer.check.conformance import Test

FOLDER = "parity"  # in which the tests appear to be
FACTS = "parity_facts"  # what is added to the report of a test, and to what a process of pytest-xdist sends at its end
PASSED, FAILED = "passed", "failed"
MOST = 3  # findings that a report has, and tests that a message names: one is enough, and skips say why


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("parity", "agreement with the reference Transformer")
    group.addoption(
        "--parity-port",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="compare a port with the reference, one test per case and dtype; may be repeated",
    )
    group.addoption(
        "--parity-stage",
        metavar="NAME[,NAME]",
        help="the stages to compare, among activations, gradients, steps and decode (default: all)",
    )
    group.addoption(
        "--parity-expected-failures",
        type=Path,
        metavar="FILE",
        help='a TOML file of known failures: "test or pattern" = "reason". One that passes, or is no test, fails',
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Import ports from their source, even if a conftest file imports them."""
    for reference in early_config.known_args_namespace.parity_port:
        from transformer_parity.engine.processes.provenance import import_port

        import_port(reference.partition(":")[0])


def pytest_configure(config: pytest.Config) -> None:
    """Read the list of expected failures, and get ready to collect."""
    references = list(dict.fromkeys(config.getoption("parity_port")))
    path = config.getoption("parity_expected_failures")
    if path is not None and not references:
        raise pytest.UsageError("--parity-expected-failures is about the tests of a port: add --parity-port")
    stages = config.getoption("parity_stage")
    if stages is not None and not references:
        raise pytest.UsageError("--parity-stage is about the tests of a port: add --parity-port")
    if references:
        from transformer_parity.engine.system.machine import needs

        if unmet := needs():
            raise pytest.UsageError(f"--parity-port {unmet}")
        expected = {} if path is None else _read(config.invocation_params.dir / path)
        config.pluginmanager.register(Conformance(references, expected, _stages(stages)), "parity-conformance")


def _stages(names: str | None) -> tuple[str, ...]:
    """Return the stages that were named; all if none were."""
    from transformer_parity.transformer.stages.registry import STAGES

    chosen = STAGES if names is None else tuple(names.split(","))
    if unknown := [name for name in chosen if name not in STAGES]:
        raise pytest.UsageError(f"--parity-stage must be among {', '.join(STAGES)}: got {unknown[0]!r}")
    return tuple(chosen)


def _read(path: Path) -> dict[str, str]:
    """Return the reason by the test, or the pattern, of each expected failure."""
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"expected failures cannot be read from {path}: {error}") from error
    for name, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(f'{path}: expected failures are "test" = "reason": got {name!r} = {reason!r}')
    return entries


class Conformance:
    """The part of the plug-in that is there when a port is given."""

    def __init__(self, references: list[str], expected: Mapping[str, str], stages: Sequence[str]) -> None:
        self.references = references
        self.expected = expected
        self.stages = stages
        self.tests: list[Test] = []
        self.unchecked: dict[str, TestItem] = {}  # by port, the known-answer tests that have not run after its others
        self.facts: dict[str, dict[str, Any]] = {}  # by the name of a test
        self.failed: set[str] = set()  # the tests that pytest reports as failed
        self.planned: dict[str, str] = {}  # the port by the name of each test, also of those that were deselected
        self.changed: list[str] = []  # what known-answer tests found at the end of other processes
        self.files: list[str] = []  # of modules with our names
        self.missing: list[str] = []

    @pytest.hookimpl(tryfirst=True)  # before -k chooses
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add our tests to those that pytest has found."""
        collector = Cases.from_parent(session, name=FOLDER, nodeid=FOLDER, conformance=self)
        session.ihook.pytest_collectstart(collector=collector)
        report = session.ihook.pytest_make_collect_report(collector=collector)
        vars(report).pop("call", None)  # as pytest does: pytest-xdist cannot send it
        session.ihook.pytest_collectreport(report=report)
        for item in report.result or ():
            session.ihook.pytest_itemcollected(item=item)
            items.append(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to the report of a test what it compared; pytest-xdist sends it to the first process."""
        report = yield
        if isinstance(item, TestItem) and report.when in ("setup", "call"):
            setattr(report, FACTS, item.facts())
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came of our tests."""
        if facts := getattr(report, FACTS, None):
            self.facts[facts["name"]] = facts
            if report.failed:
                self.failed.add(facts["name"])

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Keep in mind that the reference is to be tested after the tests of a port."""
        if isinstance(item, TestItem):
            known = [one for one in item.session.items if isinstance(one, TestItem) and one.is_known_answer]
            own = [one for one in known if one.test.title == item.test.title]
            if item.is_known_answer:
                self.unchecked.pop(item.test.title, None)
            elif own:
                self.unchecked[item.test.title] = own[0]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive what a process of pytest-xdist found at its end."""
        if found := getattr(node, "workeroutput", {}).get(FACTS):
            self._add(*found)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the exit status is set after all other hooks
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Fail unless every test of a port ran and passed: a test that did not run is not a pass."""
        from transformer_parity.engine.processes.provenance import described_elsewhere, files_elsewhere

        planned = {test.name: test.title for test in self.tests}
        found = planned, list(self._changed()), described_elsewhere(files_elsewhere())
        if hasattr(session.config, "workeroutput"):  # the first process decides
            session.config.workeroutput[FACTS] = found
            return (yield)
        self._add(*found)
        if not {"--collect-only", "--co"} & set(session.config.invocation_params.args):
            self.missing = list(self._incomplete())
        yield
        if (self.missing or self.changed) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _add(self, planned: Mapping[str, str], changed: Sequence[str], files: Sequence[str]) -> None:
        self.planned |= planned
        self.changed += changed
        self.files = list(dict.fromkeys([*self.files, *files]))

    def _incomplete(self) -> Iterator[str]:
        """Yield what was not compared, and which failures an option, a marker or a hook has hidden."""
        if not self.planned:
            yield "no test of a port was collected"
        for title in dict.fromkeys(self.planned.values()):
            planned = [name for name, port in self.planned.items() if port == title]
            facts = [self.facts[name] for name in planned if name in self.facts and self.facts[name]["outcome"]]
            ran = [fact["name"] for fact in facts]
            if absent := [name for name in planned if name not in ran]:
                yield f"{title}: {len(absent)} of {len(planned)} tests were deselected or skipped: {_some(absent)}"
            failed = [fact["name"] for fact in facts if fact["outcome"] == FAILED and not fact["expected"]]
            if hidden := [name for name in failed if name not in self.failed]:
                yield f"{title}: {len(hidden)} tests failed but are not reported as failures: {_some(hidden)}"
            of_stages = [fact for fact in facts if fact["stage"]]
            stages = dict.fromkeys(fact["stage"] for fact in of_stages) if absent else self.stages
            yield from _missing(title, of_stages, list(stages))

    def _changed(self) -> Iterator[str]:
        """Yield what known-answer tests find that ran in another process than the tests of the port, or before them."""
        from transformer_parity.transformer.check.conformance import KnownAnswer, PortDisagreementError

        for item in self.unchecked.values():
            if isinstance(item.test, KnownAnswer):
                try:
                    item.test.check()
                except PortDisagreementError as error:
                    yield str(error)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say so."""
        for line in self.changed:
            terminalreporter.write_line(line, red=True)
        for line in self.files:
            terminalreporter.write_line(f"NOT OURS: {line}")
        for line in self.missing:
            terminalreporter.write_line(f"INCOMPLETE: {line}", red=True)
        for line in _commands(self.facts.values()):
            terminalreporter.write_line(line)


def _commands(facts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how to find out what each port that differs does: float64 first, in which a mistake is no rounding."""
    failed = [fact for fact in facts if fact["failed"]]
    for port in dict.fromkeys(fact["port"] for fact in failed):
        own = [fact for fact in failed if fact["port"] == port]
        exact = [fact for fact in own if fact["dtype"] == "float64"]
        stage = (exact or own)[0]["stage"] or "activations"
        dtype = "float64" if exact else own[0]["dtype"]
        yield f"{port} differs from the reference. What it does instead, and in which block:"
        yield f"  parity check --port {own[0]['reference']} --stage {stage} --dtype {dtype}"
        if exact and len(exact) < len(own):
            yield "  Its failures in other dtypes may all come from that."


def _stage(test: Test) -> str:
    return getattr(test, "stage", "")


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST], "..."] if len(names) > MOST else names)


def _missing(port: str, facts: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> list[str]:
    """Return the stages of a port that were not compared, by the facts of the tests that ran."""
    from transformer_parity.engine.findings import Finding
    from transformer_parity.engine.verdict import Coverage

    planned = Counter((fact["stage"], fact["dtype"]) for fact in facts)
    dtypes = tuple(dict.fromkeys(dtype for _, dtype in planned))
    findings = [Finding(**{**entry, "backend": port}) for fact in facts for entry in fact["findings"]]
    return Coverage(port, stages, dtypes, planned=planned).missing(findings)


class Cases(pytest.Collector):
    """All tests of all ports."""

    def __init__(self, *, conformance: Conformance, **options: Any) -> None:
        super().__init__(**options)
        self.conformance = conformance

    def collect(self) -> Iterator[pytest.Item]:
        """Return the tests."""
        from transformer_parity.transformer.check.conformance import PortDisagreementError, find_tests

        try:
            tests = find_tests(self.conformance.references, self.conformance.stages)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        self.conformance.tests = tests
        expected = self.conformance.expected
        unknown = [pattern for pattern in expected if not any(fnmatchcase(test.name, pattern) for test in tests)]
        if unknown:
            raise self.CollectError(f"expected to fail, but no tests: {', '.join(unknown)}")
        for test in tests:
            item = TestItem.from_parent(self, name=test.name, test=test)
            reasons = [reason for pattern, reason in expected.items() if fnmatchcase(test.name, pattern)]
            if reasons:
                marker = pytest.mark.xfail(reason="; ".join(reasons), strict=True, raises=PortDisagreementError)
                item.add_marker(marker)
                item.is_expected_to_fail = True
            yield item


class TestItem(pytest.Item):
    """One case in one dtype, or the known-answer test of a port."""

    __test__ = False  # it is no class of tests

    def __init__(self, *, test: Test, **options: Any) -> None:
        super().__init__(**options)
        self.test = test
        self.findings: list[Finding] = []
        self.outcome = ""  # before it has run; reports may be changed by hooks of others
        self.is_expected_to_fail = False

    @property
    def is_known_answer(self) -> bool:
        """Whether it tests the reference."""
        return not hasattr(self.test, "case")

    def runtest(self) -> None:
        """Compare, and skip what the port does not offer."""
        from transformer_parity.transformer.check.conformance import KnownAnswer, check

        self.outcome, reason = FAILED, ""
        if isinstance(self.test, KnownAnswer):
            self.test.check()
        else:
            self.findings = self.test.findings()
            reason = check(self.findings)
        self.outcome = PASSED
        if reason:
            pytest.skip(reason)

    def facts(self) -> dict[str, Any]:
        """Return what this test adds to the coverage, as plain values: one comparison, or why there is none."""
        numeric = [finding for finding in self.findings if finding.is_numeric]
        return {
            "name": self.test.name,
            "outcome": self.outcome,
            "expected": self.is_expected_to_fail,
            "port": self.test.title,
            "stage": _stage(self.test),
            "dtype": getattr(self.test, "dtype", ""),
            "failed": any(finding.verdict in ("diverges", "imprecise") for finding in self.findings),
            "reference": getattr(getattr(self.test, "port", None), "reference", ""),
            "findings": [asdict(finding) for finding in numeric[:1] or self.findings[:MOST]],
        }

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the first tap that failed; of anything unforeseen, the traceback."""
        from transformer_parity.transformer.check.conformance import PortDisagreementError

        if isinstance(excinfo.value, PortDisagreementError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int, str]:
        """Return where the test appears to be; pytest needs a line to report a skip by a marker."""
        return FOLDER, 0, self.name
