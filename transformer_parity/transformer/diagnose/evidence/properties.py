"""Properties of every correct model, measured on a port: on what an error of unknown cause depends.

The port is run on inputs that leave the reference's numbers as they are: twice, a sentence alone, without its padding,
with another last token, with weights that are slightly disturbed. Each statement is what such a run shows, and not a
guess from the size of an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import given, relative_error
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import Case
from transformer_parity.transformer.diagnose.evidence.blame import distance
from transformer_parity.transformer.diagnose.evidence.signatures import ENOUGH, is_of
from transformer_parity.transformer.ports.protocol import Implementation, LoadedPort, Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_parity.transformer.stages.padding import Read, before_padding
from transformer_parity.transformer.stages.training_stage import LOSS
from transformer_spec.config import TransformerConfig

SAME = {"float64": 1e-11, "float32": 1e-4}  # relative: another shape of a batch may round in another way
SMALL = 2.0**-6  # relative: what rounding to any of the dtypes leaves is less
LEAST_ROUNDING = {"float64": POLICY["float64"]["tap"], "float32": 0.0}  # relative: a smaller error is float64's own
NOISE = 30.0  # times the error of rounding: an effect of that size is more than rounding
LEAST = 1e-6  # relative: by how much weights, which come in float32, are disturbed at least
MIXED = "for example, it is attended to, counted, or moved"
CALLS = 20  # of which one at least differs, where a dropout of 0.001 is left on in one place
REDRAWN = 0.3  # of an error, that changes with the weights at random; of any other, as little as the weights
ROUNDED_LOSS = 1e-6  # relative: sums in another order leave less, after 20 steps too
SINGLE = 2.0**-16  # relative: float32 leaves less, the narrower dtypes leave more
REMEDIES = {
    "jax": 'call jax.config.update("jax_enable_x64", True) before any array is created',
    "tensorflow": 'call keras.config.set_floatx("float64"), or pass dtype="float64" to every layer and tensor',
    "torch": "call torch.set_default_dtype(torch.float64), or pass dtype=torch.float64 to every module and tensor",
}
Ids = Mapping[str, ndarray]


@dataclass(frozen=True)
class _Runs:
    """Runs of one port and the reference, in one dtype, on variants of a case."""

    case: Case
    port: Implementation
    placement: Placement

    def load(self, weights: Mapping[str, ndarray]) -> LoadedPort:
        """Return the port with some weights."""
        return self.port.load(self.case.config, given(weights, self.placement.dtype), self.placement)

    def error(self, weights: Mapping[str, ndarray]) -> tuple[ndarray, ndarray]:
        """Return the difference between the outputs of the port and of the reference, and the latter."""
        truth = DEFINITION.load(self.case.config, weights, Placement("float64"))
        expected = output(truth, self.case.inputs, self.case.config)
        return output(self.load(weights), self.case.inputs, self.case.config) - expected, expected


def lacking(case: Case, port: Implementation, placement: Placement, noise: float = 0.0) -> list[str]:
    """Return which properties of a correct model a port lacks, those first that explain others.

    Args:
        case: A full model's case, run on source and target ids.
        port: The port.
        placement: In which dtype, and where.
        noise: The relative error of the port, if it is one of rounding: no effect of that size shows a property.

    Returns:
        A sentence each; none if the port has all of them, or where such a case cannot show it.
    """
    if case.block or case.inputs.keys() != {"source_ids", "target_ids"} or placement.dtype not in SAME:
        return []
    if case.is_long:  # a run for each token would take minutes
        return []
    found: list[str] = []
    with suppress(Exception):  # a port need not run on other shapes than those of the case
        loaded = _Runs(case, port, placement).load(case.load_weights())
        if random := is_random(loaded, case):
            return [random]
        if not np.isfinite(output(loaded, case.inputs, case.config)).all():  # NaN differs from everything
            return []
        for test in (_of_the_batch, _of_the_target, _of_padding, _of_tokens):
            with suppress(Exception):
                found += test(loaded, case.inputs, case.config, max(SAME[placement.dtype], NOISE * noise))
    return found


def output(loaded: LoadedPort, inputs: Ids, config: TransformerConfig) -> ndarray:
    """Return the logits, computed from copies of the inputs, and zero at the padding that ends a target."""
    found = np.asarray(loaded.run("", given(inputs, "float64"), taps=True).output, np.float64)
    read = before_padding(inputs["target_ids"], config.pad_id)
    return np.where(read[:, :, None], found, 0.0)


def of_path(loaded: LoadedPort, case: Case, tolerance: float) -> str:
    """Say whether the same input gives another output without taps than with them."""
    fast, explicit = (loaded.run(case.block, given(case.inputs, "float64"), taps=taps).output for taps in (False, True))
    error = distance("output", {"output": fast}, {"output": explicit})
    if error <= tolerance / 2:
        return "the difference is not reproduced: an earlier run caused it, for example by writing to an input"
    paths = f"the output without taps differs from the output with taps (error {error:.0e})"
    if fast.dtype == np.float64 and fast.size >= ENOUGH and is_of(fast, "float32"):
        return f"{paths}: without taps, every value is a number of float32"
    if fast.dtype == np.float64 and LEAST_ROUNDING["float64"] < error < SINGLE:
        return f"{paths}: as small as rounding to float32, which may happen in one of the two"
    return f"{paths}: they are computed in two ways, for example by fused attention, or in compiled code"


def is_random(loaded: LoadedPort, case: Case) -> str:
    """Say whether calls on the same input differ; empty if they do not."""
    once = output(loaded, case.inputs, case.config)
    calls = (output(loaded, case.inputs, case.config) for _ in range(1 if case.is_long else CALLS))
    again = next((other for other in calls if not np.array_equal(once, other, equal_nan=True)), None)
    if again is None:
        return ""
    error = distance("output", {"output": again}, {"output": once})
    return f"two calls on the same input differ (error {error:.0e}): dropout is on, or something else is random"


def has_random_loss(runs: Sequence[Mapping[str, ndarray]]) -> str:
    """Say whether the losses of two runs on the same input differ; empty if they do not."""
    once, again = runs
    errors = [distance(name, again, once) for name in once if name.endswith(LOSS)]
    if not max(errors, default=0.0) > ROUNDED_LOSS:
        return ""
    error = f"error {max(errors):.0e}"
    causes = "dropout is on, something else is random, or something is kept from one run to the next"
    return f"the losses of two runs on the same input differ ({error}): {causes}"


def remedy() -> str:
    """Return how to compute in float64, in the frameworks that are imported here."""
    ways = [way for module, way in REMEDIES.items() if module in sys.modules]
    return f": {' or '.join(ways)}" if ways else ""


def only_float32(case: Case, shown: Mapping[str, ndarray], truth: Mapping[str, ndarray]) -> str:
    """Say whether all outputs are numbers of float32, although float64 was requested; empty if they are not."""
    names = [name for name in shown if name in truth and truth[name].size >= ENOUGH and truth[name].dtype == np.float64]
    read = Read.of(case, truth).combine(
        {name: shown[name] for name in names}, {name: 0.0 * truth[name] for name in names}
    )
    if not names or not all(np.isfinite(value).all() and is_of(value, "float32") for value in read.values()):
        return ""
    if all(is_of(value, "float16") for value in read.values()):  # such as zeros
        return ""
    return f"float64 was requested, and every value is a number of float32{remedy()}"


def rounding(case: Case, port: Implementation, placement: Placement) -> tuple[str, float]:
    """Say whether an error is one of rounding, and how large it is; empty if it is not, or if it cannot be told.

    All weights are disturbed a little: an error of rounding is then another one, any other error nearly the same.
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
        else "to less than float32, such as TensorFloat32, float16 or bfloat16"
    )
    if placement.dtype == "float32" and size < SINGLE:
        kind = "more often, or in another order, than the reference"
    return f"the error ({size:.0e}) changes at random with the weights: something is rounded {kind}", size


def _of_the_batch(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Run each sentence alone."""
    whole, alone = output(loaded, inputs, config), []
    for row in range(len(whole)) if len(whole) > 1 else ():
        sentence = {name: ids[row : row + 1] for name, ids in inputs.items()}
        alone.append((relative_error(output(loaded, sentence, config)[0], whole[row]), row))
    error, row = max(alone, default=(0.0, 0))
    if not error <= same:
        yield f"sentence {row} alone gives other logits than in its batch (error {error:.0e}): others affect it"


def _of_the_target(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Put another token in the last place of a target, and then none."""
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
        yield f"a target without its last token has other logits before it (error {error:.0e}): they depend on length"


def _of_padding(loaded: LoadedPort, inputs: Ids, config: TransformerConfig, same: float) -> Iterator[str]:
    """Cut off what is behind each source sentence."""
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
    """Replace each token of a sentence without padding: the logits must change, and later ones for a target token."""
    if same > min(SAME.values()) and same not in SAME.values():  # rounding may hide an effect
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
                yield f"another token at {which} changes {effect}: it is not attended to"
