"""The settings and the result of a comparison of two implementations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from transformer_parity.engine.findings import Finding
from transformer_parity.engine.localization import Blame, Mark
from transformer_parity.engine.tensors import Tensors
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.pairs.compare.names import Names
from transformer_parity.pairs.compare.stages import FORWARD, NEEDS
from transformer_parity.pairs.compare.truth import ALL_EPS
from transformer_parity.pairs.diagnose.locate import Located, introduced
from transformer_parity.pairs.diagnose.recognize import Recognized
from transformer_parity.pairs.run.side import SILENCE

SEEDS = 3  # number of batches


@dataclass(frozen=True)
class Settings:
    """The dtypes, stages, and batches to compare, and how to run the processes.

    Attributes:
        seeds: The number of batches.
        dtypes: The dtypes to compare in; None for all dtypes of the port.
        stages: The stages to compare; None for all stages that both implementations support.
        interpreters: The paths of Python interpreters, keyed by ``original`` and ``port``.
        timeout: Seconds without an answer after which a process is stopped.

    Raises:
        ValueError: If there are no batches, dtypes, or stages, or if one of the names is unknown.
    """

    seeds: int = SEEDS
    dtypes: Sequence[str] | None = None
    stages: Sequence[str] | None = None
    interpreters: Mapping[str, str] = field(default_factory=dict)
    timeout: float = SILENCE

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1: got {self.seeds}")
        known: dict[str, Collection[str]] = {"dtypes": ALL_EPS, "stages": NEEDS, "interpreters": ("original", "port")}
        for name, words in known.items():
            value = getattr(self, name)
            wrong = isinstance(value, str) or (value is not None and not {*value} <= {*words})
            if wrong or (not value and name != "interpreters" and value is not None):
                raise ValueError(f"{name} must be some of {', '.join(words)}: got {value!r}")


@dataclass
class RecordedPair:
    """The tensors of one batch in one dtype, which a page shows.

    Attributes:
        dtype: The working dtype of the port.
        expected: The original's tensors, in the order of computation.
        actual: The port's tensors under the original's names, with its axes.
        marks: The errors of all tensors.
    """

    dtype: str = "float64"
    expected: Tensors = field(default_factory=dict)
    actual: Tensors = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()


@dataclass
class PairResult:
    """The result of a comparison.

    Attributes:
        original: The name of the implementation that is trusted.
        port: The name of the other implementation.
        findings: One finding per compared tensor, batch, and dtype.
        asked: The comparisons that were requested.
        located: The places where differences start, one per stage.
        named: The recognized causes of the first difference, starting with the most specific.
        notes: Limits of the comparison, such as inputs without padding.
        not_tested: The comparisons that the implementations don't support.
        names: The correspondence of the taps.
        taps: All taps of the original, in the order of computation.
        replaced: The weights whose constant values were replaced.
        versions: The versions of the frameworks of both implementations.
        seconds: The duration.
        recorded: The tensors that a page shows.
    """

    original: str
    port: str
    findings: list[Finding] = field(default_factory=list)
    asked: list[Coverage] = field(default_factory=list)
    located: list[Located] = field(default_factory=list)
    named: list[Recognized] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_tested: list[str] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    taps: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    recorded: RecordedPair = field(default_factory=RecordedPair)

    @property
    def verdict(self) -> Verdict:
        """The verdict on the port."""
        return Verdict.of(self.findings, self.asked or [Coverage(self.port, (FORWARD,))])

    @property
    def introduced(self) -> list[str]:
        """The original's names of the tensors at which differences start, in the order of computation."""
        return introduced(self.located)

    @property
    def blames(self) -> list[Blame]:
        """The errors of all tensors in the runs that were replayed."""
        return [entry.blame for entry in self.located if entry.blame is not None]
