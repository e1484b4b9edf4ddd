"""The state in which a training run starts: a new one, or the one in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import reference_numpy as ref
from transformer_parity.apps.train import corpora
from transformer_parity.apps.train.batches import Batches, number
from transformer_parity.apps.train.corpora import Corpus, Recipe
from transformer_parity.apps.train.learner import Learner, Where
from transformer_parity.apps.train.log import MODEL, checkpoints, step_of
from transformer_parity.apps.train.run import Data, Observer, RunPlan, TrainingRun
from transformer_parity.engine.system.machine import check_memory
from transformer_parity.transformer.sentences.subwords import SPECIAL, Subwords
from transformer_parity.transformer.sentences.vocabulary import LONGEST
from transformer_spec.checkpoint import load_checkpoint
from transformer_spec.checks import check_integer, check_number
from transformer_spec.config import TransformerConfig
from transformer_spec.training_config import TrainingConfig, TrainingState


@dataclass(frozen=True)
class Setup:
    """A run before its first step."""

    corpus: Corpus
    config: TransformerConfig
    settings: TrainingConfig
    weights: Mapping[str, Any]
    plan: RunPlan
    tokens_per_batch: int
    seed: int
    state: TrainingState | None = None
    position: Sequence[int] = (0, 0)  # in the data: epoch and batch
    seconds: float = 0.0

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return next(iter(self.weights.values())).dtype.name

    def start(self, backends: Sequence[str], folder: Path, observer: Observer, where: Where) -> TrainingRun:
        """Build batches and learners; several learners run in lockstep, without dropout.

        Raises:
            TypeError: The position in the data is none.
            ValueError: The text does not fit the model, or a dtype or device the backend.
            RuntimeError: A device is not visible.
        """
        vocabulary = self.corpus.vocabulary.numbered(self.config)
        training, held_out = (number(pairs, vocabulary) for pairs in (self.corpus.training, self.corpus.held_out))
        slices, most = self.settings.accumulation_steps, max(self.tokens_per_batch, LONGEST)
        batches = Batches(training, self.config, self.tokens_per_batch, self.seed, slices, most)
        validation = Batches(held_out, self.config, self.tokens_per_batch, max_length=most)
        positions = max(rows * max(widths) for rows, *widths in batches.shapes) // slices
        layers = self.config.num_encoder_layers + self.config.num_decoder_layers
        kept = self.config.d_model * layers * (1 if self.settings.activation_checkpointing else 8)  # for the gradient
        check_memory(4 * positions * kept, f"a batch of {self.tokens_per_batch:,} tokens")
        batches.seek(self.position)
        config = self.config
        if len(backends) > 1:  # no two frameworks draw the same random numbers
            config = config.replace(dropout=ref.DropoutRates(embedding=0.0, residual=0.0))
        learners = [Learner(name, config, self.weights, self.settings, self.seed, where) for name in backends]
        if self.state is not None:
            for learner in learners:
                learner.trainer.load_state(self.state)
        data = Data(self.corpus, batches, validation)
        return TrainingRun(learners, data, self.plan, folder, observer, self.seconds)


@dataclass(frozen=True)
class Changes:
    """How a new run differs from its recipe.

    Attributes:
        preset: The conventions of the model.
        steps: The length of the run; None keeps the recipe's.
        model: Fields of the model's config. ``dropout`` may be one rate, for the sites of the preset.
        training: Fields of the training config.
        run: Fields of ``RunPlan``, and ``tokens_per_batch``.
        seed: Of weights, batches and dropout.
    """

    preset: str = "paper_base"
    steps: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def begin(corpus: Corpus, recipe: Recipe, changes: Changes) -> Setup:
    """Return a new run by a recipe, with some of its values changed.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or the sizes describe no model.
    """
    check_integer("seed", changes.seed, minimum=0)
    config = _model_config(recipe, corpus.vocabulary, changes)
    parameters = ref.count_parameters(config)
    check_memory(16 * parameters, f"training {parameters:,} parameters")  # with their gradients and both moments
    steps = changes.steps or recipe.steps
    # A run of another length cools down over the same share of it.
    cooldown = round(recipe.training["cooldown_steps"] * steps / recipe.steps)
    settings = TrainingConfig(total_steps=steps, **{**recipe.training, "cooldown_steps": cooldown, **changes.training})
    run = dict(changes.run)
    tokens = check_integer("tokens_per_batch", run.pop("tokens_per_batch", recipe.tokens_per_batch), minimum=1)
    tenth = max(1, steps // 10)
    average = run.get("average", recipe.average)
    plan = RunPlan(
        **{"validate_every": tenth, "save_every": tenth, "keep": average, "average": average, **run}, steps=steps
    )
    if plan.keep < plan.average:
        raise ValueError(f"keep must be at least average {plan.average}: got {plan.keep}")
    weights = ref.init_weights(config, changes.seed)
    return Setup(corpus, config, settings, weights, plan, tokens, changes.seed)


def resume(
    path: Path,
    folder: Path,
    steps: int | None,
    plan: Mapping[str, Any],
    moved: Mapping[str, Sequence[Path] | None],
) -> Setup:
    """Return a run in the state of a checkpoint.

    Args:
        path: A run's folder, where the newest checkpoint counts, or one checkpoint.
        folder: Where the run is continued.
        steps: The new end of the run; None keeps it.
        plan: How often to validate and save, and how many to keep and to average; all others stay.
        moved: The text of the run, ``files`` and ``held_out``, where it is now; None is where it was.

    Raises:
        OSError: There is no such checkpoint, or the text of the run cannot be read.
        ValueError: The checkpoint is damaged or not from a run, the text has changed, all steps are taken, or the
            folder holds later checkpoints of the run.
    """
    if path.is_dir():
        found = checkpoints(path)
        if not found:
            raise FileNotFoundError(f"{path} holds no checkpoint")
        path = found[-1]
    checkpoint = load_checkpoint(path)
    progress = checkpoint.progress
    try:
        if not isinstance(checkpoint.vocabulary, bytes):
            raise KeyError("vocabulary")
        kept = RunPlan(**progress["plan"])
        position, tokens, seconds = progress["position"], progress["tokens_per_batch"], progress["seconds"]
        check_integer("tokens_per_batch", tokens, minimum=1)
        check_number("seconds", seconds, "at least 0", lambda x: x >= 0)
        corpus = corpora.rebuild(progress["corpus"], Subwords(checkpoint.vocabulary), moved)
    except KeyError as error:
        raise ValueError(f"{path} cannot be resumed: it lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be resumed: {error}") from error
    changes, settings = dict(plan), checkpoint.settings
    if steps is not None:
        changes["steps"] = steps
        # As in a new run of that length: the same share of it is cool-down.
        cooldown = round(settings.cooldown_steps * steps / (settings.total_steps or steps))
        settings = replace(settings, total_steps=steps, cooldown_steps=cooldown)
    kept = replace(kept, **changes)
    kept = replace(kept, keep=max(kept.keep, kept.average))
    finished = (path.parent / MODEL).exists()  # or else it was stopped before the final weights could be written
    if checkpoint.state.step > kept.steps or (checkpoint.state.step == kept.steps and finished):
        raise ValueError(f"{path} is the end of a run of {kept.steps} steps: ask for more with --steps")
    later = [other.name for other in checkpoints(path.parent) if step_of(other) > checkpoint.state.step]
    if folder == path.parent and later:
        raise ValueError(f"this run has gone on beyond {path.name}, to {later[-1]}: branch off with --out DIR")
    return Setup(
        corpus,
        checkpoint.config,
        settings,
        checkpoint.weights,
        kept,
        tokens,
        checkpoint.state.seed,
        checkpoint.state,
        position,
        seconds,
    )


def _model_config(recipe: Recipe, vocabulary: Subwords, changes: Changes) -> TransformerConfig:
    """Return the conventions of a preset at the sizes of a recipe, with any of them replaced."""
    vocab_size = vocabulary.size + SPECIAL
    fields = {
        "source_vocab_size": vocab_size,
        "target_vocab_size": vocab_size,
        "d_k": None,
        "d_v": None,
        **recipe.model,
        **changes.model,
    }
    rate = fields.pop("dropout", recipe.dropout)
    config = TransformerConfig.preset(changes.preset, **fields)
    if isinstance(rate, Mapping):
        return config.replace(dropout=rate)
    sites = {site: rate if used else 0.0 for site, used in vars(config.dropout).items()}  # those of the preset
    return config.replace(dropout=ref.DropoutRates(**sites))
