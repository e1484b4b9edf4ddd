"""A training run, either with one backend or with multiple backends in lockstep.

A run writes a log. With one backend, the run also writes checkpoints and the final weights.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.apps.train.batches import Batches
from transformer_parity.apps.train.corpora import Corpus
from transformer_parity.apps.train.learner import Learner
from transformer_parity.apps.train.log import LOG, MODEL, Log, checkpoints, step_of, was_renamed
from transformer_parity.engine.system.errors import UsageError, printable
from transformer_parity.engine.system.interrupts import Stop
from transformer_parity.transformer.sentences.vocabulary import LONGEST
from transformer_spec.checkpoint import average_weights, save_checkpoint
from transformer_spec.checks import check_integer
from transformer_spec.files import save_weights
from transformer_spec.names import count_parameters

MOST_STEPS = 100  # maximum number of steps between two exchanges in which the processes agree on whether to stop
PATIENCE = 0.5  # minimum time in seconds between two reads of losses from the device
SAMPLE = 200  # number of held-out sentences to translate at each validation
LONGER = 10  # maximum number of tokens by which a translation may exceed the longest held-out target


@dataclass(frozen=True)
class RunPlan:
    """The length of a run, the intervals between validations and between checkpoints, and the handling of checkpoints.

    Attributes:
        steps: Number of steps.
        validate_every: Number of steps between two validations.
        save_every: Number of steps between two checkpoints.
        keep: Maximum number of checkpoints to keep. The oldest checkpoints are deleted first.
        average: Number of most recent checkpoints to average for the final weights.
    """

    steps: int
    validate_every: int
    save_every: int
    keep: int
    average: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_integer(name, value, minimum=1)


@dataclass(frozen=True)
class Status:
    """The progress of a run.

    Attributes:
        step: Number of steps taken so far.
        losses: Dict from backend names to the losses at the last step.
        learning_rate: Learning rate at the last step.
        tokens_per_second: Average number of target tokens per second since the previous status.
    """

    step: int
    losses: Mapping[str, float]
    learning_rate: float
    tokens_per_second: float


@dataclass
class Observer:
    """Callbacks of a run.

    Attributes:
        status: Function that is called with the run's status whenever the losses have been read from the devices.
        say: Function that is called with each message to show to the user.
    """

    status: Callable[[Status], None]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """A corpus, with batches of its training data and its held-out data."""

    corpus: Corpus
    batches: Batches
    held_out: Batches


class TrainingRun:
    """A training run with one learner or with multiple learners that use the same batches.

    Args:
        learners: One learner for each backend.
        data: Training data and held-out data.
        plan: Number of steps and frequency of validation and checkpoints.
        directory: Directory for checkpoints, log, and final weights.
        observer: Callbacks for progress and messages.
        seconds: Training time in seconds before the run was resumed.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        data: Data,
        plan: RunPlan,
        directory: Path,
        observer: Observer,
        seconds: float = 0.0,
    ) -> None:
        self.learners = learners
        self.corpus = data.corpus
        self.batches = data.batches
        self.held_out = data.held_out
        self.plan = plan
        self.directory = directory
        self.observer = observer
        self.group = learners[0].where.group
        self.log = self._open_log()
        self._pending: list[tuple[int, float, list[Any]]] = []
        self._read_at = time.perf_counter()
        self.seconds = seconds  # training time in seconds, including time before the run was resumed
        self._began = self.step  # first step of this run, which is not 0 in a resumed run
        self._saved: int | None = None  # step of the last checkpoint that this run wrote
        self._step_seconds = PATIENCE  # average time per step in seconds, measured when losses were last read
        # The next step at which the processes agree on whether to stop, and their latest decision.
        self._ask_at, self._stopping = 0, False

    @property
    def step(self) -> int:
        """Number of steps that have been taken."""
        return self.learners[0].trainer.step

    @property
    def description(self) -> str:
        """A summary of the corpus, the model, the batches, the devices, and the output directory."""
        learner, batches = self.learners[0], self.batches
        config, plan = learner.model.config, learner.where.plan
        lines = [
            f"{self.corpus.task}: {len(self.corpus.training):,} pairs, {len(self.corpus.held_out):,} held out, "
            f"vocabulary {config.target_vocab_size:,}; {count_parameters(config) / 1e6:.2f} M parameters; "
            f"batches per epoch: {batches.per_epoch:,}, shapes: {len(batches.shapes)}; "
            f"output: {printable(str(self.directory))}",
        ]
        if plan is not None:
            processes = f"{self.group.size} processes" if self.group.size > 1 else "1 process"
            lines.append(f"{plan.devices} devices ({plan}) in {processes}")
        if batches.dropped:
            most = min(config.max_positions or math.inf, max(batches.tokens_per_batch, LONGEST))
            lines.append(f"skipping {batches.dropped:,} pairs that are longer than {most:,} tokens")
        if len(self.learners) > 1:
            lines.append("in lockstep: same weights, same batches, no dropout; only the log and the curve are saved")
        if self.step:
            lines.append(f"resuming from step {self.step:,}")
        return "\n".join(lines)

    def go(self, stop: Stop, stop_at: int | None = None) -> None:
        """Train and save checkpoints until the last step, until step ``stop_at``, or until ``stop`` is set."""
        last = min(self.plan.steps, stop_at or self.plan.steps)
        lead = self.learners[0]
        self.log.write(
            "start",
            step=self.step,
            task=self.corpus.task,
            backends=[learner.backend for learner in self.learners],
            config=lead.model.config.to_dict(),
            settings=lead.trainer.settings.to_dict(),
            batch_shapes=self.batches.shapes,
            environment={learner.backend: learner.environment for learner in self.learners},
        )
        self._read_at = time.perf_counter()
        try:
            while self.step < last and not self._stops(stop):
                self._take_step()
                if self.step % self.plan.save_every == 0:
                    self._save()
                if self.step % self.plan.validate_every == 0 and self.step < self.plan.steps:
                    self._validate(SAMPLE)
            self._read_losses()
            if self._saved != self.step:
                self._save()
        finally:
            self.log.close()

    def finish(self) -> dict[str, dict[str, float]]:
        """Write the final weights, validate on all held-out data, and return each backend's loss and score."""
        self.log = self._open_log()
        try:
            averaged, weights = self._write_model() if len(self.learners) == 1 and self.group.rank == 0 else (0, {})
            reached = self._validate(None)
            if averaged > 1:
                reached |= self._validate_average(averaged, weights)
            self.log.write("end", step=self.step, seconds=self.seconds, reached=reached)
        finally:
            self.log.close()
        return reached

    def _open_log(self) -> Log:
        """Open the log. If the run has multiple processes, only the first process writes to the log."""
        return Log(self.directory / LOG if self.group.rank == 0 else Path(os.devnull))

    def _stops(self, stop: Stop) -> bool:
        """Return whether to stop before the next step.

        Multiple processes must stop at the same step. To reduce communication, the processes exchange signals only
        about every ``PATIENCE`` seconds, but at least every ``MOST_STEPS`` steps.
        """
        if self.group.size > 1 and self.step >= self._ask_at:
            own = stop.signal or 0
            signals, steps = self.learners[0].summed([own, 1 + int(PATIENCE / max(self._step_seconds, 1e-9))])
            self._ask_at = self.step + min(MOST_STEPS, int(steps) // self.group.size)
            self._stopping = signals > 0
            stop.signal = own or (signal.SIGTERM if self._stopping else None)
        return self._stopping if self.group.size > 1 else bool(stop.signal)

    def _take_step(self) -> None:
        batch = next(self.batches)
        results = [learner.train_step(batch) for learner in self.learners]
        lead = self.learners[0]
        learning_rate = lead.trainer.settings.learning_rate(self.step, lead.model.config.d_model)
        self._pending.append((self.step, learning_rate, results))
        if time.perf_counter() - self._read_at > PATIENCE:
            self._read_losses()

    def _read_losses(self) -> None:
        """Wait until the devices have computed the pending steps, and log the results.

        Raises:
            UsageError: If a loss is not finite.
        """
        if not self._pending:
            return
        names = [learner.backend for learner in self.learners]
        tokens = 0
        for step, learning_rate, results in self._pending:
            losses = {name: float(result.loss) for name, result in zip(names, results, strict=True)}
            counted, norm = int(results[0].tokens), float(results[0].gradient_norm)
            self.log.write(
                "step", step=step, loss=losses, learning_rate=learning_rate, gradient_norm=norm, tokens=counted
            )
            tokens += counted
            if not all(map(math.isfinite, losses.values())):
                raise self._diverged("the loss is not finite", step)
        count = len(self._pending)
        self._pending.clear()
        now = time.perf_counter()
        elapsed, self._read_at = now - self._read_at, now
        self._step_seconds = elapsed / count
        self.seconds += elapsed
        self.log.write("time", step=self.step, seconds=self.seconds, tokens_per_second=tokens / elapsed)
        self.log.flush()
        self.observer.status(Status(self.step, losses, learning_rate, tokens / elapsed))

    def _diverged(self, what: str, step: int) -> UsageError:
        """Return the error to raise if the run has diverged."""
        self.log.flush()
        saved = checkpoints(self.directory)[-1:]
        last = f" (the last checkpoint is {saved[0].name})" if saved else ""
        return UsageError(f"{what} at step {step}{last}; try a smaller learning_rate_factor, or clip_norm=1")

    def _validate(self, sample: int | None, averaged: int = 0) -> dict[str, dict[str, float]]:
        """Return each learner's held-out loss and score.

        Args:
            sample: Number of sentences to translate for the score. If None, all sentences are translated. The loss
                always uses all sentences.
            averaged: Number of checkpoints that were averaged to obtain the weights. Used only in the log.
        """
        self._read_losses()
        found = {}
        pairs = self.corpus.held_out[:sample]
        vocabulary = self.corpus.vocabulary.numbered(self.learners[0].model.config)
        max_length = longest_translation(self.held_out)
        for learner in self.learners:
            loss = learner.validate(self.held_out.once())
            if not math.isfinite(loss):
                raise self._diverged("the held-out loss is not finite", self.step)
            try:
                lines = learner.translate([source for source, _ in pairs], vocabulary, max_length)
            except ValueError as error:  # the search rejects logits that are not finite
                raise self._diverged(f"held-out sentences cannot be translated ({error})", self.step) from error
            score = self.corpus.score(lines, [target for _, target in pairs])
            found[learner.backend] = {"loss": loss, self.corpus.metric: score}
            found_by = {"backend": learner.backend, "averaged": averaged, "sentences": len(pairs)}
            self.log.write("validation", step=self.step, loss=loss, score=score, **found_by)
            self.observer.say(
                f"step {self.step:,}  {learner.backend}: held-out loss {loss:.3f}, "
                f"{self.corpus.metric} {score:.1f}{'%' * (self.corpus.task == 'dates')} on {len(pairs):,} sentences"
            )
        self._read_at = time.perf_counter()  # exclude validation from the training time
        return found

    def _save(self) -> None:
        """Write a checkpoint, and delete old checkpoints. Runs of multiple backends in lockstep are not saved."""
        if len(self.learners) > 1:
            return
        self._read_losses()
        progress = {
            "corpus": self.corpus.origin,
            "position": list(self.batches.position),
            "tokens_per_batch": self.batches.tokens_per_batch,
            "plan": asdict(self.plan),
            "seconds": self.seconds,
        }
        path = self.directory / f"checkpoint-{self.step:07}.safetensors"
        # All processes must call ``checkpoint``, because it gathers the shards of all processes.
        checkpoint = self.learners[0].checkpoint(progress, self.corpus.vocabulary.model)
        self._saved = self.step
        if self.group.rank != 0:
            return
        if not all(np.isfinite(array).all() for array in checkpoint.weights.values()):
            raise self._diverged("weights are not finite", self.step)
        save_checkpoint(path, checkpoint)
        if self.step > self._began:  # the final weights that an earlier run wrote to this directory are now outdated
            (self.directory / MODEL).unlink(missing_ok=True)
        self.log.write("checkpoint", step=self.step, file=path.name)
        self.log.flush()
        kept = {path, *self._regular()[-self.plan.keep :]}
        for old in checkpoints(self.directory):
            if old not in kept and not was_renamed(old):
                old.unlink()
        self._read_at = time.perf_counter()

    def _regular(self) -> list[Path]:
        """Return the checkpoints, except those that were written only because the run was interrupted.

        Only these checkpoints are averaged, so that interruptions do not affect the final weights.
        """
        plan = self.plan
        steps = {path: step_of(path) for path in checkpoints(self.directory)}
        return [path for path, step in steps.items() if step == plan.steps or (step and step % plan.save_every == 0)]

    def _write_model(self) -> tuple[int, Mapping[str, ndarray]]:
        """Write the final weights. Return the number of checkpoints that were averaged, and the weights."""
        chosen = self._regular()[-self.plan.average :]
        config, weights = average_weights(chosen)
        save_weights(self.directory / MODEL, config, weights, vocabulary=self.corpus.vocabulary.model)
        return len(chosen), weights

    def _validate_average(self, count: int, weights: Mapping[str, ndarray]) -> dict[str, dict[str, float]]:
        learner = self.learners[0]
        self.observer.say(f"average of the last {count} checkpoints:")
        if learner.where.plan is None:
            own = learner.model.export_weights()
            learner.set_weights(weights)
            found = self._validate(None, averaged=count)
            learner.set_weights(own)
        else:  # use one device, because the other processes have ended
            self.learners = [learner.on_one_device(weights)]
            found = self._validate(None, averaged=count)
            self.learners = [learner]
        return {f"{learner.backend}, {count} checkpoints averaged": found[learner.backend]}


def longest_translation(held_out: Batches) -> int:
    """Return the maximum number of tokens in the translation of a held-out sentence."""
    return max(target_width for _, _, target_width in held_out.shapes) + LONGER
