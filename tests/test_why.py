"""The script for docs/why.md: its measurements match theory and finite differences, and it rejects bad options."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from reference_numpy.functional import masked_softmax

DOCS = Path(__file__).resolve().parent.parent / "docs"
sys.path.insert(0, str(DOCS / "examples" / "why"))

import measurements  # noqa: E402  a module of the example
import tables  # noqa: E402

specification = spec_from_file_location("why", DOCS / "examples" / "why" / "__main__.py")
why = module_from_spec(specification)
specification.loader.exec_module(why)


@pytest.fixture
def small(monkeypatch):
    """Reduce the measurements, and print as if the output were a pipe with 80 columns."""
    monkeypatch.setattr(tables, "D_KS", [1, 16, 256])
    monkeypatch.setattr(tables, "LAYER_D_KS", [8, 512])
    monkeypatch.setattr(tables, "LENGTHS", [16, 32])
    monkeypatch.setattr(tables, "COST_D_KS", [1, 64])
    monkeypatch.setattr(tables, "COST_LENGTH", 32)
    monkeypatch.setattr(measurements, "LAYERS", 2)
    for function in (measurements.measure_cost, measurements.measure_steps):
        monkeypatch.setattr(function, "__defaults__", (64, 0.0))
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments):
    """Run the script, and return its exit code and output."""
    try:
        code = why.main(list(map(str, arguments)))
    except SystemExit as leaving:  # argparse exits this way
        code = leaving.code
    return code, *capsys.readouterr()


def test_gain_is_the_norm_of_the_jacobian():
    weights = masked_softmax(np.random.default_rng(0).normal(0, 3, (4, 7)))
    jacobians = weights[:, :, None] * np.eye(7) - weights[:, :, None] * weights[:, None, :]
    np.testing.assert_allclose(measurements.softmax_gain(weights), np.linalg.norm(jacobians, axis=(1, 2)), rtol=1e-13)
    np.testing.assert_allclose(measurements.softmax_gain(np.full(64, 1 / 64)), tables.uniform_gain(), rtol=1e-13)
    saturated = np.array([1.0, 1e-30, 0.0])  # the squared entries of its Jacobian add up to four times 1e-60
    np.testing.assert_allclose(measurements.softmax_gain(saturated), 2e-30, rtol=1e-13)


@pytest.mark.parametrize("d_k", [1, 4, 64, 1024])
def test_score_variance_matches_footnote_4(d_k):
    raw, divided = (measurements.measure_saturation(d_k, divided=divided) for divided in (False, True))
    assert raw.variance == pytest.approx(d_k, rel=0.06)
    assert divided.variance == pytest.approx(raw.variance / d_k)


def test_only_raw_scores_saturate():
    raw = {d_k: measurements.measure_saturation(d_k, divided=False) for d_k in (64, 1024, 4096)}
    divided = {d_k: measurements.measure_saturation(d_k, divided=True) for d_k in raw}
    assert [entry.gradient.median for entry in raw.values()] == pytest.approx([0.1976, 3.66e-4, 6.38e-9], rel=0.01)
    assert [entry.largest.median for entry in raw.values()] == pytest.approx([0.860, 1.0, 1.0], abs=1e-3)
    assert raw[1024].entropy.median < 0.01
    for entry in divided.values():
        assert 0.15 < entry.gradient.low < entry.gradient.median < entry.gradient.high < 0.25
        assert entry.largest.high < 0.2
        assert 3.5 < entry.entropy.median < math.log(measurements.POSITIONS)
    assert measurements.measure_saturation(64, divided=False) == raw[64]  # the measurement is seeded
    assert measurements.measure_saturation(1, divided=False) == dataclasses.replace(
        measurements.measure_saturation(1, divided=True), divided=False
    )


def test_unscaled_scores_concentrate_the_gradient_in_few_queries(monkeypatch):
    monkeypatch.setattr(measurements, "LAYERS", 4)
    raw, divided = (measurements.measure_layer(256, divided=divided) for divided in (False, True))
    assert raw.num_heads == 2
    assert raw.carriers.high < 0.25 < 0.7 < divided.carriers.low
    assert raw.query_kernel.low > 10 * divided.query_kernel.high
    assert raw.key_kernel.low > 10 * divided.key_kernel.high


@pytest.mark.parametrize("divided", [False, True])
def test_layer_gradient_matches_finite_differences(divided):
    def rng():
        return np.random.default_rng(3)

    d_model, d_k = 12, 4
    _, of_query_kernel, of_key_kernel = measurements._layer_gradients(rng(), d_k, divided, d_model)
    draws = rng()
    layer = measurements.random_layer(draws, d_k, d_model)
    x, upstream = draws.standard_normal((2, 1, measurements.POSITIONS, d_model))
    upstream /= np.linalg.norm(upstream)

    def scale(name, value):  # the tap for the scores multiplies them by sqrt(d_k) to undo the division
        return value if divided or name != "scores" else value * math.sqrt(d_k)

    for projection, found in ((layer.query_proj, of_query_kernel), (layer.key_proj, of_key_kernel)):
        kernel, direction = projection.kernel, rng().standard_normal((d_model, d_model))
        losses = []
        for sign in (1, -1):
            projection.kernel = kernel + sign * 1e-6 * direction
            losses.append((layer(x, x, tap=scale) * upstream).sum())
        projection.kernel = kernel
        assert (found * direction).sum() == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


def test_fraction_of_queries_that_carry_the_gradient_is_measured():
    assert measurements.carriers(np.ones((2, 5, 3))) == pytest.approx(0.9)
    assert measurements.carriers(np.eye(10)[:, :1]) == pytest.approx(0.1)
    assert measurements.carriers(np.sqrt([[[8.0], [1.0]], [[0.5], [0.5]]])) == pytest.approx(
        0.5
    )  # the mean of 9 of 10 and two of four


@pytest.mark.parametrize(("length", "d_k"), [(128, 16), (256, 64)])
def test_measured_cost_matches_the_formulas(length, d_k):
    cost = measurements.measure_cost(length, d_k, seconds=0.0)
    shapes = [(length, measurements.D_MODEL, d_k)] * 2 + [
        (length, d_k, length),
        (length, length, 64),
    ]  # shapes of matmuls
    assert cost.multiply_adds == sum(map(math.prod, shapes))
    assert cost.extra == length * length * d_k
    # Additive attention stores the pre-activation and the tanh for each pair. Dot-product attention stores queries,
    # keys, scores (which become weights in place), and the average.
    assert cost.additive_bytes == pytest.approx(4 * 2 * length**2 * d_k, rel=0.03)
    assert cost.dot_bytes == pytest.approx(4 * (2 * length * d_k + length**2 + length * 64), abs=12_000)
    assert cost.rounds >= measurements.LEAST_ROUNDS
    for spread in (cost.dot_seconds, cost.additive_seconds, cost.ratio):
        assert 0 < spread.low <= spread.median <= spread.high < math.inf


def test_additive_attention_matches_a_loop_over_pairs():
    shapes = [(2, 3, 5), (2, 4, 5), (2, 4, 6), (5, 7), (5, 7), (7,)]
    arrays = [np.random.default_rng(seed).normal(size=shape) for seed, shape in enumerate(shapes)]
    query, key, value, query_kernel, key_kernel, score_vector = arrays
    mask = np.random.default_rng(6).random((2, 3, 4)) < 0.6
    mask[0, 1] = False
    hidden_query, hidden_key, expected = query @ query_kernel, key @ key_kernel, np.zeros((2, 3, 6))
    for b, i in np.ndindex(2, 3):
        allowed = [j for j in range(4) if mask[b, i, j]]
        scores = [math.exp(score_vector @ np.tanh(hidden_query[b, i] + hidden_key[b, j])) for j in allowed]
        for j, score in zip(allowed, scores, strict=True):
            expected[b, i] += score / sum(scores) * value[b, j]
    actual = measurements.additive_attention(query, key, value, query_kernel, key_kernel, score_vector, mask)
    np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=1e-13)
    assert not expected[0, 1].any()


def test_timed_attention_functions_match_the_reference():
    inputs = measurements.attention_inputs(9, 5, 7)
    shared = {name: value for name, value in inputs.items() if name != "score_vector"}
    assert measurements.additive_attention(**inputs).shape == (1, 9, 7)
    scores = (inputs["query"] @ inputs["query_kernel"]) @ (inputs["key"] @ inputs["key_kernel"]).mT / math.sqrt(5)
    expected = masked_softmax(scores) @ inputs["value"]
    np.testing.assert_allclose(measurements.dot_product_attention(**shared)[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_steps_sum_to_the_number_of_multiply_adds():
    steps = measurements.measure_steps(32, 16, seconds=0.0)
    assert [step.used_by for step in steps] == ["both", "dot", *["additive"] * 3, "both", "both"]
    by_name = {step.name: step for step in steps}
    products = ("projections", "query @ key.mT", "weights @ value")
    assert sum(by_name[name].operations for name in products) == 2 * measurements.count_multiply_adds(32, 16, 64)
    assert by_name["hidden @ v"].operations == by_name["query @ key.mT"].operations
    assert by_name["tanh"].operations == 32 * 32 * 16
    assert by_name["tanh"].bytes_moved == 4 * 2 * 32 * 32 * 16
    assert tables.intensity(by_name["query @ key.mT"]) > 10 * tables.intensity(by_name["tanh"])


@pytest.mark.usefixtures("small")
def test_why_prints_results_and_writes_figures_and_json(capsys, tmp_path):
    directory, file = tmp_path / "new" / "pictures", tmp_path / "why.json"
    code, out, err = run(capsys, "--out", directory, "--json", file)
    assert (code, err) == (0, "")
    paths = [directory / f"why-{question}.svg" for question in why.QUESTIONS]
    assert [line for line in out.splitlines() if line.endswith(".svg")] == list(map(str, paths))
    assert max(len(line) for line in out.splitlines() if not line.endswith(".svg")) <= 80
    assert "…" not in out
    for path in paths:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    found = json.loads(file.read_text())
    assert [entry["d_k"] for entry in found["sqrt-dk"]["softmax"]] == [1, 1, 16, 16, 256, 256]
    assert [(cost["length"], cost["d_k"]) for cost in found["additive"]["costs"]] == [(16, 64), (32, 64), (32, 1)]
    words = " ".join(out.split())
    raw = found["sqrt-dk"]["softmax"][-2]
    assert f"at d_k = 1 to {raw['gradient']['median']:.0e} at 256; divided by sqrt(d_k)" in words
    cost = found["additive"]["costs"][1]
    assert f"it is slower by a factor of {cost['ratio']['median']:.0f} and uses" in words
    assert sorted(path.name for path in directory.iterdir()) == sorted(path.name for path in paths)


@pytest.mark.usefixtures("small")
def test_why_command_answers_a_single_question(capsys, tmp_path):
    code, out, _ = run(capsys, "sqrt-dk", "--out", tmp_path, "--format", "png")
    assert code == 0
    assert "multiply-adds" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["why-sqrt-dk.png"]


def test_why_rejects_invalid_options_before_measuring(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(why, "QUESTIONS", {"sqrt-dk": None})
    file = tmp_path / "file"
    file.touch()
    error = "python docs/examples/why: error: "
    assert run(capsys, "--out", file) == (2, "", f"{error}--out must be a directory: {file} is a file\n")
    nowhere = tmp_path / "nowhere"
    assert run(capsys, "--json", nowhere / "a") == (2, "", f"{error}there is no directory {nowhere}\n")
    assert run(capsys, "--json", tmp_path) == (2, "", f"{error}{tmp_path} must be a file: got a directory\n")
    code, out, err = run(capsys, "--out", file / "below")
    assert (code, out, err.startswith(error)) == (2, "", True)
    code, out, err = run(capsys, "because")
    assert (code, out) == (2, "")
    assert "invalid choice: 'because'" in err


def test_page_shows_both_figures_and_the_seeded_results():
    page = " ".join((DOCS / "why.md").read_text("utf-8").split())
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert {f"why-{question}.svg" for question in why.QUESTIONS} < set(links)
    for link in links:
        assert (DOCS / link).exists(), link
    raw, divided = (measurements.measure_layer(512, divided=divided) for divided in (False, True))
    factor = raw.query_kernel.median / divided.query_kernel.median
    assert f"is {factor:.0f} times larger without the division" in page
    assert f"90% of this gradient comes from only {100 * raw.carriers.median:.0f}% of the queries." in page
    assert (
        f"With the division, 90% of the gradient comes from {100 * divided.carriers.median:.0f}% of the queries."
        in page
    )
    low = [measurements.measure_saturation(64, divided=divided).gradient.low for divided in (False, True)]
    assert round(low[1] / low[0], -1) == 50
    assert "gradient would be about 50 times smaller than with the division" in page
