"""A model and its trainer in one backend, with an interface that accepts and returns text and NumPy arrays."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.apps.train.batches import TrainingBatch
from transformer_parity.apps.train.group import ALONE, Group
from transformer_parity.apps.translate.translator import Translator
from transformer_parity.transformer.distributed.jax_process import prepare_jax_process
from transformer_parity.transformer.ports.package import allow_dtype
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.vocabulary import Vocabulary
from transformer_spec.checkpoint import Checkpoint
from transformer_spec.config import TransformerConfig
from transformer_spec.parallel_plan import Plan
from transformer_spec.search import Search
from transformer_spec.training_config import StepResult, TrainingConfig

GREEDY = Search()
JOINING = 60  # seconds to wait for the other processes of a run to join


@dataclass(frozen=True)
class Where:
    """The devices and processes of a run.

    Attributes:
        placement: Dtype, device, and precision.
        plan: Parallelism plan for multiple devices. None for a single device.
        group: Processes of the run.
    """

    placement: Placement
    plan: Plan | None = None
    group: Group = ALONE


@contextmanager
def _ended_if_alone() -> Iterator[None]:
    """End this process if the run's other processes do not join within ``JOINING`` seconds.

    TensorFlow waits without a timeout and prevents signal handlers from running. Therefore, this function uses
    ``faulthandler``, whose watchdog thread can end the process even if no Python code can run.
    """
    faulthandler.dump_traceback_later(JOINING, exit=True, file=2)  # 2 is standard error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Learner:
    """A model and its trainer in one backend.

    On multiple devices, all processes must call the methods in the same order.
    """

    def __init__(
        self,
        backend: str,
        config: TransformerConfig,
        weights: Mapping[str, ndarray],
        settings: TrainingConfig,
        seed: int,
        where: Where,
    ) -> None:
        port = PORTS[backend]
        self.package = package = allow_dtype(port.import_package(), where.placement.dtype)
        self.backend, self.where = backend, where
        placement = where.placement
        if where.plan is not None and backend == "jax":
            prepare_jax_process()
        with _ended_if_alone() if "TF_CONFIG" in os.environ and backend == "tf" else nullcontext():
            mesh = None if where.plan is None else package.make_mesh(where.plan, placement.device)
        # TensorFlow replicates variables only if they are created in the strategy's scope.
        with getattr(mesh, "scope", nullcontext)():
            self.model = package.Transformer.from_weights(config, weights, *placement)
        self.trainer = package.Trainer(self.model, settings, seed, mesh=mesh)
        self.loaded = port.loaded(package, self.model, placement)
        self.environment: dict[str, str] = package.describe()

    def train_step(self, batch: TrainingBatch) -> StepResult:
        """Take a training step. The method may return before the device has computed the result."""
        return self.trainer.train_step(batch.source_ids, batch.target_ids, batch.labels)

    def validate(self, batches: Iterable[TrainingBatch]) -> float:
        """Return the mean cross-entropy per target token in nats."""
        sums = [self.trainer.evaluate(batch.source_ids, batch.target_ids, batch.labels) for batch in batches]
        return sum(float(loss) for loss, _ in sums) / max(sum(int(tokens) for _, tokens in sums), 1)

    def translate(
        self, lines: Sequence[str], vocabulary: Vocabulary, max_length: int, search: Search = GREEDY
    ) -> list[str]:
        """Translate lines. If a line exceeds the model's maximum length, its translation is empty.

        If the run has multiple processes, each process translates its shard of the lines but returns all translations.
        """
        config, loaded = self.model.config, self.loaded
        if self.where.plan is not None:  # the search requires the entire model on one device
            weights, placement = self.model.export_weights(), self.where.placement
            whole = self.package.Transformer.from_weights(config, weights, *placement)
            loaded = type(loaded)(self.package, whole, placement)
        most = search.max_length or max_length
        search = replace(search, max_length=min(most, config.max_positions or most))
        own = lines[self.where.group.rank :: self.where.group.size]
        translator = Translator(config, vocabulary, search, window=len(own))
        return self._gathered([translation.text for translation in translator.translate(loaded, own)], len(lines))

    def _gathered(self, own: Sequence[str], count: int) -> list[str]:
        """Gather the texts of all processes.

        The texts are distributed round robin. Each process writes its texts as bytes to its rows of a zero matrix, and
        the matrices of all processes are summed.
        """
        group, sent = self.where.group, [text.encode() for text in own]
        if group.size == 1:
            return list(own)
        own_lengths = np.zeros(count)
        own_lengths[group.rank :: group.size] = [len(text) for text in sent]
        lengths = [int(length) for length in self.summed(own_lengths.tolist())]
        found = np.zeros((count, max([1, *lengths])))
        for row, text in zip(range(group.rank, count, group.size), sent, strict=True):
            found[row, : len(text)] = [*text]
        rows = np.array(self.summed(found.ravel().tolist()), np.uint8).reshape(found.shape)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Sum each number over all processes."""
        if self.where.group.size == 1:
            return list(numbers)
        return [float(number) for number in self.loaded.summed(self.trainer.mesh, numbers)]

    def on_one_device(self, weights: Mapping[str, ndarray]) -> Learner:
        """Return a learner on a single device with the given weights."""
        trainer, where = self.trainer, Where(self.where.placement)
        return Learner(self.backend, self.model.config, weights, trainer.settings, trainer.seed, where)

    def set_weights(self, weights: Mapping[str, ndarray]) -> None:
        """Replace the weights of the model."""
        self.package.set_weights(self.model, weights)

    def checkpoint(self, progress: dict[str, Any], vocabulary: bytes) -> Checkpoint:
        """Return a checkpoint with the current state."""
        return Checkpoint(
            self.model.config,
            self.trainer.settings,
            self.model.export_weights(),
            self.trainer.export_state(),
            progress,
            vocabulary,
        )
