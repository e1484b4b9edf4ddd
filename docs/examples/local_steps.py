"""Train with local steps as in DiLoCo (Douillard et al., 2023, arXiv 2311.08105).

    python docs/examples/local_steps.py                    the table of docs/results/devices-memory.md
    python docs/examples/local_steps.py --backend torch    use a different backend

Each worker trains independently for H steps. The workers then average their weights. The script runs all workers one
after another in a single process. An implementation with multiple processes must return the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.costs import ALL_REDUCE, Collective
from transformer_parity.apps.train.batches import Batches, number
from transformer_parity.apps.train.corpora import RECIPES, dates
from transformer_parity.apps.train.learner import Learner, Where
from transformer_parity.apps.train.run import longest_translation
from transformer_parity.apps.train.start import Changes, Setup, begin
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.parallel_plan import spread

Weights = Mapping[str, ndarray]
HERE = Where(Placement("float32", "cpu"))
SIZES = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 1, "num_decoder_layers": 1}  # trains in one minute
SETTINGS = {"warmup_steps": 100}
HELD_OUT = 500  # number of dates on which each trained model is evaluated


@dataclass
class Outer:
    """The outer optimizer, Nesterov's method as in ``torch.optim.SGD``. It uses the mean weight change as the gradient.

    Attributes:
        rate: Learning rate, which is 0.7 in the DiLoCo paper.
        momentum: Momentum, which is 0.9 in the DiLoCo paper.
        velocity: Accumulated gradient of each parameter, by name. The dict is empty before the first step.
    """

    rate: float = 0.7
    momentum: float = 0.9
    velocity: dict[str, ndarray] = field(default_factory=dict)

    def step(self, weights: Weights, found: Sequence[Weights], tokens: Sequence[int]) -> Weights:
        """Return the weights after the outer step, with which all workers continue.

        Args:
            weights: Weights after the previous outer step.
            found: Current weights of each worker.
            tokens: Number of target tokens that each worker has processed since the previous outer step. The mean over
                the workers is weighted by these numbers.
        """
        shares = np.array(tokens) / sum(tokens)
        following = {}
        for name, array in weights.items():
            moved = array - sum(share * each[name] for share, each in zip(shares, found, strict=True))
            self.velocity[name] = self.momentum * self.velocity.get(name, 0.0) + moved
            step = moved + self.momentum * self.velocity[name]
            following[name] = (array - self.rate * step).astype(array.dtype)
        return following


def train(
    package: Any, trainers: Sequence[Any], batches: Iterable[Sequence[ndarray]], local_steps: int, outer: Outer
) -> Iterator[Weights]:
    """Run one local step per worker on the worker's rows of each batch, and yield the weights after each outer step.

    Args:
        package: Package that provides ``set_weights``.
        trainers: The workers, all with the same initial weights.
        batches: Training batches. Worker k of K trains on the same rows as device k of a plan with data=K.
        local_steps: Number of local steps between two outer steps, H.
        outer: Optimizer that applies the averaged change of the weights.
    """
    weights = trainers[0].model.export_weights()
    tokens, pad_id = np.zeros(len(trainers), int), trainers[0].model.config.pad_id
    for step, batch in enumerate(batches, 1):
        parts = [spread(np.asarray(ids), 1, len(trainers), pad_id)[0] for ids in batch]
        for worker, trainer in enumerate(trainers):
            tokens[worker] += int(trainer.train_step(*(part[worker] for part in parts)).tokens)
        if step % local_steps == 0:
            weights = outer.step(weights, [trainer.model.export_weights() for trainer in trainers], tokens.tolist())
            for trainer in trainers:
                package.set_weights(trainer.model, weights)
            tokens[:] = 0
            yield weights


class Comparison:
    """A comparison of training runs on the dates task. All runs use the same initial weights and the same batches.

    Args:
        backend: Name of the backend that trains.
        steps: Number of steps in each run.
        workers: Number of workers.
    """

    def __init__(self, backend: str, steps: int, workers: int) -> None:
        corpus = dates(0)
        self.backend, self.workers = backend, workers
        self.setup: Setup = begin(corpus, RECIPES["dates"], Changes(steps=steps, model=SIZES, training=SETTINGS))
        self.vocabulary = corpus.vocabulary.numbered(self.setup.config)
        self.training = number(corpus.training, self.vocabulary)
        self.pairs = corpus.held_out[:HELD_OUT]
        self.score = corpus.score

    def learner(self, seed: int = 0) -> Learner:
        """Return a new trainer, whose model has the initial weights."""
        setup = self.setup
        return Learner(self.backend, setup.config, setup.weights, setup.settings, seed, HERE)

    def batches(self) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
        """Yield the batches of a run as source IDs, target IDs, and labels."""
        setup = self.setup
        batches = Batches(self.training, setup.config, setup.tokens_per_batch, setup.seed)
        for batch in islice(batches, setup.plan.steps):
            yield batch.source_ids, batch.target_ids, batch.labels

    def ordinary(self) -> list[str]:
        """Train without local steps, and return the held-out loss and the percentage of correct dates."""
        learner = self.learner()
        for batch in self.batches():
            learner.trainer.train_step(*batch)
        return self.reached(learner)

    def with_local_steps(self, count: int, outer: Outer) -> list[str]:
        """Train with ``count`` local steps per outer step, and return the loss and the percentage of correct dates."""
        learners = [self.learner(seed) for seed in range(self.workers)]
        trainers = [learner.trainer for learner in learners]
        for _ in train(learners[0].package, trainers, self.batches(), count, outer):
            pass
        return self.reached(learners[0])

    def reached(self, learner: Learner) -> list[str]:
        """Return the held-out loss of a model and the percentage of dates that the model converts correctly."""
        held_out = Batches(number(self.pairs, self.vocabulary), self.setup.config, self.setup.tokens_per_batch)
        loss = learner.validate(held_out.once())
        lines = learner.translate([source for source, _ in self.pairs], self.vocabulary, longest_translation(held_out))
        return [f"{loss:.3f}", f"{self.score(lines, [target for _, target in self.pairs]):.1f}%"]

    def sent(self, count: int) -> str:
        """Return the MiB that each worker sends during a run if the workers communicate every ``count`` steps."""
        numbers = ref.count_parameters(self.setup.config)
        once = 4 * Collective(ALL_REDUCE, "weights", "data", self.workers, numbers).sent
        return f"{once * (self.setup.plan.steps // count) / 2**20:,.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=PORTS, default="numpy")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--local", type=int, nargs="+", default=[1, 10, 50], metavar="H")
    options = parser.parse_args()
    runs = Comparison(options.backend, options.steps, options.workers)
    print("| | each sends, MiB | loss, mean | exact | loss, Nesterov | exact |\n|---|---:|---:|---:|---:|---:|")
    print(f"| ordinary | {runs.sent(1)} | {' | '.join(runs.ordinary())} | | |", flush=True)
    for count in options.local:
        reached = [*runs.with_local_steps(count, Outer(1.0, 0.0)), *runs.with_local_steps(count, Outer())]
        print(f"| H = {count} | {runs.sent(count)} | {' | '.join(reached)} |", flush=True)


if __name__ == "__main__":
    main()
