"""The tasks of `parity bench`: forward passes, training steps, growth, compiled variants, and plots."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass, replace

import pytest
from bench_runs import Wrong, bench, read
from bench_runs import no_pause as no_pause  # an autouse fixture
from test_bench_verify import FORWARD, SMALL, TRAIN, no_steps

import reference_numpy as ref
from transformer_bench import imports
from transformer_bench.implementations import FORMS, OURS, ForwardPackage, TrainPackage, others
from transformer_bench.measurements import Entry
from transformer_bench.plots import draw_growth, draw_times
from transformer_bench.run import Setting
from transformer_bench.verify import verifier_of


@pytest.mark.extended("timed steps")
@pytest.mark.parametrize("task", ["forward", "train"])
def test_forward_and_train_agree_before_they_are_timed(task, capsys, tmp_path):
    code, printed, errors = bench(
        *(capsys, "--backends", "numpy,torch,jax,tf", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg"),
        task=task,
    )
    assert code == 0, printed + errors
    what = {"forward": "Logits", "train": "Losses"}[task]
    assert f"{what} of every call of numpy, torch, jax, tf agree with the float64 reference." in printed
    found, _ = read(tmp_path / "a.json")
    assert [entry["name"] for entry in found["implementations"]] == ["numpy", "torch", "jax", "tf"]
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


@dataclass
class WrongLogits(ForwardPackage):
    """An implementation that returns its logits in the wrong order of sentences."""

    def result(self, found):
        return super().result(found)[::-1]


@dataclass
class Lazy(TrainPackage):
    """An implementation that doesn't train, so its loss stays the same."""

    def ready(self, model, work):
        step = super().ready(model, work)
        first = step()
        calls = iter(range(1, 100))
        return lambda: (next(calls), first[1])


@pytest.mark.parametrize(
    ("task", "implementation", "reason"),
    [
        ("forward", WrongLogits("torch"), "DIVERGES  torch: the error of the logits must be at most"),
        pytest.param(
            *("train", Lazy("torch"), "DIVERGES  torch: the loss of step 2 must be"),
            marks=pytest.mark.extended("timed steps"),
        ),
    ],
    ids=["forward", "train"],
)
def test_wrong_results_are_not_timed(task, implementation, reason, capsys, monkeypatch):
    monkeypatch.setitem(OURS[task], "torch", implementation)
    code, printed, _ = bench(capsys, "--backends", "numpy,torch", task=task)
    assert code == 1
    assert reason in printed
    assert "of numpy agree" in printed


@pytest.mark.extended("timed growth")
def test_growth_is_measured_and_plotted(capsys, tmp_path):
    code, printed, errors = bench(
        *(capsys, "--backends", "numpy,torch", "--scale", "source=8,32", "--batch", 2),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"),
        task="forward",
    )
    assert code == 0, printed + errors
    assert "milliseconds, by source" in printed
    assert "MiB of additional memory since the first call, by source" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    _, found = read(tmp_path / "a.json")
    assert found["scale"] == "source"
    assert {"numpy", "torch"} <= {*found["exponents"]}
    assert [entry["work"]["source"] for entry in found["races"]] == [8, 32]


def test_import_times_are_compared_with_the_frameworks(capsys, tmp_path):
    imports.main(["--backends", "numpy", "--rounds", "2", "--json", str(tmp_path / "a.json")])
    assert "reference_numpy" in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    assert [entry["name"] for entry in found["imports"]] == ["numpy, safetensors.numpy", "reference_numpy"]
    assert found["ratios"]["numpy"]["median"] > 0.5
    assert all(len(entry["seconds"]) == 2 for entry in found["imports"])


def test_failed_framework_import_is_reported(monkeypatch):
    monkeypatch.setitem(imports.FRAMEWORKS, "numpy", "no_such_module")
    with pytest.raises(ImportError, match=r"^import no_such_module: ModuleNotFoundError"):
        imports.main(["--backends", "numpy", "--rounds", "1"])


def test_marian_is_the_only_peer_with_beam_search():
    assert [other.name for other in others(replace(SMALL, beam_size=3))] == ["marian"]
    assert [other.name for other in others(SMALL)] == ["marian", "flax nnx", "keras hub", "keras hub XLA"]
    assert [other.name for other in others(TRAIN)] == [
        *("torch.nn", "torch.nn compiled", "marian", "flax nnx", "keras hub", "keras hub XLA")
    ]


@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=lambda work: work.task)
def test_compiled_variant_is_timed_with_peers(work):
    names = lambda *ours, **how: [one.name for one in Setting(ours, **how).implementations(work)]  # noqa: E731
    forms = [] if work.task == "decode" else ["torch compiled"]
    assert names("torch", peers=True)[: len(forms) + 2] == ["torch", *forms, others(work)[0].name]
    # Training in this many processes uses too much memory.
    assert ("torch compiled" in names("torch", "numpy", peers=True)) == (work.task == "forward")
    assert names("torch") == ["torch"]
    assert "torch compiled" not in names("numpy", peers=True)
    # TensorFlow's forward pass is always compiled.
    assert ("tf compiled" in names("tf", peers=True)) == (work.task == "train")
    assert "tf compiled" not in names("tf", "numpy", peers=True)


@pytest.mark.parametrize("work", [FORWARD, TRAIN], ids=lambda work: work.task)
def test_compiled_torch_variant_is_compiled(work, tmp_path, monkeypatch):
    import torch

    compiled = []

    def compile_eagerly(what):
        compiled.append(what)
        return compile_it(what, backend="eager")

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    weights = work.weights()
    ref.save_weights(tmp_path / "model.safetensors", work.config, weights)
    form = copy(FORMS[work.task]["torch"])  # a copy, because other tests send the original to a process
    form.prepare()
    form.load(work, tmp_path / "model.safetensors")
    verifier = verifier_of(work, weights)
    for _ in range(2):
        verifier.verify(form.result(form.run()), no_steps)
    assert len(compiled) == 1
    torch.compiler.reset()


@pytest.mark.extended("timed steps")
def test_compiled_tensorflow_variant_is_compiled(tmp_path, monkeypatch):
    import tensorflow as tf

    by_xla = []
    trace = tf.function
    monkeypatch.setattr(
        tf, "function", lambda *of, **options: by_xla.append(options.get("jit_compile")) or trace(*of, **options)
    )
    weights = TRAIN.weights()
    ref.save_weights(tmp_path / "model.safetensors", TRAIN.config, weights)
    verifier = verifier_of(TRAIN, weights)
    for form, expected in ((copy(FORMS["train"]["tf"]), True), (copy(OURS["train"]["tf"]), None)):
        form.prepare()
        form.load(TRAIN, tmp_path / "model.safetensors")
        verifier.verify(form.result(form.run()), no_steps)
        assert by_xla.pop() is expected


def test_bar_color_depends_on_the_first_word_of_the_name():
    entries = [Entry(name, seconds=[1.0]) for name in ("torch compiled", "torch data=2", "torch.nn compiled")]
    (axes,) = draw_times("title", "details", entries, "machine").axes
    colors = [bar.get_facecolor() for bar in axes.patches]
    assert colors[0] == colors[1] != colors[2]


@pytest.mark.extended("timed steps")
def test_plot_excludes_diverging_implementations(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", Wrong("torch"))
    seen = []
    monkeypatch.setattr("transformer_bench.command.write", lambda figure, path: None)
    monkeypatch.setattr("transformer_bench.command.draw_times", lambda *found: seen.append(found))
    options = ["--backends", "numpy,torch", "--plot", tmp_path / "a.png"]
    code, _, _ = bench(capsys, *options)
    assert code == 1
    ((_, _, timed, _),) = seen
    assert [entry.name for entry in timed] == ["numpy"]


@pytest.mark.parametrize("memory", [None, 2**20])
def test_growth_plot_supports_unknown_memory(memory, tmp_path):
    peak = memory and memory + 2**20
    races = [[Entry("numpy", seconds=[float(size)], loaded_bytes=memory, peak_bytes=peak)] for size in (1, 2)]
    figure = draw_growth("title", "details", "batch", (1, 2), races, "machine")
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == (1 if memory is None else 2)


@pytest.mark.only("torch")
def test_bfloat16_training_step_keeps_float32_weights(capsys):
    code, printed, errors = bench(capsys, "--backends", "torch", "--dtype", "bfloat16", task="train")
    assert code == 0, printed + errors
    assert "bfloat16" in printed
