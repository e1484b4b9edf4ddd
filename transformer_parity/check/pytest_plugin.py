"""``pytest --parity-port=module:Class``: the cases as tests of your own port, beside your own tests.

Loaded by every pytest of the environment, so it imports nothing until a port is given.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformer_parity.check.conformance import Comparison

FOLDER = "parity"  # in which the tests appear to be


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
        "--parity-expected-failures",
        type=Path,
        metavar="FILE",
        help='a TOML file of known failures: "test or pattern" = "reason". One that passes, or is no test, fails',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the list of expected failures, and get ready to collect."""
    references = list(dict.fromkeys(config.getoption("parity_port")))
    path = config.getoption("parity_expected_failures")
    if path is not None and not references:
        raise pytest.UsageError("--parity-expected-failures is about the tests of a port: add --parity-port")
    if references:
        expected = {} if path is None else _read(config.invocation_params.dir / path)
        config.pluginmanager.register(Conformance(references, expected), "parity-conformance")


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

    def __init__(self, references: list[str], expected: Mapping[str, str]) -> None:
        self.references = references
        self.expected = expected
        self.skipped: dict[str, list[bool]] = {}  # by port, of each of our tests that ran

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came of our tests."""
        if report.when == "call" and report.nodeid.startswith(f"{FOLDER}::"):
            port = re.split(r"-(?=float|bfloat)", report.nodeid.removeprefix(f"{FOLDER}::"))[0]
            skipped = report.skipped and not hasattr(report, "wasxfail")  # pytest calls either skipped
            self.skipped.setdefault(port, []).append(skipped)

    @property
    def nothing_compared(self) -> bool:
        """Whether all tests of some port that ran were skipped."""
        return any(map(all, self.skipped.values()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail if nothing was compared: a skip is not a pass."""
        if self.nothing_compared and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say so."""
        if self.nothing_compared:
            terminalreporter.write_line("FAILED: no case of a port was compared, and a skip is not a pass", red=True)


class Cases(pytest.Collector):
    """All tests of all ports."""

    def __init__(self, *, conformance: Conformance, **options: Any) -> None:
        super().__init__(**options)
        self.conformance = conformance

    def collect(self) -> Iterator[pytest.Item]:
        """Return one test per case and dtype."""
        from transformer_parity.check.conformance import DisagreementError, find_tests

        try:
            tests = find_tests(self.conformance.references)
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        expected = self.conformance.expected
        unknown = [pattern for pattern in expected if not any(fnmatchcase(test.name, pattern) for test in tests)]
        if unknown:
            raise self.CollectError(f"expected to fail, but no tests: {', '.join(unknown)}")
        for test in tests:
            item = CaseItem.from_parent(self, name=test.name, comparison=test)
            reasons = [reason for pattern, reason in expected.items() if fnmatchcase(test.name, pattern)]
            if reasons:
                marker = pytest.mark.xfail(reason="; ".join(reasons), strict=True, raises=DisagreementError)
                item.add_marker(marker)
            yield item


class CaseItem(pytest.Item):
    """One case in one dtype."""

    def __init__(self, *, comparison: Comparison, **options: Any) -> None:
        super().__init__(**options)
        self.comparison = comparison

    def runtest(self) -> None:
        """Compare, and skip what the port does not offer."""
        if reason := self.comparison.run():
            pytest.skip(reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the first tap that failed; of anything unforeseen, the traceback."""
        from transformer_parity.check.conformance import DisagreementError

        if isinstance(excinfo.value, DisagreementError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return where the test appears to be."""
        return FOLDER, None, self.name
