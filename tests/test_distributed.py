"""Comparing runs on multiple devices finds, locates, and identifies injected bugs, and accepts correct runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial

import distributed_ports
import psutil
import pytest
from result_schema import read_document

import reference_numpy
from reference_numpy import Plan
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, FAILED, IMPRECISE, SKIPPED
from transformer_parity.transformer.bugs.distributed import BUGS
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.check.messages import CaseCompared
from transformer_parity.transformer.distributed import compare
from transformer_parity.transformer.distributed import run as processes
from transformer_parity.transformer.distributed.cases import PLANS, probes, rounded
from transformer_parity.transformer.distributed.check import DistributedCheck
from transformer_parity.transformer.distributed.compare import DIVIDED, NAMES, REPLICAS, DeviceRun, findings
from transformer_parity.transformer.distributed.worker import Seen, TrainingTask, train

INVISIBLE = ("reduced twice", "norm includes every replica")  # bugs that don't change the loss


@cache
def expected(name: str):
    """Return the result of training a case on one device, by the name of the case."""
    return train(reference_numpy, task(name))


def task(name: str, plan: Plan | None = None) -> TrainingTask:
    """Return the training task of a case; ``resumed`` starts from the middle of the ``short`` run."""
    if name != "resumed":
        return TrainingTask(probes()[name], plan)
    return TrainingTask(probes()["short"], plan, expected("short").snapshots[2])


def run(bug):
    """Train with an injected bug, and return the observed run, the expected run, and all findings."""
    _, plan, name = bug.case.split("/")
    package = edited_package("reference_numpy", tuple(bug.edits["numpy"]))
    seen = train(package, task(name, package.Plan.parse(plan)))
    started = task(name)
    return (
        seen,
        expected(name),
        findings("numpy", DeviceRun(started.probe, Plan.parse(plan), started.start), [seen], expected(name)),
    )


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_injected_bug_is_detected_located_and_identified(bug):
    seen, right, found = run(bug)
    first = next(finding for finding in found if finding.verdict != AGREES)
    assert first.tap.startswith(bug.at)
    assert bug.detail in first.detail
    if bug.name in INVISIBLE:
        assert seen.losses[:4] == pytest.approx(right.losses[:4], abs=1e-6)


def test_per_shard_clipping_is_diagnosed_without_reported_norms():
    (bug,) = (one for one in BUGS if one.name == "clipped by the norm of each shard")
    plan, right = Plan(data=2, fsdp=2), replace(expected("short"), norms=[])
    package = edited_package("reference_numpy", tuple(bug.edits["numpy"]))
    seen = replace(train(package, task("short", plan)), norms=[])
    first = next(iter(failing(findings("mine", DeviceRun(probes()["short"], plan), [seen], right)).items()))
    assert first[0] == "step 2 loss"
    assert first[1].endswith("correct: later steps differ, as with this bug: clipped by the norm of each shard")


@pytest.fixture(scope="module")
def two():
    """A function that returns a framework's process group with two devices, which is started only once."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(processes.group(name, 2, timeout=200)))


def injected(name, bug, *marks):
    return pytest.param(name, bug, id=f"{name}-{bug.name.replace(' ', '-')}", marks=[pytest.mark.only(name), *marks])


IN_PORTS = [
    # By default, only one JAX bug runs here; test_own_trainer.py runs one bug in torch processes.
    injected(name, bug, *[pytest.mark.extended("plans")] * (name != "jax" or bug is not bugs[0]))
    for name, bugs in distributed_ports.BUGS.items()
    for bug in bugs
]


@pytest.mark.parametrize(("name", "bug"), IN_PORTS)
def test_bug_in_a_port_is_detected_located_and_identified(two, name, bug):
    _, plan, case = bug.case.split("/")
    run_of = replace(task(case, Plan.parse(plan)), edits=tuple(bug.edits[name]))
    if not bug.at:
        with processes.group(name, 2, timeout=200) as group, pytest.raises(processes.GroupError, match=bug.detail):
            group.train(run_of)
        return
    seen = two(name).train(run_of)
    right = two(name).train(task(case))[0] if "dropout" in case else expected(case)
    found = failing(findings(name, DeviceRun(run_of.probe, run_of.plan), seen, right))
    at, said = next(iter(found.items()))
    assert at.startswith(bug.at)
    assert bug.detail in said
    assert (REPLICAS in found) == (bug.name in distributed_ports.APART[name])


@pytest.mark.extended("plans")
@pytest.mark.only("jax")
def test_explicit_gradient_sums_are_correct_without_an_injected_bug(two):
    edits = distributed_ports.on_each(distributed_ports.SUM_OF_ALL)
    seen = two("jax").train(replace(task("shallow", Plan(data=2)), edits=tuple(edits)))
    assert failing(findings("jax", DeviceRun(probes()["shallow"], Plan(data=2)), seen, expected("shallow"))) == {}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_correct_run_raises_no_alarm(plan):
    probe = probes()["short"]
    seen = train(reference_numpy, TrainingTask(probe, plan))
    found = findings("numpy", DeviceRun(probe, plan), [seen], expected("short"))
    assert {finding.verdict for finding in found} == {AGREES}
    assert {REPLICAS, DIVIDED} <= {finding.tap for finding in found}


@pytest.mark.parametrize("name", rounded())
def test_float64_rounding_errors_agree_and_a_halved_gradient_does_not(name):
    """NumPy has no mixed precision, so the test rounds its float32 gradients."""
    probe, plan = rounded()[name], Plan(data=2)
    float32 = replace(probe, settings=probe.exact.settings)
    one_device, seen = (train(reference_numpy, TrainingTask(float32, devices)) for devices in (None, plan))
    if probe.settings.mixed_bfloat16:
        for each in (one_device, seen):
            each.gradient = {name: array.astype("bfloat16").astype("float32") for name, array in each.gradient.items()}
    exact = train(reference_numpy, TrainingTask(probe.exact))
    found = findings("numpy", DeviceRun(probe, plan), [seen], exact, one_device)
    assert {finding.verdict for finding in found} == {AGREES}
    assert {finding.dtype for finding in found} == {"float32"}
    half = replace(seen, gradient={name: array / 2 for name, array in seen.gradient.items()})
    found = findings("numpy", DeviceRun(probe, plan), [half], exact, one_device)
    wrong = {finding.tap for finding in found if finding.verdict == IMPRECISE}
    assert {"the whole gradient", "of source_embedding.table"} <= wrong
    counted = replace(seen, tokens=[30, *seen.tokens[1:]])
    assert failing(findings("numpy", DeviceRun(probe, plan), [counted], exact, one_device)).keys() == {"step 1 tokens"}


def test_bfloat16_tolerance_includes_the_roundings_of_partial_sums():
    def allowed(plan):
        return compare._tolerance("of source_embedding.table", DeviceRun(rounded()["mixed bfloat16"], plan), baseline)

    baseline = {"of source_embedding.table": 0.01, "the whole gradient": 0.02}
    floor, alone = allowed(Plan(data=2)) - 4 * 0.02, 4 * 0.02
    assert floor == pytest.approx(4 * 2**-7)
    assert allowed(Plan(fsdp=2)) == allowed(Plan(data=2))
    assert allowed(Plan(tensor=2)) == pytest.approx(floor + 3**0.5 * alone)
    assert allowed(Plan(data=2, tensor=4)) == pytest.approx(floor + 5**0.5 * alone)


def on_two(change=lambda seen: seen) -> list:
    """Return the findings for two processes with one device each, where ``change`` alters the second one's results."""
    seen = train(reference_numpy, TrainingTask(probes()["short"], Plan(data=2)))
    of_each = [
        replace(seen, shards={name: [held[device]] for name, held in seen.shards.items()}) for device in range(2)
    ]
    run_of = DeviceRun(probes()["short"], Plan(data=2))
    return findings("numpy", run_of, [of_each[0], change(of_each[1])], expected("short"))


def failing(found) -> dict[str, str]:
    return {finding.tap: finding.detail for finding in found if finding.verdict != AGREES}


def test_differing_replicas_are_detected():
    bias = "encoder.layers.0.feed_forward_norm.bias"

    def moved(seen):
        ((device, place, _),) = seen.shards[bias]
        return replace(seen, shards={**seen.shards, bias: [(device, place, "other")]})

    assert failing(on_two()) == {}
    said = f"1 of 61 parameters differ between their replicas, starting with {bias}"
    assert failing(on_two(moved)) == {REPLICAS: said}


def test_process_with_missing_or_wrong_results_is_detected():
    def blind(seen):
        return replace(seen, gradient={name: seen.gradient[name] for name in [*seen.gradient][1:]})

    def wrong(seen):
        return replace(seen, norms=[2.0 * seen.norms[0], *seen.norms[1:]])

    assert "process 1 must return" in failing(on_two(blind))[NAMES]
    assert "in process 1" in failing(on_two(wrong))["step 1 norm of the gradient"]


@pytest.mark.parametrize(("named", "verdict"), [(True, FAILED), (False, SKIPPED)])
def test_unsupported_plan_is_reported_with_the_reason(named, verdict):
    (finding,) = findings(
        "tf", DeviceRun(probes()["short"], Plan(fsdp=2), named=named), [Seen(refused="rows only")], expected("short")
    )
    assert (finding.verdict, finding.detail) == (verdict, "rows only")


def steps(backend, *plans, count=None):
    """Return the finding for each plan and case."""
    check = DistributedCheck([backend], asked=[*map(Plan.parse, plans)], processes=count)
    start = partial(processes.group, backend, processes=count, timeout=200)
    (port,) = check.checked_ports()
    found = [message.findings for message in check.steps(port, start) if isinstance(message, CaseCompared)]
    return {finding.case.removeprefix("distributed/"): finding for of_run in found for finding in of_run}


CASES = ("plain", "resumed", "uneven", "dropout", "float32")


def test_failed_plan_does_not_stop_the_remaining_plans():
    found = steps("numpy", "tensor=3", "data=2")
    assert {found[f"tensor=3/{case}"].verdict for case in CASES} == {FAILED}
    assert "must be divisible by tensor=3: got 4" in found["tensor=3/plain"].detail
    assert {found[f"data=2/{case}"].verdict for case in CASES} == {AGREES}


def test_crashed_process_ends_the_distributed_run():
    with processes.group("numpy", 1, timeout=200) as group:
        children = [one for one in psutil.Process().children() if processes.WORK in one.cmdline()]
        max(children, key=psutil.Process.create_time).kill()  # the newest process; older ones belong to other tests
        with pytest.raises(processes.GroupError, match=r"^process 0 of 1: the process ended with exit code"):
            group.train(task("short", Plan(data=2)))


def test_interpreter_that_cannot_be_started_is_reported_once(capsys):
    command = ["check-distributed", "--backends", "torch", "--isolate", "torch=/absent/python"]
    assert main([*command, "--parallel", "data=2", "--parallel", "tensor=2"]) == 3
    said = "the interpreter /absent/python cannot be started: No such file or directory"
    assert " ".join(capsys.readouterr().out.split()).count(said) == 1


def test_command_reports_verdict_and_cases(monkeypatch, capsys, tmp_path):
    as_numpy = partial(processes.group, "numpy")
    monkeypatch.setattr(
        "transformer_parity.transformer.distributed.check.group",
        lambda backend, devices, **how: as_numpy(devices, **how),
    )
    # NumPy, which replaces torch here, doesn't support bfloat16.
    command = ["check-distributed", "--backends", "torch", "--dtype", "float64"]
    command += ["--json", str(tmp_path / "result.json")]
    assert main([*command, "--parallel", "data=2", "--parallel", "fsdp=2,tensor=2"]) == 0
    printed = capsys.readouterr().out
    assert "AGREE  1 port, 10 cases" in printed
    assert "fsdp=2,tensor=2 " in printed
    result = read_document(tmp_path / "result.json", "check-distributed")["result"]
    assert {row["case"] for row in result["cases"]} >= {"distributed/data=2/resumed"}
    assert main([*command, "--parallel", "tensor=3"]) == 3
    assert "INCOMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--backends", "numpy"],
            "specify at least one backend or port to compare with the NumPy reference (--backends torch or --port",
        ),
        (
            ["--backends", "torch", "--parallel", "data=4", "--processes", "2"],
            "one process per device of data=4): got 2",
        ),
        (["--backends", "torch", "--isolate", "jax=python"], "--isolate must be PORT=PYTHON, with PORT one of torch"),
    ],
)
def test_unusable_options_are_rejected(options, message, capsys):
    assert main(["check-distributed", *options]) == 3
    assert message in capsys.readouterr().err


def test_check_and_check_distributed_reject_each_others_options(capsys):
    for command in (["check", "--stage", "distributed"], ["check", "--parallel", "data=2"]):
        with pytest.raises(SystemExit, match="3"):
            main([*command, "--backends", "torch"])
    with pytest.raises(SystemExit, match="3"):
        main(["check-distributed", "--dtype", "bfloat16"])
    assert "unknown bfloat16; choose from float64, float32" in capsys.readouterr().err


def test_listing_cases_does_not_start_training(monkeypatch):
    monkeypatch.setattr("transformer_parity.transformer.distributed.check.train", None)
    check = DistributedCheck(["torch", "tf"])
    names = [case.name for port in check.checked_ports() for case in port.given]
    assert len(names) == 7 * 3 + 7
    assert "distributed/tensor=2/resumed" in names


@pytest.mark.extended("plans")
def test_every_framework_agrees_on_all_of_its_plans(backend):
    found = steps(backend.name)
    assert {case: finding.detail for case, finding in found.items() if finding.verdict != AGREES} == {}


@pytest.mark.extended("plans")
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("jax", ["data=2,fsdp=2", "data=2,tensor=2"], marks=pytest.mark.only("jax")),
        pytest.param("tf", ["data=2"], marks=pytest.mark.only("tf")),
    ],
)
def test_multiple_processes_of_a_framework_agree(name, plans):
    """Each JAX process has two devices."""
    found = steps(name, *plans, count=2)
    assert {case: finding.detail for case, finding in found.items() if finding.verdict != AGREES} == {}
