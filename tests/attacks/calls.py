"""Attacks through what a port does between its calls: with its inputs, with earlier results, and only now and then."""

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
from attacks.attack import FAILS, REFUSED, TOLERATED, Sound, attack, plant
from transformer_parity.transformer.cases.case import ACTIVATIONS, GRADIENTS
from transformer_spec.taps import no_tap

STAGES = (ACTIVATIONS,)


def wrong_where(name: str, what: str, is_wrong: Callable[..., Any], expected: str = FAILS) -> None:
    """Plant a port whose logits are wrong in some calls: ``is_wrong(source_ids, target_ids, tap, calls)``."""

    def forward(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> ndarray:
        self.calls = getattr(self, "calls", 0) + 1
        logits = Sound.forward(self, source_ids, target_ids, tap)
        return logits[..., ::-1] if is_wrong(source_ids, target_ids, tap, self.calls) else logits

    plant(__name__, name, expected, what, {"forward": forward}, stages=STAGES)


wrong_where("WrongTwice", "The logits are wrong but in the first call.", lambda s, t, tap, calls: calls > 1)
wrong_where("WrongUntapped", "The logits are wrong in a call without taps.", lambda s, t, tap, calls: tap is no_tap)
wrong_where("WrongForOne", "The logits of a single sentence are wrong.", lambda s, t, tap, calls: len(s) == 1)
wrong_where("WrongForSeveral", "The logits of several sentences are wrong.", lambda s, t, tap, calls: len(s) > 1)
wrong_where("WrongForOneToken", "The logits of one token are wrong.", lambda s, t, tap, calls: t.shape[1] == 1)
wrong_where(
    "WrongWherePadded", "The logits are wrong where a source is padded.", lambda s, t, tap, calls: (s == 0).any()
)
wrong_where(
    "WrongWhereLong",
    "The logits are wrong where a sentence has more than 16 tokens: the model takes 32.",
    lambda s, t, tap, calls: max(s.shape[1], t.shape[1]) > 16,
)


@attack(FAILS, stages=STAGES)
class WrongButTheFirstSentence(Sound):
    """The logits of all sentences but the first are wrong."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return np.concatenate([logits[:1], logits[1:, :, ::-1]])


@attack(FAILS, stages=STAGES)
class WrongButTheFirstPosition(Sound):
    """The logits of all positions but the first are wrong."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return np.concatenate([logits[:, :1], logits[:, 1:, ::-1]], 1)


@attack(FAILS, stages=STAGES)
class NoSourceMask(Sound):
    """The padding of the source is attended to."""

    def forward(self, source_ids, target_ids, tap):
        return self.model(source_ids, target_ids, np.ones(source_ids.shape, bool), tap=tap)


# Inputs.


@attack(FAILS, stages=STAGES)
class IdsOfSixteenBits(Sound):
    """The ids are cast to 16-bit integers: those above 32,767 become negative."""

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
    """The ids are cast to 8-bit integers: those above 127 become negative."""

    integer = np.int8


@attack(REFUSED, stages=STAGES)
class IdsReturned(Sound):
    """The source ids come back in place of logits."""

    def forward(self, source_ids, target_ids, tap):
        return source_ids


@attack(REFUSED, stages=STAGES)
class IdsOverwritten(Sound):
    """The padding in the ids is overwritten before the model runs."""

    def forward(self, source_ids, target_ids, tap):
        source_ids[source_ids == self.config.pad_id] = 5
        return super().forward(source_ids, target_ids, tap)


@attack(REFUSED, stages=(ACTIVATIONS, GRADIENTS))
class MemoryOverwritten(Sound):
    """The padding in the memory of the ids is overwritten, by a framework that shares it; gradients ignore padding."""

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        if tap is no_tap:  # in a later call, nothing would be right
            overwrite(source_ids, self.without_padding(source_ids))
        return logits

    def gradients(self, source_ids, target_ids, labels):
        return super().gradients(self.without_padding(source_ids), target_ids, labels)

    def without_padding(self, ids):
        return np.where(ids == self.config.pad_id, 5, ids)


def overwrite(array: ndarray, values: ndarray) -> None:
    """Overwrite an array, whether it may be written to or not."""
    for index in np.ndindex(array.shape):
        offset = sum(i * stride for i, stride in zip(index, array.strides, strict=True))
        ctypes.memmove(array.ctypes.data + offset, values[index].astype(array.dtype).tobytes(), array.itemsize)


@attack(TOLERATED, stages=STAGES)
class WeightsOverwritten(Sound):
    """The arrays of weights, which belong to the port, are overwritten with NaN once they have been copied."""

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        for array in weights.values():
            array[...] = np.nan


# Earlier results.


@attack(FAILS, stages=STAGES)
class PreviousResult(Sound):
    """Every call returns what the call before it computed, where that has the right shape."""

    previous: Any = None

    def forward(self, source_ids, target_ids, tap):
        before, self.previous = self.previous, super().forward(source_ids, target_ids, tap)
        return before if before is not None and before.shape == self.previous.shape else 0.0 * self.previous


@attack(FAILS, stages=STAGES)
class ResultsByShape(Sound):
    """What was computed for a batch is returned for every other batch of the same shape."""

    taps = ()

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.known: dict[Any, ndarray] = {}

    def forward(self, source_ids, target_ids, tap):
        logits = super().forward(source_ids, target_ids, tap)
        return self.known.setdefault((source_ids.shape, target_ids.shape), logits)


@attack(FAILS, stages=STAGES)
class MasksByShape(Sound):
    """The masks of the first batch of a shape are used for every other batch of it, as by a traced program."""

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.known: dict[Any, tuple[ndarray, ndarray]] = {}

    def forward(self, source_ids, target_ids, tap):
        pad_id = self.config.pad_id
        masks = source_ids != pad_id, reference_numpy.target_padding_mask(target_ids, pad_id)
        return self.model(source_ids, target_ids, *self.known.setdefault(tuple(m.shape for m in masks), masks), tap=tap)


@attack(FAILS, stages=STAGES)
class FirstWeightsForEver(Sound):
    """The weights of the first model of a config that is built in a process are those of every later one too."""

    first: Any = {}

    def load(self, config, weights, dtype):
        copies = {name: array.copy() for name, array in weights.items()}
        super().load(config, self.first.setdefault((type(self), config), copies), dtype)


@attack(FAILS, stages=STAGES)
class StaleFile(Sound):
    """The logits of a batch are read from a file that is named by its shape, and that an earlier model has written."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        path = stale_files() / f"{source_ids.shape}{target_ids.shape}.npy"
        logits = super().forward(source_ids, target_ids, tap)
        if not path.exists():
            np.save(path, logits)
        return np.load(path).astype(logits.dtype)


@cache
def stale_files() -> Path:
    """Return a folder for files, which goes with the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@attack(TOLERATED, stages=STAGES)
class OneBuffer(Sound):
    """Everything that is returned or shown is a view of one buffer, which the next call overwrites."""

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
