"""Translate lines of text with one port, or compare the translations of multiple ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from numpy import ndarray

from transformer_parity.apps.translate.agreement import TranslationComparison
from transformer_parity.apps.translate.lines import Line, TranslatedLine, Translation
from transformer_parity.transformer.decoding.near_ties import Doubt, differing, follow
from transformer_parity.transformer.decoding.prefixes import PrefixScorer, tokens_of
from transformer_parity.transformer.ports.protocol import Decoded, LoadedPort
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, most_tokens, pad
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

WINDOW = 512  # number of lines to read and sort by length at a time
MOST_SENTENCES = 64  # maximum number of sentences per batch
MOST_POSITIONS = 4096  # maximum of the beam size times the number of source positions in a batch


Found = TypeVar("Found")


class Translator:
    """A translator that batches lines of similar length but yields the translations in the original order.

    If a line is blank or too long, its translation is empty.

    Args:
        config: Config of the model.
        vocabulary: Vocabulary of the model.
        options: Search settings.
        window: Number of lines to read and sort by length before translating the first one.
    """

    def __init__(
        self, config: TransformerConfig, vocabulary: Vocabulary, options: Search, window: int = WINDOW
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.options = options
        self.window = window

    def translate(self, port: LoadedPort, lines: Iterable[str]) -> Iterator[Translation]:
        """Translate lines, and yield each translation as soon as all previous translations have been yielded."""

        def search(source_ids: ndarray) -> list[list[TranslatedLine]]:
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
        scorer_of: Callable[[ndarray], PrefixScorer],
        lines: Iterable[str],
        progress: Callable[[str, int], None] = lambda backend, sentences: None,
    ) -> Iterator[TranslationComparison]:
        """Translate the same batches with multiple ports. If translations differ, compare the ports' decisions.

        Args:
            ports: Dict from backend names to loaded ports.
            scorer_of: Function that creates the reference's scorer for a sentence, given the sentence's padded IDs.
            lines: Lines to translate.
            progress: Function that is called after each batch, with the backend and the number of sentences.
        """

        def search(source_ids: ndarray) -> list[tuple[dict[str, TranslatedLine], dict[str, list[Doubt]]]]:
            found = {}
            for backend, port in ports.items():
                found[backend] = Decoded.by(partial(port.search, source_ids, self.options))
                progress(backend, len(source_ids))
            said = [decoded.result.nbest_ids for decoded in found.values()]
            apart = {row for ids in said[1:] for row in differing(ids, said[0], self.config.pad_id)}
            return [
                compared(row, source_ids[row], found) if row in apart else ({}, {}) for row in range(len(source_ids))
            ]

        def compared(
            row: int, source_ids: ndarray, found: Mapping[str, Decoded]
        ) -> tuple[dict[str, TranslatedLine], dict[str, list[Doubt]]]:
            scorer = scorer_of(source_ids)
            results = {backend: decoded.result for backend, decoded in found.items()}
            said = {name: self._hypothesis(result.ids[row], result.scores[row]) for name, result in results.items()}
            return said, {name: follow(scorer, row, decoded, self.options) for name, decoded in found.items()}

        for line, outcome in self._in_order(lines, search):
            said, doubts = outcome or ({}, {})
            numbered = {name: [replace(doubt, sentence=line.number) for doubt in doubts[name]] for name in doubts}
            yield TranslationComparison(line, said, numbered)

    def _in_order(
        self, lines: Iterable[str], search: Callable[[ndarray], Sequence[Found]]
    ) -> Iterator[tuple[Line, Found | None]]:
        """Run the search on batches of lines, and yield the results in line order.

        For lines that cannot be translated, yield None as the result.
        """
        least = len(self.vocabulary.ids("")) + 1
        numbered = (
            Line(number, text, self.vocabulary.ids(text), most_tokens(self.config), least)
            for number, text in enumerate(lines, 1)
        )
        while window := list(islice(numbered, self.window)):
            found: dict[int, Found | None] = {}
            batches = iter(self._batches([line for line in window if line.can_be_translated]))
            for line in window:
                if line.can_be_translated and line.number not in found:
                    batch = next(batches)  # this batch contains the line, because batches are sorted by first line
                    results = search(pad([member.ids for member in batch], self.config))
                    found |= zip((member.number for member in batch), results, strict=True)
                yield line, found.pop(line.number, None)

    def _batches(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Divide lines into batches of similar length, and sort the batches by their smallest line number."""
        rows = self.options.beam_size or 1
        batches: list[list[Line]] = [[]]
        for line in sorted(lines, key=lambda line: len(line.ids)):
            most = max(1, min(MOST_SENTENCES, MOST_POSITIONS // (rows * len(line.ids))))
            if len(batches[-1]) >= most:
                batches.append([])
            batches[-1].append(line)
        return sorted(batches, key=lambda batch: min((line.number for line in batch), default=0))

    def _hypothesis(self, ids: ndarray, score: float) -> TranslatedLine:
        tokens = tokens_of(ids, self.config)
        text = " ".join(self.vocabulary.text(tokens).splitlines())  # because a subword may contain a newline
        return TranslatedLine(text, float(score), tokens, self.vocabulary.names(tokens))
