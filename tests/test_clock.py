"""A comparison loads, computes, and times nothing twice, and its report includes the compilation time."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, Finding
from transformer_parity.engine.report.tables import verdict_line
from transformer_parity.engine.tensors import CHUNK, relative_error
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.engine.verdict import Verdict
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports import tensorflow
from transformer_parity.transformer.ports.compile_clock import COMPILING, Clock, Spent, listen_to_jax
from transformer_parity.transformer.ports.package import LoadedPackage, PackagePort
from transformer_parity.transformer.ports.protocol import Placement, Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.search import Search

CASES_BY_NAME = {case.name: case for case in standard_cases()}


def clock_at(*times: float) -> Clock:
    """Return a clock that reads the given times in turn."""
    return Clock(iter(times).__next__)


def test_clock_sums_the_added_seconds():
    clock = clock_at(10.0, 20.0)
    clock.add(2.0)
    clock.add(3.0)
    assert clock.seconds == 5.0


def test_overlapping_spans_are_counted_once():
    clock = clock_at(10.0, 12.0, 13.0, 20.0)
    clock.add(1.0)
    clock.add(1.0)
    clock.add(5.0)  # started at 8, so it includes both earlier spans
    assert clock.seconds == 5.0
    clock.add(9.0)  # started at 11, so it overlaps the earlier span
    assert clock.seconds == 12.0


def test_stopping_a_span_twice_counts_it_once():
    clock = clock_at(1.0, 4.0, 4.0)
    with clock.running() as stop:
        stop()
        stop()
    assert clock.seconds == 3.0
    clock = clock_at(1.0, 6.0, 6.0)
    with pytest.raises(KeyError), clock.running():
        raise KeyError
    assert clock.seconds == 5.0


def test_jax_compile_events_are_timed(monkeypatch):
    import jax

    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    monkeypatch.setattr("transformer_parity.transformer.ports.compile_clock.COMPILING", clock := clock_at(10.0))
    listen_to_jax()
    (hear,) = listeners
    hear("/jax/checkpoint/write", 5.0)
    assert clock.seconds == 0.0
    hear("/jax/core/compile/backend_compile_duration", 3.0, platform="cpu")
    assert clock.seconds == 3.0


def test_tf_compilation_is_timed_in_the_first_call_of_each_kind(monkeypatch):
    clock = Clock(iter(np.arange(0.0, 1000.0)).__next__)
    monkeypatch.setattr(tensorflow, "COMPILING", clock)
    case = CASES_BY_NAME["attention/no_mask"]
    loaded = PORTS["tf"].load(case.config, case.load_weights(), Placement("float32"))
    counted = []
    for inputs in (case.inputs, case.inputs, CASES_BY_NAME["attention/one_key"].inputs):
        loaded.run(case.block, inputs, taps=False)
        counted.append(clock.seconds)
    assert 0 < counted[0] == counted[1] < counted[2]
    monkeypatch.setattr(LoadedPackage, "search", lambda self, ids, options, on_step: [on_step(ids) for _ in range(3)])
    shown = []
    before = clock.seconds
    loaded.search(np.ones((2, 3), int), Search(), shown.append)
    assert len(shown) == 3
    assert clock.seconds == before + 1.0  # until the end of the first step
    loaded.search(np.ones((2, 3), int), Search(), shown.append)
    assert clock.seconds == before + 1.0
    monkeypatch.setattr(LoadedPackage, "trainer", lambda self, *settings: SimpleNamespace(train_step=shown.append))
    trainer = loaded.trainer(None)
    for _ in range(3):
        trainer.train_step("a batch")
        assert clock.seconds == before + 2.0
    assert shown[-3:] == ["a batch"] * 3


def test_tf_compiles_float32_calls_and_traces_whole_float64_models(monkeypatch):
    import tensorflow as tf

    def asked_of(dtype, run):
        asked = []
        monkeypatch.setattr(tf, "function", lambda function, *_, **how: asked.append(how["jit_compile"]) or function)
        case = CASES_BY_NAME["full/large_vocabulary"]
        config = case.config.replace(source_vocab_size=13, target_vocab_size=13)
        run(PORTS["tf"].load(config, hard_weights(config), Placement(dtype)))
        return asked

    part = CASES_BY_NAME["attention/no_mask"]
    ids = {"source_ids": np.full((1, 2), 5), "target_ids": np.full((1, 2), 5)}

    def run_a_part(loaded):
        loaded.run(part.block, part.inputs, taps=False)

    def run_all(loaded):
        loaded.run("", ids, taps=False)

    def search(loaded, **rules):
        options = Search.preset("hf", rules) if rules else Search()
        loaded.search(ids["source_ids"], replace(options, max_length=2))

    by_other_rules = partial(search, banned_ids=(7,))
    assert [asked_of("float32", run) for run in (run_a_part, run_all, search)] == [[True], [True], [False, True]]
    assert [asked_of("float64", run) for run in (run_a_part, run_all, search)] == [[], [False], []]
    assert asked_of("float64", by_other_rules) == [False, True]


def test_last_line_reports_the_compile_time():
    finding = Finding(
        "torch", "float64", "full model", "full/padded", "taps", "logits", 0.0, 1.0, AGREES, "", "activations"
    )
    verdict = Verdict.of([finding])
    spent = {"torch": Spent(50.0, 60.0, 0.0), "jax": Spent(90.0, 95.0, 40.4)}
    console = Console(file=io.StringIO(), width=300)
    console.print(verdict_line(verdict, [finding], ["torch", "jax"], 99.6, spent))
    console.print(verdict_line(verdict, [finding], ["torch"], 9.6, {"torch": spent["torch"]}))
    console.print(verdict_line(verdict, [finding], ["torch"], 9.6))
    first, *others = console.file.getvalue().splitlines()
    assert first.endswith("; 100 s (compiling: jax 40 s).")
    assert all(line.endswith("; 10 s.") for line in others)


def test_json_reports_the_compile_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--preset", "marian", "--stage", "activations", "--sentences", "0", "--dtype", "float32"]
    assert main(["check", "--backends", "torch,jax", *options, "--json", "result.json"]) == 0
    document = json.loads((tmp_path / "result.json").read_text())
    time = document["result"]["time"]
    assert time["ports"].keys() == {"torch", "jax"}
    for name, spent in time["ports"].items():
        assert 0.0 <= spent["compiling"] < spent["seconds"] < document["seconds"]
        assert spent["cpu_seconds"] > 0.0
        assert (spent["compiling"] > 0.0) == (name == "jax")
        assert list(spent["parts"]) == ["importing", "activations float32", "the rest"]
        assert sum(spent["parts"].values()) == pytest.approx(spent["cpu_seconds"], abs=0.1)
    assert time["cpu_seconds"] > 0.0


def test_each_model_is_loaded_once_and_each_block_run_once(monkeypatch):
    loads, runs = Counter(), Counter()
    load, run = PackagePort.load, LoadedPackage.run

    def count_load(self, config, weights, placement):
        loads[self.name, placement.dtype] += 1
        return load(self, config, weights, placement)

    def count_run(self, block, inputs, **options):
        runs[self.package.__name__, self.dtype, block] += 1
        return run(self, block, inputs, **options)

    monkeypatch.setattr(PackagePort, "load", count_load)
    monkeypatch.setattr(LoadedPackage, "run", count_run)
    cases = [CASES_BY_NAME[name] for name in ("feed_forward/relu", "feed_forward/gelu", "layer_norm/standard")]
    assert cases[0].config == cases[2].config != cases[1].config
    findings = list(compare(cases, PORTS["torch"], Placements()))
    assert all(finding.verdict == AGREES for finding in findings)
    assert {(finding.case, finding.dtype) for finding in findings} == {
        (case.name, dtype) for case in cases for dtype in ALL_DTYPES
    }
    assert all(loads["torch", dtype] == 2 for dtype in ALL_DTYPES)  # the three cases have two distinct configs
    norm = cases[2].block
    # float32 and float64 share one reference run; for bfloat16, inputs and weights are rounded first.
    assert runs["reference_numpy", "float64", norm] == 2
    assert runs["reference_numpy", "float32", norm] == 1


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_relative_error_includes_every_element(size):
    expected = np.random.default_rng(size).normal(size=size)
    norm = np.linalg.norm(expected)
    for index in {0, size // 2, size - 1}:
        actual = expected.copy()
        actual[index] += 1.0
        assert relative_error(actual, expected) == pytest.approx(1.0 / norm, rel=1e-12)
    turned = expected[:, None].astype(np.float32)
    assert relative_error(turned, expected[:, None]) == pytest.approx(
        np.linalg.norm(turned[:, 0].astype(float) - expected) / norm, rel=1e-12
    )


@pytest.mark.only("jax")
def test_only_a_worker_times_jax_compilation(port):
    import jax

    before = COMPILING.seconds
    jax.jit(lambda x: x + 174.0)(1.0)
    assert COMPILING.seconds == before
