"""Attacks through taps, and through what a port offers, declares and leaves out."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import ndarray

from attacks.attack import FAILS, INCOMPLETE, REFUSED, TOLERATED, Sound, attack, padded, plant, showing
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
    """Plant a port that shows something else at its taps than it goes on with: ``show(tap, name, value)``."""
    plant(__name__, name, expected, what, {"forward": showing(show)}, **ONE_CASE)


def at(name: str, alter: Callable[[ndarray], ndarray]) -> Callable[[Any, str, ndarray], Any]:
    """Return what shows an altered value at the taps whose names end so."""
    return lambda tap, n, x: tap(n, alter(x) if n.endswith(name) else x)


def overwrite(tap: Any, name: str, value: ndarray) -> None:
    """Show a value, and overwrite what was shown."""
    shown = value.copy()
    tap(name, shown)
    shown[...] = np.nan


# Taps.
taps("TapMissing", "A tap that is promised does not fire.", lambda tap, n, x: n == TAP or tap(n, x))
taps("TapsMissing", "Every tap is promised, and none fires.", lambda tap, n, x: None)
taps(
    "TapTwice",
    "A tap fires twice, at first with a wrong value.",
    lambda tap, n, x: (n == TAP and tap(n, 2.0 * x), tap(n, x)),
    expected=REFUSED,
)
taps(
    "TapUnknown",
    "A tap fires that does not exist.",
    lambda tap, n, x: tap(n.replace("weights", "w"), x),
    expected=REFUSED,
)
taps("TapOverwritten", "What was shown at a tap is overwritten with NaN.", overwrite, expected=TOLERATED)
taps("TapIgnored", "The model does not go on with what a tap returns.", lambda tap, n, x: tap(n, x), expected=TOLERATED)
taps("TapOfOneSentence", "Attention weights are shown as [1, H, L, M].", at(".weights", lambda x: x[:1]))
taps(
    "TapOfMergedHeads",
    "Queries are shown as [B, L, H d_k].",
    at(".query", lambda x: x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)),
)
taps("TapOfFloat32", "Weights are shown in float32.", at(".weights", lambda x: x.astype(np.float32)))


@attack(FAILS, **ONE_CASE)
class TapsReordered(Sound):
    """Two taps fire in the wrong order, with the right values."""

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
    """Taps fire in the first call of a model only."""

    called = False

    def forward(self, source_ids, target_ids, tap):
        first, self.called = not self.called, True
        return super().forward(source_ids, target_ids, tap if first else lambda name, value: value)


@attack(FAILS, **ONE_CASE)
class TapsOfAnotherModel(Sound):
    """The intermediate values are right, and the logits are not."""

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, tap)[..., ::-1]


@attack(TOLERATED, **ONE_CASE)
class MoreTapsThanPromised(Sound):
    """Taps fire that are not promised; nothing is compared there."""

    taps = ("encoder.output", "decoder.output")


class Word(str):
    """A text that no other process knows, as a version of torch is one."""

    def __reduce__(self) -> Any:
        raise TypeError("this text is of its own kind")


@attack(TOLERATED, stages=STAGES, alone=True)
class WordsOfItsOwn(Sound):
    """The names of weights and taps, and the reason why a case is left out, are of a subclass of str."""

    name = Word("WordsOfItsOwn")
    left_out = {EASIEST: Word("it needs two tokens")}

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, lambda name, value: tap(Word(name), value))

    def export_weights(self):
        return {Word(name): array for name, array in super().export_weights().items()}


@attack(TOLERATED, stages=(GRADIENTS,))
class MoreGradientsThanPromised(MoreTapsThanPromised):
    """There are gradients at taps that are not promised; nothing is compared there."""

    gradients = MyPort.gradients


# What is not offered.
def lacks(name: str, what: str, *missing: str, expected: str = INCOMPLETE, **attributes: Any) -> None:
    """Plant a port that lacks some methods, or has other attributes."""
    options = {"stages": attributes.pop("stages")} if "stages" in attributes else {}
    absent = {method: getattr(Port, method) for method in missing}
    plant(__name__, name, expected, what, {**absent, **attributes}, **options)


def not_yet(self: Any, *inputs: Any) -> Any:
    """Say that something is not offered."""
    raise MissingAbilityError("not yet")


def easiest_only(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Run a single position only."""
    return Sound.forward(self, source_ids, target_ids, tap) if target_ids.shape[1] == 1 else not_yet(self)


def not_in_float64(self: Any, config: Any, weights: Any, dtype: str) -> Any:
    """Build a model in float32 only."""
    return not_yet(self) if dtype == "float64" else Sound.load(self, config, weights, dtype)


WEIGHTS_ONLY = ("gradients", "start_training", "train_step", "generate")
lacks("NoForward", "There is no forward().", "forward", expected=REFUSED)
lacks("WeightsOnly", "Nothing is offered but the weights.", *WEIGHTS_ONLY, forward=not_yet)
lacks("EasiestOnly", "All cases but the easiest are said not to be offered.", forward=easiest_only)
lacks("NotInFloat64", "float64 is declared, and said not to be offered.", load=not_in_float64)
lacks("NoGenerate", "There is no generate(), and searches are asked for.", "generate", stages=(*STAGES, DECODE))
lacks("NoGradients", "There is no gradients(), and gradients are asked for.", "gradients", stages=(*STAGES, GRADIENTS))
lacks("NoSteps", "There is no train_step().", "start_training", "train_step")
lacks(
    "NoExport",
    "There is no export_weights(), and what is asked for is compared.",
    "export_weights",
    stages=STAGES,
    expected=TOLERATED,
)


# What is declared, and left out.
lacks("LeavesOutNearlyEverything", "Every case but the easiest is left out.", left_out=dict.fromkeys(REST, "later"))
lacks(
    "LeavesOutEverything",
    "Every case is left out, and the weights come back.",
    left_out=dict.fromkeys((*REST, EASIEST), "later"),
)
lacks(
    "LeavesOutOneCase",
    "One of several full models is left out, and listed.",
    left_out={EASIEST: "it needs two tokens"},
    stages=STAGES,
    expected=TOLERATED,
)
lacks(
    "LeavesOutNothing",
    "What is left out is a pattern, and no case has that name: it is refused, as any typing error is.",
    left_out={"full/*": "later"},
    stages=STAGES,
)
lacks("NoDtype", "No dtype is declared.", dtypes=())
lacks("UnknownDtype", "A dtype is declared that nothing is compared in.", dtypes=("float16",))
lacks("Float32Only", "float32 alone is declared: most stages are compared in float64.", dtypes=("float32",))
lacks("Bfloat16Only", "bfloat16 alone is declared, in which mistakes hide.", dtypes=("bfloat16",))
lacks(
    "WrongInFloat32Only",
    "float32 alone is declared, and the logits are wrong: whether by precision only stays open.",
    dtypes=("float32",),
    forward=lambda self, *inputs: Sound.forward(self, *inputs) * np.float32(1.01),
)
lacks("UnknownPreset", "The preset does not exist.", preset="paper_bse")
lacks("UnknownOverride", "A field is overridden that does not exist.", overrides={"norm_oder": "pre"})
lacks(
    "OtherConvention",
    "The model is pre-norm, and declared as the paper's.",
    load=lambda self, config, *rest: Sound.load(self, config.replace(norm_order="pre"), *rest),
    stages=STAGES,
    expected=FAILS,
)
lacks(
    "OneHead",
    "One head is declared: whether several would be split rightly is not asked.",
    overrides={"num_heads": 1},
    stages=STAGES,
    expected=TOLERATED,
)


# Models on which nothing shows: a forward pass that ignores its ids, or masks nothing, agrees.
def ignore(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Run on sentences of one token each, whatever the ids are."""
    return Sound.forward(self, np.ones_like(source_ids), np.ones_like(target_ids), tap)


def no_mask(self: Any, source_ids: ndarray, target_ids: ndarray, tap: Any) -> Any:
    """Attend to padding."""
    masks = {"source_mask": np.ones(source_ids.shape, bool), "target_mask": np.ones(target_ids.shape, bool)}
    return self.model(source_ids, target_ids, tap=tap, **masks)


def blind(name: str, what: str, forward: Any = ignore, **overrides: Any) -> None:
    """Add a port of a declared convention under which its forward pass makes no difference."""
    lacks(name, what, forward=forward, taps=(), overrides=overrides, stages=(ACTIVATIONS,))


LEARNED = {"position_encoding": "learned"}
blind("HugeEpsilon", "The epsilon of the norms is 1e30, and the ids are ignored.", layer_norm_epsilon=1e30)
blind(
    "OneChannel",
    "The model has one channel, which the norms make zero, and the ids are ignored.",
    d_model=1,
    num_heads=1,
    **LEARNED,
)
blind(
    "TwoChannels",
    "The model has two channels, which the norms make 1 and -1, and padding is not masked.",
    no_mask,
    d_model=2,
    num_heads=1,
)
blind(
    "OneToken",
    "The vocabulary has one token beside padding.",
    no_mask,
    source_vocab_size=2,
    target_vocab_size=2,
    eos_id=1,
)
blind("FarPositions", "Positions begin at 1e18, where all sines are alike.", no_mask, position_offset=10**18)
blind(
    "FewPositions",
    "The table of positions has four rows, and the sentences of the cases are longer.",
    no_mask,
    max_length=4,
    **LEARNED,
)
blind("NoLabels", "Label smoothing leaves 1e-13 of the right label.", no_mask, label_smoothing=1 - 1e-13)
lacks(
    "FourTokens",
    "The vocabulary has four tokens, the special ones among them: that is enough.",
    overrides={"source_vocab_size": 4, "target_vocab_size": 4},
    stages=STAGES,
    expected=TOLERATED,
)
lacks(
    "OneLayer",
    "Both stacks have one layer: that is enough.",
    overrides={"num_encoder_layers": 1, "num_decoder_layers": 1},
    stages=STAGES,
    expected=TOLERATED,
)


# Weights that come back.
def export(name: str, what: str, alter: Callable[[dict[str, ndarray]], Any]) -> None:
    """Plant a port that returns altered weights."""
    method = {"export_weights": lambda self: alter(dict(Sound.export_weights(self)))}
    plant(__name__, name, FAILS, what, method, **ONE_CASE)


TABLE = "source_embedding.table"
export("ExportOfNothing", "No weight comes back.", lambda weights: {})
export("ExportOfMore", "One more weight comes back.", lambda weights: {**weights, "more": weights[TABLE]})
export("ExportOfOneBit", "A bit is another.", lambda weights: {**weights, TABLE: np.nextafter(weights[TABLE], 9)})
export("ExportTransposed", "A table comes back transposed.", lambda weights: {**weights, TABLE: weights[TABLE].T})


@attack(FAILS, **ONE_CASE)
class ExportLies(Sound):
    """The weights come back as they were given, and one that is in use is another."""

    def load(self, config, weights, dtype):
        self.given = {name: array.astype(dtype) for name, array in weights.items()}
        super().load(config, {**weights, TABLE: 1.01 * weights[TABLE]}, dtype)

    def export_weights(self):
        return self.given
