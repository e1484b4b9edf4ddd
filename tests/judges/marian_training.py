"""Compare gradients and steps of Adam with Marian's, from the weights of the same model and for the same batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from reference_numpy import layers
from reference_numpy.optimizer import Adam, clip_factor, global_norm
from reference_numpy.weights import parameters
from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.containers import npz
from transformer_spec.config import DropoutRates
from transformer_spec.training_config import TrainingConfig

from .marian_program import BASE, Trained, flags, padded, read

SMOOTHING, RATE, EPSILON, STEPS = 0.1, 1e-3, 1e-3, 4
ALIGNED = 64  # Marian starts each parameter at a multiple of 64 values
OPTIONS = [
    *("--cpu-threads", 1, "--workspace", 256, "--maxi-batch", 1, "--maxi-batch-sort", "none", "--shuffle", "none"),
    *("--mini-batch-round-up=false", "--save-freq", "1u", "--max-length", 100, "--cost-type", "ce-mean-words"),
    *("--label-smoothing", SMOOTHING, "--learn-rate", RATE),
]
right_backward = layers.layer_norm_backward


def marians_backward(
    x: ndarray, scale: ndarray, epsilon: float, dy: ndarray, kind: str = "standard"
) -> tuple[ndarray, ndarray, ndarray]:
    """Return the gradients that Marian computes for a layer norm.

    ``LayerNormalizationGrad`` in src/tensors/cpu/tensor_operators.cpp and src/tensors/gpu/tensor_operators.cu sums the
    gradients before it multiplies them by the scale. The result is right only if all scales are equal.
    """
    dx, dscale, dbias = right_backward(x, np.ones_like(scale), epsilon, dy, kind)
    return scale * dx, dscale, dbias


@contextmanager
def backward_of_norms(function: Callable[..., Any]) -> Iterator[None]:
    """Replace the backward pass of layer norm in the NumPy package."""
    layers.layer_norm_backward = function
    try:
        yield
    finally:
        layers.layer_norm_backward = right_backward


def with_equal_scales(path: Path, to: Path) -> Path:
    """Write a copy of a model in which all scales of layer norms are 1."""
    arrays = npz.read(path)
    npz.write(to, {name: np.ones_like(array) if "_ln_scale" in name else array for name, array in arrays.items()})
    return to


class Steps:
    """Steps of Adam from the weights of an imported model, with one batch.

    Args:
        imported: Model. Its added padding token is not updated, because Marian's decoder starts from zeros.
        sources: Source sentences.
        targets: Target sentences.
    """

    def __init__(self, imported: Imported, sources: list[str], targets: list[str]) -> None:
        vocabulary, self.pad_id = imported.vocabulary, imported.config.pad_id
        assert vocabulary is not None
        size = self.pad_id  # the padding token is the last one
        # Marian smooths over all tokens. Without the padding token, this is the same as smoothing over the other ones.
        config = imported.config.replace(
            label_smoothing=SMOOTHING * (size - 1) / size,
            label_smoothing_kind="off_target_and_pad",
            dropout=DropoutRates(embedding=0.0, attention=0.0, residual=0.0, feed_forward=0.0),
        )
        source_ids = padded([vocabulary.ids(line) for line in sources], self.pad_id)
        labels = padded([vocabulary.target_ids(line) for line in targets], self.pad_id)
        target_ids = np.concatenate([np.full((len(labels), 1), config.bos_id), labels[:, :-1]], axis=1)
        self.batch = source_ids, target_ids, labels
        self.tokens = int((labels != self.pad_id).sum())
        self.model = ref.Transformer.from_weights(config, imported.weights, dtype="float64", fast=False)

    def gradient(self) -> tuple[float, dict[str, ndarray]]:
        """Return the loss per token and the gradient of the summed loss, which Marian passes to Adam."""
        found = ref.gradients(self.model, *self.batch)
        gradient = {name: self.tokens * array for name, array in found.parameters.items()}
        for name in gradient:
            if name.endswith("_embedding.table"):
                gradient[name][self.pad_id] = 0.0
        return found.loss, gradient

    def run(self, clip_norm: float | None, warmup: int | None) -> Iterator[dict[str, ndarray]]:
        """Yield the weights after each step. Marian's step n uses the learning rate of equation (3) for step n - 1."""
        width = self.model.config.d_model
        settings = TrainingConfig(
            epsilon=EPSILON, learning_rate_factor=RATE * (width * (warmup or 1)) ** 0.5, warmup_steps=warmup or 1
        )
        adam = Adam(parameters(self.model), settings)
        for step in range(1, STEPS + 1):
            _, gradient = self.gradient()
            rate = RATE if warmup is None else settings.learning_rate(step - 1, width) if step > 1 else 0.0
            adam.update(gradient, clip_factor(global_norm(gradient), clip_norm), rate, settings.bias_corrections(step))
            yield {name: array.copy() for name, array in adam.parameters.items()}


def error(found: dict[str, ndarray], expected: dict[str, ndarray]) -> float:
    """Return the relative L2 error, without the biases of the keys, whose exact gradient is zero."""
    names = [name for name in found if not name.endswith("key_proj.bias")]
    difference = {name: found[name] - expected[name].astype(np.float64) for name in names}
    norm = global_norm({name: expected[name].astype(np.float64) for name in names})
    return float(global_norm(difference) / max(norm, 1e-30))  # a learning rate of 0 changes nothing


def changes(weights: dict[str, ndarray], start: dict[str, ndarray]) -> dict[str, ndarray]:
    """Return the differences of all parameters from their values at the start."""
    return {name: weights[name].astype(np.float64) - start[name] for name in weights}


def compare_training(both: Any, combination: Any, sentences: int = 12) -> dict[str, Any]:
    """Compare the gradient and four steps of Adam. Return the results in a form that can be written as JSON."""
    trained = both.train("training", combination)
    equal = with_equal_scales(trained.path, trained.path.with_name("equal.npz"))
    texts = [both.directory / f"training{path.suffix}" for path in both.files]
    lines = both.sources[:sentences], both.targets[:sentences]
    for path, side in zip(texts, lines, strict=True):
        path.write_text("".join(f"{line}\n" for line in side), "utf-8")

    def updated(start: Path, count: int, beta1: float, *options: Any) -> Path:
        directory = both.directory / "updated"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        both.marian.run(
            *("train", "--pretrained-model", start, "--model", directory / "model.npz", "--train-sets", *texts),
            *("--vocabs", *trained.vocabularies, "--mini-batch", sentences, "--after-batches", count),
            *("--optimizer-params", beta1, 0.98, EPSILON, *OPTIONS, *options),
            *flags({name: value for name, value in BASE.items() if name != "learn-rate"} | combination.options),
        )
        return directory

    def imported(path: Path) -> Imported:
        return read(Trained(both.marian, path, trained.vocabularies))

    result: dict[str, Any] = {"gradients": [], "steps": []}
    for title, start in (("equal", equal), ("trained", trained.path)):
        directory = updated(start, 1, 0.5, "--clip-norm", 0)
        theirs = gradient_of(directory / "model.npz", imported)
        for backward in (right_backward, marians_backward):
            with backward_of_norms(backward):
                steps = Steps(imported(start), *lines)
                loss, gradient = steps.gradient()
            result |= {"tokens": steps.tokens}
            result["gradients"].append(
                {
                    "scales": title,
                    "backward": "Marian's" if backward is marians_backward else "exact",
                    "error": error(gradient, theirs),
                    "norm": global_norm(gradient) / steps.tokens,
                    "loss": loss,
                }
            )
    runs = (("equal", equal, 0, None), *(("trained", trained.path, *one) for one in ((0, None), (0.5, None), (0, 2))))
    for title, start, clip_norm, warmup in runs:
        options = ["--clip-norm", clip_norm]
        options += [] if warmup is None else ["--lr-warmup", warmup, "--lr-decay-inv-sqrt", warmup]
        directory = updated(start, STEPS, 0.9, *options)
        start_weights = imported(start).weights
        expected = [imported(directory / f"model.iter{step}.npz").weights for step in range(1, STEPS + 1)]
        for backward in (right_backward, marians_backward):
            with backward_of_norms(backward):
                found = list(Steps(imported(start), *lines).run(clip_norm or None, warmup))
            result["steps"].append(
                {
                    "scales": title,
                    "options": " ".join(map(str, options)),
                    "backward": "Marian's" if backward is marians_backward else "exact",
                    "errors": [
                        error(changes(a, start_weights), changes(dict(b), start_weights))
                        for a, b in zip(found, expected, strict=True)
                    ],
                }
            )
    return result


def gradient_of(path: Path, imported: Callable[[Path], Imported]) -> dict[str, ndarray]:
    """Return the gradient of Marian's first update with beta1 = 0.5, which is twice the first moment of Adam."""
    arrays, state = npz.read(path), npz.read(path.with_name("model.npz.optimizer.npz"))
    at, found = 0, dict(arrays)
    for name in sorted(name for name in arrays if not name.startswith("special:") and name != "decoder_c0"):
        size = arrays[name].size
        if not np.array_equal(state["master_parameters"][0, at : at + size], arrays[name].ravel()):
            raise ValueError(f"the parameters in the optimizer's file must have the order of their names: got {name}")
        found[name] = 2.0 * state["adam_mt"][0, at : at + size].reshape(arrays[name].shape)
        at += -(-size // ALIGNED) * ALIGNED
    npz.write(path.with_name("gradient.npz"), found)
    gradient = dict(imported(path.with_name("gradient.npz")).weights)
    gradient["output_proj.bias"] = np.where(gradient["output_proj.bias"] < -1e3, 0.0, gradient["output_proj.bias"])
    return gradient
