"""The pytest plugin: ``pytest --parity-port=module:Class`` adds one test of the port for each case and dtype.

Every pytest run in the environment loads this module. Therefore, the module doesn't import any other module of this
project unless a port is specified.
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

DIRECTORY = "parity"  # directory under which pytest's output lists the tests
# Name of the attribute of a test report that stores the result of ``TestItem.facts``. A pytest-xdist worker uses the
# same name as a key in its output.
FACTS = "parity_facts"
PASSED, FAILED = "passed", "failed"
MOST = 3  # maximum number of findings in a report and of tests in a message


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line options."""
    group = parser.getgroup("parity", "agreement with the reference Transformer")
    group.addoption(
        "--parity-port",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="compare a port with the reference, with one test for each case and dtype; repeat for multiple ports",
    )
    group.addoption(
        "--parity-stage",
        metavar="NAME[,NAME]",
        help="compare only these stages: activations, gradients, steps, decode (default: all)",
    )
    group.addoption(
        "--parity-expected-failures",
        type=Path,
        metavar="FILE",
        help='read expected failures from a TOML file with entries "test or pattern" = "reason"; '
        "fail if such a test passes or doesn't exist",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Prepare the import of each port before any conftest file can import the port."""
    for reference in early_config.known_args_namespace.parity_port:
        from transformer_parity.engine.processes.provenance import import_port

        import_port(reference.partition(":")[0])


def pytest_configure(config: pytest.Config) -> None:
    """If a port is specified, validate the options, read the expected failures, and register the plugin."""
    references = list(dict.fromkeys(config.getoption("parity_port")))
    path = config.getoption("parity_expected_failures")
    if path is not None and not references:
        raise pytest.UsageError("--parity-expected-failures requires --parity-port")
    stages = config.getoption("parity_stage")
    if stages is not None and not references:
        raise pytest.UsageError("--parity-stage requires --parity-port")
    if references:
        from transformer_parity.engine.system.machine import needs

        if unmet := needs():
            raise pytest.UsageError(f"--parity-port {unmet}")
        expected = {} if path is None else _read(config.invocation_params.dir / path)
        config.pluginmanager.register(Conformance(references, expected, _stages(stages)), "parity-conformance")


def _stages(names: str | None) -> tuple[str, ...]:
    """Parse the option ``--parity-stage``. None selects all stages."""
    from transformer_parity.transformer.stages.registry import STAGES

    chosen = STAGES if names is None else tuple(names.split(","))
    if unknown := [name for name in chosen if name not in STAGES]:
        raise pytest.UsageError(f"--parity-stage must be one or more of {', '.join(STAGES)}: got {unknown[0]!r}")
    return tuple(chosen)


def _read(path: Path) -> dict[str, str]:
    """Read the expected failures: a reason for each test name or pattern."""
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"expected failures cannot be read from {path}: {error}") from error
    for name, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(
                f'expected failures in {path} must have the form "test" = "reason": got {name!r} = {reason!r}'
            )
    return entries


class Conformance:
    """The hooks that the plugin registers only if a port is specified."""

    def __init__(self, references: list[str], expected: Mapping[str, str], stages: Sequence[str]) -> None:
        self.references = references
        self.expected = expected
        self.stages = stages
        self.tests: list[Test] = []
        # The known-answer tests to rerun at the end, keyed by port. A port has an entry if it has run other tests after
        # its known-answer test.
        self.unchecked: dict[str, TestItem] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # maps the name of a test to the result of ``TestItem.facts``
        self.failed: set[str] = set()  # names of the tests that pytest reports as failed
        self.planned: dict[str, str] = {}  # maps the name of each collected or deselected test to its port
        self.changed: list[str] = []  # failures of the known-answer tests that each process reruns at the end
        self.files: list[str] = []  # files that shadow modules of this package
        self.missing: list[str] = []  # reasons why the comparison is incomplete

    @pytest.hookimpl(tryfirst=True)  # before -k selects tests
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the ports' tests to the tests that pytest has collected."""
        collector = Cases.from_parent(session, name=DIRECTORY, nodeid=DIRECTORY, conformance=self)
        session.ihook.pytest_collectstart(collector=collector)
        report = session.ihook.pytest_make_collect_report(collector=collector)
        vars(report).pop("call", None)  # pytest also removes this entry, because pytest-xdist can't serialize it
        session.ihook.pytest_collectreport(report=report)
        for item in report.result or ():
            session.ihook.pytest_itemcollected(item=item)
            items.append(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the facts of a test to its report, so that pytest-xdist sends them to the main process."""
        report = yield
        if isinstance(item, TestItem) and report.when in ("setup", "call"):
            setattr(report, FACTS, item.facts())
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the result of ``TestItem.facts`` for a port's test, and whether pytest reports the test as failed."""
        if facts := getattr(report, FACTS, None):
            self.facts[facts["name"]] = facts
            if report.failed:
                self.failed.add(facts["name"])

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Record which ports have run other tests since their last known-answer test."""
        if isinstance(item, TestItem):
            known = [one for one in item.session.items if isinstance(one, TestItem) and one.is_known_answer]
            own = [one for one in known if one.test.title == item.test.title]
            if item.is_known_answer:
                self.unchecked.pop(item.test.title, None)
            elif own:
                self.unchecked[item.test.title] = own[0]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Receive the results of a pytest-xdist worker when it finishes."""
        if found := getattr(node, "workeroutput", {}).get(FACTS):
            self._add(*found)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # sets the exit status after all other hooks
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Fail unless every test of every port has run and passed. Tests that didn't run are treated as failures."""
        from transformer_parity.engine.processes.provenance import described_elsewhere, files_elsewhere

        planned = {test.name: test.title for test in self.tests}
        found = planned, list(self._changed()), described_elsewhere(files_elsewhere())
        if hasattr(session.config, "workeroutput"):  # a worker only sends its results to the main process
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
        """Yield the comparisons that didn't run and the failures that an option, a marker, or a hook has hidden."""
        if not self.planned:
            yield "no tests of a port were collected"
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
        """Rerun the known-answer tests in ``unchecked``, and yield the messages of those that fail."""
        from transformer_parity.transformer.check.conformance import KnownAnswer, PortDisagreementError

        for item in self.unchecked.values():
            if isinstance(item.test, KnownAnswer):
                try:
                    item.test.check()
                except PortDisagreementError as error:
                    yield str(error)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the problems, and the commands for investigating the failures."""
        for line in self.changed:
            terminalreporter.write_line(line, red=True)
        for line in self.files:
            terminalreporter.write_line(f"LOCAL COPY: {line}")
        for line in self.missing:
            terminalreporter.write_line(f"INCOMPLETE: {line}", red=True)
        for line in _commands(self.facts.values()):
            terminalreporter.write_line(line)


def _commands(facts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """For each port that differs from the reference, yield a message with a command for investigating the difference.

    Prefer a failure in float64, because rounding errors can't cause failures in float64.
    """
    failed = [fact for fact in facts if fact["failed"]]
    for port in dict.fromkeys(fact["port"] for fact in failed):
        own = [fact for fact in failed if fact["port"] == port]
        exact = [fact for fact in own if fact["dtype"] == "float64"]
        stage = (exact or own)[0]["stage"] or "activations"
        dtype = "float64" if exact else own[0]["dtype"]
        yield f"{port} differs from the reference. To find the block that differs and what it computes instead, run:"
        yield f"  parity check --port {own[0]['reference']} --stage {stage} --dtype {dtype}"
        if exact and len(exact) < len(own):
            yield "  The same difference may cause the failures in other dtypes."


def _stage(test: Test) -> str:
    return getattr(test, "stage", "")


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST], "..."] if len(names) > MOST else names)


def _missing(port: str, facts: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> list[str]:
    """Return messages about stages of a port that were not fully compared, given the facts that the tests recorded."""
    from transformer_parity.engine.findings import Finding
    from transformer_parity.engine.verdict import Coverage

    planned = Counter((fact["stage"], fact["dtype"]) for fact in facts)
    dtypes = tuple(dict.fromkeys(dtype for _, dtype in planned))
    findings = [Finding(**{**entry, "backend": port}) for fact in facts for entry in fact["findings"]]
    return Coverage(port, stages, dtypes, planned=planned).missing(findings)


class Cases(pytest.Collector):
    """A collector for all tests of all ports."""

    def __init__(self, *, conformance: Conformance, **options: Any) -> None:
        super().__init__(**options)
        self.conformance = conformance

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the tests."""
        from transformer_parity.transformer.check.conformance import PortDisagreementError, find_tests

        try:
            tests = find_tests(self.conformance.references, self.conformance.stages)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        self.conformance.tests = tests
        expected = self.conformance.expected
        unknown = [pattern for pattern in expected if not any(fnmatchcase(test.name, pattern) for test in tests)]
        if unknown:
            raise self.CollectError(f"these expected failures match no test: {', '.join(unknown)}")
        for test in tests:
            item = TestItem.from_parent(self, name=test.name, test=test)
            reasons = [reason for pattern, reason in expected.items() if fnmatchcase(test.name, pattern)]
            if reasons:
                marker = pytest.mark.xfail(reason="; ".join(reasons), strict=True, raises=PortDisagreementError)
                item.add_marker(marker)
                item.is_expected_to_fail = True
            yield item


class TestItem(pytest.Item):
    """A test of one case in one dtype, or the known-answer test of a port."""

    __test__ = False  # tell pytest that this class doesn't contain tests, despite its name

    def __init__(self, *, test: Test, **options: Any) -> None:
        super().__init__(**options)
        self.test = test
        self.findings: list[Finding] = []
        self.outcome = ""  # empty until the test has run; stored here because other plugins may modify the report
        self.is_expected_to_fail = False

    @property
    def is_known_answer(self) -> bool:
        """True if this is a known-answer test."""
        return not hasattr(self.test, "case")

    def runtest(self) -> None:
        """Run the comparison, or skip the test if the port doesn't support it."""
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
        """Return this test's result as JSON-compatible values: one comparison, or the reasons why it was skipped."""
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
        """Return a message about the first tap that failed. For unexpected exceptions, return the traceback."""
        from transformer_parity.transformer.check.conformance import PortDisagreementError

        if isinstance(excinfo.value, PortDisagreementError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int, str]:
        """Return the test's location, including the line number that pytest needs to report skipped tests."""
        return DIRECTORY, 0, self.name
