"""Messages between the process of a port and its parent.

The process receives a ``PortJob``, imports the port, and sends a ``PortImported``. The parent chooses the name of the
port and its cases, and replies with an ``Assignment``. The process sends a ``CaseRan`` for each case and dtype, then an
``AllCasesRan``. It receives an ``AllCasesCompared``, and sends a ``FailureExplained`` for each failure that it can
explain. It also sends a ``NowDoing`` before each task that may take long, a ``Broken`` if it can't continue, and a
``PortFinished`` at the end.
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
    """The port for a process to import and run.

    Attributes:
        backend: A name in ``PORTS`` or, for a user's port, ``module:class`` or the name of an entry point.
        setting: Dtypes, device and precision.
        failures: Directory in which to save the inputs of the first wrong block; None to save nothing.
        views: True to record views of the differences for an HTML page.
    """

    backend: str
    setting: Placements
    failures: Path | None = None
    views: bool = False

    @property
    def title(self) -> str:
        """Name of the port until it has been imported."""
        return self.backend.rpartition(":")[2]


@dataclass(frozen=True)
class PortImported:
    """Name and dtypes that a port declares, and its config if it is a user's port."""

    name: str
    config: TransformerConfig | None = None
    dtypes: Sequence[str] = ALL_DTYPES


@dataclass(frozen=True)
class Assignment:
    """The cases for a port to run, and the name of the port in findings and reports."""

    label: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class NowDoing:
    """The next task of a process."""

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
    """The fate of each weight in a user's port."""

    fates: tuple[Fate, ...]


@dataclass(frozen=True)
class FailureExplained:
    """The block that introduced a difference, and the explanation."""

    report: FailureReport


@dataclass(frozen=True)
class PortFinished:
    """The last message of a process: its versions and switches, and the time that it used."""

    environment: Mapping[str, str]
    spent: Spent | None = None


@dataclass(frozen=True)
class CaseCompared:
    """The findings about one case in one dtype, or about the port itself. Only the parent creates this message."""

    findings: Sequence[Finding]
