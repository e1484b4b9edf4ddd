"""Training batches that group sentences of similar length. They have few different shapes and a reproducible order.

Compilers such as XLA compile a training step once per shape, so the shapes are chosen once for the entire corpus. Up to
``MAX_SHAPES`` shapes are added, as long as each additional shape reduces the computation per epoch by at least
``WORTH_A_SHAPE``.
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
WORTH_A_SHAPE = 0.01  # an additional shape must save at least this fraction of the computation per epoch
MAX_BOUNDS = 256  # maximum number of candidates to try for the length limits of the buckets

Numbered = tuple[Sequence[int], Sequence[int]]


def number(pairs: Iterable[tuple[str, str]], vocabulary: Vocabulary) -> list[Numbered]:
    """Convert sentence pairs to the IDs that the encoder reads and the IDs that the decoder must predict."""
    return [(vocabulary.ids(source), vocabulary.target_ids(target)) for source, target in pairs]


@dataclass(frozen=True)
class TrainingBatch:
    """A batch for one training step. All IDs are int32 arrays of shape [rows, width], padded with ``pad_id``.

    Attributes:
        source_ids: Input of the encoder.
        target_ids: Input of the decoder: ``bos_id`` followed by the target without its last token.
        labels: Target, which specifies the token to predict at each position.
        tokens: Number of labels that are not padding.
    """

    source_ids: ndarray
    target_ids: ndarray
    labels: ndarray
    tokens: int


@dataclass(frozen=True)
class _Bucket:
    """All pairs whose batches have the same shape, followed by a row of padding for filling up incomplete batches."""

    source_ids: ndarray  # [pairs + 1, source_width]
    labels: ndarray  # [pairs + 1, target_width]
    rows: int  # number of rows per batch

    def fill(self, order: ndarray) -> ndarray:
        """Divide the pairs into batches in the given order.

        Returns:
            Pair indices, [batches, rows]. The last batch is filled up with the index of the padding row.
        """
        pairs = len(self.labels) - 1
        dealt = np.full(-(-pairs // self.rows) * self.rows, pairs)
        dealt[:pairs] = order
        return dealt.reshape(-1, self.rows)


class Batches:
    """An infinite iterator over the batches of a corpus, shuffled in each epoch.

    The order depends only on the seed and the epoch. Therefore, ``seek`` can continue from any position with the same
    batches that an uninterrupted run would have used.

    Args:
        pairs: Source and target IDs. All sentences end with ``eos_id``, and none start with ``bos_id``.
        config: Config of the model, which defines the special IDs and the maximum length.
        tokens_per_batch: Maximum number of positions per batch, including padding, in the source or the target,
            whichever is longer. A batch has at least ``multiple`` rows, even if it then exceeds this maximum.
        seed: Random seed for the order.
        multiple: Number by which the number of rows of every batch must be divisible. For gradient accumulation, this
            is the number of micro-batches.
        max_length: Maximum length of the source and the target in tokens. Longer pairs are dropped. If None, the
            model's maximum length is used.

    Attributes:
        tokens_per_batch: The argument ``tokens_per_batch``.
        shapes: Number of rows, source width, and target width of each bucket's batches.
        per_epoch: Number of batches per epoch.
        dropped: Number of pairs that are too long.
        padding: Fraction of padding among all source and target IDs in an epoch.

    Raises:
        TypeError: If an argument that must be an integer is not an integer.
        ValueError: If an argument is out of range, if a sentence is empty or contains ``pad_id``, or if all pairs are
            too long.
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
                    raise ValueError(f"the {name} of pair {index} must contain at least eos_id: got an empty sentence")
                if config.pad_id in ids:  # the model would mask this token, and the loss would ignore it
                    raise ValueError(f"pad_id {config.pad_id} must not occur in the {name} of pair {index}")
        limit = min(limit for limit in (max_length, config.max_positions, math.inf) if limit is not None)
        kept = [pair for pair in pairs if max(map(len, pair)) <= limit]
        if not kept:
            raise ValueError(
                f"all {len(pairs):,} sentence pairs are longer than the maximum length of {limit:,} tokens"
            )
        if multiple > len(kept):  # some micro-batches would contain only padding
            raise ValueError(f"{multiple:,} micro-batches require at least {multiple:,} pairs: got {len(kept):,}")
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
        """The zero-based epoch of the next batch, and the zero-based index of the batch in this epoch."""
        return self._epoch, self._index

    def seek(self, position: Sequence[int]) -> None:
        """Continue from a position that the property ``position`` returned.

        Raises:
            TypeError: If the position does not consist of two integers.
            ValueError: If the position is out of range, for example because the corpus is different.
        """
        if isinstance(position, str) or not isinstance(position, Sequence) or len(position) != 2:
            raise TypeError(f"position must consist of an epoch and an index: got {position!r}")
        epoch, index = position
        check_integer("epoch", epoch, minimum=0)
        check_integer("index", index, minimum=0)
        if index >= self.per_epoch:
            raise ValueError(f"index must be below {self.per_epoch}, the number of batches per epoch: got {index}")
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
        """Iterate once over all pairs, by bucket and then in the original order. ``position`` does not change."""
        return (self._make(bucket, rows) for bucket, rows in self._in_order)

    def _shuffle(self, epoch: int) -> list[tuple[_Bucket, ndarray]]:
        """Return the batches in an epoch. Each batch consists of a bucket and row indices."""
        # Shuffle by sorting raw random bits. These bits are the same in all NumPy versions, whereas the results of a
        # Generator's methods may differ between versions.
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
        target_ids[~real] = self._config.pad_id  # positions without a label need no input
        return TrainingBatch(bucket.source_ids[rows], target_ids, labels, int(real.sum()))


def _make_buckets(pairs: Sequence[Numbered], pad_id: int, tokens_per_batch: int, multiple: int) -> list[_Bucket]:
    """Return the buckets in ascending order of length.

    If a bucket's last batch is incomplete, it is filled up with the longest pairs from the next shorter bucket.
    """
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
        rows = -(-len(members) // batches)  # distribute the pairs evenly if there are not enough to fill all batches
        buckets.append(
            _Bucket(
                source_ids=_pad([pairs[member][0] for member in members], pad_id),
                labels=_pad([pairs[member][1] for member in members], pad_id),
                rows=-(-rows // multiple) * multiple,
            )
        )
    return buckets[::-1]


def _pad(sentences: Sequence[Sequence[int]], pad_id: int) -> ndarray:
    """Pad the sentences, and return int32 IDs with one sentence per row, followed by a row of padding."""
    ids = np.full((len(sentences) + 1, max(map(len, sentences))), pad_id, np.int32)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    return ids


def _rows(width: ndarray, tokens_per_batch: int, multiple: int) -> ndarray:
    return np.maximum(tokens_per_batch // width // multiple, 1) * multiple


def _choose_bounds(lengths: ndarray, tokens_per_batch: int, multiple: int) -> ndarray:
    """Choose the buckets that minimize the computation per epoch, and return their maximum sentence lengths, sorted.

    Because an incomplete batch costs as much as a full batch, the result rarely has buckets with very few sentences.

    Args:
        lengths: Source and target lengths, [pairs, 2].
        tokens_per_batch: Maximum number of positions per batch. The limit applies to source and target separately.
        multiple: Number by which the number of rows of every batch must be divisible.
    """
    longest = lengths.max(axis=1)
    bounds = np.unique(longest)
    bounds = bounds[np.linspace(0, len(bounds) - 1, min(len(bounds), MAX_BOUNDS)).round().astype(int)]
    group = np.searchsorted(bounds, longest)
    widths = np.zeros((len(bounds), 2), int)
    np.maximum.at(widths, group, lengths)
    counts = np.bincount(group)

    cost = np.full((len(bounds), len(bounds)), np.inf)  # [first bound, last bound]: cost of a bucket in this range
    for first in range(len(bounds)):
        width = np.maximum.accumulate(widths[first:])
        rows = _rows(width.max(axis=1), tokens_per_batch, multiple)
        cost[first, first:] = -(-np.cumsum(counts[first:]) // rows) * rows * width.sum(axis=1)

    # Minimum cost of all sentences up to each bound, and the bucket bounds that achieve this cost. Each iteration adds
    # a bucket: total[i, j] is the cost if this bucket ends with bound j and the bucket before it ends with bound i.
    best, chosen = cost[0], [[last] for last in range(len(bounds))]
    for _ in range(MAX_SHAPES - 1):
        total = best[:-1, None] + cost[1:]
        if not len(total) or total[:, -1].min() > best[-1] * (1 - WORTH_A_SHAPE):
            break
        before = total.argmin(axis=0)
        best, chosen = total.min(axis=0), [[*chosen[before[last]], last] for last in range(len(bounds))]
    return bounds[chosen[-1]]
