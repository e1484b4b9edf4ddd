"""Mutation testing: the generated mutants and their results."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from dataclasses import asdict

import pytest
from imports import ROOT

from transformer_bench import mutation, mutation_work
from transformer_bench.mutants import Mutant, mutants_of, mutants_of_text, sample
from transformer_bench.mutation_work import COLUMNS, ColumnResult, Worker, forget_open_calls
from transformer_parity.transformer.cases.for_ports import port_cases
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.ports.registry import PORTS

sys.path.append(str(ROOT / "docs" / "results"))
import keep


def changes(body: str, kind: str | None = None) -> set[tuple[str, str]]:
    """Return the old and new texts of all mutants of a function with this body."""
    text = "def f(x, y, config):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
    return {(one.old, one.new) for one in mutants_of_text("p", "m", text) if kind in (None, one.kind)}


@pytest.mark.parametrize(
    ("body", "kind", "expected"),
    [
        ("return x + 1.5", "operator", {("x + 1.5", "(x - 1.5)")}),
        ("return x // 2", "operator", {("x // 2", "(x * 2)"), ("x // 2", "(x % 2)")}),
        ("return x * y", "operand removed", {("x * y", "x"), ("x * y", "y")}),
        ("return x @ y", "operands swapped", {("x @ y", "(y @ x)")}),
        ("x *= y\nreturn x", "operator", {("x *= y", "x /= y")}),
        ("return x < y", "comparison", {("x < y", "(x <= y)"), ("x < y", "(x > y)")}),
        ("return x is None", "comparison", {("x is None", "(x is not None)")}),
        ("return x and y", "boolean operator", {("x and y", "(x or y)")}),
        ("return not x", "operator removed", {("not x", "x")}),
        ("return g(axis=-1)", "operator removed", {("-1", "(1)")}),
        ("return g(axis=-1)", "argument removed", {("g(axis=-1)", "g()")}),
        ("return x[2]", "constant", {("2", "3"), ("2", "1"), ("2", "4"), ("2", "0")}),
        ("return g(0.5)", "constant", {("0.5", "1.0"), ("0.5", "1.5"), ("0.5", "0.0")}),
        ("return g(True)", "constant", {("True", "False")}),
        ("return g('a')", "constant", {("'a'", "'a_'")}),
        ("return x[1:y]", "slice", {("1:y", ":y"), ("1:y", "1:")}),
        ("return g(x, y)", "arguments swapped", {("g(x, y)", "g(y, x)")}),
        ("return g(x, y)", "call removed", {("g(x, y)", "x")}),
        ("return x.copy()", "call removed", {("x.copy()", "x")}),
        ("return x.T", "transposition removed", {("x.T", "x")}),
        ("return x.max()", "attribute", {("x.max", "x.min")}),
        ("return config.a + config.b", "attribute", {("config.a", "config.b"), ("config.b", "config.a")}),
        ("g(x)\nreturn x", "statement removed", {("g(x)", "pass")}),
        ("x[0] = y\nreturn x", "statement removed", {("x[0] = y", "pass")}),
        ("x = g(x)\nreturn x", "statement removed", {("x = g(x)", "pass")}),
        ("if x:\n    return y\nreturn x", "condition", {("x", "True"), ("x", "False")}),
        ("return x if y else 3", "condition", {("x if y else 3", "x"), ("x if y else 3", "(3)")}),
        ("while x:\n    break", "statement removed", {("break", "pass")}),
    ],
)
def test_operator_generates_the_expected_mutants(body, kind, expected):
    assert changes(body, kind) == expected


def test_variable_is_replaced_by_a_variable_of_the_same_function():
    found = changes("return [g(x), g(y), g(config), x, y, config]", "name")
    assert found
    assert {name for change in found for name in change} <= {"x", "y", "config"}


def test_decorators_and_defaults_change():
    text = 'class A:\n    @staticmethod\n    def f(x=1, *, dtype="float32"):\n        return x\n'
    found = {(one.where, one.kind, one.old, one.new) for one in mutants_of_text("p", "m", text)}
    assert ("A.f", "decorator removed", "staticmethod", "(lambda same: same)") in found
    assert ("A.f", "constant", "1", "2") in found
    assert not any("float32" in old for _, _, old, _ in found)


@pytest.mark.parametrize(
    "body",
    [
        '"""Multiply by 2."""',
        "if x:\n    raise ValueError(x)",
        "check_ids(x, 1)",
        "x: Float[ndarray, 'B L']",
        "import g",
        "x = dropout(x, 0.1)",
        "if rng is not None:\n    y = 2",
        'return f"{x} is wrong"',
    ],
)
def test_code_without_computation_is_not_mutated(body):
    assert {change for change in changes(body) if change[0] not in ("x", "y")} == set()


@pytest.mark.parametrize("name", list(PORTS))
def test_mutants_of_a_package_are_distinct_and_compile(name):
    mutants = mutants_of(PORTS[name].package)
    assert mutants == mutants_of.__wrapped__(PORTS[name].package)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 2000
    for mutant in sample(mutants, 200, seed=1):
        ((module, text, changed),) = mutant.edits()
        assert module == mutant.module
        assert changed != text
        with warnings.catch_warnings(action="ignore"):  # for example, a list that is indexed with a tuple
            compile(changed, module, "exec", dont_inherit=True)


def test_sample_depends_on_its_seed_only():
    mutants = mutants_of("reference_numpy")
    assert sample(mutants, 30, seed=3) == sample(mutants, 30, seed=3)
    assert sample(mutants, 30, seed=3) != sample(mutants, 30, seed=4)
    assert sample(mutants, 10**6, seed=3) == mutants


def few(cases: list) -> list:
    return [case for case in cases if case.name in ("full/padded", "gradients/padded", "decode/port_beam")]


@pytest.fixture
def worker(monkeypatch) -> Worker:
    monkeypatch.setattr(mutation_work, "CONVENTIONS", (("paper_base", {}),))
    monkeypatch.setattr(mutation_work, "standard_cases", lambda: few(standard_cases()))
    monkeypatch.setattr(mutation_work, "port_cases", lambda config: few(port_cases(config)))
    return Worker("numpy", None, lambda doing: None)


def mutant(module: str, old: str, new: str) -> Mutant:
    """Return the only mutant of the reference with these texts."""
    (found,) = {one for one in mutants_of("reference_numpy") if (one.module, one.old, one.new) == (module, old, new)}
    return found


def test_mutant_is_caught_or_survives(worker):
    def caught(*texts: str) -> dict[str, str]:
        return {result.column: result.caught for result in worker.results(mutant(*texts))}

    scale = "1.0 / math.sqrt(query.shape[-1])"
    assert caught("fast", scale, "(1.0 * math.sqrt(query.shape[-1]))") == dict.fromkeys(COLUMNS, "difference")
    assert caught("fast", "weights @ value", "(value @ weights)") == dict.fromkeys(COLUMNS, "exception")
    assert caught("fast", "2**15", "(2 * 15)") == dict.fromkeys(COLUMNS, "")  # affects only the speed


def test_cases_not_covering_the_mutated_line_are_skipped(worker):
    results = list(worker.results(mutant("optimizer", "1.0 - settings.beta1", "(1.0 + settings.beta1)")))
    assert [(result.caught, result.cases) for result in results] == [("", 0)] * len(COLUMNS)


@pytest.mark.only("tf")
def test_only_steps_of_the_check_are_traced_in_tensorflow():
    import tensorflow as tf

    cases = {case.stage: case for case in standard_cases()}
    for column in COLUMNS:
        trials = mutation_work.ColumnTrials(column, "tf", lambda doing: None)
        assert trials.dtypes == (["float64", "bfloat16"] if column == mutation_work.CHECK else ["float64"])
        for stage, case in cases.items():
            with trials.running([case]):
                is_traced = stage == "steps" and column == mutation_work.CHECK
                assert tf.config.functions_run_eagerly() != is_traced


def test_results_are_resumed_after_a_truncated_line(tmp_path, monkeypatch, capsys):
    def run(children, backend, due, file):
        ran.append([one.key for one in due])
        for one in due:
            yield [ColumnResult(one.key, column, "", "", 3, 0.1) for column in COLUMNS]

    ran: list[list[str]] = []
    monkeypatch.setattr(mutation, "run", run)
    file = tmp_path / "results.jsonl"
    arguments = ["--backends", "numpy", "--sample", "3", "--results", str(file)]
    mutation.main(arguments)
    lines = file.read_text("utf-8").splitlines(keepends=True)
    assert len(lines) == 3 * len(COLUMNS)
    file.write_text("".join(lines[:5]) + lines[5][:20], "utf-8")
    mutation.main(arguments)
    assert [len(keys) for keys in ran] == [3, 1]
    assert ran[1] == ran[0][2:]
    rows = mutation.read(file)
    assert len({(row["key"], row["column"]) for row in rows}) == 3 * len(COLUMNS)
    assert "survives" in capsys.readouterr().out
    assert json.loads(lines[0])["caught"] == ""


def test_surviving_mutant_requires_a_reason():
    survivor = {**asdict(mutant("fast", "2**15", "(2 * 15)")), "cases": 3}
    found = keep.judged(keep.CHECK, {"survivors": [survivor, {**survivor, "cases": 0}]})
    assert (found["not run"], found["missed"], [one["count"] for one in found["equivalent"]]) == (1, [], [1])
    unknown = {"survivors": [{**survivor, "new": "7"}]}
    assert keep.judged("cases for ports", unknown)["unexamined"] == 1
    with pytest.raises(SystemExit, match=r"no reason for reference_numpy.fast. operator: 2\*\*15 -> 7"):
        keep.judged(keep.CHECK, unknown)


def test_figures_on_the_site_count_every_mutant():
    kept = json.loads((ROOT / "docs" / "results" / "mutation.json").read_text("utf-8"))
    for package in kept["packages"]:
        for found in package["columns"].values():
            equivalent = sum(one["count"] for one in found["equivalent"])
            survivors = found["not run"] + equivalent + len(found["missed"]) + found["unexamined"]
            assert sum(found["caught"].values()) + survivors == package["run"]


def test_call_context_left_open_by_a_mutant_in_keras_is_cleared():
    from keras.src.backend.common import global_state

    global_state.set_global_attribute("current_call_ctx", object())
    forget_open_calls()
    assert global_state.get_global_attribute("current_call_ctx") is None
