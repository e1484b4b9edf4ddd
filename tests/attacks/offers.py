"""Attacks through taps, and through the methods, declarations and omitted cases of a port."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import Sound, attack, inject, padded, showing
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED
from transformer_parity.engine.outputs import MissingAbilityError
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS
from transformer_parity.transformer.ports.templates.other_port import MyPort
from transformer_parity.transformer.ports.user import Port

STAGES: tuple[str, ...] = (ACTIVATIONS,)
ONE_CASE: dict[str, Any] = {"stages": STAGES, "cases": padded}
TAP = "encoder.layers.0.self_attention.weights"
EASIEST = "full/one_token"
REST = (
    *("full/padded", "full/source_as_long_as_target", "full/one_sentence", "full/other_padding", "full/other_weights"),
    *("full/longest", "full/large_vocabulary", "gradients/padded", "gradients/one_token", "steps/port"),
    *("steps/port_clipped", "decode/port_greedy", "decode/port_beam"),
    *("decode/many_greedy", "decode/many_greedy_ends", "decode/many_beam", "decode/many_narrow_beam"),
)


def taps(name: str, what: str, show: Callable[[Any, str, ndarray], Any], expected: str = FAILS) -> None:
    """Add a port that calls ``show(tap, name, value)`` at each tap and continues with ``value``."""
    inject(__name__, name, expected, what, {"forward": showing(show)}, **ONE_CASE)


def at(name: str, alter: Callable[[ndarray], ndarray]) -> Callable[[Any, str, ndarray], Any]:
    """Return a function that passes an altered value to the taps whose names end with ``name``."""
    return lambda tap, n, x: tap(n, alter(x) if n.endswith(name) else x)


def overwrite(tap: Any, name: str, value: ndarray) -> None:
    """Pass a copy to a tap and overwrite the copy."""
    shown = value.copy()
    tap(name, shown)
    shown[...] = np.nan


# Taps.
taps("TapMissing", "The port declares a tap but never calls it.", lambda tap, n, x: n == TAP or tap(n, x))
taps("TapsMissing", "The port declares every tap but never calls any of them.", lambda tap, n, x: None)
taps(
    "TapTwice",
    "The port calls a tap twice, the first time with a wrong value.",
    lambda tap, n, x: (n == TAP and tap(n, 2.0 * x), tap(n, x)),
    expected=REFUSED,
)
taps(
    "TapUnknown",
    "The port calls a tap with an unknown name.",
    lambda tap, n, x: tap(n.replace("weights", "w"), x),
    expected=REFUSED,
)
taps(
    "TapOverwritten",
    "The port passes an array to a tap and then fills the array with NaN.",
    overwrite,
    expected=TOLERATED,
)
taps("TapIgnored", "The port ignores the return values of taps.", lambda tap, n, x: tap(n, x), expected=TOLERATED)
taps(
    "TapOfOneSentence",
    "The attention weight taps receive an array with the shape [1, H, L, M].",
    at(".weights", lambda x: x[:1]),
)
taps(
    "TapOfMergedHeads",
    "The query taps receive an array with the shape [B, L, H * d_k].",
    at(".query", lambda x: x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)),
)
taps(
    "TapOfFloat32",
    "The attention weight taps receive float32 arrays.",
    at(".weights", lambda x: x.astype(np.float32)),
)


@attack(FAILS, **ONE_CASE)
class TapsReordered(Sound):
    """The port calls two taps in the wrong order, with the correct values."""

    def forward(self, source_ids, target_ids, tap):
        held = []

        def show(name, value):
            if name.endswith("0.self_attention.query"):
                held.append((name, value))
            else:
                tap(name, value)
                while held:
                    tap(*held.pop())
            return value

        return super().forward(source_ids, target_ids, show)


@attack(FAILS, stages=STAGES)
class TapsOnce(Sound):
    """The port calls its taps only the first time that a model is called."""

    called = False

    def forward(self, source_ids, target_ids, tap):
        first, self.called = not self.called, True
        return super().forward(source_ids, target_ids, tap if first else lambda name, value: value)


@attack(FAILS, **ONE_CASE)
class TapsOfAnotherModel(Sound):
    """The tapped values are correct, but the logits are wrong."""

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, tap)[..., ::-1]


@attack(TOLERATED, **ONE_CASE)
class MoreTapsThanPromised(Sound):
    """The port calls taps that it doesn't declare. These taps aren't compared."""

    taps = ("encoder.output", "decoder.output")


class Word(str):
    """A string of a class that can't be pickled, like ``torch.__version__`` outside of torch."""

    def __reduce__(self) -> Any:
        raise TypeError("this string can't be pickled")


@attack(TOLERATED, stages=STAGES, separate=True)
class WordsOfItsOwn(Sound):
    """The names of weights and taps, and the reason for an omitted case, are instances of a subclass of str."""

    name = Word("WordsOfItsOwn")
    left_out = {EASIEST: Word("it needs two tokens")}

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, lambda name, value: tap(Word(name), value))

    def export_weights(self):
        return {Word(name): array for name, array in super().export_weights().items()}


@attack(TOLERATED, stages=(GRADIENTS,))
class MoreGradientsThanPromised(MoreTapsThanPromised):
    """The port returns gradients at taps that it doesn't declare. These gradients aren't compared."""

    gradients = MyPort.gradients


# Methods that are missing or not supported.
def lacks(name: str, what: str, *missing: str, expected: str = INCOMPLETE, **attributes: Any) -> None:
    """Add a port that lacks some methods or has different attributes."""
    options = {"stages": attributes.pop("stages")} if "stages" in attributes else {}
    absent = {method: getattr(Port, method) for method in missing}
    inject(__name__, name, expected, what, {**absent, **attributes}, **options)


def not_yet(self: Any, *inputs: Any) -> Any:
    """Report that something isn't supported."""
    raise MissingAbilityError("not yet")


def easiest_only(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Support only targets of one token."""
    return Sound.forward(self, source_ids, target_ids, tap) if target_ids.shape[1] == 1 else not_yet(self)


def not_in_float64(self: Any, config: Any, weights: Any, dtype: str) -> Any:
    """Support only float32."""
    return not_yet(self) if dtype == "float64" else Sound.load(self, config, weights, dtype)


WEIGHTS_ONLY = ("gradients", "start_training", "train_step", "generate")
lacks("NoForward", "The port doesn't define forward().", "forward", expected=REFUSED)
lacks("WeightsOnly", "The port supports only exporting its weights.", *WEIGHTS_ONLY, forward=not_yet)
lacks("EasiestOnly", "The port reports every case except the easiest as unsupported.", forward=easiest_only)
lacks("NotInFloat64", "The port declares float64 but reports it as unsupported.", load=not_in_float64)
lacks(
    "NoGenerate",
    "The port doesn't define generate(), but searches are requested.",
    "generate",
    stages=(*STAGES, DECODE),
)
lacks(
    "NoGradients",
    "The port doesn't define gradients(), but gradients are requested.",
    "gradients",
    stages=(*STAGES, GRADIENTS),
)
lacks("NoSteps", "The port doesn't define train_step().", "start_training", "train_step")
lacks(
    "NoExport",
    "The port doesn't define export_weights(). All requested results are still compared.",
    "export_weights",
    stages=STAGES,
    expected=TOLERATED,
)


# Declarations and omitted cases.
lacks(
    "LeavesOutNearlyEverything", "The port omits every case except the easiest.", left_out=dict.fromkeys(REST, "later")
)
lacks(
    "LeavesOutEverything",
    "The port omits every case and only exports its weights.",
    left_out=dict.fromkeys((*REST, EASIEST), "later"),
)
lacks(
    "LeavesOutOneCase",
    "The port omits one of several full-model cases, and the report lists it.",
    left_out={EASIEST: "it needs two tokens"},
    stages=STAGES,
    expected=TOLERATED,
)
lacks(
    "LeavesOutNothing",
    "The port omits cases using a pattern that matches no case, so the port is rejected, as for a typo.",
    left_out={"full/*": "later"},
    stages=STAGES,
)
lacks("NoDtype", "The port doesn't declare any dtype.", dtypes=())
lacks("UnknownDtype", "The port declares a dtype for which no comparison exists.", dtypes=("float16",))
lacks("Float32Only", "The port declares only float32, but most stages are compared in float64.", dtypes=("float32",))
lacks("Bfloat16Only", "The port declares only bfloat16, in which bugs can hide.", dtypes=("bfloat16",))
lacks(
    "WrongInFloat32Only",
    "The port declares only float32, and its logits are wrong. A loss of precision can't be ruled out.",
    dtypes=("float32",),
    forward=lambda self, *inputs: Sound.forward(self, *inputs) * np.float32(1.01),
)
lacks("UnknownPreset", "The port declares a preset that doesn't exist.", preset="paper_bse")
lacks("UnknownOverride", "The port overrides a config field that doesn't exist.", overrides={"norm_oder": "pre"})
lacks(
    "OtherConvention",
    "The model is pre-norm, but the port declares the paper's convention.",
    load=lambda self, config, *rest: Sound.load(self, config.replace(norm_order="pre"), *rest),
    stages=STAGES,
    expected=FAILS,
)
lacks(
    "OneHead",
    "The port declares one head, so the comparison can't show whether it splits heads correctly.",
    overrides={"num_heads": 1},
    stages=STAGES,
    expected=TOLERATED,
)


# Models that reveal no bug: a forward pass that ignores the IDs, or doesn't mask padding, agrees.
def ignore(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Replace all IDs by the same token."""
    return Sound.forward(self, np.ones_like(source_ids), np.ones_like(target_ids), tap)


def no_mask(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Attend to padding."""
    masks = {"source_mask": np.ones(source_ids.shape, bool), "target_mask": np.ones(target_ids.shape, bool)}
    return self.model(source_ids, target_ids, tap=tap, **masks)


def blind(name: str, what: str, forward: Any = ignore, **overrides: Any) -> None:
    """Add a wrong port with a declared convention that makes its error invisible."""
    lacks(name, what, forward=forward, taps=(), overrides=overrides, stages=(ACTIVATIONS,))


LEARNED = {"position_encoding": "learned"}
blind("HugeEpsilon", "The epsilon of layer norm is 1e30, and the port ignores the IDs.", layer_norm_epsilon=1e30)
blind(
    "OneChannel",
    "The model has one channel, which layer norm sets to zero, and the port ignores the IDs.",
    d_model=1,
    num_heads=1,
    **LEARNED,
)
blind(
    "TwoChannels",
    "The model has two channels, which layer norm sets to 1 and -1, and the port doesn't mask padding.",
    no_mask,
    d_model=2,
    num_heads=1,
)
blind(
    "OneToken",
    "The vocabulary has only one token besides padding, and the port doesn't mask padding.",
    no_mask,
    source_vocab_size=2,
    target_vocab_size=2,
    eos_id=1,
)
blind(
    "FarPositions",
    "Positions start at 1e18, so adjacent positions are the same number in float64.",
    no_mask,
    position_offset=10**18,
)
blind(
    "FewPositions",
    "The position embedding has four rows, but the cases have longer sentences.",
    no_mask,
    max_length=4,
    **LEARNED,
)
blind(
    "NoLabels",
    "With label smoothing, the target probability of the correct label is only 1e-13.",
    no_mask,
    label_smoothing=1 - 1e-13,
)
lacks(
    "FourTokens",
    "The vocabulary has four tokens, including the special tokens, which is enough for a comparison.",
    overrides={"source_vocab_size": 4, "target_vocab_size": 4},
    stages=STAGES,
    expected=TOLERATED,
)
lacks(
    "OneLayer",
    "The encoder and the decoder have one layer each, which is enough for a comparison.",
    overrides={"num_encoder_layers": 1, "num_decoder_layers": 1},
    stages=STAGES,
    expected=TOLERATED,
)


# Exported weights.
def export(name: str, what: str, alter: Callable[[dict[str, ndarray]], Any]) -> None:
    """Add a port that exports altered weights."""
    method = {"export_weights": lambda self: alter(dict(Sound.export_weights(self)))}
    inject(__name__, name, FAILS, what, method, **ONE_CASE)


TABLE = "source_embedding.table"
export("ExportOfNothing", "The port exports no weights.", lambda weights: {})
export("ExportOfMore", "The port exports one additional weight.", lambda weights: {**weights, "more": weights[TABLE]})
export(
    "ExportOfOneBit",
    "The last bits of one exported tensor are wrong.",
    lambda weights: {**weights, TABLE: np.nextafter(weights[TABLE], 9)},
)
export(
    "ExportTransposed",
    "One exported embedding matrix is transposed.",
    lambda weights: {**weights, TABLE: weights[TABLE].T},
)


@attack(FAILS, **ONE_CASE)
class ExportLies(Sound):
    """The port exports the original weights but uses a different embedding matrix."""

    def load(self, config, weights, dtype):
        self.given = {name: array.astype(dtype) for name, array in weights.items()}
        super().load(config, {**weights, TABLE: 1.01 * weights[TABLE]}, dtype)

    def export_weights(self):
        return self.given
