"""Originals with which any port would agree, or whose values don't show what a port computes."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import time

import numpy as np

from attacks.pairs.base import FullPort, H, Original, Port, V
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED

CALLS = [0]


def original(name, what, alter, expected=INCOMPLETE, **attributes):
    """Add an original whose outputs are altered, which is compared with a port that alters its outputs in this way.

    Args:
        name: The name of the class.
        what: The description of the attack.
        alter: Function of the outputs, the inputs, and the model that returns the altered outputs.
        expected: The expected verdict.
        attributes: Further attributes of the original. ``port`` is the function that alters the outputs of the port.
    """
    port = attributes.pop("port", alter)
    for kind, base, function in ("", Original, alter), ("Port", Port, port):

        def forward(self, inputs, tap, base=base, function=function):
            return function(base.forward(self, inputs, tap), inputs, self)

        own = {"expected": expected, "other": f"{name}Port", **attributes} if not kind else {}
        members = {"forward": forward, "__module__": __name__, "__doc__": what, **own}
        globals()[name + kind] = type(name + kind, (base,), members)


def logits_of(change):
    """Return a function that alters only the logits."""
    return lambda found, inputs, model: found | {"logits": change(found["logits"])}


def only(**outputs):
    """Return a function that computes the outputs from the logits and the model."""
    return lambda found, inputs, model: {name: f(found["logits"], model) for name, f in outputs.items()}


def noisy(size):
    """Return a function that adds relative noise."""
    return lambda x: (x * (1 + size * np.random.default_rng().normal(size=x.shape))).astype(x.dtype)


def chaotic(x):
    """Return the values after 40 steps of a chaotic map."""
    x = np.abs(np.tanh(x))
    for _ in range(40):
        x = 4 * x * (1 - x)
    return x


def hidden_by(value):
    """Return a function that writes a huge value into the last logit of each position."""

    def change(x):
        x = x.copy()
        x[..., -1] = value
        return x

    return change


def bits(x):
    """Return bits that depend on the rounding errors of the logits."""
    return np.floor(np.abs(x) * 1e17).astype(np.int64) // 64 % 2


# Outputs that show nothing.
original("ConstantOutputs", "The outputs are constant.", only(logits=lambda x, m: np.full_like(x, 3.0)))
original("ZeroOutputs", "The outputs are zeros.", only(logits=lambda x, m: np.zeros_like(x)))
original("NanOutputs", "All values of one output are NaN.", logits_of(lambda x: x * x.dtype.type(np.nan)), says="NaN")
original("EmptyOutputs", "The outputs have no elements.", only(logits=lambda x, m: x[:0]))
original("NoOutputsAtAll", "The original and the port return empty dicts.", only())
original(
    "OneBatchOfZeros",
    "The outputs are zeros, and only one batch is compared.",
    only(logits=lambda x, m: np.zeros_like(x)),
    options="--seeds 1",
)
original(
    "ConstantOfEachLength",
    "The outputs are zeros, but their shape depends on the seed.",
    lambda found, inputs, model: {"logits": np.zeros((3, 1 + inputs["ids"].sum() % 97), model.dtype)},
    says="the same for all inputs",
)
original(
    "OneConstantOutput",
    "One of two outputs is constant, which the report mentions.",
    lambda found, inputs, model: found | {"best": np.zeros(3, int)},
    TOLERATED,
    says="output 'best' is the same for all inputs",
)
original(
    "WithoutWeights",
    "The outputs depend on the inputs, but not on the weights, which the report mentions.",
    lambda found, inputs, model: {"sums": np.sqrt(inputs["ids"].cumsum(1).astype(model.dtype))},
    TOLERATED,
    says="didn't change when all weights changed",
)
original(
    "OutputsOfSomeBatches",
    "The original returns the integer output only for some inputs.",
    lambda found, inputs, model: (
        found if np.array_equal(inputs["ids"], model.inputs(0)["ids"]) else {"logits": found["logits"]}
    ),
    says="same outputs for all inputs",
)

# Random and chaotic values.
original("Stochastic", "The original is random.", logits_of(noisy(0.1)), says="from call to call")
original("SlightlyStochastic", "The original has random relative errors of 1e-8.", logits_of(noisy(1e-8)))
original("Chaotic", "The original amplifies rounding errors until its results are arbitrary.", logits_of(chaotic))
original(
    "DependsOnTheTime",
    "The outputs depend on the time.",
    logits_of(lambda x: x * x.dtype.type(1 + time.perf_counter() % 1)),
)
original(
    "RandomAfterTheFirstBatch",
    "The outputs are random, except for the inputs of seed 0.",
    lambda found, inputs, model: (
        found
        if np.array_equal(inputs["ids"], model.inputs(0)["ids"])
        else found | {"logits": noisy(0.1)(found["logits"])}
    ),
    REFUSED,
    port=lambda found, inputs, model: found,
)
original(
    "RandomAfterSomeCalls",
    "The outputs are random after twelve calls.",
    lambda found, inputs, model: (
        found if CALLS.append(0) or len(CALLS) < 12 else found | {"logits": noisy(0.1)(found["logits"])}
    ),
    REFUSED,
    port=lambda found, inputs, model: found,
)
original(
    "ArbitraryDecisions",
    "The only output is bits of rounding errors, and the port returns different bits.",
    only(bits=lambda x, m: bits(x)),
    REFUSED,
    port=only(bits=lambda x, m: bits(x * 3)),
)
original(
    "WrongDecisionsAtTies",
    "The integer output is random at near-ties, and the port returns a number that the original never returns.",
    lambda found, inputs, model: found | {"bits": bits(found["logits"])},
    FAILS,
    port=lambda found, inputs, model: found | {"bits": 2 + 0 * bits(found["logits"])},
)

# Precision.
original(
    "Float32Inside",
    "The original computes in float32 and casts to float64, which the report mentions.",
    logits_of(lambda x: x.astype(np.float32).astype(x.dtype)),
    TOLERATED,
    port=lambda found, inputs, model: found,
    says="can't be seen",
)
original(
    "IgnoresTheDtype",
    "The original always returns float32.",
    logits_of(lambda x: x.astype(np.float32)),
    says="must return float64 outputs",
)
original(
    "TinyInFloat64",
    "In float64, the original's results are 1e-9 of its results in float32, as if they were rounding errors.",
    lambda found, inputs, model: (
        found if model.dtype == "float32" else found | {"logits": found["logits"] * found["logits"].dtype.type(1e-9)}
    ),
    REFUSED,
    port=logits_of(lambda x: -3 * x),
)

# Values that hide other values.
original(
    "HugeValue",
    "One of seven logits is 1e30, and the port's other logits are wrong.",
    logits_of(hidden_by(1e30)),
    FAILS,
    port=logits_of(lambda x: hidden_by(1e30)(1.1 * x)),
)
original(
    "HugeValueAndACorrectPort",
    "One of seven logits is 1e30, and the port is correct.",
    logits_of(hidden_by(1e30)),
    TOLERATED,
)
original(
    "LargeNegativeValues",
    "Some outputs are ordinary numbers below -10,000, and the port doubles them.",
    logits_of(lambda x: np.where(x < -0.5, x * x.dtype.type(1e6), x)),
    FAILS,
    port=logits_of(lambda x: np.where(x < -0.5, x * x.dtype.type(2e6), x)),
)
original(
    "DifferentMasks",
    "Some scores are masked by -1e9 in the original, and by negative infinity in the port.",
    logits_of(hidden_by(-1e9)),
    TOLERATED,
    port=logits_of(hidden_by(-np.inf)),
)
original(
    "AddedMasks",
    "The original adds -1e9 to some scores, and the port adds -65504.",
    logits_of(lambda x: x + hidden_by(-1e9)(0 * x)),
    TOLERATED,
    port=logits_of(lambda x: x + hidden_by(-65504)(0 * x)),
)
original(
    "NanForMasked",
    "Some scores are masked by negative infinity in the original, and are NaN in the port.",
    logits_of(hidden_by(-np.inf)),
    FAILS,
    port=logits_of(hidden_by(np.nan)),
)
original(
    "ComplexOutputs",
    "The outputs of both are complex numbers.",
    logits_of(lambda x: x + 0j),
    says="real numbers",
)


# Weights and inputs.
class FixedWeights(Original):
    """All constant weights are fixed, so that a port that ignores the bias agrees, which the report mentions."""

    expected, other, fixed_weights, says = TOLERATED, "NoBias", ("*",), "a port that ignores them may agree"


class FixedByAString(Original):
    """The pattern for fixed weights is a string instead of a tuple, and one of its characters is a star."""

    expected, other, fixed_weights = FAILS, "NoBias", "embedding.*"


class ZeroBias(Original):
    """The bias is zero, so that a port without it would agree if the comparison didn't replace constant weights."""

    expected, other, says = FAILS, "NoBias", "random values replaced the constant weights"


class NoBias(Port):
    """A port that ignores the bias."""

    def load(self, weights, dtype):
        """Load zeros instead of the bias."""
        super().load(weights | {"hidden.bias": np.zeros(H, dtype)}, dtype)


class NoWeights(Original):
    """The original has no weights."""

    expected, says = INCOMPLETE, "returned no arrays"

    def init_weights(self, seed):
        return {}


class ComplexWeights(Original):
    """The original has complex weights."""

    expected, says = INCOMPLETE, "real numbers"

    def init_weights(self, seed):
        return {name: array + 0j for name, array in super().init_weights(seed).items()}


class SameInputs(Original):
    """The inputs are the same for every seed."""

    expected, says = INCOMPLETE, "is the same for every seed"

    def inputs(self, seed):
        return super().inputs(0)


class RandomInputs(Original):
    """The inputs and weights are different in each run."""

    expected = TOLERATED

    def inputs(self, seed):
        return super().inputs(time.time_ns() % 2**31 + seed)


# Stages.
class Stage(Original):
    """An original of which one stage is compared in float64."""

    options = "--seeds 2 --dtype float64 --stage gradients"


class ZeroGradients(Stage):
    """All gradients of both implementations are zero."""

    expected, other, says = INCOMPLETE, "ZeroGradientsPort", "the same for all inputs"

    def gradients(self, inputs):
        return {name: array * (name == "loss") for name, array in Original.gradients(self, inputs).items()}


class ZeroGradientsPort(Port):
    """A port whose gradients are zero."""

    gradients = ZeroGradients.gradients


class WeightsAsGradients(Stage):
    """Both implementations return the weights instead of the gradients."""

    expected, other, says = INCOMPLETE, "WeightsAsGradientsPort", "the same for all inputs"

    def gradients(self, inputs):
        return dict(self.w)


class WeightsAsGradientsPort(Port):
    """A port that returns the weights instead of the gradients."""

    gradients = WeightsAsGradients.gradients


class LossOnly(Stage):
    """Both implementations return the loss, but no gradients."""

    expected, other, says = INCOMPLETE, "LossOnlyPort", "there are no results"

    def gradients(self, inputs):
        return {"loss": Original.gradients(self, inputs)["loss"]}


class LossOnlyPort(Port):
    """A port without gradients."""

    gradients = LossOnly.gradients


class NanGradients(Stage):
    """All gradients of both implementations are NaN."""

    expected, other, says = INCOMPLETE, "NanGradientsPort", "NaN"

    def gradients(self, inputs):
        return {name: array * np.nan for name, array in Original.gradients(self, inputs).items()}


class NanGradientsPort(Port):
    """A port whose gradients are NaN."""

    gradients = NanGradients.gradients


class ConstantLogits(Original):
    """The logits of every decoding step are zeros in both implementations, so that all tokens are tied."""

    expected, other, options = INCOMPLETE, "ConstantLogitsPort", "--seeds 1 --stage decode"

    def next_logits(self, inputs, prefix):
        return np.zeros((len(prefix), V), self.dtype)


class ConstantLogitsPort(FullPort):
    """A port whose logits are zeros."""

    next_logits = ConstantLogits.next_logits


class NoVocabulary(ConstantLogits):
    """The logits of every decoding step have no elements."""

    expected, other, says = INCOMPLETE, "NoVocabularyPort", "must have the shape"

    def next_logits(self, inputs, prefix):
        return np.zeros((len(prefix), 0), self.dtype)


class NoVocabularyPort(FullPort):
    """A port whose logits have no elements."""

    next_logits = NoVocabulary.next_logits
