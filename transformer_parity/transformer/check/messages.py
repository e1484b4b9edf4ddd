"""Messages between the process that runs a port and its parent process.

The child process receives a ``PortJob``, imports the port, and sends a ``PortImported``. The parent chooses the port's
name and cases and replies with an ``Assignment``. The child sends a ``CaseRan`` for each case and dtype, followed by an
``AllCasesRan``. After it receives an ``AllCasesCompared``, it sends a ``FailureExplained`` for each failure that it can
explain. It also sends a ``NowDoing`` before each task that may take a long time, a ``Broken`` if it can't continue, and
a ``PortFinished`` at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_parity.engine.findings import Finding, Kept
from transformer_parity.engine.outputs import Outputs
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.ports.compile_clock import Spent
from transformer_parity.transformer.ports.protocol import Placements
from transformer_spec.config import TransformerConfig


@dataclass(frozen=True)
class PortJob:
    """The port that a process imports and runs.

    Attributes:
        backend: A name in ``PORTS`` or, for a user's port, ``module:class`` or the name of an entry point.
        setting: Dtypes, device, and precision.
        failures: Directory in which to save the inputs of the first wrong block; None to save nothing.
        views: True to record the data that the HTML report needs to show the differences.
    """

    backend: str
    setting: Placements
    failures: Path | None = None
    views: bool = False

    @property
    def title(self) -> str:
        """Preliminary name of the port, which is used until the port is imported."""
        return self.backend.rpartition(":")[2]


@dataclass(frozen=True)
class PortImported:
    """The name and the dtypes that a port declares. The message about a user's port also contains the port's config."""

    name: str
    config: TransformerConfig | None = None
    dtypes: Sequence[str] = ALL_DTYPES


@dataclass(frozen=True)
class Assignment:
    """The cases that a port runs, and the port's name in findings and reports."""

    label: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class NowDoing:
    """The task that a process is about to start."""

    text: str


@dataclass(frozen=True)
class CaseRan:
    """The outputs of one case in one dtype."""

    outputs: Outputs


class AllCasesRan:
    """All cases have run, and the process is waiting for an ``AllCasesCompared``."""


@dataclass(frozen=True)
class AllCasesCompared:
    """All findings about a port, and the tensors of the cases that failed."""

    findings: Sequence[Finding]
    kept: Kept


@dataclass(frozen=True)
class WeightsAudited:
    """The result of the weight audit of a user's port."""

    fates: tuple[Fate, ...]


@dataclass(frozen=True)
class FailureExplained:
    """A report on a failing case. It names the block that introduced a difference and explains the difference."""

    report: FailureReport


@dataclass(frozen=True)
class PortFinished:
    """The last message from a process: package versions, settings, and the wall-clock and CPU time of the process."""

    environment: Mapping[str, str]
    spent: Spent | None = None


@dataclass(frozen=True)
class CaseCompared:
    """The findings about one case in one dtype, or about the port itself. Only the parent creates this message."""

    findings: Sequence[Finding]
