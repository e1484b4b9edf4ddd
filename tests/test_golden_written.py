"""Golden vectors written by ports, for presets, and by the program in the documentation."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_vectors import PADDED, STEPS, compare, drop, findings_of, manifest_of, moved, rounded, set_field
from golden_vectors import copy as copy  # a fixture
from golden_vectors import truth as truth  # a fixture

import reference_numpy as ref
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.golden import vectors, writer
from transformer_parity.transformer.golden.vectors import LeftOut
from transformer_parity.transformer.stages.registry import STAGES

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
DOCUMENT = REFERENCE / "golden-vectors.md"


def test_written_golden_vectors_match_the_reference(truth):
    directory = vectors.read(truth)
    assert {case.stage for case in directory.cases} == set(STAGES)
    assert (directory.producer, directory.left_out) == ("numpy", ())
    assert directory.dtypes == ("float64", "float32")
    padded = next(case for case in directory.cases if case.name == PADDED)
    model = ref.Transformer.from_weights(directory.config, padded.load_weights(), "float32", fast=False)
    seen = ref.Recorder()
    logits = model(**padded.inputs, tap=seen)
    tensors = directory.tensors(padded, "float32")
    assert list(tensors) == [*seen, "output"]  # in the order of computation
    assert all(tensors[name].tobytes() == value.tobytes() for name, value in seen.items())
    np.testing.assert_array_equal(tensors["output"], logits)
    assert not any(array.flags.writeable for array in tensors.values())
    config, weights = ref.load_weights(truth / "weights.safetensors")
    assert config == directory.config
    assert weights.keys() == directory.weights.keys()
    gradients = next(case for case in directory.cases if case.stage == "gradients")
    assert directory.tensors(gradients, "float64")["loss"].shape == ()
    with pytest.raises(ValueError, match="has no float32 tensors of gradients/padded"):
        directory.tensors(gradients, "float32")
    steps = next(case for case in manifest_of(truth)["cases"] if case["name"] == STEPS)
    settings = next(case.settings for case in directory.cases if case.name == STEPS)
    assert steps["learning_rates"] == [settings.learning_rate(step, directory.config.d_model) for step in range(1, 21)]


def test_golden_vectors_in_a_single_dtype_can_be_compared(truth, copy, tmp_path, capsys):
    half, other = tmp_path / "float64", tmp_path / "float32"
    assert main(["golden", "--dtype", "float64", "--out", str(half)]) == 0
    assert main(["golden", "--dtype", "float32", "--out", str(other)]) == 0
    assert compare(half, copy) == 0  # float32 is compared as well, with results that the reference computes
    assert compare(truth, rounded(half)) == 0
    assert "NOT TESTED: numpy: float32 (not in B)" in capsys.readouterr().out
    assert compare(truth, rounded(other)) == 3  # golden vectors have no float32 gradients
    printed = capsys.readouterr().out
    assert "NOT TESTED: numpy: float64 (not in B)" in printed
    assert "MISSING   numpy: gradients: no such cases exist" in printed
    assert compare(truth, other, "--stage", "activations") == 0


@pytest.mark.extended("golden vectors")
def test_golden_writes_and_compares_multiple_presets(tmp_path, capsys):
    out = tmp_path / "both"
    assert main(["golden", "--preset", "paper_learned,annotated", "--dtype", "float64", "--out", str(out)]) == 0
    assert sorted(vectors.find(out)) == ["annotated", "paper_learned"]
    mine = shutil.copytree(out, tmp_path / "mine")
    for name in ("annotated", "paper_learned"):
        rounded(mine / name)
    assert compare(out, mine) == 0
    printed = capsys.readouterr().out
    written = sum(map(int, re.findall(r": (\d+) cases, float64, ", printed)))
    assert written > 20
    assert f"AGREE  2 ports, {written} cases, " in printed
    # Each model must be compared, so results for the other model aren't enough.
    drop(mine / "annotated", lambda name: False)
    set_field("left_out", value=[{"case": "*", "reason": "later"}])(mine / "annotated")
    assert compare(out, mine) == 3
    assert "annotated/numpy: activations: nothing was compared (later)" in capsys.readouterr().out
    set_field("dtypes", value=["float32"])(mine / "annotated")
    assert compare(out, mine) == 3
    assert "annotated/numpy: activations: no such cases exist" in capsys.readouterr().out
    shutil.rmtree(mine / "annotated")
    assert compare(out, mine) == 3
    assert "both directories must contain the same models" in capsys.readouterr().err
    assert compare(out, out / "annotated") == 3
    assert "both directories must contain the same models" in capsys.readouterr().err
    assert compare(out / "annotated", out / "paper_learned") == 3
    assert "config: norm_order pre and post" in capsys.readouterr().err
    assert main(["golden", "--preset", "paper_learned", "--dtype", "float64", "--out", str(out), "--force"]) == 0
    assert sorted(vectors.find(out)) == [""]


def test_golden_vectors_of_a_user_port_can_be_compared(tmp_path, capsys):
    right, mine = tmp_path / "right", tmp_path / "mine"
    assert main(["golden", "--for", "golden_vectors:Forward", "--out", str(right)]) == 0
    assert main(["golden", "--port", "golden_vectors:Forward", "--out", str(mine)]) == 0
    assert "omitted: full/one_token: it is not made for that" in capsys.readouterr().out
    directory = vectors.read(mine)
    assert (directory.producer, directory.config.norm_order) == ("Forward", "pre")
    assert {case.stage for case in directory.cases} == {"activations"}
    assert LeftOut(STEPS, "the port does not define train_step()", dtype="float64") in directory.left_out
    findings = findings_of(right, mine)
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    assert {finding.tap.partition(".")[0] for finding in findings if finding.verdict == AGREES} == {"encoder", "output"}
    assert compare(right, mine) == 3  # the port has no gradients, steps, or search
    assert compare(right, mine, "--stage", "activations") == 0


def test_golden_vectors_of_a_port_with_all_methods_can_be_compared(truth, tmp_path, capsys):
    mine = tmp_path / "mine"
    assert main(["golden", "--port", "golden_vectors:Full", "--out", str(mine)]) == 0
    findings = findings_of(truth, mine)
    assert {finding.verdict for finding in findings} == {AGREES, SKIPPED}
    assert {finding.case for finding in findings if finding.verdict == AGREES} == {
        case["name"] for case in manifest_of(truth)["cases"]
    }
    seen = {finding.tap for finding in findings if finding.verdict == AGREES}
    assert {"at encoder.output", "of source_embedding.table", "step 20 weight source_embedding.table"} <= seen
    reasons = {finding.detail.partition(": ")[2] for finding in findings if finding.verdict == SKIPPED}
    assert reasons == {
        "these taps are not reported",
        "gradients at these taps are not reported",
        "norms of the gradient are not reported",
        "moments are not reported",
        "scores are not reported",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "golden_vectors:Failing"], "Failing, float64 full/one_sentence: KeyError: 'head'"),
        (["--port", "golden_vectors:Empty"], "Empty has no results to write: Empty supports only"),
        (["--port", "golden_vectors:Nothing"], "cannot be imported"),
        (["--port", "golden_vectors:Forward", "--backend", "torch"], "cannot be combined with --backend or --device"),
        (["--device", "gpu"], "device must be"),
    ],
)
def test_failed_golden_command_writes_nothing(tmp_path, capsys, options, says):
    assert main(["golden", *options, "--out", str(tmp_path / "out")]) == 3
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_golden_command_keeps_the_old_directory(truth, tmp_path, monkeypatch, stop):
    def write(directory, *rest):
        (directory / "weights.safetensors").write_bytes(b"half")
        raise stop

    monkeypatch.setattr(writer, "write", write)
    assert main(["golden", "--out", str(tmp_path / "new")]) == 3
    assert list(tmp_path.iterdir()) == []
    old = shutil.copytree(truth, tmp_path / "old")
    assert main(["golden", "--force", "--out", str(old)]) == 3
    assert list(tmp_path.iterdir()) == [old]
    assert manifest_of(old) == manifest_of(truth)
    assert vectors.read(old).cases


def test_only_golden_vectors_are_overwritten_and_only_if_requested(copy, tmp_path, capsys):
    write = ["golden", "--dtype", "float64", "--out"]
    assert main([*write, str(copy)]) == 3
    assert "already contains golden vectors; use --force to replace them" in capsys.readouterr().err
    assert vectors.read(copy).dtypes == ("float64", "float32")
    assert main([*write, str(copy), "--force"]) == 0
    assert vectors.read(copy).dtypes == ("float64",)
    (copy / "notes.txt").write_text("mine")
    for path in (copy, tmp_path):
        assert main([*write, str(path), "--force"]) == 3
        assert (
            "must be empty or contain only golden vectors: got a directory with other files" in capsys.readouterr().err
        )
    assert (copy / "notes.txt").read_text() == "mine"
    assert main([*write, str(copy / "notes.txt")]) == 3
    assert main([*write, str(tmp_path / "no" / "directory")]) == 3
    assert "there is no directory" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert compare(copy, empty) == 3
    assert "does not contain golden vectors" in capsys.readouterr().err
    assert main([*write, str(empty)]) == 0
    assert sorted(child.name for child in tmp_path.iterdir()) == ["copy", "empty"]


def test_documented_writer_produces_comparable_golden_vectors(truth, tmp_path, monkeypatch, capsys):
    def my_port(weights, inputs, dtype):
        model = ref.load_transformer(weights, dtype)
        seen = ref.Recorder()
        output = model(**inputs, tap=seen)
        shown = {name: x for name, x in seen.items() if not name.endswith((".scores", ".weights"))}
        return {name: np.array(x, order="C") for name, x in {**shown, "output": moved(output)}.items()}

    program = re.search(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(truth, "truth")
    exec(compile(program, str(DOCUMENT), "exec"), {"my_port": my_port})
    assert {file.name for file in Path("mine/steps").rglob("*")} == set()  # no results are copied
    assert compare("truth", "mine") == 3
    printed = capsys.readouterr().out
    assert "MISSING   mine: steps: nothing was compared (inference only)" in printed
    assert compare("truth", "mine", "--stage", "activations") == 0
    printed = capsys.readouterr().out
    assert "SKIPPED   mine: 12 tensors: fused into one kernel (" in printed
    assert "AGREE  1 port, 15 cases," in printed


def test_documentation_lists_every_entry_and_tolerance(truth):
    text = "\n".join(page.read_text("utf-8") for page in (DOCUMENT, REFERENCE / "golden-values.md"))
    manifest = manifest_of(truth)
    tables = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    file = manifest["weights"]
    entries = {*manifest, *file, *LeftOut.__dataclass_fields__, *STAGES}
    for case in manifest["cases"]:
        entries |= case.keys()
    assert tables == entries
    assert {name for case in manifest["cases"] for name in case.get("search", ())} <= set(re.findall(r"`(\w+)`", text))
    gradients, steps = POLICY["gradients"]["float64"], POLICY["steps"]["float64"]
    rules = " ".join((REFERENCE / "comparison.md").read_text("utf-8").split())
    tolerances = (
        f"may be at most {POLICY['float64']['tap']:.0e} for a tap, {gradients['loss']:.0e} for a loss, "
        f"{gradients['tensor']:.0e} for a gradient, {gradients['whole']:.0e} for all gradients together, and "
        f"{steps['tensor']:.0e} for every value after twenty steps."
    )
    assert tolerances in rules
    score = POLICY["decode"]["float64"]["score"]
    assert f"In float64, the relative error of B's scores may be at most {score:.0e}." in rules
    assert (POLICY["float32"]["ratio"], POLICY["float32"]["floor_in_eps"], steps["loss"]) == (4.0, 4.0, 1e-10)


def test_compare_imports_no_framework(truth, copy):
    program = (
        "import sys; from transformer_parity.transformer.golden import vectors; "
        "from transformer_parity.__main__ import main; "
        f"code = main(['compare', {str(truth)!r}, {str(copy)!r}]); "
        "found = {'torch', 'jax', 'flax', 'tensorflow', 'keras'} & set(sys.modules); "
        "sys.exit(f'{code} {found}' if code or found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
