"""The initial state of a training run, which is either new or loaded from a checkpoint."""

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
    """The state of a run before its first step.

    Attributes:
        corpus: Training data and held-out data.
        config: Config of the model.
        settings: Settings of the trainer.
        weights: Initial weights, one array per canonical name.
        plan: Length of the run, intervals between validations and between checkpoints, and handling of checkpoints.
        tokens_per_batch: Maximum number of positions per batch.
        seed: Random seed for weights, batches, and dropout.
        state: Optimizer state of a resumed run, or None.
        position: Position in the data, as an epoch and a batch index.
        seconds: Training time in seconds before the run was resumed.
    """

    corpus: Corpus
    config: TransformerConfig
    settings: TrainingConfig
    weights: Mapping[str, Any]
    plan: RunPlan
    tokens_per_batch: int
    seed: int
    state: TrainingState | None = None
    position: Sequence[int] = (0, 0)
    seconds: float = 0.0

    @property
    def dtype(self) -> str:
        """Dtype of the weights."""
        return next(iter(self.weights.values())).dtype.name

    def start(self, backends: Sequence[str], directory: Path, observer: Observer, where: Where) -> TrainingRun:
        """Build the batches and one learner per backend, and return the run.

        Multiple backends train in lockstep and without dropout.

        Raises:
            TypeError: If the position in the data is invalid.
            ValueError: If the model does not support the corpus, for example because all sentences are too long, or if
                the backend does not support the dtype or the device.
            RuntimeError: If a device is not available.
        """
        vocabulary = self.corpus.vocabulary.numbered(self.config)
        training, held_out = (number(pairs, vocabulary) for pairs in (self.corpus.training, self.corpus.held_out))
        micro_batches, most = self.settings.accumulation_steps, max(self.tokens_per_batch, LONGEST)
        batches = Batches(training, self.config, self.tokens_per_batch, self.seed, micro_batches, most)
        validation = Batches(held_out, self.config, self.tokens_per_batch, max_length=most)
        positions = max(rows * max(widths) for rows, *widths in batches.shapes) // micro_batches
        layers = self.config.num_encoder_layers + self.config.num_decoder_layers
        # Estimate of how many activations are stored per position for the backward pass.
        kept = self.config.d_model * layers * (1 if self.settings.activation_checkpointing else 8)
        check_memory(4 * positions * kept, f"a batch of {self.tokens_per_batch:,} tokens")
        batches.seek(self.position)
        config = self.config
        if len(backends) > 1:  # frameworks generate different random numbers, so their dropout masks would differ
            config = config.replace(dropout=ref.DropoutRates(embedding=0.0, residual=0.0))
        learners = [Learner(name, config, self.weights, self.settings, self.seed, where) for name in backends]
        if self.state is not None:
            for learner in learners:
                learner.trainer.load_state(self.state)
        data = Data(self.corpus, batches, validation)
        return TrainingRun(learners, data, self.plan, directory, observer, self.seconds)


@dataclass(frozen=True)
class Changes:
    """The user's changes to a recipe.

    Attributes:
        preset: Preset that defines the model's conventions.
        steps: Number of steps, or None to use the recipe's value.
        model: New values of fields of the model config. ``dropout`` may be a number, which sets the dropout rate
            wherever the preset uses dropout.
        training: New values of fields of the training config.
        run: New values of fields of ``RunPlan`` and of ``tokens_per_batch``.
        seed: Random seed for weights, batches, and dropout.
    """

    preset: str = "paper_base"
    steps: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


def begin(corpus: Corpus, recipe: Recipe, changes: Changes) -> Setup:
    """Return the initial state of a new run that follows a recipe with the user's changes.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting is out of range or the config is invalid.
    """
    check_integer("seed", changes.seed, minimum=0)
    config = _model_config(recipe, corpus.vocabulary, changes)
    parameters = ref.count_parameters(config)
    # Each parameter takes 16 bytes: the weight, the gradient, and both moments in float32.
    check_memory(16 * parameters, f"training {parameters:,} parameters")
    steps = changes.steps or recipe.steps
    # If the run's length differs from the recipe's, scale the cool-down so that it covers the same fraction of the run.
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
        raise ValueError(f"keep must be at least {plan.average}, the value of average: got {plan.keep}")
    weights = ref.init_weights(config, changes.seed)
    return Setup(corpus, config, settings, weights, plan, tokens, changes.seed)


def resume(
    path: Path,
    directory: Path,
    steps: int | None,
    plan: Mapping[str, Any],
    moved: Mapping[str, Sequence[Path] | None],
) -> Setup:
    """Return the state of a run that continues from a checkpoint.

    Args:
        path: Checkpoint to load, or a run directory, in which case the last checkpoint in this directory is loaded.
        directory: Output directory of the resumed run.
        steps: New total number of steps, or None to use the number in the checkpoint.
        plan: Changed fields of ``RunPlan``. All other fields are taken from the checkpoint.
        moved: New paths of the run's text files, with the keys ``files`` and ``held_out``. None
            means that the paths in the checkpoint are still valid.

    Raises:
        OSError: If the checkpoint does not exist or the run's text files cannot be read.
        ValueError: If the checkpoint is damaged or was not written by a run, if the text has changed, if the run is
            complete, or if the output directory contains later checkpoints of the run.
    """
    if path.is_dir():
        found = checkpoints(path)
        if not found:
            raise FileNotFoundError(f"{path} contains no checkpoint")
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
        raise ValueError(f"{path} cannot be resumed: the file does not contain {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be resumed: {error}") from error
    changes, settings = dict(plan), checkpoint.settings
    if steps is not None:
        changes["steps"] = steps
        # Scale the cool-down so that it covers the same fraction of the run as before the number of steps changed.
        cooldown = round(settings.cooldown_steps * steps / (settings.total_steps or steps))
        settings = replace(settings, total_steps=steps, cooldown_steps=cooldown)
    kept = replace(kept, **changes)
    kept = replace(kept, keep=max(kept.keep, kept.average))
    finished = (path.parent / MODEL).exists()  # a run may have been interrupted before it wrote the final weights
    if checkpoint.state.step > kept.steps or (checkpoint.state.step == kept.steps and finished):
        raise ValueError(
            f"{path} is the end of a run of {kept.steps} steps; to continue, specify a higher number with --steps"
        )
    later = [other.name for other in checkpoints(path.parent) if step_of(other) > checkpoint.state.step]
    if directory == path.parent and later:
        raise ValueError(
            f"{directory} already contains later checkpoints than {path.name}, up to {later[-1]}; specify a different "
            "directory with --out DIR"
        )
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
    """Return a config with the preset's conventions, the recipe's sizes, and the user's changes."""
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
    # Set the rate only for the dropout layers that the preset uses.
    sites = {site: rate if used else 0.0 for site, used in vars(config.dropout).items()}
    return config.replace(dropout=ref.DropoutRates(**sites))
