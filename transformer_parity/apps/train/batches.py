"""Batches for training: sentences of similar length together, in a handful of shapes, in an order that can be resumed.

A compiler such as XLA compiles a step once for every shape it meets, so the shapes are chosen once for the whole
corpus: as many as pay for themselves, and never more than ``MAX_SHAPES``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.checks import check_integer
from transformer_spec.config import TransformerConfig

MAX_SHAPES = 8
WORTH_A_SHAPE = 0.01  # of an epoch's work: what one more shape has to save to be worth compiling a step for
MAX_BOUNDS = 256  # candidates for a bucket's longest sentence

Numbered = tuple[Sequence[int], Sequence[int]]


def number(pairs: Iterable[tuple[str, str]], vocabulary: Vocabulary) -> list[Numbered]:
    """Return pairs of sentences as ids: what the encoder reads, and the right target tokens."""
    return [(vocabulary.ids(source), vocabulary.target_ids(target)) for source, target in pairs]


@dataclass(frozen=True)
class TrainingBatch:
    """What one training step takes: int32 ids [rows, width], padded with ``pad_id``."""

    source_ids: ndarray
    target_ids: ndarray  # what the decoder reads: bos_id, then all but the last token of the target
    labels: ndarray  # what it has to predict at each position: the target
    tokens: int  # labels that are not padding


@dataclass(frozen=True)
class _Bucket:
    """The pairs that share a shape; behind the last pair stands a row of padding, to fill up a batch with."""

    source_ids: ndarray  # [pairs + 1, source_width]
    labels: ndarray  # [pairs + 1, target_width]
    rows: int  # of a batch

    def fill(self, order: ndarray) -> ndarray:
        """Deal the pairs, in an order, into batches [batches, rows]; the last one is filled up with padding."""
        pairs = len(self.labels) - 1
        dealt = np.full(-(-pairs // self.rows) * self.rows, pairs)
        dealt[:pairs] = order
        return dealt.reshape(-1, self.rows)


class Batches:
    """An endless stream of batches over a corpus, shuffled anew in each epoch.

    The order depends on the seed and the epoch only, so ``seek`` goes to any position at once, and what follows is
    exactly what would have followed.

    Args:
        pairs: Numbered source and target; both end with ``eos_id``, and neither begins with ``bos_id``.
        config: The model's config, for its special ids and the longest sequence it can take.
        tokens_per_batch: The most positions of a batch on the longer side, padding included. A batch has
            at least ``multiple`` rows, even where they exceed this.
        seed: Decides the order.
        multiple: The rows of every batch are a multiple of this, for gradient accumulation.
        max_length: The longest source or target that is kept, in tokens; None keeps all that the model can take.

    Attributes:
        tokens_per_batch: As given.
        shapes: The rows, source width and target width of every batch there is, one triple per bucket.
        per_epoch: The batches of an epoch.
        dropped: How many pairs were too long.
        padding: The share of padding in all source and target ids of an epoch.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is too small or too large, a sentence is empty or contains ``pad_id``, or no pair is left.
    """

    def __init__(
        self,
        pairs: Sequence[Numbered],
        config: TransformerConfig,
        tokens_per_batch: int,
        seed: int = 0,
        multiple: int = 1,
        max_length: int | None = None,
    ) -> None:
        check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
        check_integer("seed", seed, minimum=0)
        check_integer("multiple", multiple, minimum=1)
        if max_length is not None:
            check_integer("max_length", max_length, minimum=1)
        for index, pair in enumerate(pairs):
            for name, ids in zip(("source", "target"), pair, strict=True):
                if not len(ids):
                    raise ValueError(f"a sentence must hold at least eos_id: the {name} of pair {index} is empty")
                if config.pad_id in ids:  # it would be taken for padding: never read, never learned
                    raise ValueError(f"pad_id {config.pad_id} must not occur in the {name} of pair {index}")
        limit = min(limit for limit in (max_length, config.max_positions, math.inf) if limit is not None)
        kept = [pair for pair in pairs if max(map(len, pair)) <= limit]
        if not kept:
            raise ValueError(f"no pair is left to train on: got {len(pairs)}, {len(pairs)} of them too long")
        if multiple > len(kept):  # the rest of every batch would be padding
            raise ValueError(f"a batch in {multiple:,} slices takes as many pairs or more: got {len(kept):,}")
        self.tokens_per_batch = tokens_per_batch
        self.dropped = len(pairs) - len(kept)
        self._config = config
        self._seed = seed
        self._buckets = _make_buckets(kept, config.pad_id, tokens_per_batch, multiple)
        self.shapes = [(bucket.rows, bucket.source_ids.shape[1], bucket.labels.shape[1]) for bucket in self._buckets]
        in_order = [bucket.fill(np.arange(len(bucket.labels) - 1)) for bucket in self._buckets]
        self._in_order = [
            (bucket, rows) for bucket, dealt in zip(self._buckets, in_order, strict=True) for rows in dealt
        ]
        self.per_epoch = len(self._in_order)
        cells = sum(
            dealt.size * (source_width + target_width)
            for dealt, (_, source_width, target_width) in zip(in_order, self.shapes, strict=True)
        )
        self.padding = 1 - sum(len(source) + len(target) for source, target in kept) / cells
        self.seek((0, 0))

    @property
    def position(self) -> tuple[int, int]:
        """The epoch and, within it, the batch that comes next, both counted from 0."""
        return self._epoch, self._index

    def seek(self, position: Sequence[int]) -> None:
        """Go to a position: the next batch is the one that came after it.

        Raises:
            TypeError: The position is not two integers.
            ValueError: There is no such position; the corpus is perhaps another one.
        """
        if isinstance(position, str) or not isinstance(position, Sequence) or len(position) != 2:
            raise TypeError(f"position must be an epoch and an index: got {position!r}")
        epoch, index = position
        check_integer("epoch", epoch, minimum=0)
        check_integer("index", index, minimum=0)
        if index >= self.per_epoch:
            raise ValueError(f"index must be below the {self.per_epoch} batches of an epoch: got {index}")
        self._epoch, self._index = epoch, index
        self._order = self._shuffle(epoch)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> TrainingBatch:
        batch = self._make(*self._order[self._index])
        self._index += 1
        if self._index == self.per_epoch:
            self.seek((self._epoch + 1, 0))
        return batch

    def once(self) -> Iterator[TrainingBatch]:
        """Return every pair once, from short to long and otherwise in the given order; ``position`` stays."""
        return (self._make(bucket, rows) for bucket, rows in self._in_order)

    def _shuffle(self, epoch: int) -> list[tuple[_Bucket, ndarray]]:
        """Return the batches of an epoch, each a bucket and the rows to take from it."""
        # Ranks of raw random bits: unlike a Generator's methods, a bit generator never changes between NumPy versions.
        bits = np.random.PCG64([self._seed, epoch])
        batches = [
            (bucket, rows)
            for bucket in self._buckets
            for rows in bucket.fill(np.argsort(bits.random_raw(len(bucket.labels) - 1), kind="stable"))
        ]
        return [batches[i] for i in np.argsort(bits.random_raw(len(batches)), kind="stable")]

    def _make(self, bucket: _Bucket, rows: ndarray) -> TrainingBatch:
        labels = bucket.labels[rows]
        real = labels != self._config.pad_id
        target_ids = np.roll(labels, 1, axis=1)
        target_ids[:, 0] = self._config.bos_id
        target_ids[~real] = self._config.pad_id  # where nothing follows, nothing is read
        return TrainingBatch(bucket.source_ids[rows], target_ids, labels, int(real.sum()))


def _make_buckets(pairs: Sequence[Numbered], pad_id: int, tokens_per_batch: int, multiple: int) -> list[_Bucket]:
    """Return the buckets, short sentences first; rows that one leaves empty go to the longest of the next shorter."""
    lengths = np.array([[len(source), len(target)] for source, target in pairs])  # [pairs, 2]
    longest = lengths.max(axis=1)
    order = np.argsort(-longest, kind="stable")
    buckets: list[_Bucket] = []
    taken = 0
    for shorter in (*_choose_bounds(lengths, tokens_per_batch, multiple)[-2::-1], 0):
        count = int((longest > shorter).sum()) - taken
        if count <= 0:
            continue
        rows = int(_rows(longest[order[taken]], tokens_per_batch, multiple))
        batches = -(-count // rows)
        members = np.sort(order[taken : taken + batches * rows]).tolist()
        taken += len(members)
        rows = -(-len(members) // batches)  # fewer only where no pairs are left: none of the batches is nearly empty
        buckets.append(
            _Bucket(
                source_ids=_pad([pairs[member][0] for member in members], pad_id),
                labels=_pad([pairs[member][1] for member in members], pad_id),
                rows=-(-rows // multiple) * multiple,
            )
        )
    return buckets[::-1]


def _pad(sentences: Sequence[Sequence[int]], pad_id: int) -> ndarray:
    """Return int32 ids, one sentence a row, and behind them a row of padding."""
    ids = np.full((len(sentences) + 1, max(map(len, sentences))), pad_id, np.int32)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    return ids


def _rows(width: ndarray, tokens_per_batch: int, multiple: int) -> ndarray:
    return np.maximum(tokens_per_batch // width // multiple, 1) * multiple


def _choose_bounds(lengths: ndarray, tokens_per_batch: int, multiple: int) -> ndarray:
    """Return the longest sentence of each bucket, ascending, such that an epoch computes as little as possible.

    An incomplete batch counts as a whole one, so no bucket is made for a few sentences.

    Args:
        lengths: Of source and target, [pairs, 2].
        tokens_per_batch: The most positions of a batch on the longer side.
        multiple: The rows of every batch are a multiple of this.
    """
    longest = lengths.max(axis=1)
    bounds = np.unique(longest)
    bounds = bounds[np.linspace(0, len(bounds) - 1, min(len(bounds), MAX_BOUNDS)).round().astype(int)]
    group = np.searchsorted(bounds, longest)
    widths = np.zeros((len(bounds), 2), int)
    np.maximum.at(widths, group, lengths)
    counts = np.bincount(group)

    cost = np.full((len(bounds), len(bounds)), np.inf)  # of one bucket, from the first to the last of its bounds
    for first in range(len(bounds)):
        width = np.maximum.accumulate(widths[first:])
        rows = _rows(width.max(axis=1), tokens_per_batch, multiple)
        cost[first, first:] = -(-np.cumsum(counts[first:]) // rows) * rows * width.sum(axis=1)

    best, chosen = cost[0], [[last] for last in range(len(bounds))]  # of all sentences up to each bound
    for _ in range(MAX_SHAPES - 1):
        total = best[:-1, None] + cost[1:]  # [last bound of the other buckets, bound]
        if not len(total) or total[:, -1].min() > best[-1] * (1 - WORTH_A_SHAPE):
            break
        before = total.argmin(axis=0)
        best, chosen = total.min(axis=0), [[*chosen[before[last]], last] for last in range(len(bounds))]
    return bounds[chosen[-1]]
