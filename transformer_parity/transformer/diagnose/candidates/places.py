"""Places: the model parts in which the diagnosis tries a known bug, such as one layer or one kind of attention.

A bug edits a class, so it affects every instance of the class. To try the bug in only some model parts, the diagnosis
loads one correct model and one model with the bug. It then replaces these parts of the correct model with the
corresponding parts of the incorrect model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.transformer.bugs.bug import Bug, Edit
from transformer_parity.transformer.bugs.catalog import BACKWARD_BLOCKS, EVERYWHERE, TRAINING
from transformer_parity.transformer.cases.case import ACTIVATIONS, Case
from transformer_parity.transformer.diagnose.evidence.blame import REPLAYED, blame_files
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION
from transformer_spec.config import TransformerConfig
from transformer_spec.names import find, parameter_shapes, tap_shapes

SUBLAYERS = ("self_attention", "cross_attention", "feed_forward")
# Maps each module that a bug can edit, and each config field that a bug can set, to a pattern that matches the affected
# model parts.
CHANGED = {
    "attention": r"_attention$",
    "feed_forward": r"\.feed_forward$",
    "activation": r"\.feed_forward$",
    "layers": r"_norm$",
    "linear": r"_proj$",
    "layer_norm_kind": r"_norm$",
    "layer_norm_epsilon": r"_norm$",
    "final_norm": r"\.final_norm$",
    "embedding_norm": r"_embedding_norm$",
    "embedding": r"_(embedding|position)$",
    "scale_embedding": r"_embedding$",
    "position_layout": r"_position$",
    "position_timescale": r"_position$",
    "position_offset": r"_position$",
    "relative_position": r"\.relative_bias$",
    "scale_scores": r"_attention$",
    "encoder": r"^encoder\.layers\.\d+$",
    "decoder": r"^decoder\.layers\.\d+$",
    "norm_order": r"\.layers\.\d+$",
}
# Text that is removed from the name of a bug when the diagnosis tries the bug in only some model parts.
WHOLE_MODEL = re.compile(r",? (in every sub-layer.*|of all attention blocks)")


@dataclass(frozen=True)
class Place:
    """A set of model parts, with a description.

    Attributes:
        words: Description of the model parts in messages.
        parts: Attribute path of each part, for example ``encoder.layers.0.self_attention``.
    """

    words: str
    parts: tuple[str, ...]

    def replace(self, model: Any, edited: Any) -> None:
        """Replace the parts of a model with the corresponding parts of an edited model."""
        for path in self.parts:
            owner, _, name = path.rpartition(".")
            holder = find(model, owner) if owner else model
            if name.isdecimal():
                holder[int(name)] = find(edited, path)
            else:
                setattr(holder, name, find(edited, path))


@dataclass(frozen=True)
class _Atom:
    """The smallest unit in which the diagnosis tries a bug: a model part, or a sub-layer with its residual sum."""

    shown: str
    part: str
    edits: tuple[Edit, ...]


def at_single_places(case: Case, actual: Mapping[str, ndarray], known: Sequence[Bug]) -> list[tuple[Bug, Place]]:
    """Return pairs of a known bug and the model parts in which to try the bug.

    The pairs are sorted by the number of model parts, in descending order. In the ``activations`` stage, the result
    includes only model parts that may have introduced a difference.

    Args:
        case: The case that the port ran.
        actual: The port's tensors.
        known: The known bugs.
    """
    if case.block or case.stage not in REPLAYED:
        return []
    weights, introduced = case.load_weights(), list[range]()
    if case.stage == ACTIVATIONS:
        truth = DEFINITION.load(case.config, weights, Placement("float64"))
        found = blame_files(case, actual, truth, "").blame.introduced
        introduced = intervals(found, list(actual), case.config)
    else:
        known = [bug for bug in known if bug in (*TRAINING["gradient"], *BACKWARD_BLOCKS)]
    found_places = [one for bug in known for one in placed(bug, case.config, weights, introduced)]
    return sorted(found_places, key=lambda one: -len(one[1].parts))


def placed(
    bug: Bug, config: TransformerConfig, weights: Mapping[str, ndarray], introduced: Sequence[range]
) -> Iterator[tuple[Bug, Place]]:
    """Yield pairs of a bug and the model parts in which to try it.

    Each pair contains a copy of the bug with only the edits for these model parts.

    Args:
        bug: The bug. If the bug changes fewer than two model parts, the function yields nothing.
        config: Config of the model.
        weights: Weights of the model. The function applies the bug's conversion to these weights, to find out which
            weights the bug changes.
        introduced: Ranges of taps that may have introduced a difference (see ``intervals``); empty if unknown.
    """
    atoms = _atoms(bug, config, weights)
    if len(atoms) < 2:
        return
    taps = list(tap_shapes(config, 1, 1, 1))
    spans = {atom: _span(atom.part, taps) for atom in atoms}
    for words, some in _groups(atoms, [atom for atom in atoms if _meets(spans[atom], introduced)]):
        if not all(_meets(spans[atom], introduced) for atom in some):
            continue
        # The bug must explain the first difference. Later differences may follow from the first one, because blocks can
        # read values that are not compared.
        if not any(_meets(spans[atom], introduced[:1]) for atom in some):
            continue
        edits = tuple(dict.fromkeys(edit for atom in some for edit in atom.edits))
        limited = replace(bug, name=WHOLE_MODEL.sub("", bug.name), edits={"numpy": list(edits)})
        yield limited, Place(words, tuple(dict.fromkeys(atom.part for atom in some)))


def intervals(introduced: Sequence[str], shown: Sequence[str], config: TransformerConfig) -> list[range]:
    """Return, for each tap in ``introduced``, the range of taps that may have introduced its difference.

    The range starts after the previous tap that the port recorded, and ends with the tap itself.

    Args:
        introduced: Recorded taps whose differences don't result from earlier recorded taps; may include the output.
        shown: All taps that the port recorded.
        config: Config of the model.
    """
    taps = [*tap_shapes(config, 1, 1, 1), OUTPUT]
    known = sorted(taps.index(name) for name in shown if name in taps)
    found = []
    for name in introduced:
        last = taps.index(name)
        found.append(range(max((i for i in known if i < last), default=-1) + 1, last + 1))
    return found


def _atoms(bug: Bug, config: TransformerConfig, weights: Mapping[str, ndarray]) -> list[_Atom]:
    """Return the model parts that a bug changes, or an empty list if the bug can't be limited to some model parts."""
    edits = tuple(bug.edits.get("numpy", ()))
    parts = list(_parts(config))
    if bug in EVERYWHERE:  # each of these bugs consists of one edit per sub-layer
        return [
            _Atom(f"{part}.{name}", part, (edit,))
            for edit in edits
            for part in parts
            if (name := next((name for name in SUBLAYERS if name in edit[1]), "")) and _changes(edit[0], part)
        ]
    sources = {*bug.config, *(_module(edit) for edit in edits)}
    if len(bug.config) > 1 or sources - CHANGED.keys():
        return []
    smaller = [name.rpartition(".")[0] for name in weights if name.endswith("_proj.kernel")]
    changed = [part for part in (*parts, *smaller) if any(_changes(source, part) for source in sources)]
    try:
        converted = bug.convert(weights)
    except Exception:  # the bug's weight conversion doesn't work for this model
        return []
    kept = {name for name, weight in weights.items() if converted[name] is weight}
    names = [name for name in weights if name not in kept and not np.array_equal(weights[name], converted[name])]
    changed += [part for part in parts if part[-1].isalpha() and any(name.startswith(f"{part}.") for name in names)]
    for name in ("final_norm", "embedding_norm"):
        if not getattr(config, name) and name not in sources:
            changed = [part for part in changed if not part.endswith(name)]
    return [_Atom(part, part, edits) for part in dict.fromkeys(changed)]


def _module(edit: Edit) -> str:
    """Return the key of an edit. ``CHANGED`` maps this key to a pattern for the model parts that the edit changes."""
    module, old, _ = edit
    if module == "functional" and ("sigma" in old or "axis=rows" in old):
        return "layers"
    if module == "functional":
        return "attention" if "scores" in old or "weights" in old else "feed_forward"
    return "linear" if module == "layers" and "return dx" in old else module


def _changes(source: str, part: str) -> bool:
    return re.search(CHANGED.get(source, "$."), part) is not None


def _parts(config: TransformerConfig) -> Iterator[str]:
    """Yield the attribute path of each model part in which the diagnosis can try a bug, in the order of computation."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(config))
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        yield from (f"{side}_embedding", f"{side}_position", f"{side}_embedding_norm")
        if f"{stack}.relative_bias" in owners:
            yield f"{stack}.relative_bias"
        for i in range(getattr(config, f"num_{stack}_layers")):
            layer = f"{stack}.layers.{i}"
            yield layer
            inside = (
                owner.removeprefix(f"{layer}.").split(".")[0] for owner in owners if owner.startswith(f"{layer}.")
            )
            yield from (f"{layer}.{name}" for name in dict.fromkeys(inside))
        yield f"{stack}.final_norm"


def _groups(atoms: Sequence[_Atom], possible: Sequence[_Atom]) -> Iterator[tuple[str, tuple[_Atom, ...]]]:
    """Yield groups of model parts in which to try a bug, and a description of each group.

    The groups are the stacks, all blocks of each type, the individual model parts, and the layers. The last group
    contains all model parts in ``possible``.
    """
    shown = [atom.shown for atom in atoms]
    layers = dict.fromkeys(found[0] for name in shown if (found := re.match(r"\w+\.layers\.\d+(?=\.)", name)))
    patterns = {"the encoder": "(encoder[.]|source_).*", "the decoder": "(decoder[.]|target_).*"}
    for name in (*(re.sub(r"\.\d+", ".*", name) for name in shown), *shown):
        patterns[name] = re.escape(name).replace(r"\*", r"\d+")
    for name in shown:
        patterns[f"**.{name.rpartition('.')[2]}"] = rf".*\.{name.rpartition('.')[2]}"
    patterns |= {layer: rf"{re.escape(layer)}\..*" for layer in layers}
    groups = {
        words: tuple(atom for atom in atoms if re.fullmatch(pattern, atom.shown)) for words, pattern in patterns.items()
    }
    groups[" and ".join(atom.shown for atom in possible)] = tuple(possible)
    seen = {tuple(atoms), ()}
    for words, some in groups.items():
        if some not in seen:
            seen.add(some)
            yield (some[0].shown if "*" in words and len(some) == 1 else words), some


def _span(part: str, taps: Sequence[str]) -> range:
    """Return the indices of a part's taps as a range.

    If the part has no taps, the range contains only the index of the first tap that depends on the part.
    """
    own = [i for i, tap in enumerate(taps) if tap.startswith(f"{part}.")]
    if not own:
        stack, _, name = part.partition(".")
        tap = f"{stack}.output" if name else f"{part.partition('_')[0]}_embedding.output"
        own = [taps.index(tap)]
    return range(own[0], own[-1] + 1)


def _meets(span: range, introduced: Sequence[range]) -> bool:
    """Return whether the range ``span`` overlaps any range in ``introduced``, or True if ``introduced`` is empty."""
    return not introduced or any(span.start < one.stop and one.start < span.stop for one in introduced)
