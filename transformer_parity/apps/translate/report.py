"""Formatting of translations and comparisons as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_parity.apps.translate.agreement import DIVERGENCE, NEAR_TIE, SAME, TranslationComparison
from transformer_parity.apps.translate.lines import Translation
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED
from transformer_parity.engine.report.envelope import WORDS
from transformer_parity.engine.system.errors import printable
from transformer_parity.engine.verdict import EXIT_CODES
from transformer_parity.transformer.decoding.near_ties import summary
from transformer_parity.transformer.decoding.prefixes import Tokens


def answers(translation: Translation, nbest: int | None = None, *, as_json: bool = False) -> list[str]:
    """Return the output for a line: its translation, the ``nbest`` best hypotheses with scores, or a JSON object."""
    line, hypotheses = translation.line, list(translation.hypotheses)
    if as_json:
        found = [vars(hypothesis) for hypothesis in hypotheses]
        return [_json({"line": line.number, "source": line.text, "hypotheses": found})]
    if nbest is None:
        return [translation.text]
    scored = [f"{hypothesis.score:.4f}\t{hypothesis.text}" for hypothesis in hypotheses]
    scored += ["-inf\t"] * (nbest - len(hypotheses))
    return [f"{line.number}\t{answer}" for answer in scored]


def differences(found: TranslationComparison, *, as_json: bool) -> list[str]:
    """Return the output for a line whose translations differ: all translations and the decisions that differ."""
    if as_json:
        doubts = [
            {"backend": backend, "token": doubt.step, "what": doubt.what}
            | {"margin": doubt.margin if doubt.margin < math.inf else "inf", "noise": doubt.noise}
            for backend, doubts in found.doubts.items()
            for doubt in doubts
        ]
        said = {backend: vars(hypothesis) for backend, hypothesis in found.said.items()}
        answer = {"line": found.line.number, "verdict": found.verdict, "source": found.line.text}
        return [_json({**answer, "said": said, "doubts": doubts})]
    by_ids: dict[Tokens, list[str]] = {}
    for backend, hypothesis in found.said.items():
        by_ids.setdefault(hypothesis.ids, []).append(backend)
    texts = {"source": found.line.text}
    texts |= {", ".join(backends): found.said[backends[0]].text for backends in by_ids.values()}
    width = max(map(len, texts))
    return [
        f"line {found.line.number}: {found.verdict}",
        *(f"  {name:{width}}  {printable(text)}" for name, text in texts.items()),
        *(f"  {backend} in {summary(doubts)}" for backend, doubts in found.doubts.items() if doubts),
    ]


@dataclass
class Tally:
    """The number of lines with each verdict.

    Attributes:
        backends: Names of the compared backends.
        dtype: Dtype of the computation.
        left_empty: Number of lines whose output is empty because the lines are too long.
        seconds: Duration of the comparison in seconds.
        counts: Number of lines with each verdict.
    """

    backends: Sequence[str]
    dtype: str
    left_empty: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((SAME, NEAR_TIE, DIVERGENCE), 0))

    def add(self, found: TranslationComparison) -> None:
        """Include the verdict for one line of the input in the tally."""
        self.counts[found.verdict] += 1

    @property
    def exit_code(self) -> int:
        """The exit code: 1 if a line diverges, 3 if a line is too long or no lines were compared, and 0 otherwise."""
        if self.counts[DIVERGENCE]:
            return EXIT_CODES[DIVERGES]
        return EXIT_CODES[FAILED if self.left_empty or not any(self.counts.values()) else AGREES]

    def to_dict(self) -> dict[str, Any]:
        """Return the tally as JSON-compatible values."""
        head = {"backends": list(self.backends), "dtype": self.dtype, "lines": sum(self.counts.values())}
        return {**head, **self.counts, "left_empty": self.left_empty}

    def verdict_line(self) -> str:
        """Return the last line of the output, which reports the overall verdict and the number of lines."""
        word = WORDS[self.exit_code]
        lines = sum(self.counts.values())
        counted = ", ".join(
            f"{count:,} {what}" + "s" * (what != SAME and count != 1) for what, count in self.counts.items()
        )
        counted += f", {self.left_empty:,} too long" * (self.left_empty > 0)
        compared = f"{', '.join(self.backends)} in {self.dtype}, {lines:,} line{'s' * (lines != 1)}"
        return f"{word}  {compared}: {counted}; {self.seconds:.0f} s."


def _json(answer: dict[str, object]) -> str:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False)
