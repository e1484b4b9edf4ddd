"""Lines of text in, translations out: with one port, or with several that are compared."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, TypeVar

from numpy import ndarray

from reference_numpy.checks import check_integer
from reference_numpy.config import TransformerConfig
from reference_numpy.files import open_file, read_vocabulary, read_weights
from transformer_parity.decoding import Decoded, Doubt, Judge, SearchOptions, Tokens, differing, follow, tokens_of
from transformer_parity.ports import LoadedPort
from transformer_parity.text import Vocabulary, pad

WINDOW = 512  # lines that are sorted by length at a time
MOST_SENTENCES = 64  # of a batch
MOST_POSITIONS = 4096  # of a batch: source positions of all hypotheses

SAME, NEAR_TIE, DIVERGENCE = "same", "near-tie", "divergence"

Found = TypeVar("Found")


@dataclass(frozen=True)
class Trained:
    """What `parity train` wrote: a weight file, or a checkpoint but for its optimizer state."""

    path: Path
    step: int | None  # None in a weight file
    config: TransformerConfig
    weights: Mapping[str, ndarray]
    vocabulary: Vocabulary


def read_trained(path: Path) -> Trained:
    """Read a weight file or a checkpoint, whose moments are left unread.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not ours, or holds no vocabulary.
    """
    with open_file(path, "weight file") as (description, file):
        config, weights = read_weights(description, file)
        model = read_vocabulary(file)
        step = None
        if "training" in description:
            step = description["training"]["step"]
            check_integer("step", step, minimum=0)
    if model is None:
        raise ValueError(f"{path} holds no vocabulary: parity train writes one, save_weights only when given it")
    return Trained(path, step, config, weights, Vocabulary(model))


def read_lines(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, which newlines separate and nothing else.

    Raises:
        ValueError: A line is not UTF-8, or the file is damaged.
    """
    try:
        for number, line in enumerate(file, 1):
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{name} is not UTF-8 text: line {number}: {error}") from error
            yield text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name} is not gzipped text: {error}") from error


@dataclass(frozen=True)
class Line:
    """A line to translate.

    Attributes:
        number: Counted from 1.
        text: As it was read.
        ids: Its subwords, and the end symbol.
        positions: How many the model has; None where there is no limit.
    """

    number: int
    text: str
    ids: Sequence[int]
    positions: int | None

    @property
    def is_too_long(self) -> bool:
        """Whether the model cannot read it."""
        return self.positions is not None and len(self.ids) > self.positions

    @property
    def can_be_translated(self) -> bool:
        """Whether it holds anything, and not too much."""
        return len(self.ids) > 1 and not self.is_too_long


@dataclass(frozen=True)
class Hypothesis:
    """A translation of a line.

    Attributes:
        text: One line.
        score: The log-probability in nats; in beam search, over the length penalty.
        ids: The tokens, ``eos_id`` included unless the maximum length came first.
        pieces: The same, spelled out.
    """

    text: str
    score: float
    ids: Tokens
    pieces: Sequence[str]


@dataclass(frozen=True)
class Translation:
    """What was found for a line, best first: nothing for a line that is blank or too long."""

    line: Line
    hypotheses: Sequence[Hypothesis]

    @property
    def text(self) -> str:
        """The best hypothesis, or an empty line."""
        return self.hypotheses[0].text if self.hypotheses else ""


@dataclass(frozen=True)
class Comparison:
    """What several ports say to a line.

    Attributes:
        line: The line.
        said: The best hypothesis, by backend; empty where all say the same, and for a line that is blank or too long.
        doubts: Each decision that the reference would have taken otherwise, by backend; likewise.
    """

    line: Line
    said: Mapping[str, Hypothesis]
    doubts: Mapping[str, Sequence[Doubt]]

    @property
    def verdict(self) -> str:
        """Whether all say the same, or rounding explains why not, or a port decided as no rounding explains."""
        if not self.said:
            return SAME
        doubts = chain.from_iterable(self.doubts.values())
        undoubted = {hypothesis.ids for backend, hypothesis in self.said.items() if not self.doubts[backend]}
        explained = len(undoubted) <= 1 and all(doubt.is_near_tie for doubt in doubts)
        return NEAR_TIE if explained else DIVERGENCE


class Translator:
    """Searches sentences of similar length together, and yields the lines in their order.

    A line without subwords is left empty, and so is one that is longer than the model's positions.

    Args:
        config: That of the model.
        vocabulary: What it was trained on.
        options: How to search.
        window: How many lines are read before the first is translated; they are sorted by length.
    """

    def __init__(
        self, config: TransformerConfig, vocabulary: Vocabulary, options: SearchOptions, window: int = WINDOW
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.options = options
        self.window = window

    def translate(self, port: LoadedPort, lines: Iterable[str]) -> Iterator[Translation]:
        """Translate lines, each as soon as those before it are done."""

        def search(source_ids: ndarray) -> list[list[Hypothesis]]:
            result = port.search(source_ids, self.options)
            return [
                [self._hypothesis(ids, score) for ids, score in zip(*row, strict=True) if (ids != pad_id).any()]
                for row in zip(result.nbest_ids, result.nbest_scores, strict=True)
            ]

        pad_id = self.config.pad_id
        return (Translation(line, found or []) for line, found in self._in_order(lines, search))

    def compare(
        self,
        ports: Mapping[str, LoadedPort],
        judge: Callable[[ndarray], Judge],
        lines: Iterable[str],
        progress: Callable[[str, int], None] = lambda backend, sentences: None,
    ) -> Iterator[Comparison]:
        """Let several ports translate the same batches, and follow each of them where they differ.

        Args:
            ports: By backend.
            judge: Returns the judge of a sentence, given its ids, padded.
            lines: What to translate.
            progress: Told how many sentences a backend has just translated.
        """

        def search(source_ids: ndarray) -> list[tuple[dict[str, Hypothesis], dict[str, list[Doubt]]]]:
            found = {}
            for backend, port in ports.items():
                found[backend] = Decoded.by(partial(port.search, source_ids, self.options))
                progress(backend, len(source_ids))
            said = [decoded.result.nbest_ids for decoded in found.values()]
            apart = {row for ids in said[1:] for row in differing(ids, said[0], self.config.pad_id)}
            return [
                look_at(row, source_ids[row], found) if row in apart else ({}, {}) for row in range(len(source_ids))
            ]

        def look_at(
            row: int, source_ids: ndarray, found: Mapping[str, Decoded]
        ) -> tuple[dict[str, Hypothesis], dict[str, list[Doubt]]]:
            judging = judge(source_ids)
            results = {backend: decoded.result for backend, decoded in found.items()}
            said = {name: self._hypothesis(result.ids[row], result.scores[row]) for name, result in results.items()}
            return said, {name: follow(judging, row, decoded, self.options) for name, decoded in found.items()}

        for line, outcome in self._in_order(lines, search):
            said, doubts = outcome or ({}, {})
            numbered = {name: [replace(doubt, sentence=line.number) for doubt in doubts[name]] for name in doubts}
            yield Comparison(line, said, numbered)

    def _in_order(
        self, lines: Iterable[str], search: Callable[[ndarray], Sequence[Found]]
    ) -> Iterator[tuple[Line, Found | None]]:
        """Search batches in the order in which their first lines are due; yield None for what is left empty."""
        numbered = (
            Line(number, text, self.vocabulary.ids(text, self.config), self.config.max_positions)
            for number, text in enumerate(lines, 1)
        )
        while window := list(islice(numbered, self.window)):
            found: dict[int, Found | None] = {}
            batches = iter(self._batches([line for line in window if line.can_be_translated]))
            for line in window:
                if line.can_be_translated and line.number not in found:
                    batch = next(batches)  # this line is the first that has not been searched, so it is in there
                    results = search(pad([member.ids for member in batch], self.config))
                    found |= zip((member.number for member in batch), results, strict=True)
                yield line, found.pop(line.number, None)

    def _batches(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Cut lines, sorted by length, into batches; the batch with the first line comes first."""
        rows = self.options.beam_size or 1
        batches: list[list[Line]] = [[]]
        for line in sorted(lines, key=lambda line: len(line.ids)):
            most = max(1, min(MOST_SENTENCES, MOST_POSITIONS // (rows * len(line.ids))))
            if len(batches[-1]) >= most:
                batches.append([])
            batches[-1].append(line)
        return sorted(batches, key=lambda batch: min((line.number for line in batch), default=0))

    def _hypothesis(self, ids: ndarray, score: float) -> Hypothesis:
        tokens = tokens_of(ids, self.config)
        text = " ".join(self.vocabulary.text(tokens, self.config).splitlines())  # a subword may be a newline
        return Hypothesis(text, float(score), tokens, self.vocabulary.names(tokens, self.config))
