"""A table of cases with different batch sizes, lengths, magnitudes, and earlier calls.

Some bugs occur only with a single sentence, with a high length limit, with large values, or after an earlier call of a
different kind. A port with such a bug diverges in at least one of these cases.

``tests/variety.py`` defines dimensions, such as the number of sentences, and lists the values of each dimension.
Together with the cases in ``for_ports``, the cases in this table cover every possible pair of values from two different
dimensions. A greedy algorithm selected a small set of such cases.

The name of a variant starts with the name of the original case. If a port lists ``full/one_token`` in ``left_out``, all
variants of this case are skipped as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from numpy import ndarray

from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, Case
from transformer_parity.transformer.cases.inputs import generator, padded_ids, with_labels
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search

ONE, ODD, SEVERAL, MANY = 1, 3, 4, 8  # sentences per batch
LONGEST = None  # stands for the maximum number of positions of the model
LENGTHY = 32  # number of positions to use if the model has no limit
FEW, SOME = 1, 12  # maximum lengths of hypotheses in tokens
BATCH, MODEL = "batch", "model"  # earlier calls: a different batch of the same shape, or a second model

Padding = tuple[int, ...]  # number of padding tokens at the end of each row, repeated cyclically
NONE: Padding = (0,)
MIXED: Padding = (0, 4, 8, 1)


class Variant(NamedTuple):
    """A batch for the full model, and optionally a call to make before the model processes the batch.

    Attributes:
        name: Name of the case. It starts with the stage and the name of the original case.
        sentences: Number of rows.
        source: Width and padding of the source ids.
        target: Width and padding of the target ids; ignored by searches.
        before: The earlier call (``BATCH``, ``MODEL``, or the name of a different stage), or an empty string for none.
        large: True to use large weights.
        unlabeled: True to remove the labels from all rows except the first.
        search: Beam size, length penalty, and maximum length of a search. With the maximum length ``LONGEST``, a
            hypothesis can have as many tokens as the model has positions.
    """

    name: str
    sentences: int
    source: tuple[int | None, Padding]
    target: tuple[int | None, Padding] = (1, NONE)
    before: str = ""
    large: bool = False
    unlabeled: bool = False
    search: tuple[int | None, float, int | None] | None = None

    @property
    def has_one_key(self) -> bool:
        """True if every attention block has a single key. If so, rounding of large float32 scores has no effect."""
        return self.source[0] == self.target[0] == 1


FORWARD = (
    Variant("full/one_sentence/after_a_search", ONE, (9, NONE), (7, NONE), DECODE),
    Variant("full/one_token/large_after_a_batch", ONE, (9, (4,)), (1, NONE), BATCH, large=True),
    Variant("full/one_token/longest_target", ONE, (1, NONE), (LONGEST, (4,)), BATCH, large=True),
    Variant("full/one_token/large_after_a_backward_pass", SEVERAL, (1, NONE), (7, NONE), GRADIENTS, large=True),
    Variant("full/one_token/many_sentences", MANY, (1, NONE), (1, NONE), MODEL, large=True),
    Variant("full/one_token/longest_source", MANY, (LONGEST, MIXED), (1, NONE), DECODE, large=True),
    Variant("full/longest/one_sentence", ONE, (LONGEST, NONE), (LONGEST, NONE), MODEL, large=True),
    Variant("full/longest/target_of_many", MANY, (9, NONE), (LONGEST, MIXED), GRADIENTS),
    Variant("full/longest/source_of_many", MANY, (LONGEST, NONE), (7, (0, 3, 6)), large=True),
    Variant("full/longest/source_after_a_batch", MANY, (LONGEST, NONE), (7, (0, 3, 6)), BATCH, large=True),
)
BACKWARD = (
    Variant("gradients/padded/large", ONE, (9, NONE), (7, NONE), large=True),
    Variant("gradients/padded/three_sentences", ODD, (9, NONE), (7, NONE)),
    Variant("gradients/padded/after_a_batch", SEVERAL, (9, MIXED), (7, NONE), BATCH, unlabeled=True),
    Variant("gradients/one_token/one_sentence", ONE, (1, NONE), (7, (3,)), BATCH),
    Variant("gradients/one_token/one_sentence_of_two_models", ONE, (9, (4,)), (1, NONE), MODEL),
    Variant("gradients/one_token/large_after_forward", ONE, (9, (4,)), (1, NONE), ACTIVATIONS, large=True),
    Variant("gradients/one_token/large_after_a_batch", SEVERAL, (1, NONE), (1, NONE), BATCH, large=True),
    Variant("gradients/one_token/after_a_search", SEVERAL, (1, NONE), (7, (0, 3, 6)), DECODE, unlabeled=True),
    Variant("gradients/one_token/of_two_models", SEVERAL, (1, NONE), (7, (0, 3, 6)), MODEL, large=True, unlabeled=True),
    Variant("gradients/one_token/unlabeled_rows", SEVERAL, (9, NONE), (1, NONE), unlabeled=True),
)
SEARCHES = (
    Variant("decode/port_greedy/one_token", MANY, (1, NONE), search=(None, 0.0, FEW)),
    Variant("decode/port_greedy/one_sentence", ONE, (LONGEST, (4,)), large=True, search=(None, 0.0, SOME)),
    Variant("decode/port_greedy/of_two_models", ONE, (LONGEST, (4,)), before=MODEL, search=(None, 0.0, FEW)),
    Variant("decode/port_greedy/longest", MANY, (LONGEST, NONE), large=True, search=(None, 0.0, LONGEST)),
    Variant(
        "decode/port_greedy/longest_after_forward",
        *(SEVERAL, (LONGEST, NONE)),
        before=ACTIVATIONS,
        search=(None, 0.0, LONGEST),
    ),
    Variant(
        "decode/port_greedy/longest_after_a_batch",
        *(ONE, (1, NONE)),
        before=BATCH,
        large=True,
        search=(None, 0.0, LONGEST),
    ),
    Variant("decode/port_beam/longest", ONE, (9, NONE), before=MODEL, search=(3, 0.6, LONGEST)),
    Variant(
        "decode/port_beam/one_sentence",
        *(ONE, (9, NONE)),
        before=GRADIENTS,
        large=True,
        search=(2, 0.6, FEW),
    ),
    Variant(
        "decode/port_beam/one_token_each",
        *(SEVERAL, (1, NONE)),
        before=ACTIVATIONS,
        large=True,
        search=(4, 0.0, SOME),
    ),
    Variant(
        "decode/port_beam/after_a_batch",
        *(SEVERAL, (LONGEST, MIXED)),
        before=BATCH,
        large=True,
        search=(2, 0.6, FEW),
    ),
    Variant(
        "decode/port_beam/of_two_models",
        *(SEVERAL, (1, NONE)),
        before=MODEL,
        large=True,
        search=(4, 1.5, FEW),
    ),
)


# Large weights for each stage. Gradients through saturated attention are rounding noise, and with large logits, the
# scores of likely hypotheses are small differences between large numbers. In both cases, correct ports would exceed the
# tolerance.
LARGE = {ACTIVATIONS: "large", GRADIENTS: "loud", DECODE: "sharp"}
STAGES = {"full": (ACTIVATIONS, "full model"), "gradients": (GRADIENTS, "gradients"), "decode": (DECODE, "decoding")}


def variants(config: TransformerConfig, seed: int) -> Iterator[Case]:
    """Yield a case for each variant.

    The weights are generated by ``inputs.hard_weights``. If ``Variant.large`` is true, some weights are scaled up.
    """
    for variant in (*FORWARD, *BACKWARD, *SEARCHES):
        stage, component = STAGES[variant.name.partition("/")[0]]
        ids = _ids(variant, config)
        inputs = {
            ACTIVATIONS: ids,
            GRADIENTS: _with_labels(ids, config, unlabeled=variant.unlabeled),
            DECODE: {"source_ids": ids["source_ids"]},
        }
        case = Case(variant.name, component, config, "", inputs[stage], seed=seed, stage=stage)
        if variant.large:
            case = replace(case, magnitude=LARGE[stage])
        if not (stage == ACTIVATIONS and variant.has_one_key):
            case = replace(case, dtypes=("float64",))
        if variant.search is not None:
            beam_size, length_penalty, limit = variant.search
            case = replace(case, search=Search(beam_size, length_penalty, limit or longest(config)))
        if variant.before == BATCH:
            other = _ids(variant, config, turn=1)
            earlier = [replace(case, inputs={name: other.get(name, array) for name, array in case.inputs.items()})]
        elif variant.before == MODEL:
            earlier = [replace(case, seed=seed + 1)]
        elif variant.before:
            search = Search(max_length=SOME) if variant.before == DECODE else None
            earlier = [replace(case, stage=variant.before, inputs=inputs[variant.before], search=search)]
        else:
            earlier = []
        yield replace(case, before=tuple(earlier))


def longest(config: TransformerConfig) -> int:
    """Return the length of the longest sequence in the cases."""
    return config.max_positions or LENGTHY


def _ids(variant: Variant, config: TransformerConfig, turn: int = 0) -> dict[str, ndarray]:
    """Return the source and target IDs of a variant.

    If ``turn`` is 1, the shapes are the same, but the tokens and the padding differ.
    """
    rng, found = generator(f"{variant.name} {turn}"), {}
    for side, (width, padding) in (("source", variant.source), ("target", variant.target)):
        width = width or longest(config)
        lengths = [width - (padding[(row + turn) % len(padding)] + turn) % width for row in range(variant.sentences)]
        vocab_size = getattr(config, f"{side}_vocab_size")
        found[f"{side}_ids"] = padded_ids(rng, vocab_size, config.pad_id, lengths, width)
    return found


def _with_labels(ids: dict[str, ndarray], config: TransformerConfig, *, unlabeled: bool) -> dict[str, ndarray]:
    inputs = with_labels(ids, config)
    if unlabeled:
        inputs["labels"][1:] = config.pad_id
    return inputs
