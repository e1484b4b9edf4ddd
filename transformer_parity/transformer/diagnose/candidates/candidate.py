"""Candidates: possible explanations of the difference between a port and the reference.

A candidate is a set of changes to the NumPy reference. Each change is either a bug from the catalog or a convention
that a published implementation uses. If the reference with these changes reproduces all values of the port, the
candidate explains the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations, product
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.transformer.bugs import t5
from transformer_parity.transformer.bugs.bug import Bug, Edit
from transformer_parity.transformer.bugs.catalog import (
    BACKWARD_BLOCKS,
    BACKWARD_PATHS,
    CANDIDATES,
    EVERYWHERE,
    FORWARD,
    LOSSES,
    SEARCH,
    SEARCH_CANDIDATES,
    STEP_VARIANTS,
    STRUCTURE,
    TRAINING,
)
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.cases.case import GRADIENTS
from transformer_parity.transformer.diagnose.candidates.places import Place
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.config import CHOICES, TransformerConfig
from transformer_spec.names import parameter_shapes
from transformer_spec.presets import IMPLEMENTATIONS

EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12)  # defaults of published layer norms
# Fields of absolute positions, which have no effect in a model with relative positions.
ABSOLUTE = ("position_layout", "position_timescale", "position_offset")
# Fields that candidates take from a preset. Candidates don't change sizes, dropout rates, IDs, or tied embeddings.
MATHEMATICS = (
    "norm_order",
    "final_norm",
    "embedding_norm",
    "layer_norm_epsilon",
    "layer_norm_kind",
    *ABSOLUTE,
    "scale_embedding",
    "activation",
    "scale_scores",
    "scale_logits",
    "label_smoothing_kind",
)
SWITCHED = ("final_norm", "embedding_norm", "skip_first_self_attention", "scale_embedding")  # boolean fields
SWITCHED_IN_T5 = ("scale_scores", "scale_logits")  # boolean fields that only candidates for T5 change
Renames = Mapping[str, str | Callable[[re.Match[str]], str]]  # maps a pattern in a parameter name to the replacement
LOSS_FIELDS = ("label_smoothing", "label_smoothing_kind")
# This edit removes a check from the backward pass. The check would reject a model that contains blocks from an edited
# copy of the package, because these blocks have different classes.
UNCHECKED: Edit = ("backward_checks", '    _check_block("", model, (Transformer,))\n', "")


@dataclass(frozen=True)
class Candidate:
    """A set of bugs and conventions that apply either to the full model or only to some parts of the model."""

    parts: tuple[Bug, ...]
    place: Place | None = None

    @property
    def name(self) -> str:
        """Return a name that describes the candidate."""
        names = " and ".join(part.name for part in self.parts)
        return names if self.place is None else f"{names}, in {self.place.words} only"

    @property
    def content(self) -> Any:
        """Return a key that identifies the changes: only candidates with the same changes have the same key."""
        return (*map(content, self.parts), self.place and self.place.parts)

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray]) -> LoadedPackage:
        """Load the reference in float64, with the changes of the candidate applied.

        Raises:
            ValueError: If the changes conflict with each other or don't result in a valid model.
        """
        usual = None if self.place is None else _reference((UNCHECKED,), config, weights)
        for part in self.parts:
            config = config.replace(**part.config)
            weights = part.convert(weights)
        edits = tuple(edit for part in self.parts for edit in part.edits.get("numpy", ()))
        edited = _reference(edits, config, _fitted(weights, config))
        if self.place is None or usual is None:
            return edited
        self.place.replace(usual.model, edited.model)
        return usual


def _reference(edits: tuple[Edit, ...], config: TransformerConfig, weights: Mapping[str, ndarray]) -> LoadedPackage:
    """Load the reference in float64, with the given edits to its source code."""
    package = edited_package("reference_numpy", edits)
    model = package.Transformer.from_weights(config, weights, "float64", fast=False)
    return LoadedPackage(package, model, Placement("float64"))


def candidates(config: TransformerConfig, stage: str, *, forward_agrees: bool = False) -> list[Bug]:
    """Return the known bugs and conventions that may explain why a port differs from the reference in one stage.

    Args:
        config: The config that was passed to the port.
        stage: Name of this stage. For example, training bugs can't affect activations.
        forward_agrees: Whether the port's activations agree with the reference. If so, the function omits bugs in the
            forward pass, except bugs in code that is called only by searches.
    """
    if forward_agrees:
        found = [one for one in conventions(config, stage) if one.config.keys() <= {*LOSS_FIELDS}]
        parts = [STRUCTURE["edge cases"]] if STAGES[stage].searches else []
    else:
        found = [
            *conventions(config, stage),
            *mixed_up_weights(config.d_k == config.d_v),
            *misplaced_weights(config.pad_id),
        ]
        parts = [*FORWARD.values(), EVERYWHERE, CANDIDATES, *STRUCTURE.values()]
    if STAGES[stage].has_loss:
        parts += [*TRAINING.values(), LOSSES]
    if stage == GRADIENTS:  # in other training stages, each candidate would require a full training run
        parts += [BACKWARD_BLOCKS, BACKWARD_PATHS]
    if STAGES[stage].trains:
        parts.append(STEP_VARIANTS)
    if STAGES[stage].searches:
        parts += [SEARCH, SEARCH_CANDIDATES]
    seen = {content(bug) for bug in found}
    irrelevant = [] if config.position_encoding == "relative" else [*t5.T5, *t5.SEARCH]
    for bug in (bug for part in parts for bug in part if bug not in irrelevant):
        what = content(bug)
        if "numpy" in bug.edits and what not in seen and _changes(bug, config):
            seen.add(what)
            found.append(bug)
    return found


def conventions(config: TransformerConfig, stage: str) -> list[Bug]:
    """Return candidates that change one convention, and candidates that use all conventions of a preset.

    A convention is a config field for which published implementations use different values. For each convention, the
    function returns one candidate per alternative value.
    """
    fields: list[dict[str, Any]] = []
    is_relative = config.position_encoding == "relative"
    # The first two fields determine which parameters a model has.
    fixed = ("tie_embeddings", "position_encoding", *_unread(config))
    for name, choices in CHOICES.items():
        if name in fixed:
            continue
        if name in LOSS_FIELDS and not STAGES[stage].has_loss:
            continue
        fields += [{name: choice} for choice in choices if choice != getattr(config, name)]
    switched = (*SWITCHED, *SWITCHED_IN_T5) if is_relative else SWITCHED
    fields += [{name: not getattr(config, name)} for name in switched]
    fields += [{"layer_norm_epsilon": value} for value in EPSILONS if value != config.layer_norm_epsilon]
    if is_relative:
        if config.relative_max_distance != 128:  # the first implementations of T5 use this constant
            fields.append({"relative_max_distance": 128})
    else:
        offsets = sorted({0, 1, 2, config.pad_id + 1} - {config.position_offset})
        fields += [{"position_offset": offset} for offset in offsets]
    named = [Bug(_words(entry), "", config=entry) for entry in fields]
    for preset, values in {"paper": {}, **IMPLEMENTATIONS}.items():
        defaults = {entry.name: entry.default for entry in TransformerConfig.__dataclass_fields__.values()}
        wanted = {name: values.get(name, defaults[name]) for name in MATHEMATICS}
        entry = {
            name: value
            for name, value in wanted.items()
            if value != getattr(config, name)
            and name not in fixed
            and (STAGES[stage].has_loss or name not in LOSS_FIELDS)
        }
        # Presets that differ only in sizes, such as T5 v1.1, mT5, and ByT5, have the same conventions.
        if len(entry) > 1 and all(entry != bug.config for bug in named):
            named.append(Bug(f"{_words(entry)} (the conventions of {preset})", "", config=entry))
    return named


@cache
def mixed_up_weights(as_wide: bool) -> list[Bug]:
    """Return typical bugs of weight converters: transposed or permuted weights in all attention blocks.

    Args:
        as_wide: Whether ``d_k`` equals ``d_v``, so that value kernels can be exchanged with query and key kernels.
    """
    every = ("query", "key", "value", "output")
    # The bug catalog already contains a bug that transposes only the output kernels, so this list omits it.
    families = [*((name,) for name in every[:3]), every[:3], every]
    found = [
        Bug(f"{', '.join(names)} kernels of all attention blocks transposed", "", convert=partial(_turned, names))
        for names in families
    ]
    for order in permutations(every[:3]):
        if order != every[:3] and (as_wide or order[2] == "value"):
            words = f"{', '.join(every[:3])} weights of all attention blocks loaded from {', '.join(order)}"
            found.append(Bug(words, "", convert=partial(_reordered, dict(zip(every, order, strict=False)))))
    return found


@cache
def misplaced_weights(pad_id: int) -> list[Bug]:
    """Return bugs that load weights into the wrong block, round weights, or use a zero embedding for padding.

    The bugs of the first type load weights of one layer, norm, or attention block into a different one.
    """
    others: dict[str, Renames] = {
        **{
            f"{what} of the {where} layer": {rf"\.layers\.(\d+)\.(?=.*{end})": partial(_other_layer, step)}
            for where, step in (("previous", -1), ("next", 1))
            for what, end in (("weights", ""), ("kernels", r"\.kernel$"))
        },
        **{
            f"weights of {first} and {second} exchanged": {
                rf"\.{first}\.": f".{second}.",
                rf"\.{second}\.": f".{first}.",
            }
            for first, second in (
                ("self_attention_norm", "feed_forward_norm"),
                ("self_attention_norm", "cross_attention_norm"),
                ("cross_attention_norm", "feed_forward_norm"),
                ("self_attention", "cross_attention"),
            )
        },
    }
    found = [Bug(name, "", convert=partial(_from_other_names, changes)) for name, changes in others.items()]
    for dtype, (what, least) in product(("bfloat16", "float16"), (("weights", 0), ("matrices", 2))):
        found.append(Bug(f"{what} rounded to {dtype}", "", convert=partial(_rounded, dtype, least)))
    return [*found, Bug("a zero embedding for padding", "", convert=partial(_without_row, pad_id))]


def _other_layer(step: int, found: re.Match[str]) -> str:
    return f".layers.{int(found[1]) + step}."


def _from_other_names(changes: Renames, weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    def source(name: str) -> str:
        renamed = (re.sub(pattern, new, name) for pattern, new in changes.items() if re.search(pattern, name))
        return next(
            (other for other in renamed if other in weights and weights[other].shape == weights[name].shape), name
        )

    return {name: weights[source(name)] for name in weights}


def _rounded(dtype: str, least: int, weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    return {name: x.astype(dtype).astype(x.dtype) if x.ndim >= least else x for name, x in weights.items()}


def _without_row(row: int, weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    def emptied(table: ndarray) -> ndarray:
        return np.where(np.arange(len(table))[:, None] == row, table.dtype.type(0), table)

    return {name: emptied(x) if name.endswith("_embedding.table") else x for name, x in weights.items()}


def _turned(names: Sequence[str], weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    ends = tuple(f"_attention.{name}_proj.kernel" for name in names)
    return {name: np.ascontiguousarray(value.T) if name.endswith(ends) else value for name, value in weights.items()}


def _reordered(order: Mapping[str, str], weights: Mapping[str, ndarray]) -> dict[str, ndarray]:
    def source(name: str) -> str:
        parent, found, rest = name.partition("_attention.")
        kind = rest.partition("_proj")[0]
        return f"{parent}{found}{order.get(kind, kind)}{rest.removeprefix(kind)}" if found else name

    return {name: weights[source(name)] for name in weights}


def is_convention(bug: Bug) -> bool:
    """Return whether a bug is a convention, that is, whether it changes only the config."""
    return bool(bug.config) and not bug.edits.get("numpy") and bug.convert is dict


def _words(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _changes(bug: Bug, config: TransformerConfig) -> bool:
    """Return whether a bug changes the reference, for example by setting a config field to a different value."""
    return bool(
        bug.edits["numpy"]
        or bug.convert is not dict
        or any(getattr(config, name) != value for name, value in bug.config.items() if name not in _unread(config))
    )


def _unread(config: TransformerConfig) -> tuple[str, ...]:
    """Return the fields that have no effect in a model with this config."""
    return ABSOLUTE if config.position_encoding == "relative" else ()


def content(bug: Bug) -> Any:
    """Return a key that identifies the changes that a bug makes to the reference. It doesn't contain the bug's name."""
    return (repr(sorted(bug.config.items())), tuple(bug.edits.get("numpy", ())), bug.convert)


def _fitted(weights: Mapping[str, ndarray], config: TransformerConfig) -> dict[str, ndarray]:
    """Return the weights that a config requires. Missing scales are set to 1, and missing biases to 0."""
    shapes = parameter_shapes(config)
    fitted = {}
    for name, shape in shapes.items():
        if name in weights:
            fitted[name] = weights[name]
        elif name.endswith((".scale", ".bias")):
            fitted[name] = np.full(shape, float(name.endswith(".scale")), np.float32)
        else:
            raise ValueError(f"no weight or default for {name}")
    return fitted
