"""Lines of text in, translations out: with one port, or with several that are compared."""

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

WINDOW = 512  # lines that are sorted by length at a time
MOST_SENTENCES = 64  # of a batch
MOST_POSITIONS = 4096  # of a batch: source positions of all hypotheses


Found = TypeVar("Found")


class Translator:
    """Searches sentences of similar length together, and yields the lines in their order.

    A line without subwords is left empty, and so is one that is too long.

    Args:
        config: That of the model.
        vocabulary: That of the training text.
        options: Of the search.
        window: Lines that are read before the first is translated; they are sorted by length.
    """

    def __init__(
        self, config: TransformerConfig, vocabulary: Vocabulary, options: Search, window: int = WINDOW
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.options = options
        self.window = window

    def translate(self, port: LoadedPort, lines: Iterable[str]) -> Iterator[Translation]:
        """Translate lines, each as soon as those before it are done."""

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
        """Translate the same batches with several ports, and compare decision by decision where they differ.

        Args:
            ports: By backend.
            scorer_of: From the padded ids of a sentence to its scorer by the reference.
            lines: The lines to translate.
            progress: Called with a backend and the number of sentences that it has translated.
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
        """Search batches in the order in which their first lines are due; yield None for what is left empty."""
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

    def _hypothesis(self, ids: ndarray, score: float) -> TranslatedLine:
        tokens = tokens_of(ids, self.config)
        text = " ".join(self.vocabulary.text(tokens).splitlines())  # a subword may be a newline
        return TranslatedLine(text, float(score), tokens, self.vocabulary.names(tokens))
