"""`pytest --parity-port`: cases as tests of a port, with expected failures, skips, and errors that state the reason."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from transformer_parity.engine.findings import DIVERGES
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.protocol import Placements

pytest_plugins = ["pytester"]

PORT = """
import numpy as np
from reference_numpy import Transformer
from transformer_parity.plugin import Port

class MyPort(Port):
    dtypes = ("float64",)
    {attributes}

    def load(self, config, weights, dtype):
        self.model = Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        logits = self.model(source_ids, target_ids)
        {forward}
        return logits
"""
EXPORT = """
    def export_weights(self):
        return self.model.export_weights()
"""
ROUNDED = "logits = logits + 1e-7"
DTYPES = ("float64", "float32")
CASES = port_cases(tiny())
FULL, FULL32 = (
    [case.name for case in CASES if case.stage == "activations" and dtype in case.dtypes] for dtype in DTYPES
)
N, N32 = len(FULL), len(FULL32)
OTHERS = len(CASES) - N  # gradients, steps, and searches, only in float64
FORWARD = "--parity-stage=activations"
SEARCH = """
    def generate(self, source_ids, max_length, beam_size, length_penalty):
        from reference_numpy import beam_search, greedy_search
        if beam_size == 1:
            return greedy_search(self.model, source_ids, max_length).ids
        return beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids
"""


@pytest.fixture
def write(pytester):
    """Return a function that writes a port to the directory of the inner pytest run."""

    def write(forward="pass", attributes="pass", more=EXPORT, name="mine"):
        pytester.makepyfile(**{name: PORT.format(forward=forward, attributes=attributes) + more})

    return write


@pytest.fixture
def plugins(monkeypatch):
    """Return the options that select the plugins of the inner pytest run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing all other plugins would double the run time
    monkeypatch.setenv("COLUMNS", "200")
    return ("-p", "transformer-parity", "-p", "xdist", "-p", "no:cacheprovider")


@pytest.fixture
def run(pytester, plugins):
    """Return a function that runs pytest in this process, which has already imported everything."""
    return lambda *options, port="mine:MyPort": pytester.runpytest_inprocess(
        f"--parity-port={port}", *plugins, *options
    )


@pytest.fixture
def start(pytester, plugins):
    """Return a function that runs pytest in a separate process, for ports that modify global state."""
    return lambda *options, port="mine:MyPort": pytester.runpytest_subprocess(
        f"--parity-port={port}", *plugins, *options
    )


def outcomes(result) -> dict[str, int]:
    return result.parseoutcomes()


def test_plugin_runs_one_test_per_case_and_dtype_with_skip_reasons(write, start):
    write(attributes="dtypes = ('float64', 'float32')")
    result = start("-v", "-rs")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert outcomes(result) == {"passed": N + N32 + 2 + 1, "skipped": OTHERS}
    names = [
        f"parity::MyPort-{dtype}-{case} PASSED*"
        for dtype, cases in zip(DTYPES, (FULL, FULL32), strict=True)
        for case in ["weights", *cases]
    ]
    result.stdout.fnmatch_lines_random(
        [*names, f"*collected {N + N32 + 2 + 1 + OTHERS} items*", "parity::MyPort-float64-steps/port SKIPPED*"]
    )
    for reason in (
        "the port does not define gradients()",
        "the port does not define train_step()",
        "user ports do not expose a cache; the port does not define generate",
    ):
        assert reason in result.stdout.str()


def test_run_without_some_tests_of_a_port_is_incomplete(write, run, pytester):
    write()
    pytester.makepyfile(test_own="def test_own(): pass")
    assert outcomes(run(FORWARD)) == {"passed": N + 3}
    own = run("-k", "test_own")
    assert (own.ret, outcomes(own)) == (1, {"passed": 1, "deselected": N + 2 + OTHERS})
    number = N + 2 + OTHERS
    own.stdout.fnmatch_lines([f"INCOMPLETE: MyPort: {number} of {number} tests were deselected or skipped: *"])
    some = run("-k", "MyPort and full/one")
    ones = sum(name.startswith("full/one") for name in FULL)
    assert (some.ret, outcomes(some)) == (1, {"passed": ones, "deselected": N + 2 + 1 - ones + OTHERS})
    assert some.stdout.str().count("INCOMPLETE") == 1  # other stages aren't listed
    nothing = run("-k", "no_such_test")
    assert nothing.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_plugin_is_inactive_without_its_option(pytester, plugins):
    pytester.makepyfile(test_own="def test_own(): pass")
    result = pytester.runpytest_subprocess(*plugins)
    assert outcomes(result) == {"passed": 1}


def test_plugin_imports_no_heavy_libraries_at_startup():
    code = "import sys, transformer_parity.transformer.check.pytest_plugin as p; print({'numpy', 'rich', 'torch'} & "
    code += "set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_plugin_failure_starts_with_a_one_line_summary(write, run):
    write(ROUNDED)
    result = run("-k", "padded")
    assert result.ret == 1
    lines = result.stdout.str().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("____") and "full/padded" in line)
    first, second = lines[start + 1 : start + 3]
    assert first.startswith("DIVERGES MyPort float64 full/padded output: error ")
    assert "times the tolerance of 1.0e-12" in first
    assert second == "2 of 3 comparisons fail."
    assert "  parity check --port mine:MyPort --stage activations --dtype float64" in lines
    assert "Traceback" not in result.stdout.str()


def test_failed_plugin_tests_match_the_diverging_cases(write, run, pytester):
    """A test fails if and only if its case diverges."""
    write("logits = np.where(np.arange(logits.shape[1])[:, None] > 0, logits * 1.5, logits)")
    result = run("--junitxml=result.xml", FORWARD)
    failed = {
        test.get("name")
        for test in ElementTree.parse(pytester.path / "result.xml").iter("testcase")
        if test.find("failure") is not None
    }
    sys.path.insert(0, str(pytester.path))
    from transformer_parity.transformer.ports.user import PluginPort

    port = PluginPort("mine:MyPort")
    findings = list(compare(port_cases(port_config(port), ["activations"]), port, Placements(("float64",))))
    assert failed == {f"MyPort-float64-{finding.case}" for finding in findings if finding.verdict == DIVERGES}
    single = [case for case in CASES if case.name in FULL and case.inputs["target_ids"].shape[1] == 1]
    assert len(failed) == N - len(single)
    assert result.ret == 1


WRONG = {
    "logits = logits[:, :, :-1]": "float64 full/padded output: shape must be [4, 7, 37]: got [4, 7, 36]",
    "logits[0, 0, :3] = np.nan": "output: 3 of 1036 values are NaN or infinite",
    "logits = logits.astype(np.float32)": "output: dtype must be float64: got float32",
    "return logits.tolist()": "float64 full/padded: TypeError: a port must return NumPy arrays",
    "tap('logit', logits)": "ValueError: unknown tap 'logit'",
    "source_ids += 1": "ValueError: output array is read-only",
    "raise SystemError('no memory')": "SystemError: no memory",
}


def test_plugin_failure_message_explains_the_error(write, run):
    for i, forward in enumerate(WRONG):
        write(forward, name=f"wrong{i}")
    ports = [f"--parity-port=wrong{i}:MyPort" for i in range(1, len(WRONG))]
    result = run(*ports, "-k", "full/padded", port="wrong0:MyPort")
    assert outcomes(result)["failed"] == len(WRONG)
    said = result.stdout.str()
    for i, message in enumerate(WRONG.values()):
        failure = said.split(f" parity::wrong{i}:MyPort-float64-full/padded ")[1].partition("\n____")[0]
        assert message in failure, message


def test_port_that_cannot_load_fails_every_plugin_test(write, run):
    write(more=EXPORT + "\n    def load(self, config, weights, dtype):\n        raise OSError('no such file')\n")
    result = run()
    assert outcomes(result) == {"failed": N + 1 + OTHERS, "passed": 1}
    assert result.stdout.str().count("FAILED MyPort float64 full/padded: OSError: no such file") >= 2


def test_changed_exported_weights_fail_the_round_trip(write, run):
    body = "return {name: array + 1 for name, array in self.model.export_weights().items()}"
    write(more=f"\n    def export_weights(self):\n        {body}\n")
    result = run(FORWARD)
    assert outcomes(result) == {"failed": 1, "passed": N + 1}
    assert "full/padded round trip: " in result.stdout.str()
    assert "differs from the loaded value" in result.stdout.str()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("absent:MyPort", "port 'absent:MyPort' cannot be imported: No module named 'absent'"),
        ("mine:Other", "port 'mine:Other' cannot be imported: module 'mine' has no 'Other'; 'mine' was imported from "),
        ("unknown", "a port must be module:class"),
        ("broken:MyPort", "port 'broken:MyPort' cannot be imported: ZeroDivisionError: division by zero"),
        ("odd:MyPort", "port MyPort has no valid config: norm_order must be one of post, pre: got 'middle'"),
        ("half:MyPort", "port MyPort must support at least one of float64, float32, bfloat16: got ('float16',)"),
    ],
)
def test_port_that_cannot_be_collected_interrupts_the_run(reference, message, write, run, pytester):
    write()
    write(name="odd", attributes="overrides = {'norm_order': 'middle'}")
    write(name="half", attributes="dtypes = ('float16',)")
    pytester.makepyfile(broken="1 / 0", test_own="def test_own(): pass")
    result = run(port=reference)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert message in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_plugin_runs_multiple_ports(write, run):
    write()
    write(ROUNDED, name="other")
    result = run("--parity-port=other:MyPort", "--parity-port=mine:MyPort", "-k", "full/one_token", "-v")
    chosen = sum(name.startswith("full/one_token") for name in FULL)
    assert outcomes(result)["deselected"] == 2 * (N + 2 + OTHERS - chosen)
    result.stdout.fnmatch_lines(["parity::mine:MyPort-float64-full/one_token PASSED*", "parity::other:MyPort-*FAILED*"])


def test_expected_failures_are_reported_as_xfailed(write, run, pytester):
    write(ROUNDED)
    file = pytester.path / "expected.toml"
    file.write_text('"*-full/*" = "one part in ten million too much"\n')
    result = run(FORWARD, "--parity-expected-failures=expected.toml", "-rx")
    assert result.ret == 0
    assert outcomes(result) == {"passed": 2, "xfailed": N}
    assert "one part in ten million too much" in result.stdout.str()

    file.write_text('"MyPort-float64-weights" = "they are rounded"\n"*-full/*" = "too much"')
    result = run(FORWARD, "--parity-expected-failures=expected.toml")
    assert outcomes(result) == {"failed": 1, "xfailed": N, "passed": 1}
    assert "[XPASS(strict)] they are rounded" in result.stdout.str()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"*-full/*" = ""', "must have the form \"test\" = \"reason\": got '*-full/*' = ''"),
        ('"*-full/*" = 3', "got '*-full/*' = 3"),
        ("nonsense", "expected failures cannot be read from"),
        (None, "expected failures cannot be read from"),
        ('"*-full/*" = "r"\n"*-fool/*" = "r"', "these expected failures match no test: *-fool/*"),
    ],
)
def test_invalid_expected_failures_are_reported(content, message, write, run, pytester):
    write(ROUNDED)
    if content is not None:
        (pytester.path / "expected.toml").write_text(content)
    result = run("--parity-expected-failures=expected.toml")
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)
    assert message in result.stdout.str() + result.stderr.str()


def test_expected_failures_without_a_port_are_rejected(pytester, plugins):
    result = pytester.runpytest_subprocess(*plugins, "--parity-expected-failures=expected.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "requires --parity-port" in result.stderr.str()


def test_requested_stages_must_have_been_compared(write, run):
    write()
    result = run("-k", "steps or gradients")
    chosen = sum(case.stage in ("gradients", "steps") for case in CASES)
    assert outcomes(result) == {"skipped": chosen, "deselected": N + 2 + OTHERS - chosen}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["INCOMPLETE: MyPort: gradients: nothing was compared (the port does not define gradients()*"]
    )
    assert "MyPort: decode" not in result.stdout.str()  # the decode stage was deselected
    searches = run("--parity-stage=decode")
    assert searches.ret == pytest.ExitCode.TESTS_FAILED
    result = searches.stdout.str()
    assert "INCOMPLETE: MyPort: decode: nothing was compared (" in result
    assert "the port does not define generate" in result
    write(more=EXPORT + SEARCH)
    everything = run("--parity-stage=activations,decode")
    assert (everything.ret, outcomes(everything)) == (
        0,
        {"passed": N + 2 + sum(case.stage == "decode" for case in CASES)},
    )
    write(attributes=f"left_out = {dict.fromkeys(FULL[1:], 'slow')!r}")
    few = run(FORWARD)
    assert few.ret == pytest.ExitCode.TESTS_FAILED
    assert (
        f"INCOMPLETE: MyPort: activations: only 1 of {N} cases were compared, but at least half are required (slow)"
        in few.stdout.str()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--parity-port=mine:MyPort", "--parity-stage=logits"],
            "must be one or more of activations, gradients, steps, decode",
        ),
        (["--parity-stage=decode"], "requires --parity-port"),
    ],
)
def test_invalid_stages_are_a_pytest_usage_error(options, message, pytester):
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


@pytest.mark.parametrize(
    ("patch", "what"),
    [
        ("np.exp = lambda x, *rest, f=np.exp, **more: f(x, *rest, **more) * (1 + 1e-9)", "numpy exp: error "),
        (
            "np.sqrt = lambda x, *rest, f=np.sqrt, **more: f(x, *rest, **more) * (1 + 1e-9)",
            "relative_error must return",
        ),
        pytest.param(
            "np.broadcast_arrays = lambda *x, f=np.broadcast_arrays: [a * 2 for a in f(*x)]",
            "numpy broadcast_arrays",
            marks=pytest.mark.extended("known answers"),
        ),
        pytest.param(
            "np.linalg.norm = lambda *x, f=np.linalg.norm, **more: f(*x, **more) * 2",
            "numpy linalg.norm: error ",
            marks=pytest.mark.extended("known answers"),
        ),
        (
            "import reference_numpy.layers as l; f = l.layer_norm; l.layer_norm = lambda *x, **m: f(*x, **m) * 1.001",
            "full/padded ",
        ),
    ],
)
@pytest.mark.parametrize("when", ["import", pytest.param("load", marks=pytest.mark.extended("known answers"))])
def test_port_that_modifies_the_reference_fails_the_known_answer(patch, what, when, write, start, pytester):
    write(more=EXPORT if when == "load" else f"{EXPORT}\n{patch}\n")
    if when == "load":
        loads = f"    def load(self, config, weights, dtype):\n        {patch}\n"
        body = "        self.model = Transformer.from_weights(config, weights, dtype)\n"
        write(more=EXPORT + "\n" + loads + body)
    result = start(FORWARD, "-k", "full/one_token or known")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "FAILED MyPort known answer: " in result.stdout.str()
    assert what in result.stdout.str()


def test_known_answer_runs_last_and_passes_for_an_unmodified_reference(write, run):
    write()
    result = run("--collect-only", "-q")
    names = [line for line in result.stdout.str().splitlines() if line.startswith("parity::")]
    assert names[-1] == "parity::MyPort-known_answer"
    assert outcomes(run("-k", "known_answer"))["passed"] == 1  # with all stages


@pytest.mark.extended("pytest processes")
@pytest.mark.parametrize("forward", ["pass", ROUNDED])
def test_plugin_works_with_multiple_pytest_processes(forward, write, start, pytester):
    write(forward)
    pytester.makepyfile(test_own="def test_own(): pass")
    result = start("-n", "2", FORWARD)
    assert outcomes(result) == ({"passed": N + 3} if forward == "pass" else {"passed": 3, "failed": N})
    assert result.ret == (forward != "pass")
    if forward == "pass":
        skipped = start("-n", "2", "-k", "steps")
        assert skipped.ret == pytest.ExitCode.TESTS_FAILED
        assert "INCOMPLETE: MyPort: steps: nothing was compared" in skipped.stdout.str()
        broken = start("-n", "2", port="absent:MyPort")
        assert broken.ret != 0
        assert "No module named 'absent'" in broken.stdout.str()


@pytest.mark.extended("pytest processes")
def test_known_answer_is_checked_in_every_process(write, start):
    patch = "        np.exp = lambda x, f=np.exp, **more: f(x, **more) * 1.01\n"
    write(
        more=EXPORT
        + "\n    def load(self, config, weights, dtype):\n"
        + patch
        + "        self.model = Transformer.from_weights(config, weights, dtype)\n"
    )
    result = start("-n", "3", "--dist=each", "-k", "full/one_token or known", FORWARD)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = start("-n", "2", "-k", "full/one_token or known", FORWARD).stdout.str()
    assert "FAILED MyPort known answer: " in lines  # regardless of which worker ran which test
