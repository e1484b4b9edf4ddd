"""`parity bench`: what gets no time, the arithmetic of rounds, processes that die, interruption, what is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiers
from conftest import child_processes, still_running

import reference_numpy as ref
from reference_numpy.search_plan import SearchResult
from transformer_parity.bench import imports, rounds
from transformer_parity.bench.limit import Library, LibraryEntry, Limit, libraries, limit_of, multiplied
from transformer_parity.bench.matrix_products import Products
from transformer_parity.bench.measurements import Entry, Spread, exponent, exponents, fastest, ratio, verdict
from transformer_parity.bench.participants import FORMS, OURS, DecodePackage, ForwardPackage, TrainPackage, others
from transformer_parity.bench.plots import draw_growth, draw_times
from transformer_parity.bench.run import Setting, grown, work_title
from transformer_parity.bench.verify import (
    DecodeVerifier,
    DisagreementError,
    ForwardVerifier,
    TrainVerifier,
    verifier_of,
)
from transformer_parity.bench.workload import SEED, DecodeWork, ForwardWork, TrainWork
from transformer_parity.cli.main import main
from transformer_parity.compare.findings import AGREES, DIVERGES, FAILED
from transformer_parity.ports.protocol import Decoded
from transformer_parity.system.machine import processors

SMALL = DecodeWork("tiny", batch=3, source=6, target=5)
FORWARD = ForwardWork("tiny", batch=3, source=6, target=5)
TRAIN = TrainWork("tiny", batch=3, source=6, target=5)
QUICK = ["--config", "tiny", "--target", "4", "--source", "6", "--threads", "1"]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    # One test measures what all libraries can do.
    monkeypatch.setattr("transformer_parity.bench.run.libraries", lambda *_, **__: [Library("numpy")])
    here = str(Path(__file__).parent)  # where processes find the participants of this file
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))


def parity(capsys, *arguments, task="decode"):
    """Run the command and return its exit code and what it printed."""
    try:
        code = main(["bench", task, *QUICK, "--rounds", "2", *map(str, arguments)])
    except SystemExit as leaving:  # argparse's way out
        code = leaving.code
    return code, *capsys.readouterr()


# --- What is timed has to be right. ---


def searched(work=SMALL, weights=None, dtype="float32"):
    model = ref.Transformer.from_weights(work.config, weights or work.weights(), dtype)
    return lambda on_step=None: work.search.search(ref, model, work.source_ids, on_step)


def no_steps():
    raise AssertionError("nobody asked for the steps")


@pytest.mark.parametrize("beam_size", [None, 3])
def test_the_reference_agrees_with_itself(beam_size):
    work = replace(SMALL, beam_size=beam_size)
    found = searched(work)()
    assert found.ids.shape == (3, 5)
    assert not np.isin(found.ids, [work.config.pad_id, work.config.eos_id]).any()
    assert DecodeVerifier(work, work.weights()).verify(found, no_steps) == ""


def test_sentences_vary():
    work = DecodeWork("tiny")
    ids = searched(work)().ids
    assert ids.shape == (8, 64)
    assert len(np.unique(ids)) > 20
    assert all(len(np.unique(row)) > 3 for row in ids)
    assert len(np.unique(ids, axis=0)) == 8
    first = ref.Transformer.from_weights(work.config, work.weights())(
        work.source_ids, np.full((8, 1), work.config.bos_id)
    )
    assert first[..., [work.config.pad_id, work.config.eos_id]].max() < -1000  # nobody has to be kept from saying them
    assert (work.source_ids != work.config.pad_id).sum(1).tolist() == [32, 30, 27, 25, 23, 21, 18, 16]


def another_token(found):
    ids = found.nbest_ids.copy()
    ids[1, 0, 2] += 1
    return SearchResult(ids, found.nbest_scores)


WRONG = {
    "another token": (another_token, "sentence 1, token 3: "),
    "sentences in another order": (
        lambda found: SearchResult(found.nbest_ids[::-1], found.nbest_scores[::-1]),
        "where the reference has",
    ),
    "scores off by a hundred eps": (
        lambda found: SearchResult(found.nbest_ids, found.nbest_scores * np.float32(1 + 100 * 2**-23)),
        "the scores are off by 1.2e-05",
    ),
    "a score that is not a number": (
        lambda found: SearchResult(found.nbest_ids, found.nbest_scores * np.float32("nan")),
        "scores must be finite",
    ),
    "a token less": (
        lambda found: SearchResult(found.nbest_ids[:, :, :4], found.nbest_scores),
        "ids and scores must be [3, 1, 5] and [3, 1]: got [3, 1, 4] and [3, 1]",
    ),
    "a sentence less": (
        lambda found: SearchResult(found.nbest_ids[:2], found.nbest_scores[:2]),
        "got [2, 1, 5] and [2, 1]",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_result_is_refused(mistake):
    change, reason = WRONG[mistake]
    reference = DecodeVerifier(SMALL, SMALL.weights())
    right = searched()()
    for _ in range(2):  # known by now or not
        with pytest.raises(DisagreementError) as caught:
            reference.verify(change(right), no_steps)
        assert reason in str(caught.value)
        assert reference.verify(right, no_steps) == ""


def test_a_near_tie_is_no_mistake():
    weights = SMALL.weights()
    weights["source_embedding.table"][[5, 7]] = 0.0  # two tokens whose logits are their biases, exactly
    weights["output_proj.bias"][[5, 7]] = 9.0
    found = searched(weights=weights)()
    assert (found.ids == 5).all()
    found.nbest_ids[1, 0, 2] = 7
    near_ties = DecodeVerifier(SMALL, weights).verify(found, no_steps)
    assert near_ties.startswith("1 near-tie; sentence 1, token 3: 7 where the reference has 5, margin 0.0e+00")


@pytest.mark.parametrize("beam_size", [None, 3])
def test_bfloat16_has_near_ties_of_its_own_size(beam_size):
    """A search in bfloat16 agrees; one of other weights does not, nor does one in bfloat16 as float32 is judged."""
    import transformer_torch

    work = DecodeWork("tiny", dtype="bfloat16", target=24, beam_size=beam_size)
    weights, kernel = work.weights(), "decoder.layers.0.feed_forward.inner_proj.kernel"
    reference = DecodeVerifier(work, weights)

    def found(changed):
        model = transformer_torch.Transformer.from_weights(work.config, {**weights, **changed}, "bfloat16")
        return lambda on_step=None: work.search.search(transformer_torch, model, work.source_ids, on_step)

    right, wrong = found({}), found({kernel: weights[kernel] * 1.3})
    assert "near-tie" in reference.verify(right(), lambda: Decoded.by(right))
    with pytest.raises(DisagreementError, match="rounding noise"):
        reference.verify(wrong(), lambda: Decoded.by(wrong))
    with pytest.raises(DisagreementError):
        DecodeVerifier(replace(work, dtype="float32"), weights).verify(right(), lambda: Decoded.by(right))


def test_a_beam_is_followed_by_its_steps():
    work = replace(SMALL, beam_size=3)
    reference, search = DecodeVerifier(work, work.weights()), searched(work)
    wrong = another_token(search())
    with pytest.raises(DisagreementError, match="it finds something else when its steps are looked at"):
        reference.verify(wrong, lambda: Decoded.by(search))
    with pytest.raises(DisagreementError, match="is returned, and never was in the beam"):
        reference.verify(wrong, lambda: replace(Decoded.by(search), result=wrong))


# --- Arithmetic. ---


def test_ratios_are_taken_within_a_round():
    quick, slow = Entry("quick", seconds=[1.0, 10.0, 2.0]), Entry("slow", seconds=[3.0, 20.0, 5.0, 99.0])
    assert ratio(slow, quick) == Spread(2.0, 2.5, 3.0)  # and not 12.5 / 2, the medians' ratio
    assert ratio(quick, slow) == Spread(1 / 3, 0.4, 0.5)
    assert Spread.of([4.0, 1.0, 2.0, 9.0]) == Spread(1.0, 3.0, 9.0)
    baseline = Entry("baseline", has_result=False, seconds=[0.1])
    wrong = Entry("wrong", verdict=DIVERGES, seconds=[0.5])
    assert fastest([slow, wrong, baseline, quick, Entry("none")]) is quick
    assert fastest([wrong, baseline]) is None


def test_no_time_without_agreement():
    times = {"first_seconds": 1.0, "seconds": [2.0, 4.0], "cores": [1.0, 1.0], "loaded_bytes": 3, "peak_bytes": 5}
    right = Entry("right", **times).to_dict()
    assert {name: right[name] for name in times} == times
    assert right["median_seconds"] == 3.0
    wrong = Entry("wrong", verdict=DIVERGES, problem="why", **times).to_dict()
    assert [wrong[name] for name in (*times, "median_seconds")] == [None] * 6
    assert wrong["problem"] == "why"


def test_the_worst_verdict_counts():
    entries = {word: Entry(word, verdict=word) for word in (AGREES, FAILED, DIVERGES)}
    assert verdict([entries[AGREES]]) == AGREES
    assert verdict([entries[AGREES], entries[FAILED]]) == FAILED
    assert verdict(list(entries.values())) == DIVERGES


@pytest.mark.parametrize("beam_size", [None, 3])
def test_operations_are_those_of_the_formula(beam_size):
    work = DecodeWork("small", 2, 5, 4, beam_size=beam_size)
    batch, source, tokens, rows = 2, 5, 4, 2 * (beam_size or 1)
    d_model, d_ff, layers, vocabulary = 256, 1024, 3, 8000
    multiply_adds = layers * batch * source * (4 * d_model**2 + 2 * source * d_model + 2 * d_model * d_ff)  # encoder
    multiply_adds += layers * batch * source * 2 * d_model**2  # keys and values of the memory
    multiply_adds += layers * rows * tokens * (6 * d_model**2 + 2 * source * d_model + 2 * d_model * d_ff)
    multiply_adds += layers * rows * 2 * d_model * tokens * (tokens + 1) // 2  # self-attention
    multiply_adds += rows * tokens * d_model * vocabulary
    assert work.operations == 2 * multiply_adds


def test_operations_of_a_step_are_three_times_those_of_the_forward_pass():
    forward, train = (kind("small", 2, 5, 4) for kind in (ForwardWork, TrainWork))
    d_model, d_ff, layers, vocabulary = 256, 1024, 3, 8000
    multiply_adds = layers * 2 * 5 * (4 * d_model**2 + 2 * 5 * d_model + 2 * d_model * d_ff)  # encoder
    multiply_adds += layers * 2 * 4 * (6 * d_model**2 + 2 * (4 + 5) * d_model + 2 * d_model * d_ff)  # decoder
    multiply_adds += layers * 2 * 5 * 2 * d_model**2  # keys and values of the memory
    multiply_adds += 2 * 4 * d_model * vocabulary
    assert forward.operations == 2 * multiply_adds
    assert train.operations == 3 * forward.operations


@pytest.mark.parametrize("work", [FORWARD, SMALL], ids=["forward", "decode"])
def test_products_have_the_sizes_of_each_stack(work):
    work = replace(work)
    sizes = {"decoder_num_heads": 2, "decoder_d_k": 5, "decoder_d_v": 3, "decoder_d_ff": 7}
    config = work.config.replace(d_k=6, d_v=9, skip_first_self_attention=True, **sizes)
    vars(work)["config"] = config
    shapes = ref.parameter_shapes(config)
    found = {product.operand: product.right for product in work.products() if product.operand.endswith("kernel")}
    assert found == {name: shape for name, shape in shapes.items() if name.endswith("kernel")}
    heads = {"encoder": (config.num_heads, 6, 9), "decoder": (2, 5, 3)}
    for product in work.products():
        (stack, *_), kind = product.operand.split("."), product.operand.rpartition(".")[2]
        if kind in ("key", "value"):
            _, number, *matrix = product.right
            assert (number, matrix[kind == "value"]) == (heads[stack][0], heads[stack][1 + (kind == "value")])


@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=["forward", "train", "decode"])
def test_all_products_can_be_taken(work):
    products = Products()
    products.load(work, Path())
    products.run()
    for (left, right), product in zip(products._pairs, work.products(), strict=True):
        taken = (left.shape, right.shape), (right.shape[::-1], left.shape[::-1])  # as it stands, or both transposed
        assert (product.left, product.right) in taken


def test_products_lie_where_those_of_the_search_lie():
    products = Products()
    products.load(SMALL, Path())
    products.run()
    caches = {id(right.base) for _, right in products._pairs if right.shape[-1] != right.shape[-2] and right.ndim == 4}
    assert len(products._pairs) == len(list(SMALL.products()))
    assert len(caches) == 12  # keys and values, of 2 encoder and 2 decoder layers, these twice


# --- The limit of the machine. ---


def products_of(work):
    return sum(2 * np.prod(product.left) * product.right[-1] for product in work.products())


def test_the_limit_is_operations_or_reading_whichever_takes_longer():
    fast, slow = 1e30, 1e-30
    for work in (FORWARD, TRAIN, SMALL):
        assert Limit({"a": 2.0, "b": 1.0}, {"a": fast}).seconds(work) == pytest.approx(products_of(work) / 2.0)
    read = 4 * sum(np.prod(product.right) for product in FORWARD.products())
    assert Limit({"a": fast}, {"a": slow, "b": 5.0}).seconds(FORWARD) == pytest.approx(read / 5.0)
    assert Limit({"a": fast}, {"a": 5.0}).seconds(replace(FORWARD, dtype="bfloat16")) == pytest.approx(read / 10.0)
    first = replace(SMALL, target=1)
    once = 4 * sum(
        np.prod(shape) for name, shape in ref.parameter_shapes(SMALL.config).items() if name.endswith("kernel")
    )
    table = 4 * 128 * 1000
    caches = 4 * 2 * 3 * (6 + 6 + 1) * 128 * 2  # two layers, keys and values: of 6 words twice, and of one token
    assert Limit({"a": fast}, {"a": 1.0}).seconds(first) == pytest.approx(once + table + caches)


def test_an_update_reads_and_writes_every_weight():
    without = Limit({"a": 1e30}, {"a": 1.0})
    weights = sum(array.size for array in TRAIN.weights().values())
    read = 4 * sum(np.prod(product.right) for product in TRAIN.products())
    assert without.seconds(TRAIN) == pytest.approx(read + 7 * 4 * weights)


def test_the_limit_is_that_of_the_best_library():
    entries = [
        LibraryEntry("a", seconds=[1.0] * 3, found=[(1.0, 9.0), (5.0, 8.0), (2.0, 1.0)], environment={}),
        LibraryEntry("b", seconds=[1.0], found=[(3.0, 4.0)], environment={"products on a CPU": "MKL"}),
        LibraryEntry("c", verdict=FAILED),
    ]
    found = limit_of(["jax", "torch", "numpy"], entries)
    assert found == Limit({"jax": 2.0, "torch": 3.0}, {"jax": 8.0, "torch": 4.0}, {"jax": "XLA", "torch": "MKL"})
    assert (found.rate, found.bandwidth) == (3.0, 8.0)
    assert limit_of(["numpy"], entries[2:]) is None


def test_libraries_are_those_that_take_part():
    names = lambda *given, **options: [library.backend for library in libraries(*given, **options)]  # noqa: E731
    assert names(["numpy"], FORWARD) == ["numpy"]
    assert names(["tf"], FORWARD) == ["numpy", "tf"]
    assert names(["torch", "tf", "jax"], FORWARD) == ["numpy", "torch", "jax"]  # JAX's XLA is TensorFlow's
    assert names(["numpy"], FORWARD, peers=True) == ["numpy", "torch", "jax"]
    assert names(["torch"], replace(FORWARD, dtype="bfloat16")) == names(["torch"], replace(FORWARD, device="gpu"))
    assert names(["torch"], replace(FORWARD, device="gpu")) == ["torch"]


@pytest.mark.parametrize("name", tiers.first_alone(["torch", "jax", "tf"], "libraries"))
@pytest.mark.parametrize("dtype", tiers.first_alone(["float32", "bfloat16"], "libraries"))
def test_each_library_multiplies(name, dtype):
    for sizes in ((8, 16, 8), (8, 16, 1)):
        multiplied(name, sizes, dtype, "cpu")()


# --- The rounds. ---


class Process:
    """Stands for a process: writes down what it is asked, and takes ever fewer seconds."""

    def __init__(self, name, asked, fails_at=None):
        self.entry = Entry(name)
        self.asked = asked
        self.fails_at = fails_at
        self.seconds = 100.0

    def receive(self, method):
        return rounds.Reply({"version": "1"}, 0.0, 0.0)

    def ask(self, method, *arguments):
        self.asked.append(f"{self.entry.name} {method}")
        self.seconds -= method == "run"
        if self.seconds == self.fails_at:
            raise rounds.ParticipantError("enough")
        return rounds.Reply(method, self.seconds, 2.0 * self.seconds, int(self.seconds), 90)


def test_all_are_warm_before_the_rounds_and_each_is_first_in_turn():
    asked: list[str] = []
    a, b, c = processes = [Process("a", asked), Process("b", asked, fails_at=96.0), Process("c", asked)]
    verified = []
    verify = lambda result, show: verified.append(result) or ""  # noqa: E731
    rounds.run_rounds(processes, SMALL, Path(), 4, verify, lambda name, doing: None)
    assert asked[:9] == [f"{name} {method}" for name in "abc" for method in ("load", "run", "run")]
    assert [entry[0] for entry in asked[9:]] == [*"abc", *"bca", *"ca", *"ac"]
    assert len(verified) == len([entry for entry in asked if entry.endswith("run")]) - 1
    assert a.entry == Entry(
        "a",
        environment={"version": "1"},
        first_seconds=99.0,
        seconds=[97.0, 96.0, 95.0, 94.0],
        cores=[2.0] * 4,
        loaded_bytes=90,
        peak_bytes=97,  # of the rounds: compiling is not among them
    )
    assert a.entry.work_bytes == 7
    assert c.entry.seconds == a.entry.seconds
    assert (b.entry.verdict, b.entry.problem, b.entry.is_timed) == (FAILED, "enough", False)


# --- The command. ---


def read(path):
    """Return the results of the first work, and everything else."""
    found = json.loads(path.read_text())
    return found["races"][0], found


def test_times_of_two_that_agree(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_parity.bench.run.libraries", libraries)
    environment = dict(os.environ)
    code, printed, progress = parity(
        *(capsys, "--backends", "numpy,torch", "--threads", min(2, processors())),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"),
    )
    assert dict(os.environ) == environment
    assert code == 0, printed + progress
    assert "Medians of 2 interleaved rounds. Tokens and scores of every call of numpy, torch agree" in printed
    assert "d_model 128, 2+2 layers, 4 heads, d_ff 512, vocabulary 1,000, float32" in printed
    assert progress.index("torch: first call") < progress.index("round 1 of 2") < progress.index("round 2 of 2")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    report, found = read(tmp_path / "a.json")
    assert (report["verdict"], found["exit_code"], found["interrupted"]) == (AGREES, 0, False)
    limit = report["limit"]
    assert list(limit["rates"]) == list(limit["bandwidths"]) == list(limit["libraries"]) == ["numpy", "torch"]
    assert limit["rate"] == max(limit["rates"].values()) > 1e9
    assert limit["bandwidth"] == max(limit["bandwidths"].values()) > 1e8
    assert f"{limit['seconds'] / report['participants'][0]['median_seconds']:.0%}" in printed
    assert report["work"]["operations"] == DecodeWork("tiny", 8, 6, 4).operations
    assert [entry["name"] for entry in report["participants"]] == ["numpy", "torch"]
    for entry in report["participants"]:
        assert len(entry["seconds"]) == len(entry["cores"]) == 2
        assert 0 < entry["median_seconds"] < 60
        assert entry["first_seconds"] > 0
        assert entry["peak_bytes"] is None or entry["peak_bytes"] >= entry["loaded_bytes"] > 2**20
        assert entry["environment"]["threads"] == str(min(2, processors()))
        assert f"{1e3 * entry['median_seconds']:,.1f}" in printed
    numpy, torch = (entry["seconds"] for entry in report["participants"])
    expected = [ours / theirs for ours, theirs in zip(torch, numpy, strict=True)]
    assert report["ratios"]["torch"]["numpy"]["median"] == pytest.approx(sum(expected) / 2)
    assert list(report["ratios"]["torch"]) == ["numpy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]


@pytest.mark.extended("peers")
def test_peers_do_the_same_work(capsys, tmp_path):
    code, printed, _ = parity(capsys, "--backends", "numpy", "--peers", "--json", tmp_path / "a.json")
    assert code == 0, printed
    agreeing = "numpy, marian, flax nnx, keras hub, keras hub XLA"
    assert f"Tokens and scores of every call of {agreeing} agree" in printed.replace("\n", " ")
    assert "products: only the matrix products" in printed
    report, _ = read(tmp_path / "a.json")
    assert {entry["name"]: entry["has_result"] for entry in report["participants"]} == {
        "numpy": True,
        **dict.fromkeys(["marian", "flax nnx", "keras hub", "keras hub XLA"], True),
        "products": False,
    }


@pytest.mark.extended("peers")
def test_peers_search_with_the_same_beam(capsys):
    code, printed, _ = parity(capsys, "--backends", "numpy", "--peers", "--beam", 3, "--against", "numpy")
    assert code == 0, printed
    assert "beam search with 3 hypotheses" in printed
    assert "Tokens and scores of every call of numpy, marian agree" in printed
    assert re.search(r"ms +highest +per s +numpy +highest", printed)  # the second line of the headings


@dataclass
class Wrong(DecodePackage):
    """Says another token, from the third call on."""

    calls: int = 0

    def result(self, found):
        self.calls += 1
        return another_token(found) if self.calls > 2 else found


@dataclass
class Dying(DecodePackage):
    """Dies in its second round."""

    calls: int = 0

    def run(self):
        self.calls += 1
        if self.calls > 3:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        return super().run()


@dataclass
class Raising(DecodePackage):
    """Cannot load."""

    def load(self, work, weights):
        raise MemoryError("too large")


@pytest.mark.parametrize(
    ("participant", "code", "reason"),
    [
        (Wrong("torch"), 1, "DIVERGES  torch: sentence 1, token 3: "),
        *(
            pytest.param(*row, marks=pytest.mark.extended("timed steps"))
            for row in (
                (Dying("torch"), 3, "FAILED    torch: the process ended with exit code 7 in run: out of luck"),
                (Raising("torch"), 3, "FAILED    torch: MemoryError: too large"),
            )
        ),
    ],
    ids=["wrong", "dying", "raising"],
)
def test_who_is_wrong_or_fails_gets_no_time(participant, code, reason, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", participant)
    options = ["--backends", "numpy,torch", "--rounds", 3, "--json", tmp_path / "a.json"]
    found, printed, _ = parity(capsys, *options)
    assert found == code
    assert reason in printed
    assert "of numpy agree" in printed
    report, everything = read(tmp_path / "a.json")
    numpy, torch = report["participants"]
    assert len(numpy["seconds"]) == 3
    assert torch["seconds"] is torch["first_seconds"] is torch["median_seconds"] is None
    assert report["ratios"] == {"numpy": {}}
    assert everything["exit_code"] == code


@pytest.mark.needs(os.name != "nt", "signals")
@pytest.mark.parametrize(
    "number", tiers.first_alone([signal.SIGINT, signal.SIGTERM], "signals"), ids=["SIGINT", "SIGTERM"]
)
def test_an_interruption_prints_what_is_there_and_leaves_no_process_and_no_file(number, tmp_path):
    arguments = ["bench", "decode", *QUICK, "--backends", "numpy", "--rounds", "100000", "--json", tmp_path / "a.json"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "transformer_parity", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        deadline = time.monotonic() + 60
        while "round 3 of" not in errors.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) >= 3  # numpy, the matrix rate, and what ends these two if their parent is killed
        assert [path.suffix for path in temporary.glob("*/*.*")] == [".safetensors"]
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3, printed + errors.read_text()
    assert "interleaved rounds. Tokens and scores of every call of numpy agree" in printed
    assert "INTERRUPTED after" in printed
    assert "Traceback" not in errors.read_text()
    report, everything = read(tmp_path / "a.json")
    assert everything["interrupted"]
    assert 2 <= len(report["participants"][0]["seconds"]) < 100
    assert still_running(started, 10.0) == []
    assert list(temporary.iterdir()) == []


def test_ctrl_c_before_anything_is_timed(capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformer_parity.bench.run.run_rounds", interrupted)
    code, printed, _ = parity(capsys, "--backends", "numpy")
    assert code == 3
    assert "FAILED    numpy: interrupted before it was timed" in printed
    assert "INTERRUPTED after 0 of 2 rounds." in printed
    assert "agree" not in printed
    assert child_processes() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "torch", "--backends", "numpy"], "--against must be one of numpy: got torch"),
        (["--threads", "100000"], "the processors there are: got 100000"),
        (["--json", "absent/a.json"], "there is no folder absent"),
        (["--plot", "a.gif"], "--plot must end in png or svg: got a.gif"),
        (["--backends", "theano"], "unknown theano: choose from numpy, torch, jax, tf"),
        (["--rounds", "0"], "must be a positive integer: got '0'"),
        (["--config", "huge"], "invalid choice: 'huge'"),
        (["--device", "gpu", "--peers"], "--peers run on the CPU: leave out --peers or --device gpu"),
        (["--device", "gpu"], "reference_numpy runs on the CPU: add --backends torch,jax,tf"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_parity.bench.run.started", None)
    code, printed, errors = parity(capsys, *options)
    assert code == 3
    assert printed == ""
    assert message in errors


def test_missing_peers_are_named(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    code, _, errors = parity(capsys, "--backends", "numpy", "--peers")
    assert code == 3
    assert "--peers needs transformers, which is not installed: pip install transformers" in errors


GROWING_REFUSED = [
    ("forward", ["--scale", "width"], "one of source, target, length, batch, depth, vocabulary: got 'width'"),
    ("forward", ["--scale", "batch=1,x"], "must be a positive integer: got 'x'"),
    ("forward", ["--scale", "batch=2,2"], "must grow: got 2,2"),
    ("forward", ["--dtype", "bfloat16", "--peers"], "--peers compute in float32"),
    ("forward", ["--dtype", "bfloat16"], "reference_numpy has no bfloat16 worth timing"),
    ("train", ["--activation-checkpointing", "--peers"], "--peers have no activation checkpointing"),
    ("train", ["--dropout", "1"], "must be a number from 0 up to but not including 1: got '1'"),
]


@pytest.mark.parametrize(("task", "options", "message"), GROWING_REFUSED)
def test_what_cannot_be_done_is_refused_for_each_task(task, options, message, capsys, monkeypatch):
    monkeypatch.setattr("transformer_parity.bench.run.started", None)
    code, printed, errors = parity(capsys, *options, task=task)
    assert (code, printed) == (3, "")
    assert message in errors


def test_help_teaches(capsys):
    for arguments, line in (
        (["bench", "--help"], "No time is printed for a result that does not agree with the reference."),
        (["bench", "decode", "--help"], "reading the table:"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert line in capsys.readouterr().out


# --- Forward passes and training steps. ---


def logits(work=FORWARD, dtype="float32"):
    model = ref.Transformer.from_weights(work.config, work.weights(), dtype)
    return model(work.source_ids, work.target_ids).astype(np.float32)


def test_logits_are_verified():
    verifier, right = ForwardVerifier(FORWARD, FORWARD.weights()), logits()
    for _ in range(2):
        assert verifier.verify(right, no_steps) == ""
        assert verifier.verify(logits(dtype="float64"), no_steps) == ""
    pads = FORWARD.target_ids == FORWARD.config.pad_id
    pads[:, 0] = False
    assert pads.any()
    at_pads = np.where(pads[..., None], np.float32(7), right)
    assert verifier.verify(at_pads, no_steps) == ""  # nobody's business
    for wrong, reason in (
        (right * np.float32(1 + 1e-4), "the logits are off by 1.0e-04, and may be by"),
        (right[::-1], "the logits are off by"),
        (right[:, :4], "logits must be [3, 5, 1000]: got [3, 4, 1000]"),
        (right * np.float32("nan"), "logits must be finite"),
    ):
        with pytest.raises(DisagreementError) as caught:
            verifier.verify(wrong, no_steps)
        assert reason in str(caught.value)


def test_losses_are_verified_step_by_step():
    model = ref.Transformer.from_weights(TRAIN.config, TRAIN.weights())
    trainer = ref.Trainer(model, TRAIN.settings, SEED)
    losses = [float(trainer.train_step(TRAIN.source_ids, TRAIN.target_ids, TRAIN.labels).loss) for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0]  # it learns: a step that changes nothing would show
    verifier = TrainVerifier(TRAIN, TRAIN.weights())
    for step, loss in reversed(list(enumerate(losses, 1))):
        assert verifier.verify((step, loss), no_steps) == ""
    for wrong in ((2, losses[0]), (1, losses[0] * 1.001), (3, float("nan"))):
        with pytest.raises(DisagreementError, match=f"the loss of step {wrong[0]} is"):
            verifier.verify(wrong, no_steps)


def test_labels_are_the_next_tokens():
    config = TRAIN.config
    for ids, labels in zip(TRAIN.target_ids, TRAIN.labels, strict=True):
        length = 1 + (ids[1:] != config.pad_id).sum()
        assert ids[0] == config.bos_id
        assert labels[: length - 1].tolist() == ids[1:length].tolist()
        assert labels[length - 1] == config.eos_id
        assert (labels[length:] == config.pad_id).all()


def test_dropout_is_the_papers():
    work = replace(TRAIN, dropout=0.3)
    rates = work.config.dropout
    assert (rates.embedding, rates.residual, rates.attention, rates.feed_forward) == (0.3, 0.3, 0.0, 0.0)
    verifier = TrainVerifier(work, work.weights())
    expected = TrainVerifier(work, work.weights())
    with pytest.raises(DisagreementError, match="off by"):
        verifier.verify((1, 1.0), no_steps)
    expected.verify((1, verifier._losses[0] * 1.05), no_steps)


@pytest.mark.extended("timed steps")
@pytest.mark.parametrize("task", ["forward", "train"])
def test_forward_and_train_agree_before_they_are_timed(task, capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "--backends", "numpy,torch,jax,tf", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg"),
        task=task,
    )
    assert code == 0, printed + errors
    what = {"forward": "Logits", "train": "Losses"}[task]
    assert f"{what} of every call of numpy, torch, jax, tf agree with the float64 reference." in printed
    found, _ = read(tmp_path / "a.json")
    assert [entry["name"] for entry in found["participants"]] == ["numpy", "torch", "jax", "tf"]
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


@dataclass
class WrongLogits(ForwardPackage):
    """Computes the logits of other sentences."""

    def result(self, found):
        return super().result(found)[::-1]


@dataclass
class Lazy(TrainPackage):
    """Does not train: the loss stays where it was."""

    def ready(self, model, work):
        step = super().ready(model, work)
        first = step()
        calls = iter(range(1, 100))
        return lambda: (next(calls), first[1])


@pytest.mark.parametrize(
    ("task", "participant", "reason"),
    [
        ("forward", WrongLogits("torch"), "DIVERGES  torch: the logits are off by"),
        pytest.param(
            *("train", Lazy("torch"), "DIVERGES  torch: the loss of step 2 is"),
            marks=pytest.mark.extended("timed steps"),
        ),
    ],
    ids=["forward", "train"],
)
def test_who_computes_something_else_gets_no_time(task, participant, reason, capsys, monkeypatch):
    monkeypatch.setitem(OURS[task], "torch", participant)
    code, printed, _ = parity(capsys, "--backends", "numpy,torch", task=task)
    assert code == 1
    assert reason in printed
    assert "of numpy agree" in printed


@pytest.mark.extended("timed growth")
def test_growth_is_measured_and_drawn(capsys, tmp_path):
    code, printed, errors = parity(
        *(capsys, "--backends", "numpy,torch", "--scale", "source=8,32", "--batch", 2),
        *("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"),
        task="forward",
    )
    assert code == 0, printed + errors
    assert "milliseconds, by source" in printed
    assert "MiB beyond what was held before the first call, by source" in printed
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    _, found = read(tmp_path / "a.json")
    assert found["scale"] == "source"
    assert {"numpy", "torch"} <= {*found["exponents"]}
    assert [entry["work"]["source"] for entry in found["races"]] == [8, 32]


def test_the_title_leaves_out_what_grows():
    assert work_title(FORWARD, "source") == "forward, tiny: batch 3, target 5"
    assert work_title(FORWARD, "length") == "forward, tiny: batch 3"
    assert work_title(TRAIN, "depth") == "train, tiny: batch 3, source 6, target 5"


def test_exponents_are_fitted_to_the_largest_sizes():
    assert exponent([1, 2, 4, 8], [90.0, 6.0, 24.0, 96.0]) == pytest.approx(2.0)
    assert exponent([1, 2, 4], [1.0, 4.0, 4.0]) == pytest.approx(1.0)  # a line through all three, not the last two
    assert exponent([64, 512, 4096], [1.0, 2.0, None]) == pytest.approx(1 / 3)
    assert exponent([1, 2], [None, 3.0]) is None


def test_exponents_of_time_and_memory():
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
def test_each_size_grows_alone(work, axis):
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


def test_first_calls_of_all_tasks(capsys, tmp_path):
    code = main(["bench", "compile", *QUICK, "--backends", "numpy", "--json", str(tmp_path / "a.json")])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    assert re.search(r"forward +forward +train +train +decode +decode", printed)
    _, found = read(tmp_path / "a.json")
    assert [entry["work"]["size"] for entry in found["races"]] == ["tiny"] * 3
    assert all(entry["participants"][0]["first_seconds"] > 0 for entry in found["races"])


def test_imports_are_compared_with_their_frameworks(capsys, tmp_path):
    options = ["--backends", "numpy", "--rounds", "2", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    code = main(["bench", "import", *map(str, options)])
    printed, errors = capsys.readouterr()
    assert code == 0, printed + errors
    assert "reference_numpy" in printed
    found = json.loads((tmp_path / "a.json").read_text())
    assert [entry["name"] for entry in found["imports"]] == ["numpy, safetensors.numpy", "reference_numpy"]
    assert found["ratios"]["numpy"]["median"] > 0.5
    assert all(len(entry["seconds"]) == 2 for entry in found["imports"])


def test_an_import_that_fails_is_said(capsys, monkeypatch):
    monkeypatch.setitem(imports.FRAMEWORKS, "numpy", "no_such_module")
    code = main(["bench", "import", "--backends", "numpy", "--rounds", "1"])
    assert code == 3
    assert "import no_such_module: ModuleNotFoundError" in capsys.readouterr().err


def test_only_marian_has_a_beam():
    assert [other.name for other in others(replace(SMALL, beam_size=3))] == ["marian"]
    assert [other.name for other in others(SMALL)] == ["marian", "flax nnx", "keras hub", "keras hub XLA"]
    assert [other.name for other in others(TRAIN)] == [
        *("torch.nn", "torch.nn compiled", "marian", "flax nnx", "keras hub", "keras hub XLA")
    ]


@pytest.mark.parametrize("work", [FORWARD, TRAIN, SMALL], ids=lambda work: work.task)
def test_our_compiled_form_takes_part_beside_the_peers(work):
    names = lambda *ours, **how: [one.name for one in Setting(ours, **how).participants(work)]  # noqa: E731
    forms = [] if work.task == "decode" else ["torch compiled"]
    assert names("torch", peers=True)[: len(forms) + 2] == ["torch", *forms, others(work)[0].name]
    assert ("torch compiled" in names("torch", "numpy", peers=True)) == (work.task == "forward")  # for want of memory
    assert names("torch") == ["torch"]
    assert "torch compiled" not in names("numpy", peers=True)
    assert ("tf compiled" in names("tf", peers=True)) == (work.task == "train")  # its forward pass always is
    assert "tf compiled" not in names("tf", "numpy", peers=True)


@pytest.mark.parametrize("work", [FORWARD, TRAIN], ids=lambda work: work.task)
def test_our_compiled_form_in_torch_is_compiled(work, tmp_path, monkeypatch):
    import torch

    compiled = []

    def compile_eagerly(what):
        compiled.append(what)
        return compile_it(what, backend="eager")

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    weights = work.weights()
    ref.save_weights(tmp_path / "model.safetensors", work.config, weights)
    form = FORMS[work.task]["torch"]
    form.prepare()
    form.load(work, tmp_path / "model.safetensors")
    verifier = verifier_of(work, weights)
    for _ in range(2):
        verifier.verify(form.result(form.run()), no_steps)
    assert len(compiled) == 1
    torch.compiler.reset()


@pytest.mark.extended("timed steps")
def test_our_compiled_form_in_tensorflow_is_compiled(tmp_path, monkeypatch):
    import tensorflow as tf

    by_xla = []
    trace = tf.function
    monkeypatch.setattr(
        tf, "function", lambda *of, **options: by_xla.append(options.get("jit_compile")) or trace(*of, **options)
    )
    weights = TRAIN.weights()
    ref.save_weights(tmp_path / "model.safetensors", TRAIN.config, weights)
    verifier = verifier_of(TRAIN, weights)
    for form, expected in ((FORMS["train"]["tf"], True), (OURS["train"]["tf"], None)):
        form.prepare()
        form.load(TRAIN, tmp_path / "model.safetensors")
        verifier.verify(form.result(form.run()), no_steps)
        assert by_xla.pop() is expected


def test_a_bar_of_ours_is_known_by_the_first_word_of_its_name():
    entries = [Entry(name, seconds=[1.0]) for name in ("torch compiled", "torch data=2", "torch.nn compiled")]
    (axes,) = draw_times("title", "details", entries, None, "machine").axes
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[1] != colours[2]


@pytest.mark.extended("timed steps")
def test_a_picture_compares_with_nobody_who_is_wrong(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(OURS["decode"], "torch", Wrong("torch"))
    seen = []
    monkeypatch.setattr("transformer_parity.cli.bench.write", lambda figure, path: None)
    monkeypatch.setattr("transformer_parity.cli.bench.draw_times", lambda *found: seen.append(found))
    options = ["--backends", "numpy,torch", "--against", "torch", "--plot", tmp_path / "a.png"]
    code, _, _ = parity(capsys, *options)
    assert code == 1
    ((_, _, timed, against, _),) = seen
    assert [entry.name for entry in timed] == ["numpy"]
    assert against.name == "numpy"


@pytest.mark.parametrize("memory", [None, 2**20])
def test_growth_is_drawn_where_memory_is_unknown(memory, tmp_path):
    peak = memory and memory + 2**20
    races = [[Entry("numpy", seconds=[float(size)], loaded_bytes=memory, peak_bytes=peak)] for size in (1, 2)]
    figure = draw_growth("title", "details", "batch", (1, 2), races, "machine")
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == (1 if memory is None else 2)


def test_with_dropout_losses_are_said_to_be_of_the_right_size():
    assert TRAIN.agreement == "agree with the float64 reference"
    assert replace(TRAIN, dropout=0.1).agreement == "are within 10% of the reference's, which drops other elements"


@pytest.mark.only("torch")
def test_a_step_in_bfloat16_has_weights_in_float32(capsys):
    code, printed, errors = parity(capsys, "--backends", "torch", "--dtype", "bfloat16", task="train")
    assert code == 0, printed + errors
    assert "bfloat16" in printed
