"""If the cause of a port's error is unknown, test whether the port has the properties that every correct model has.

Each test reruns the port, for example with a changed input, and compares the effect with the known effect on a correct
model. The tests repeat a call, run each sentence in a separate batch, remove padding, replace or remove tokens, and
perturb the weights slightly. Each statement describes the result of such a run. It is never inferred from the size of
an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.signatures import ENOUGH, is_of
from transformer_parity.engine.tensors import given, relative_error
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.ports.protocol import AnyPort, LoadedPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.padding import Read, before_padding
from transformer_parity.transformer.stages.training_stage import LOSS
from transformer_spec.config import TransformerConfig

SAME = {"float64": 1e-11, "float32": 1e-4}  # relative tolerance; rounding may depend on the batch shape
SMALL = 2.0**-6  # rounding to any supported dtype causes smaller relative errors
LEAST_ROUNDING = {"float64": POLICY["float64"]["tap"], "float32": 0.0}  # smaller relative errors are normal
NOISE = 30.0  # rounding can't explain effects larger than this multiple of the rounding error
LEAST = 1e-6  # minimum relative perturbation; float32 weights can't represent much smaller changes
MIXED = "for example, due to a wrong mask, length, or position"
CALLS = 20  # with this many calls, even a dropout rate of 0.001 in only one operation is almost certainly detected
REDRAWN = 0.3  # minimum relative change of a rounding error if the weights are perturbed; other errors change far less
ROUNDED_LOSS = 1e-6  # relative tolerance for losses; the order of summation has a smaller effect, even after 20 steps
SINGLE = 2.0**-16  # larger relative errors occur only with dtypes narrower than float32
REMEDIES = {
    "jax": 'call jax.config.update("jax_enable_x64", True) before any array is created',
    "tensorflow": 'call keras.config.set_floatx("float64"), or pass dtype="float64" to every layer and tensor',
    "torch": "call torch.set_default_dtype(torch.float64), or pass dtype=torch.float64 to every module and tensor",
}
Ids = Mapping[str, ndarray]


@dataclass(frozen=True)
class _Runs:
    """Runs a port in one dtype and the reference in float64. The weights are arguments of the methods."""

    case: Case
    port: AnyPort
    placement: Placement

    def load(self, weights: Mapping[str, ndarray]) -> LoadedPort:
        """Load the port with the given weights."""
        return self.port.load(self.case.config, given(weights, self.placement.dtype), self.placement)

    def error(self, weights: Mapping[str, ndarray]) -> tuple[ndarray, ndarray]:
        """Return two arrays: the error of the port's output (port minus reference), and the reference's output."""
        truth = DEFINITION.load(self.case.config, weights, Placement("float64"))
        expected = output(truth, self.case.inputs, self.case.config)
        return output(self.load(weights), self.case.inputs, self.case.config) - expected, expected


def lacking(case: Case, port: AnyPort, placement: Placement, noise: float = 0.0) -> list[str]:
    """Return the properties that a correct model has but a port lacks, in the order in which to investigate them.

    Args:
        case: A case that runs the full model on source and target IDs.
        port: The port.
        placement: The dtype and device with which to run the port.
        noise: Relative rounding error of the port, or 0 if it is unknown. Effects of this size are ignored.

    Returns:
        A sentence for each property that the port lacks. The list is empty if the port lacks none, or if the tests
        can't use this case.
    """
    if case.block or case.inputs.keys() != {"source_ids", "target_ids"} or placement.dtype not in SAME:
        return []
    if case.is_long:  # running the port once for each token would take minutes
        return []
    found: list[str] = []
    with suppress(Exception):  # a port may support only the shapes of the case
        loaded = _Runs(case, port, placement).load(case.load_weights())
        if random := is_random(loaded, case):
            return [random]
        if not np.isfinite(output(loaded, case.inputs, case.config)).all():  # comparisons with NaN always fail
            return []
        for test in (_of_the_batch, _of_the_target, _of_padding, _of_tokens):
            with suppress(Exception):
                found += test(loaded, case.inputs, case.config, max(SAME[placement.dtype], NOISE * noise))
    return found


def output(loaded: LoadedPort, inputs: Ids, config: TransformerConfig) -> ndarray:
    """Run a model on copies of the inputs, and return the logits. The logits at trailing padding of a target are 0."""
    found = np.asarray(loaded.run("", given(inputs, "float64"), taps=True).output, np.float64)
    read = before_padding(inputs["target_ids"], config.pad_id)
    return np.where(read[:, :, None], found, 0.0)


def of_path(loaded: LoadedPort, case: Case, tolerance: float) -> str:
    """Return a sentence that describes how the output without taps differs from the output with taps."""
    fast, explicit = (loaded.run(case.block, given(case.inputs, "float64"), taps=taps).output for taps in (False, True))
    error = distance("output", {"output": fast}, {"output": explicit})
    if error <= tolerance / 2:
        return "the difference did not occur in a rerun: an earlier call caused it, for example by modifying an input"
    paths = f"the output without taps differs from the output with taps (error {error:.0e})"
    if fast.dtype == np.float64 and fast.size >= ENOUGH and is_of(fast, "float32"):
        return f"{paths}: without taps, every value has only float32 precision"
    if fast.dtype == np.float64 and LEAST_ROUNDING["float64"] < error < SINGLE:
        return f"{paths}: the difference is as small as float32 rounding, which may occur in one of the two paths"
    return f"{paths}: the two paths run different code, for example fused attention or a compiled function"


def is_random(loaded: LoadedPort, case: Case) -> str:
    """Return a message if two calls on the same input return different results, or an empty string otherwise."""
    once = output(loaded, case.inputs, case.config)
    calls = (output(loaded, case.inputs, case.config) for _ in range(1 if case.is_long else CALLS))
    again = next((other for other in calls if not np.array_equal(once, other, equal_nan=True)), None)
    if again is None:
        return ""
    error = distance("output", {"output": again}, {"output": once})
    return f"two calls on the same input differ (error {error:.0e}): dropout is enabled, or another operation is random"


def has_random_loss(runs: Sequence[Mapping[str, ndarray]]) -> str:
    """Return a message if the losses of two runs on the same input differ, or an empty string otherwise."""
    once, again = runs
    errors = [distance(name, again, once) for name in once if name.endswith(LOSS)]
    if not max(errors, default=0.0) > ROUNDED_LOSS:
        return ""
    error = f"error {max(errors):.0e}"
    causes = "dropout is enabled, another operation is random, or the port keeps state between runs"
    return f"the losses of two runs on the same input differ ({error}): {causes}"


def remedy() -> str:
    """Return instructions for computing in float64 with the frameworks that this process has imported."""
    ways = [way for module, way in REMEDIES.items() if module in sys.modules]
    return f": {' or '.join(ways)}" if ways else ""


def only_float32(case: Case, shown: Mapping[str, ndarray], truth: Mapping[str, ndarray]) -> str:
    """Return a message if all float64 outputs have only float32 precision, or an empty string otherwise."""
    names = [name for name in shown if name in truth and truth[name].size >= ENOUGH and truth[name].dtype == np.float64]
    read = Read.of(case, truth).combine(
        {name: shown[name] for name in names}, {name: 0.0 * truth[name] for name in names}
    )
    if not names or not all(np.isfinite(value).all() and is_of(value, "float32") for value in read.values()):
        return ""
    if all(is_of(value, "float16") for value in read.values()):  # for example, zeros
        return ""
    return f"float64 was requested, but every value has only float32 precision{remedy()}"


def rounding(case: Case, port: AnyPort, placement: Placement) -> tuple[str, float]:
    """Return a message and the relative error if the port's error is a rounding error, or ``("", 0.0)`` otherwise.

    The test perturbs the weights slightly. The perturbation changes rounding errors randomly but hardly affects other
    errors.
    """
    if case.block or placement.dtype not in SAME:
        return "", 0.0
    runs, weights = _Runs(case, port, placement), case.load_weights()
    before, expected = runs.error(weights)
    size = float(np.linalg.norm(before) / np.linalg.norm(expected))
    if not LEAST_ROUNDING[placement.dtype] < size < SMALL:
        return "", 0.0
    rng = np.random.default_rng(0)
    factor = max(size / 4, LEAST)
    disturbed = {
        name: (weight * (1.0 + factor * rng.normal(size=weight.shape))).astype(weight.dtype)
        for name, weight in weights.items()
    }
    after, _ = runs.error(disturbed)
    if not np.linalg.norm(after - before) > REDRAWN * np.linalg.norm(before):
        return "", 0.0
    kind = (
        "to float32, for example by a cast or a constant"
        if size < SINGLE
        else "to lower precision than float32, such as TensorFloat32, float16, or bfloat16"
    )
    if placement.dtype == "float32" and size < SINGLE:
        kind = "more often than in the reference, or in a different order"
    return f"the error ({size:.0e}) changes randomly with the weights: a value is rounded {kind}", size


def _of_the_batch(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Run each sentence in a separate batch. The logits of the sentence must not change."""
    whole, alone = output(loaded, inputs, config), []
    for row in range(len(whole)) if len(whole) > 1 else ():
        sentence = {name: ids[row : row + 1] for name, ids in inputs.items()}
        alone.append((relative_error(output(loaded, sentence, config)[0], whole[row]), row))
    error, row = max(alone, default=(0.0, 0))
    if not error <= same:
        yield (
            f"sentence {row} has different logits in a separate batch (error {error:.0e}): other sentences in the "
            "batch affect its logits"
        )


def _of_the_target(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Replace or remove the last token of a target. Neither change may affect earlier logits."""
    rows = np.flatnonzero((inputs["target_ids"] != config.pad_id).all(1))[:1]
    if not len(rows) or inputs["target_ids"].shape[1] < 2:
        return
    sentence = {name: ids[rows] for name, ids in inputs.items()}
    usual = output(loaded, sentence, config)[:, :-1]
    other = sentence["target_ids"].copy()
    special = {config.pad_id, config.bos_id, config.eos_id, int(other[0, -1])}
    other[0, -1] = next(token for token in range(config.target_vocab_size) if token not in special)
    error = relative_error(output(loaded, {**sentence, "target_ids": other}, config)[:, :-1], usual)
    if not error <= same:
        yield f"a later target token changes earlier logits (error {error:.0e}): {MIXED}"
        return
    error = relative_error(output(loaded, {**sentence, "target_ids": other[:, :-1]}, config), usual)
    if not error <= same:
        yield (
            f"removing the last target token changes earlier logits (error {error:.0e}): the logits depend on the "
            "target length"
        )


def _of_padding(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Remove the padding of each source sentence. The logits of the sentence must not change."""
    found = []
    for row, ids in enumerate(inputs["source_ids"]):
        length = int((ids != config.pad_id).sum())
        if 0 < length < len(ids) and (ids[:length] != config.pad_id).all():
            sentence = {name: batch[row : row + 1] for name, batch in inputs.items()}
            cut = {**sentence, "source_ids": sentence["source_ids"][:, :length]}
            found.append((relative_error(output(loaded, sentence, config), output(loaded, cut, config)), row))
    error, row = max(found, default=(0.0, 0))
    if not error <= same:
        yield f"padding of source sentence {row} changes its logits (error {error:.0e}): {MIXED}"


def _of_tokens(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Replace one token at a time in an unpadded sentence. This must change logits that depend on the token."""
    if same > min(SAME.values()) and same not in SAME.values():  # rounding may hide the effect of a token
        return
    whole = [(inputs[f"{side}_ids"] != config.pad_id).all(1) for side in ("source", "target")]
    for row in np.flatnonzero(whole[0] & whole[1])[:1]:
        sentence = {name: ids[row : row + 1] for name, ids in inputs.items()}
        usual = output(loaded, sentence, config)
        for side in ("source", "target"):
            ids, unseen = sentence[f"{side}_ids"], list[int]()
            for place in range(1, ids.shape[1] - (side == "target")):
                other = ids.copy()
                other[0, place] = next(token for token in range(3, 9) if token not in (config.pad_id, ids[0, place]))
                later = slice(place + 1, None) if side == "target" else slice(None)
                changed = output(loaded, {**sentence, f"{side}_ids": other}, config)
                if relative_error(changed[:, later], usual[:, later]) <= same:
                    unseen.append(place)
            if unseen:
                last = " (the last)" if unseen == [ids.shape[1] - 1] else ""
                which = (
                    f"{side} position{'s' * (len(unseen) > 1)} {', '.join(map(str, unseen))}{last} of sentence {row}"
                )
                effect = "no logits" if side == "source" else "no later logits"
                yield f"replacing the token at {which} changes {effect}: the model does not attend to this token"
