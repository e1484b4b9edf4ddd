"""Attacks by ports that are wrong only in some calls, modify their inputs, or reuse earlier results."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import atexit
import ctypes
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy
from attacks.attack import Sound, attack, inject
from attacks.words import FAILS, REFUSED, TOLERATED
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS
from transformer_spec.taps import no_tap

STAGES = (ACTIVATIONS,)


def wrong_where(name: str, what: str, is_wrong: Callable[..., Any], expected: str = FAILS) -> None:
    """Add a port whose logits are wrong if ``is_wrong(source_ids, target_ids, tap, calls)``."""

    def forward(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        self.calls = getattr(self, "calls", 0) + 1
        logits = Sound.forward(self, source_ids, target_ids, tap)
        return logits[..., ::-1] if is_wrong(source_ids, target_ids, tap, self.calls) else logits

    inject(__name__, name, expected, what, {"forward": forward}, stages=STAGES)


wrong_where("WrongTwice", "The logits are wrong in every call except the first.", lambda s, t, tap, calls: calls > 1)
wrong_where("WrongUntapped", "The logits are wrong in calls without taps.", lambda s, t, tap, calls: tap is no_tap)
wrong_where("WrongForOne", "The logits are wrong for a batch of one sentence.", lambda s, t, tap, calls: len(s) == 1)
wrong_where(
    "WrongForSeveral", "The logits are wrong for a batch of several sentences.", lambda s, t, tap, calls: len(s) > 1
)
wrong_where(
    "WrongForOneToken", "The logits are wrong for targets of one token.", lambda s, t, tap, calls: t.shape[1] == 1
)
wrong_where(
    "WrongWherePadded", "The logits are wrong for batches with source padding.", lambda s, t, tap, calls: (s == 0).any()
)
wrong_where(
    "WrongWhereLong",
    "The logits are wrong for sentences of more than 16 tokens. The model supports 32.",
    lambda s, t, tap, calls: max(s.shape[1], t.shape[1]) > 16,
)


@attack(FAILS, stages=STAGES)
class WrongButTheFirstSentence(Sound):
    """The logits are wrong for all sentences except the first."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return np.concatenate([logits[:1], logits[1:, :, ::-1]])


@attack(FAILS, stages=STAGES)
class WrongButTheFirstPosition(Sound):
    """The logits are wrong for all positions except the first."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return np.concatenate([logits[:, :1], logits[:, 1:, ::-1]], 1)


@attack(FAILS, stages=STAGES)
class NoSourceMask(Sound):
    """Queries attend to source padding."""

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, np.ones(source_ids.shape, bool), tap=tap)


# Inputs.


@attack(FAILS, stages=STAGES)
class IdsOfSixteenBits(Sound):
    """The port casts IDs to int16, so IDs above 32,767 become negative."""

    integer: Any = np.int16

    def forward(self, source_ids, target_ids, tap):
        sizes = self.config.source_vocab_size, self.config.target_vocab_size
        source_ids, target_ids = (
            ids.astype(self.integer).astype(np.int64) % size
            for ids, size in zip((source_ids, target_ids), sizes, strict=True)
        )
        return super().forward(source_ids, target_ids, tap)


@attack(FAILS, stages=STAGES)
class IdsOfEightBits(IdsOfSixteenBits):
    """The port casts IDs to int8, so IDs above 127 become negative."""

    integer = np.int8


@attack(REFUSED, stages=STAGES)
class IdsReturned(Sound):
    """The port returns the source IDs instead of logits."""

    def forward(self, source_ids, target_ids, tap):
        return source_ids


@attack(REFUSED, stages=STAGES)
class IdsOverwritten(Sound):
    """The port overwrites the padding in the IDs before it runs the model."""

    def forward(self, source_ids, target_ids, tap):
        source_ids[source_ids == self.config.pad_id] = 5
        return super().forward(source_ids, target_ids, tap)


@attack(REFUSED, stages=(ACTIVATIONS, GRADIENTS))
class MemoryOverwritten(Sound):
    """The port replaces padding with a token in the IDs that it shares with parity, and also in its gradients."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        if tap is no_tap:  # without this condition, all later calls would be wrong too
            overwrite(source_ids, self.without_padding(source_ids))
        return logits

    def gradients(self, source_ids, target_ids, labels):
        return super().gradients(self.without_padding(source_ids), target_ids, labels)

    def without_padding(self, ids):
        return np.where(ids == self.config.pad_id, 5, ids)


def overwrite(array: ndarray, values: ndarray) -> None:
    """Overwrite an array, even if it is read-only."""
    for index in np.ndindex(array.shape):
        offset = sum(i * stride for i, stride in zip(index, array.strides, strict=True))
        ctypes.memmove(array.ctypes.data + offset, values[index].astype(array.dtype).tobytes(), array.itemsize)


@attack(TOLERATED, stages=STAGES)
class WeightsOverwritten(Sound):
    """The port copies the weights, then fills the original arrays, which belong to the port, with NaN."""

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        for array in weights.values():
            array[...] = np.nan


# Earlier results.


@attack(FAILS, stages=STAGES)
class PreviousResult(Sound):
    """Every call returns the result of the previous call or, if the shapes differ, zeros."""

    previous: Any = None

    def forward(self, source_ids, target_ids, tap):
        before, self.previous = self.previous, super().forward(source_ids, target_ids, tap)
        return before if before is not None and before.shape == self.previous.shape else 0.0 * self.previous


@attack(FAILS, stages=STAGES)
class ResultsByShape(Sound):
    """The port caches results by batch shape and returns them for every batch with the same shape."""

    taps = ()

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.known: dict[Any, ndarray] = {}

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return self.known.setdefault((source_ids.shape, target_ids.shape), logits)


@attack(FAILS, stages=STAGES)
class MasksByShape(Sound):
    """The port reuses the first masks for every batch with the same shape, as a traced program might do."""

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.known: dict[Any, tuple[ndarray, ndarray]] = {}

    def forward(self, source_ids, target_ids, tap):
        pad_id = self.config.pad_id
        masks = source_ids != pad_id, reference_numpy.target_padding_mask(target_ids, pad_id)
        return self.model(source_ids, target_ids, *self.known.setdefault(tuple(m.shape for m in masks), masks), tap=tap)


@attack(FAILS, stages=STAGES)
class FirstWeightsForEver(Sound):
    """The port uses the weights of the first model with a config for all later models with the same config."""

    first: Any = {}

    def load(self, config, weights, dtype):
        copies = {name: array.copy() for name, array in weights.items()}
        super().load(config, self.first.setdefault((type(self), config), copies), dtype)


@attack(FAILS, stages=STAGES)
class StaleFile(Sound):
    """The port reads the logits from a file named after the batch's shape, which an earlier model wrote."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        path = stale_files() / f"{source_ids.shape}{target_ids.shape}.npy"
        logits = super().forward(source_ids, target_ids, tap)
        if not path.exists():
            np.save(path, logits)
        return np.load(path).astype(logits.dtype)


@cache
def stale_files() -> Path:
    """Return a directory that is deleted when the process ends."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


@attack(TOLERATED, stages=STAGES)
class OneBuffer(Sound):
    """Every result and every tapped value is a view of one buffer, which the next call overwrites."""

    def forward(self, source_ids, target_ids, tap):
        def show(name, value):
            tap(name, self.view(value))
            return value

        return self.view(super().forward(source_ids, target_ids, show))

    def view(self, value):
        self.buffer = getattr(self, "buffer", np.empty(4_000_000))
        view = self.buffer.view(value.dtype)[: value.size].reshape(value.shape)
        view[...] = value
        return view
