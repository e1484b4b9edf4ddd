"""`parity bench`: ratios, numbers of operations, fitted exponents, and the machine's peak performance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiers
from test_bench_verify import FORWARD, SMALL, TRAIN

import reference_numpy as ref
from transformer_bench.matmuls import Matmuls
from transformer_bench.measurements import Entry, Spread, exponent, exponents, fastest, ratio, verdict
from transformer_bench.peak import LibraryEntry, Peak, libraries, peak_of
from transformer_bench.run import grown, work_title
from transformer_bench.workload import DecodeWork, ForwardWork, TrainWork
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED
from transformer_parity.transformer.ports.matmuls import multiplied


def test_ratios_are_computed_within_each_round():
    quick, slow = Entry("quick", seconds=[1.0, 10.0, 2.0]), Entry("slow", seconds=[3.0, 20.0, 5.0, 99.0])
    assert ratio(slow, quick) == Spread(2.0, 2.5, 3.0)  # the ratio of the medians would be 12.5 / 2
    assert ratio(quick, slow) == Spread(1 / 3, 0.4, 0.5)
    assert Spread.of([4.0, 1.0, 2.0, 9.0]) == Spread(1.0, 3.0, 9.0)
    baseline = Entry("baseline", has_result=False, seconds=[0.1])
    wrong = Entry("wrong", verdict=DIVERGES, seconds=[0.5])
    assert fastest([slow, wrong, baseline, quick, Entry("none")]) is quick
    assert fastest([wrong, baseline]) is None


def test_diverging_entries_report_no_times():
    times = {"first_seconds": 1.0, "seconds": [2.0, 4.0], "cores": [1.0, 1.0], "loaded_bytes": 3, "peak_bytes": 5}
    right = Entry("right", **times).to_dict()
    assert {name: right[name] for name in times} == times
    assert right["median_seconds"] == 3.0
    wrong = Entry("wrong", verdict=DIVERGES, problem="why", **times).to_dict()
    assert [wrong[name] for name in (*times, "median_seconds")] == [None] * 6
    assert wrong["problem"] == "why"


def test_overall_verdict_is_the_worst_verdict():
    entries = {word: Entry(word, verdict=word) for word in (AGREES, FAILED, DIVERGES)}
    assert verdict([entries[AGREES]]) == AGREES
    assert verdict([entries[AGREES], entries[FAILED]]) == FAILED
    assert verdict(list(entries.values())) == DIVERGES


@pytest.mark.parametrize("beam_size", [None, 3])
def test_decode_operation_count_matches_the_formula(beam_size):
    work = DecodeWork("small", 2, 5, 4, beam_size=beam_size)
    batch, source, tokens, rows = 2, 5, 4, 2 * (beam_size or 1)
    d_model, d_ff, layers, vocabulary = 256, 1024, 3, 8000
    multiply_adds = layers * batch * source * (4 * d_model**2 + 2 * source * d_model + 2 * d_model * d_ff)  # encoder
    multiply_adds += layers * batch * source * 2 * d_model**2  # keys and values of the encoder memory
    multiply_adds += layers * rows * tokens * (6 * d_model**2 + 2 * source * d_model + 2 * d_model * d_ff)
    multiply_adds += layers * rows * 2 * d_model * tokens * (tokens + 1) // 2  # self-attention
    multiply_adds += rows * tokens * d_model * vocabulary
    assert work.operations == 2 * multiply_adds


def test_training_step_has_three_times_the_forward_operations():
    forward, train = (kind("small", 2, 5, 4) for kind in (ForwardWork, TrainWork))
    d_model, d_ff, layers, vocabulary = 256, 1024, 3, 8000
    multiply_adds = layers * 2 * 5 * (4 * d_model**2 + 2 * 5 * d_model + 2 * d_model * d_ff)  # encoder
    multiply_adds += layers * 2 * 4 * (6 * d_model**2 + 2 * (4 + 5) * d_model + 2 * d_model * d_ff)  # decoder
    multiply_adds += layers * 2 * 5 * 2 * d_model**2  # keys and values of the encoder memory
    multiply_adds += 2 * 4 * d_model * vocabulary
    assert forward.operations == 2 * multiply_adds
    assert train.operations == 3 * forward.operations


@pytest.mark.parametrize("work", [FORWARD, SMALL], ids=["forward", "decode"])
def test_matmul_sizes_match_each_stack(work):
    work = replace(work)
    sizes = {"decoder_num_heads": 2, "decoder_d_k": 5, "decoder_d_v": 3, "decoder_d_ff": 7}
    config = work.config.replace(d_k=6, d_v=9, skip_first_self_attention=True, **sizes)
    vars(work)["config"] = config
    shapes = ref.parameter_shapes(config)
    found = {matmul.operand: matmul.right for matmul in work.matmuls() if matmul.operand.endswith("kernel")}
    assert found == {name: shape for name, shape in shapes.items() if name.endswith("kernel")}
    heads = {"encoder": (config.num_heads, 6, 9), "decoder": (2, 5, 3)}
    for matmul in work.matmuls():
        (stack, *_), kind = matmul.operand.split("."), matmul.operand.rpartition(".")[2]
        if kind in ("key", "value"):
            _, number, *matrix = matmul.right
            assert (number, matrix[kind == "value"]) == (heads[stack][0], heads[stack][1 + (kind == "value")])


@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=["forward", "train", "decode"])
def test_every_listed_matmul_can_be_run(work):
    matmuls = Matmuls()
    matmuls.load(work, Path())
    matmuls.run()
    for (left, right), matmul in zip(matmuls._pairs, work.matmuls(), strict=True):
        taken = (left.shape, right.shape), (right.shape[::-1], left.shape[::-1])  # in this layout, or both transposed
        assert (matmul.left, matmul.right) in taken


def test_matmuls_use_the_memory_layout_of_the_search():
    matmuls = Matmuls()
    matmuls.load(SMALL, Path())
    matmuls.run()
    caches = {id(right.base) for _, right in matmuls._pairs if right.shape[-1] != right.shape[-2] and right.ndim == 4}
    assert len(matmuls._pairs) == len(list(SMALL.matmuls()))
    # Keys and values of 2 encoder layers and 2 decoder layers; a decoder layer has 2 attentions.
    assert len(caches) == 12


def matmuls_of(work):
    return sum(2 * np.prod(matmul.left) * matmul.right[-1] for matmul in work.matmuls())


def test_limit_is_the_longer_of_compute_time_and_read_time():
    fast, slow = 1e30, 1e-30
    for work in (FORWARD, TRAIN, SMALL):
        assert Peak({"a": 2.0, "b": 1.0}, {"a": fast}).seconds(work) == pytest.approx(matmuls_of(work) / 2.0)
    read = 4 * sum(np.prod(matmul.right) for matmul in FORWARD.matmuls())
    assert Peak({"a": fast}, {"a": slow, "b": 5.0}).seconds(FORWARD) == pytest.approx(read / 5.0)
    assert Peak({"a": fast}, {"a": 5.0}).seconds(replace(FORWARD, dtype="bfloat16")) == pytest.approx(read / 10.0)
    first = replace(SMALL, target=1)
    once = 4 * sum(
        np.prod(shape) for name, shape in ref.parameter_shapes(SMALL.config).items() if name.endswith("kernel")
    )
    table = 4 * 128 * 1000
    # Keys and values of 2 layers: 6 tokens in the encoder, 6 in cross-attention, and 1 in the decoder.
    caches = 4 * 2 * 3 * (6 + 6 + 1) * 128 * 2
    assert Peak({"a": fast}, {"a": 1.0}).seconds(first) == pytest.approx(once + table + caches)


def test_optimizer_update_reads_and_writes_every_weight():
    without = Peak({"a": 1e30}, {"a": 1.0})
    weights = sum(array.size for array in TRAIN.weights().values())
    read = 4 * sum(np.prod(matmul.right) for matmul in TRAIN.matmuls())
    assert without.seconds(TRAIN) == pytest.approx(read + 7 * 4 * weights)


def test_limit_uses_the_best_library():
    entries = [
        LibraryEntry("a", seconds=[1.0] * 3, found=[(1.0, 9.0), (5.0, 8.0), (2.0, 1.0)], environment={}),
        LibraryEntry("b", seconds=[1.0], found=[(3.0, 4.0)], environment={"matmul library on a CPU": "MKL"}),
        LibraryEntry("c", verdict=FAILED),
    ]
    found = peak_of(["jax", "torch", "numpy"], entries)
    assert found == Peak({"jax": 2.0, "torch": 3.0}, {"jax": 8.0, "torch": 4.0}, {"jax": "XLA", "torch": "MKL"})
    assert (found.rate, found.bandwidth) == (3.0, 8.0)
    assert peak_of(["numpy"], entries[2:]) is None


def test_measured_libraries_match_the_benchmarked_backends():
    names = lambda *given, **options: [library.backend for library in libraries(*given, **options)]  # noqa: E731
    assert names(["numpy"], FORWARD) == ["numpy"]
    assert names(["tf"], FORWARD) == ["numpy", "tf"]
    # JAX and TensorFlow both use XLA, which is measured once.
    assert names(["torch", "tf", "jax"], FORWARD) == ["numpy", "torch", "jax"]
    assert names(["numpy"], FORWARD, peers=True) == ["numpy", "torch", "jax"]
    assert names(["torch"], replace(FORWARD, dtype="bfloat16")) == names(["torch"], replace(FORWARD, device="gpu"))
    assert names(["torch"], replace(FORWARD, device="gpu")) == ["torch"]


@pytest.mark.parametrize("name", tiers.first_alone(["torch", "jax", "tf"], "libraries"))
@pytest.mark.parametrize("dtype", tiers.first_alone(["float32", "bfloat16"], "libraries"))
def test_each_library_can_run_a_matmul(name, dtype):
    for sizes in ((8, 16, 8), (8, 16, 1)):
        multiplied(name, sizes, dtype, "cpu")()


def test_title_omits_the_scaled_size():
    assert work_title(FORWARD, "source") == "forward, tiny: batch 3, target 5"
    assert work_title(FORWARD, "length") == "forward, tiny: batch 3"
    assert work_title(TRAIN, "depth") == "train, tiny: batch 3, source 6, target 5"


def test_exponents_are_fitted_to_the_largest_sizes():
    assert exponent([1, 2, 4, 8], [90.0, 6.0, 24.0, 96.0]) == pytest.approx(2.0)
    # The fit uses all three points, not only the last two.
    assert exponent([1, 2, 4], [1.0, 4.0, 4.0]) == pytest.approx(1.0)
    assert exponent([64, 512, 4096], [1.0, 2.0, None]) == pytest.approx(1 / 3)
    assert exponent([1, 2], [None, 3.0]) is None


def test_exponents_are_fitted_for_time_and_memory():
    def entry(name, size):
        return Entry(name, seconds=[2.0 * size**2] * 3, loaded_bytes=100, peak_bytes=100 + 5 * size)

    races = [[entry("numpy", size), entry("torch", size)] for size in (2, 4, 8)]
    races[-1][1].verdict = "DIVERGE"
    found = exponents((2, 4, 8), races)
    assert found["numpy"] == {"seconds": pytest.approx(2.0), "work_bytes": pytest.approx(1.0)}
    races[0][1].seconds = races[1][1].seconds = []
    assert exponents((2, 4, 8), races)["torch"] == {"seconds": None, "work_bytes": None}


@pytest.mark.parametrize("axis", ["source", "target", "length", "batch", "depth", "vocabulary"])
@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=lambda work: work.task)
def test_scaling_changes_only_the_chosen_size(work, axis):
    large = grown(work, axis, 40)
    config = large.config
    sizes = {
        "source": large.source_ids.shape[1],
        "target": large.target_ids.shape[1],
        "batch": len(large.source_ids),
        "depth": config.num_decoder_layers,
        "vocabulary": config.target_vocab_size,
    }
    grew = {"source", "target"} if axis == "length" else {axis}
    assert {name for name, size in sizes.items() if size == 40} == grew
    assert large.operations > work.operations or axis == "vocabulary"
    assert f"vocabulary {config.target_vocab_size:,}" in large.details
