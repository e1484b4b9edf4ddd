"""Local steps: workers train alone for H steps and then average, by DiLoCo (Douillard et al., 2023, arXiv 2311.08105).

    python docs/examples/local_steps.py                    the table of docs/how-to/several-devices.md
    python docs/examples/local_steps.py --backend torch    by another backend

All workers are in one process and compute one after another: what several processes have to equal.
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
SIZES = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 1, "num_decoder_layers": 1}  # trained in a minute
SETTINGS = {"warmup_steps": 100}
HELD_OUT = 500  # dates that a run is judged by


@dataclass
class Outer:
    """Nesterov's method, whose gradient is how far the workers have moved, as ``torch.optim.SGD`` has it.

    Attributes:
        rate: The learning rate; the paper has 0.7.
        momentum: Of the velocity; the paper has 0.9.
    """

    rate: float = 0.7
    momentum: float = 0.9
    velocity: dict[str, ndarray] = field(default_factory=dict)

    def step(self, weights: Weights, found: Sequence[Weights], tokens: Sequence[int]) -> Weights:
        """Return the weights from which all workers go on.

        Args:
            weights: From which they began.
            found: Where each of them is now.
            tokens: How many target tokens each has seen since; it counts by these.
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
    """Take a local step of each worker on its rows of each batch, and yield the weights after each average.

    Args:
        package: Whose ``set_weights`` puts weights into a model.
        trainers: The workers; all begin with the same weights.
        batches: Of each, worker k of K has the k-th K-th of the rows, as on a plan with data=K.
        local_steps: How many steps the workers take between two averages, H.
        outer: What is made of the average.
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
    """Runs on the dates, from the same weights and on the same batches.

    Args:
        backend: Which package trains.
        steps: Of each run.
        workers: How many there are.
    """

    def __init__(self, backend: str, steps: int, workers: int) -> None:
        corpus = dates(0)
        self.backend, self.workers = backend, workers
        self.setup: Setup = begin(corpus, RECIPES["dates"], Changes(steps=steps, fields=SIZES, settings=SETTINGS))
        self.vocabulary = corpus.vocabulary.numbered(self.setup.config)
        self.training = number(corpus.training, self.vocabulary)
        self.pairs = corpus.held_out[:HELD_OUT]
        self.score = corpus.score

    def learner(self, seed: int = 0) -> Learner:
        """Return a model with the weights from which all begin, and its trainer."""
        setup = self.setup
        return Learner(self.backend, setup.config, setup.weights, setup.settings, seed, HERE)

    def batches(self) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
        """Yield the batches of a run."""
        setup = self.setup
        batches = Batches(self.training, setup.config, setup.tokens_per_batch, setup.seed)
        for batch in islice(batches, setup.plan.steps):
            yield batch.source_ids, batch.target_ids, batch.labels

    def ordinary(self) -> list[str]:
        """Return what training that sums the gradient in each step has reached."""
        learner = self.learner()
        for batch in self.batches():
            learner.trainer.train_step(*batch)
        return self.reached(learner)

    def with_local_steps(self, count: int, outer: Outer) -> list[str]:
        """Return what training that averages after so many steps has reached."""
        learners = [self.learner(seed) for seed in range(self.workers)]
        trainers = [learner.trainer for learner in learners]
        for _ in train(learners[0].package, trainers, self.batches(), count, outer):
            pass
        return self.reached(learners[0])

    def reached(self, learner: Learner) -> list[str]:
        """Return the loss of a model, and how many dates it gets exactly right."""
        held_out = Batches(number(self.pairs, self.vocabulary), self.setup.config, self.setup.tokens_per_batch)
        loss = learner.validate(held_out.once())
        lines = learner.translate([source for source, _ in self.pairs], self.vocabulary, longest_translation(held_out))
        return [f"{loss:.3f}", f"{self.score(lines, [target for _, target in self.pairs]):.1f} %"]

    def sent(self, count: int) -> str:
        """Return the MiB that each worker sends in a run, of all gradients or of all weights after so many steps."""
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
