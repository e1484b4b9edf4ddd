"""Attacks through golden vectors: A, which is the truth, or B, which is compared with it, is not what it should be."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attacks.attack import FAILS, FILES, INCOMPLETE, REFUSED, TOLERATED, Attack
from attacks.vectors import MANIFEST, Vectors, computed, rounded, truth
from transformer_parity.engine.findings import FAILED, Finding, failure
from transformer_parity.engine.verdict import EXIT_CODES, Verdict
from transformer_parity.transformer.golden.compare import compare_folders, read_pairs

FOLDERS: list[Attack] = []
PADDED, SENTENCE, EASIEST, SQUARE = FULL = (
    "full/padded",
    "full/one_sentence",
    "full/one_token",
    "full/source_as_long_as_target",
)
GRADIENTS, STEPS, GREEDY, BEAM = "gradients/padded", "steps/port", "decode/port_greedy", "decode/port_beam"
TAP, OUTPUT, TABLE = "encoder.output", "output", "source_embedding.table"
FILE, WEIGHTS = f"{PADDED}/float64.safetensors", "weights.safetensors"
LATER = [{"case": "*", "reason": "later"}]
MODELS = ("first", "second")
Edit = Callable[..., Any]


def vectors(
    name: str, what: str, edit: Edit, models: tuple[str, ...] = ("",), expected: str = REFUSED, says: str = ""
) -> None:
    """Add an attack: ``edit(a, b)`` changes both sides; with several models, each side is a mapping."""
    run = partial(_run, models=models, edit=edit if len(models) > 1 else lambda a, b: edit(a[""], b[""]))
    FOLDERS.append(Attack(name, what, expected, FILES, run, says))


def on_both(name: str, what: str, edit: Edit, expected: str = REFUSED) -> None:
    """Add an attack in which the same is done to A and to B."""
    vectors(name, what, lambda a, b: (edit(a), edit(b)), expected=expected)


def on_b(name: str, what: str, edit: Edit, expected: str = FAILS) -> None:
    """Add an attack in which something is done to B."""
    vectors(name, what, lambda a, b: edit(b), expected=expected)


def written(name: str, what: str, edit: Edit, says: str = "", expected: str = INCOMPLETE) -> None:
    """Add an attack on the folders as they were written: ``edit(a, b)`` is given their paths."""
    FOLDERS.append(Attack(name, what, expected, FILES, partial(_run, afterwards=edit), says))


def _run(
    edit: Edit = lambda a, b: None, models: tuple[str, ...] = ("",), afterwards: Edit = lambda a, b: None
) -> tuple[int, list[Finding]]:
    """Write both folders, compare them, and return the exit code and the findings."""
    sides: tuple[dict[str, Vectors], ...] = tuple({name: make() for name in models} for make in (truth, computed))
    edit(*sides)
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "a", Path(folder) / "b"
        for path, side in zip((a, b), sides, strict=True):
            for name, held in side.items():
                held.write(path / name)
        afterwards(a, b)
        try:
            pairs = read_pairs(a, b)
            findings = [finding for pair in pairs for finding in compare_folders(pair)]
        except Exception as error:  # as the command does
            problem = f"{type(error).__name__}: {error}".replace(folder, "")
            return EXIT_CODES[FAILED], [failure("mine", problem)]
    return Verdict.of(findings, [pair.asked for pair in pairs]).exit_code, findings


def set_all(fields: Mapping[str, Any]) -> Edit:
    """Return what changes entries of the manifest."""
    return lambda side: side.manifest.update(fields)


# A and B agree with each other, and with nothing else.
on_b("SoundVectors", "B is within rounding of A in every tensor.", lambda b: None, expected=TOLERATED)
on_both("Zeros", "All tensors of both are zero.", lambda side: side.alter(np.zeros_like))
vectors(
    "ZerosOfAnother",
    "All tensors of both are zero, and A was not written by the reference.",
    lambda a, b: (a.manifest.update(producer={"name": "other"}), a.alter(np.zeros_like), b.alter(np.zeros_like)),
)
on_both(
    "EmptyTensors",
    "The tensors of both hold no number.",
    lambda side: (side.keep(PADDED), side.alter(lambda x: x.reshape(-1)[:0])),
)
on_both(
    "SameMistake",
    "The logits of both are wrong in the same way.",
    lambda side: side.alter(lambda x: x[..., ::-1], PADDED, only=OUTPUT),
)
on_both(
    "NanOnBothSides",
    "A tap of both is NaN.",
    lambda side: side.alter(lambda x: np.full_like(x, np.nan), PADDED, only=TAP),
)
vectors(
    "NegatedBaseline",
    "The float32 tensors of A have the wrong sign, so that those of B may be eight times as wrong.",
    lambda a, b: (a.alter(np.negative, dtype="float32"), b.alter(np.zeros_like, dtype="float32")),
)
on_both(
    "CoarseBaseline",
    "The float32 tensors of both are rounded to two decimals.",
    lambda side: side.alter(lambda x: rounded(x.round(2)), dtype="float32"),
)
on_both(
    "InfiniteBaseline",
    "The float32 tensors of both are infinite.",
    lambda side: side.alter(lambda x: np.full_like(x, np.inf), dtype="float32"),
)
on_both(
    "NamesOfNothing",
    "The taps of both have names that no tap has.",
    lambda side: [side.files.update({f: _renamed(x)}) for f, x in side.files.items() if f.startswith(PADDED + "/f")],
)
on_both(
    "ShapeOfNothing",
    "The logits of both hold one number of each sentence.",
    lambda side: side.alter(lambda x: x[:, 0, 0], PADDED, only=OUTPUT),
)
on_both(
    "OneTensor",
    "Both hold the source embedding, and nothing that was computed from it.",
    lambda side: (side.keep(PADDED), side.drop(lambda name: name != "source_embedding.output")),
)
on_both(
    "OtherWeightsInBoth",
    "The weights of both are not those that the tensors were computed with.",
    lambda side: side.files[WEIGHTS][TABLE].put(200, 0.5),
)
on_both(
    "OtherInputsInBoth",
    "The inputs of both are not those that the tensors were computed from.",
    lambda side: side.inputs(PADDED)["source_ids"].put(0, 3),
)
on_both(
    "NoSentence",
    "The batches of both have no sentence, and their tensors no number.",
    lambda side: (
        side.keep(PADDED),
        side.inputs(PADDED).update({name: ids[:0] for name, ids in side.inputs(PADDED).items()}),
        side.alter(lambda x: x[:0]),
    ),
)
on_both(
    "NonsenseBeam", "The beam of both has the size -3.", lambda side: side.case(BEAM)["search"].update(beam_size=-3)
)
on_both(
    "NonsensePenalty",
    "The length penalty of both is no number.",
    lambda side: side.case(BEAM)["search"].update(length_penalty="much"),
)
on_both(
    "OtherSearch",
    "The length penalty of both is not the one that the hypotheses were found with.",
    lambda side: side.case(BEAM)["search"].update(length_penalty=0.0),
)
on_both(
    "OtherSettings",
    "The learning rate of both is not the one that the steps were taken with.",
    lambda side: side.case(STEPS)["settings"].update(learning_rate_factor=1e-30),
)
on_both("NoCase", "Neither holds a case.", set_all({"cases": []}), expected=INCOMPLETE)
vectors(
    "TruthWithoutFloat32",
    "A holds no float32 tensors, and B does: the reference computes them.",
    lambda a, b: _drop_dtype(a, "float32"),
    expected=TOLERATED,
)
vectors(
    "TruthLeavesOut",
    "A holds one case, and leaves out everything else that B holds: that is listed.",
    lambda a, b: (a.keep(PADDED), a.manifest.update(left_out=LATER)),
    says="A omits it",
    expected=TOLERATED,
)


def _renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"tap {i}": array for i, array in enumerate(tensors.values())}


def _drop_dtype(side: Vectors, dtype: str) -> None:
    for case in side.manifest["cases"]:
        case["outputs"].pop(dtype, None)
    kept = [case for case in side.manifest["cases"] if case["outputs"]]
    side.manifest.update(cases=kept, dtypes=[held for held in side.manifest["dtypes"] if held != dtype])


# B is a copy of A.
def link(a: Path, b: Path) -> None:
    """Make B a link to A."""
    shutil.rmtree(b)
    b.symlink_to(a, target_is_directory=True)


def link_one_file(a: Path, b: Path) -> None:
    """Make one file of B a link to that of A."""
    ours, theirs = (json.loads((side / MANIFEST).read_text()) for side in (b, a))
    for case, original in zip(ours["cases"], theirs["cases"], strict=True):
        if case["name"] == PADDED:
            case["outputs"]["float64"] = original["outputs"]["float64"]
    (b / MANIFEST).write_text(json.dumps(ours))
    (b / FILE).unlink()
    (b / FILE).symlink_to(a / FILE)


vectors("Copy", "B holds A's own tensors, bit by bit.", lambda a, b: b.files.update(a.files), expected=INCOMPLETE)
vectors(
    "CopyButOneCase",
    "B has computed the easiest case itself, and everything else is A's own.",
    lambda a, b: b.files.update({file: x for file, x in a.files.items() if not file.startswith(EASIEST)}),
    expected=INCOMPLETE,
)
written("LinkToA", "B is a symbolic link to A.", link)
written(
    "LinkToAFileOfA",
    "The float64 outputs of one case of B are a symbolic link to those of A.",
    link_one_file,
    "equal to A's",
)


# B lacks something.
def two_models(name: str, what: str, edit: Edit, expected: str = INCOMPLETE) -> None:
    """Add an attack on two models, in which something is done to the second of B."""
    vectors(name, what, lambda a, b: edit(b["second"]), MODELS, expected)


vectors(
    "SecondModelMissing",
    "B does not hold the second of two models.",
    lambda a, b: b.pop("second"),
    MODELS,
    expected=INCOMPLETE,
)
two_models("SecondModelLeftOut", "B leaves out the second of two models.", set_all({"cases": [], "left_out": LATER}))
two_models(
    "SecondModelOfNoCase",
    "B holds no case of the second of two models, and declares float32 alone for it.",
    set_all({"cases": [], "dtypes": ["float32"]}),
)
two_models(
    "SecondModelInFloat32",
    "B holds the second of two models in float32 alone, and says nothing of float64.",
    lambda side: _drop_dtype(side, "float64"),
)
two_models(
    "SecondModelWrong",
    "The second of two models is wrong.",
    lambda side: side.alter(lambda x: 1.001 * x, PADDED, "float64", OUTPUT),
    expected=FAILS,
)
on_b(
    "Float32Only",
    "B holds float32 alone, without gradients, steps and searches, and says nothing of float64.",
    lambda b: _drop_dtype(b, "float64"),
    expected=INCOMPLETE,
)
on_b("EverythingLeftOut", "B leaves out everything.", set_all({"cases": [], "left_out": LATER}), expected=INCOMPLETE)
on_b(
    "NearlyEverythingLeftOut",
    "B leaves out everything but the easiest case.",
    lambda b: (b.keep(EASIEST), b.manifest.update(left_out=LATER)),
    expected=INCOMPLETE,
)
on_b(
    "EveryTensorLeftOut",
    "B holds every case without a tensor, and leaves out each of them.",
    lambda b: (b.drop(lambda name: True), b.manifest.update(left_out=[{**LATER[0], "tensors": ["?*"]}])),
    expected=INCOMPLETE,
)
on_b(
    "AllButEmbeddingsLeftOut",
    "B holds the source embeddings of full models, and leaves out what is computed from them, and every other case.",
    lambda b: (
        b.keep(*FULL),
        b.drop(lambda name: name != "source_embedding.output"),
        b.manifest.update(left_out=[{**LATER[0], "tensors": ["[!s]*"]}, {**LATER[0], "case": "[!f]*"}]),
    ),
    expected=INCOMPLETE,
)
on_b(
    "SomeTapsLeftOut",
    "B leaves out its attention scores and weights.",
    lambda b: (
        [b.drop(lambda name: name.endswith((".scores", ".weights")), case) for case in FULL],
        b.manifest.update(left_out=[{"case": "full/*", "tensors": ["*.scores", "*.weights"], "reason": "fused"}]),
    ),
    expected=TOLERATED,
)
on_b("TensorMissing", "B lacks a tensor without a word.", lambda b: b.drop(lambda name: name == TAP, PADDED))
on_b("CaseMissing", "B lacks a case without a word.", lambda b: b.keep(*FULL, STEPS, GREEDY, BEAM), expected=INCOMPLETE)


# B is something else than it says.
def swap(first: str, second: str) -> Edit:
    """Return what swaps the outputs of two cases."""

    def edit(b: Vectors) -> None:
        one, other = b.case(first), b.case(second)
        one["outputs"], other["outputs"] = other["outputs"], one["outputs"]

    return edit


def swap_dtypes(b: Vectors) -> None:
    """Swap the outputs of a case in two dtypes."""
    outputs = b.case(PADDED)["outputs"]
    outputs["float64"], outputs["float32"] = outputs["float32"], outputs["float64"]


def altered(change: Edit, *where: str) -> Edit:
    """Return what changes the logits of a case, or what else is named."""
    case, dtype, only = (*where, "", "", "")[:3] if where else (PADDED, "", OUTPUT)
    return lambda b: b.alter(change, case, dtype, only)


on_b(
    "TensorRenamed",
    "A tensor of B has another name.",
    lambda b: [held.update({"encoder.final": held.pop(TAP)}) for held in b.outputs(PADDED)],
)
on_b(
    "TensorsReordered",
    "The taps of B stand in another order.",
    lambda b: [held.update({TAP: held.pop(TAP)}) for held in b.outputs(PADDED)],
)
on_b("CaseTwice", "A case stands twice in B.", lambda b: b.keep(*FULL, PADDED), expected=INCOMPLETE)
on_b("CasesSwapped", "The outputs of two cases of B are swapped.", swap(PADDED, SQUARE))
on_b("SearchesSwapped", "The greedy and the beam search of B are swapped.", swap(GREEDY, BEAM))
on_b("DtypesSwapped", "The float64 and float32 tensors of B are swapped.", swap_dtypes)
on_b(
    "Float32Inside",
    "The float64 tensors of B were computed in float32.",
    altered(lambda x: x.astype(np.float32).astype(np.float64), "", "float64"),
)
on_b("OneNan", "One logit of B is NaN.", altered(lambda x: np.where(x == x.max(), np.nan, x)))
on_b("AxisInFront", "The logits of B have the shape [1, B, T, V].", altered(lambda x: x[None]))
on_b("SingleNumber", "The logits of B are a single number.", altered(lambda x: x.mean()))
on_b("NegatedGradients", "The gradients of B have the wrong sign.", altered(np.negative, GRADIENTS))
on_b("NanScores", "The scores of B are NaN.", altered(lambda x: np.full_like(x, np.nan), GREEDY))
on_b("OtherToken", "A token of B is another.", lambda b: b.outputs(GREEDY)[0]["tokens"].put(0, 9))
on_b("NegativeToken", "A token of B is negative.", lambda b: b.outputs(GREEDY)[0]["tokens"].put(0, -9))
on_b(
    "PaddingInside",
    "A hypothesis of B contains padding, and tokens follow it.",
    lambda b: [held["tokens"].put(1, 0) for held in b.outputs(GREEDY)],
)
on_b("OtherWeights", "A weight of B is another.", lambda b: b.files[WEIGHTS][TABLE].put(0, 1.0), expected=INCOMPLETE)
on_b(
    "OtherInputs", "An input of B is another.", lambda b: b.inputs(PADDED)["source_ids"].put(0, 3), expected=INCOMPLETE
)
on_b(
    "OtherConfig",
    "B is of another config.",
    lambda b: b.manifest["config"].update(norm_order="pre"),
    expected=INCOMPLETE,
)


# B cannot be read.
def name_a_file_of_a(a: Path, b: Path) -> None:
    """Name a file of A in the manifest of B."""
    text = (b / MANIFEST).read_text()
    (b / MANIFEST).write_text(text.replace(f'"{FILE}"', f'"../a/{FILE}"'))


def flip_a_bit(a: Path, b: Path) -> None:
    """Change the last bit of a file of B."""
    content = (b / FILE).read_bytes()
    (b / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


written("BitFlipped", "A bit of a file of B is another than when its checksum was taken.", flip_a_bit)
written(
    "OtherFile",
    "A file of B stands under the name, and with the checksum, of another.",
    lambda a, b: shutil.copy(b / SENTENCE / "float64.safetensors", b / FILE),
)
written("FileTruncated", "A file of B ends in the middle.", lambda a, b: os.truncate(b / FILE, 1000))
written("FileMissing", "A file of B does not exist.", lambda a, b: (b / FILE).unlink())
written("FileOutside", "B names a file of A.", name_a_file_of_a)
on_b("OtherVersion", "B is of an unknown version of the format.", set_all({"version": 999}), expected=INCOMPLETE)
written("NoManifest", "B has no manifest.", lambda a, b: (b / MANIFEST).unlink())
