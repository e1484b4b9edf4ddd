"""Messages between the process of a port and its parent.

The process receives a ``PortJob``, imports the port, and sends ``PortImported``. The parent chooses the name of the
port and its cases, and answers with an ``Assignment``. The process sends a ``CaseRan`` for each case and
dtype, then ``AllCasesRan``. It receives ``AllCasesCompared``, and sends a ``FailureExplained`` for each failure that it
can explain. ``NowDoing`` comes before everything that may take long, ``Broken`` if the process cannot continue, and
``PortFinished`` last.
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
    """The port that a process imports, and how it runs the port.

    Attributes:
        backend: A name of ``PORTS``, or a user's port: ``module:class``, or the name of an entry point.
        setting: Dtypes, device and precision.
        failures: Directory for the inputs of the first wrong block; None saves nothing.
        views: Whether a page will show the differences.
    """

    backend: str
    setting: Placements
    failures: Path | None = None
    views: bool = False

    @property
    def title(self) -> str:
        """The name of a port before it has been imported."""
        return self.backend.rpartition(":")[2]


@dataclass(frozen=True)
class PortImported:
    """The declarations of a port: its name, its config if it is a user's port, and its dtypes."""

    name: str
    config: TransformerConfig | None = None
    dtypes: Sequence[str] = ALL_DTYPES


@dataclass(frozen=True)
class Assignment:
    """The name of a port in findings and reports, and the cases that it is run on."""

    label: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class NowDoing:
    """The next thing that a process does."""

    text: str


@dataclass(frozen=True)
class CaseRan:
    """The outputs of one case in one dtype."""

    outputs: Outputs


class AllCasesRan:
    """All cases have run, and the process waits for a ``AllCasesCompared``."""


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
    """The last message of a process: versions and switches, and the time that it took."""

    environment: Mapping[str, str]
    spent: Spent | None = None


@dataclass(frozen=True)
class CaseCompared:
    """The findings about one case in one dtype, or about the port itself. The parent tells its caller."""

    findings: Sequence[Finding]
