"""Attacks through golden vectors: the expected values A are wrong, or B, which is compared with A, is wrong."""

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

from attacks.attack import FILES, Attack
from attacks.vectors import MANIFEST, Vectors, computed, rounded, truth
from attacks.words import FAILS, INCOMPLETE, REFUSED, TOLERATED
from transformer_parity.engine.findings import FAILED, Finding, failure
from transformer_parity.engine.verdict import EXIT_CODES, Verdict
from transformer_parity.transformer.golden.compare import compare_directories, read_pairs

DIRECTORIES: list[Attack] = []
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
    """Add an attack. ``edit(a, b)`` changes both sides, which are mappings if there are multiple models."""
    run = partial(_run, models=models, edit=edit if len(models) > 1 else lambda a, b: edit(a[""], b[""]))
    DIRECTORIES.append(Attack(name, what, expected, FILES, run, says))


def on_both(name: str, what: str, edit: Edit, expected: str = REFUSED) -> None:
    """Add an attack that changes A and B in the same way."""
    vectors(name, what, lambda a, b: (edit(a), edit(b)), expected=expected)


def on_b(name: str, what: str, edit: Edit, expected: str = FAILS) -> None:
    """Add an attack that changes B."""
    vectors(name, what, lambda a, b: edit(b), expected=expected)


def written(name: str, what: str, edit: Edit, says: str = "", expected: str = INCOMPLETE) -> None:
    """Add an attack that changes the written directories. ``edit(a, b)`` receives their paths."""
    DIRECTORIES.append(Attack(name, what, expected, FILES, partial(_run, afterwards=edit), says))


def _run(
    edit: Edit = lambda a, b: None, models: tuple[str, ...] = ("",), afterwards: Edit = lambda a, b: None
) -> tuple[int, list[Finding]]:
    """Write both directories, compare them, and return the exit code and the findings."""
    sides: tuple[dict[str, Vectors], ...] = tuple({name: make() for name in models} for make in (truth, computed))
    edit(*sides)
    with tempfile.TemporaryDirectory() as directory:
        a, b = Path(directory) / "a", Path(directory) / "b"
        for path, side in zip((a, b), sides, strict=True):
            for name, held in side.items():
                held.write(path / name)
        afterwards(a, b)
        try:
            pairs = read_pairs(a, b)
            findings = [finding for pair in pairs for finding in compare_directories(pair)]
        except Exception as error:  # like the command, report the error as a failed comparison
            problem = f"{type(error).__name__}: {error}".replace(directory, "")
            return EXIT_CODES[FAILED], [failure("mine", problem)]
    return Verdict.of(findings, [pair.asked for pair in pairs]).exit_code, findings


def set_all(fields: Mapping[str, Any]) -> Edit:
    """Return a function that changes entries of the manifest."""
    return lambda side: side.manifest.update(fields)


# A and B agree with each other, but not with the reference.
on_b("SoundVectors", "Every tensor in B matches A within rounding error.", lambda b: None, expected=TOLERATED)
on_both("Zeros", "All tensors in A and B are zero.", lambda side: side.alter(np.zeros_like))
vectors(
    "ZerosOfAnother",
    "All tensors in A and B are zero, and A wasn't written by the reference.",
    lambda a, b: (a.manifest.update(producer={"name": "other"}), a.alter(np.zeros_like), b.alter(np.zeros_like)),
)
on_both(
    "EmptyTensors",
    "All tensors in A and B are empty.",
    lambda side: (side.keep(PADDED), side.alter(lambda x: x.reshape(-1)[:0])),
)
on_both(
    "SameBug",
    "The logits in A and B have the same error.",
    lambda side: side.alter(lambda x: x[..., ::-1], PADDED, only=OUTPUT),
)
on_both(
    "NanOnBothSides",
    "The same tap is NaN in A and B.",
    lambda side: side.alter(lambda x: np.full_like(x, np.nan), PADDED, only=TAP),
)
vectors(
    "NegatedBaseline",
    "The float32 tensors in A have the wrong sign, so the tolerance for B would be a relative error of 8.",
    lambda a, b: (a.alter(np.negative, dtype="float32"), b.alter(np.zeros_like, dtype="float32")),
)
on_both(
    "CoarseBaseline",
    "The float32 tensors in A and B are rounded to two decimals.",
    lambda side: side.alter(lambda x: rounded(x.round(2)), dtype="float32"),
)
on_both(
    "InfiniteBaseline",
    "The float32 tensors in A and B are infinite.",
    lambda side: side.alter(lambda x: np.full_like(x, np.inf), dtype="float32"),
)
on_both(
    "NamesOfNothing",
    "The taps in A and B have unknown names.",
    lambda side: [side.files.update({f: _renamed(x)}) for f, x in side.files.items() if f.startswith(PADDED + "/f")],
)
on_both(
    "ShapeOfNothing",
    "The logits in A and B contain one number per sentence.",
    lambda side: side.alter(lambda x: x[:, 0, 0], PADDED, only=OUTPUT),
)
on_both(
    "OneTensor",
    "A and B contain only the source embedding, not the values computed from it.",
    lambda side: (side.keep(PADDED), side.drop(lambda name: name != "source_embedding.output")),
)
on_both(
    "OtherWeightsInBoth",
    "A and B contain weights that don't match their tensors.",
    lambda side: side.files[WEIGHTS][TABLE].put(200, 0.5),
)
on_both(
    "OtherInputsInBoth",
    "A and B contain inputs that don't match their tensors.",
    lambda side: side.inputs(PADDED)["source_ids"].put(0, 3),
)
on_both(
    "NoSentence",
    "The batches in A and B contain no sentences.",
    lambda side: (
        side.keep(PADDED),
        side.inputs(PADDED).update({name: ids[:0] for name, ids in side.inputs(PADDED).items()}),
        side.alter(lambda x: x[:0]),
    ),
)
on_both("NonsenseBeam", "The beam size in A and B is -3.", lambda side: side.case(BEAM)["search"].update(beam_size=-3))
on_both(
    "NonsensePenalty",
    "The length penalty in A and B isn't a number.",
    lambda side: side.case(BEAM)["search"].update(length_penalty="much"),
)
on_both(
    "OtherSearch",
    "The length penalty in A and B doesn't match the hypotheses.",
    lambda side: side.case(BEAM)["search"].update(length_penalty=0.0),
)
on_both(
    "OtherSettings",
    "The learning rate in A and B doesn't match the optimizer steps.",
    lambda side: side.case(STEPS)["settings"].update(learning_rate_factor=1e-30),
)
on_both("NoCase", "A and B contain no cases.", set_all({"cases": []}), expected=INCOMPLETE)
vectors(
    "TruthWithoutFloat32",
    "B contains float32 tensors, but A doesn't. The reference computes the expected values.",
    lambda a, b: _drop_dtype(a, "float32"),
    expected=TOLERATED,
)
vectors(
    "TruthLeavesOut",
    "A contains one case and declares all others as left out. The report lists them.",
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
    """Replace B by a link to A."""
    shutil.rmtree(b)
    b.symlink_to(a, target_is_directory=True)


def link_one_file(a: Path, b: Path) -> None:
    """Replace one file of B by a link to the corresponding file of A."""
    ours, theirs = (json.loads((side / MANIFEST).read_text()) for side in (b, a))
    for case, original in zip(ours["cases"], theirs["cases"], strict=True):
        if case["name"] == PADDED:
            case["outputs"]["float64"] = original["outputs"]["float64"]
    (b / MANIFEST).write_text(json.dumps(ours))
    (b / FILE).unlink()
    (b / FILE).symlink_to(a / FILE)


vectors(
    "Copy",
    "B contains bitwise identical copies of A's tensors.",
    lambda a, b: b.files.update(a.files),
    expected=INCOMPLETE,
)
vectors(
    "CopyButOneCase",
    "B's program computed only the easiest case. All other tensors are copies of A's.",
    lambda a, b: b.files.update({file: x for file, x in a.files.items() if not file.startswith(EASIEST)}),
    expected=INCOMPLETE,
)
written("LinkToA", "B is a symbolic link to A.", link)
written(
    "LinkToAFileOfA",
    "B's float64 outputs of one case are a symbolic link to A's.",
    link_one_file,
    "equal to A's",
)


# B lacks something.
def two_models(name: str, what: str, edit: Edit, expected: str = INCOMPLETE) -> None:
    """Add an attack with two models that changes the second model of B."""
    vectors(name, what, lambda a, b: edit(b["second"]), MODELS, expected)


vectors(
    "SecondModelMissing",
    "B doesn't contain the second of two models.",
    lambda a, b: b.pop("second"),
    MODELS,
    expected=INCOMPLETE,
)
two_models(
    "SecondModelLeftOut", "B declares the second of two models as left out.", set_all({"cases": [], "left_out": LATER})
)
two_models(
    "SecondModelOfNoCase",
    "B contains no cases for the second of two models and declares only float32 for this model.",
    set_all({"cases": [], "dtypes": ["float32"]}),
)
two_models(
    "SecondModelInFloat32",
    "B contains the second of two models only in float32 and doesn't declare float64 as left out.",
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
    "B contains only float32 tensors for activations and doesn't declare anything as left out.",
    lambda b: _drop_dtype(b, "float64"),
    expected=INCOMPLETE,
)
on_b(
    "EverythingLeftOut",
    "B declares everything as left out.",
    set_all({"cases": [], "left_out": LATER}),
    expected=INCOMPLETE,
)
on_b(
    "NearlyEverythingLeftOut",
    "B declares everything except the easiest case as left out.",
    lambda b: (b.keep(EASIEST), b.manifest.update(left_out=LATER)),
    expected=INCOMPLETE,
)
on_b(
    "EveryTensorLeftOut",
    "B lists every case but declares all tensors as left out.",
    lambda b: (b.drop(lambda name: True), b.manifest.update(left_out=[{**LATER[0], "tensors": ["?*"]}])),
    expected=INCOMPLETE,
)
on_b(
    "AllButEmbeddingsLeftOut",
    "B contains only the source embeddings of full models and declares everything else as left out.",
    lambda b: (
        b.keep(*FULL),
        b.drop(lambda name: name != "source_embedding.output"),
        b.manifest.update(left_out=[{**LATER[0], "tensors": ["[!s]*"]}, {**LATER[0], "case": "[!f]*"}]),
    ),
    expected=INCOMPLETE,
)
on_b(
    "SomeTapsLeftOut",
    "B declares attention scores and weights as left out.",
    lambda b: (
        [b.drop(lambda name: name.endswith((".scores", ".weights")), case) for case in FULL],
        b.manifest.update(left_out=[{"case": "full/*", "tensors": ["*.scores", "*.weights"], "reason": "fused"}]),
    ),
    expected=TOLERATED,
)
on_b(
    "TensorMissing",
    "B lacks a tensor and doesn't declare it as left out.",
    lambda b: b.drop(lambda name: name == TAP, PADDED),
)
on_b(
    "CaseMissing",
    "B lacks cases and doesn't declare them as left out.",
    lambda b: b.keep(*FULL, STEPS, GREEDY, BEAM),
    expected=INCOMPLETE,
)


# The content of B differs from its description.
def swap(first: str, second: str) -> Edit:
    """Return a function that swaps the outputs of two cases."""

    def edit(b: Vectors) -> None:
        one, other = b.case(first), b.case(second)
        one["outputs"], other["outputs"] = other["outputs"], one["outputs"]

    return edit


def swap_dtypes(b: Vectors) -> None:
    """Swap the outputs of a case in two dtypes."""
    outputs = b.case(PADDED)["outputs"]
    outputs["float64"], outputs["float32"] = outputs["float32"], outputs["float64"]


def altered(change: Edit, *where: str) -> Edit:
    """Return a function that changes the logits of a case, or the tensors selected by case, dtype and name."""
    case, dtype, only = (*where, "", "", "")[:3] if where else (PADDED, "", OUTPUT)
    return lambda b: b.alter(change, case, dtype, only)


on_b(
    "TensorRenamed",
    "A tensor in B has a different name.",
    lambda b: [held.update({"encoder.final": held.pop(TAP)}) for held in b.outputs(PADDED)],
)
on_b(
    "TensorsReordered",
    "The taps in B are in a different order.",
    lambda b: [held.update({TAP: held.pop(TAP)}) for held in b.outputs(PADDED)],
)
on_b("CaseTwice", "B lists a case twice.", lambda b: b.keep(*FULL, PADDED), expected=INCOMPLETE)
on_b("CasesSwapped", "The outputs of two cases in B are swapped.", swap(PADDED, SQUARE))
on_b("SearchesSwapped", "The outputs of greedy and beam search in B are swapped.", swap(GREEDY, BEAM))
on_b("DtypesSwapped", "The float64 and float32 tensors of one case in B are swapped.", swap_dtypes)
on_b(
    "Float32Inside",
    "B's float64 tensors were computed in float32.",
    altered(lambda x: x.astype(np.float32).astype(np.float64), "", "float64"),
)
on_b("OneNan", "One logit in B is NaN.", altered(lambda x: np.where(x == x.max(), np.nan, x)))
on_b("AxisInFront", "The logits in B have the shape [1, B, T, V].", altered(lambda x: x[None]))
on_b("SingleNumber", "The logits in B are a single number.", altered(lambda x: x.mean()))
on_b("NegatedGradients", "The gradients in B have the wrong sign.", altered(np.negative, GRADIENTS))
on_b("NanScores", "The search scores in B are NaN.", altered(lambda x: np.full_like(x, np.nan), GREEDY))
on_b("OtherToken", "One token in B is wrong.", lambda b: b.outputs(GREEDY)[0]["tokens"].put(0, 9))
on_b("NegativeToken", "One token in B is negative.", lambda b: b.outputs(GREEDY)[0]["tokens"].put(0, -9))
on_b(
    "PaddingInside",
    "A hypothesis in B contains padding that is followed by tokens.",
    lambda b: [held["tokens"].put(1, 0) for held in b.outputs(GREEDY)],
)
on_b(
    "OtherWeights",
    "One weight in B differs from A's.",
    lambda b: b.files[WEIGHTS][TABLE].put(0, 1.0),
    expected=INCOMPLETE,
)
on_b(
    "OtherInputs",
    "One input in B differs from A's.",
    lambda b: b.inputs(PADDED)["source_ids"].put(0, 3),
    expected=INCOMPLETE,
)
on_b(
    "OtherConfig",
    "The config in B differs from A's.",
    lambda b: b.manifest["config"].update(norm_order="pre"),
    expected=INCOMPLETE,
)


# B can't be read.
def name_a_file_of_a(a: Path, b: Path) -> None:
    """Refer to a file of A in the manifest of B."""
    text = (b / MANIFEST).read_text()
    (b / MANIFEST).write_text(text.replace(f'"{FILE}"', f'"../a/{FILE}"'))


def flip_a_bit(a: Path, b: Path) -> None:
    """Change the last bit of a file of B."""
    content = (b / FILE).read_bytes()
    (b / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


written("BitFlipped", "One bit of a file in B has changed since its checksum was computed.", flip_a_bit)
written(
    "OtherFile",
    "A file in B is replaced with the file of a different case.",
    lambda a, b: shutil.copy(b / SENTENCE / "float64.safetensors", b / FILE),
)
written("FileTruncated", "A file in B is truncated.", lambda a, b: os.truncate(b / FILE, 1000))
written("FileMissing", "A file listed in B's manifest doesn't exist.", lambda a, b: (b / FILE).unlink())
written("FileOutside", "B's manifest refers to a file in A.", name_a_file_of_a)
on_b("OtherVersion", "B's format version is unknown.", set_all({"version": 999}), expected=INCOMPLETE)
written("NoManifest", "B has no manifest.", lambda a, b: (b / MANIFEST).unlink())
