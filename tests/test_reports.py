"""The result as a dict, and the reports made from it: JSON and its schema, the page, the tree in a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from result_schema import violations
from rich.console import Console

from transformer_parity.cli.progress import PlainConsole
from transformer_parity.engine.findings import AGREES, DIVERGES, FAILED, IMPRECISE, SKIPPED, Finding
from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED, Blame, Mark
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.report.tables import (
    print_coverage,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
)
from transformer_parity.engine.report.tree import LINES, print_blame
from transformer_parity.engine.system.files import write_json
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.check.checked_port import CheckedPort
from transformer_parity.transformer.check.messages import PortJob
from transformer_parity.transformer.diagnose.diagnosis import Diagnosis
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.explore.recording import Recorded, Recording
from transformer_parity.transformer.explore.view import view
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.report.diagnoses import print_audit, print_failure_report
from transformer_parity.transformer.report.html import html, write_html
from transformer_parity.transformer.report.result import CheckResult, build
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_spec.names import parameter_shapes, tap_shapes

TAPS = [*tap_shapes(tiny(), 4, 9, 7), OUTPUT]
GUILTY = "encoder.layers.0.self_attention.scores"
CASES = [case for case in standard_cases() if case.name in ("full/padded", "full/untied", "gradients/padded")]
MACHINE = {"transformer-parity": "0.1.0", "python": "3.11.7", "platform": "somewhere", "cpus": 2}
SETTING = Placements(("float64", "float32"))
ENVIRONMENT = {name: {"version": f"1.0 of {name}", "threads": "1"} for name in ("numpy", "torch", "jax")}
ACTIVE = ("", "activations")  # no detail, and the stage
SIMPLE = Finding(
    "torch", "float64", "full model", "full/padded", "taps", "logits", 1e-15, 1e-12, AGREES, "", "activations"
)
NASTY = "<script>alert('&')</script> \x1b[31mred\x1b[0m"


def run_of(backend: str, dtype: str, case: str = "full/padded", guilty: str = "") -> list[Finding]:
    """Return what a run of a full model finds; behind the guilty tap everything is wrong."""
    tolerance = {"float64": 1e-12, "float32": 1e-6}[dtype]
    verdict = {"float64": DIVERGES, "float32": IMPRECISE}[dtype]
    findings = []
    for tap in TAPS:
        wrong = bool(guilty) and TAPS.index(tap) >= TAPS.index(guilty)
        error, said = (0.25, verdict) if wrong else (tolerance / 4, AGREES)
        findings.append(Finding(backend, dtype, "full model", case, "taps", tap, error, tolerance, said, *ACTIVE))
    return findings


def blame_of(guilty: set[str], dtype: str = "float64", names: list[str] = TAPS) -> Blame:
    marks, wrong = [], False
    for name in names:
        wrong = wrong or name in guilty
        verdict = INTRODUCED if name in guilty else INHERITED if wrong else FINE
        error = 0.0 if verdict == FINE else 0.25
        marks.append(Mark(name, error, error if name in guilty else 0.0, 1e-12, verdict))
    return Blame("torch", dtype, "full/padded", "activations", "port", tuple(marks))


def ports_of(findings: list[Finding], environment=ENVIRONMENT, reports=(), fates=()) -> list[CheckedPort]:
    """Return the ports with their findings; the first has the fates of its weights."""
    names = dict.fromkeys(["torch", "jax", *(finding.backend for finding in findings)])
    ports = [CheckedPort(PortJob(name, SETTING), label=name, environment=environment.get(name, {})) for name in names]
    for port in ports:
        port.findings = [finding for finding in findings if finding.backend == port.label]
        port.failure_reports = [report for report in reports if report.backend == port.label]
    ports[0].audit = tuple(fates)
    return ports


def result_of(findings: list[Finding], ports=None, **options) -> dict:
    ports = ports_of(findings) if ports is None else ports
    known = {"reference": ENVIRONMENT["numpy"], "machine": MACHINE, **options}
    return build(CheckResult(setting=SETTING, ports=ports, **known))


@pytest.fixture(scope="module")
def result():
    findings = [finding for dtype in ("float64", "float32") for finding in run_of("torch", dtype, guilty=GUILTY)]
    findings += run_of("torch", "float64", "full/untied", guilty="logits")
    findings += [finding for dtype in ("float64", "float32") for finding in run_of("jax", dtype)]
    findings += run_of("jax", "float64", "full/untied")
    infinite = replace(
        SIMPLE, component="gradients", stage="gradients", case="gradients/padded", error=math.inf, verdict=DIVERGES
    )
    findings += [
        Finding(
            "jax", "float64", "weights", "gradients/padded", "load", "round trip", 0.0, 0.0, AGREES, "", "gradients"
        ),
        replace(infinite, tap="of target_embedding.table", detail=NASTY),
        replace(infinite, backend="jax", error=1e-15, verdict=AGREES),
        replace(
            SIMPLE,
            backend="jax",
            component="decoding",
            stage="decode",
            case="decode/beam",
            verdict=SKIPPED,
            detail="no search",
        ),
    ]
    weights = np.array([[[[0.25, 0.75], [1.0, 0.0]]]])
    marks = [Mark(GUILTY, 0.25, 0.25, 1e-12, INTRODUCED)]
    recording = Recording("float64", {GUILTY: weights}, [Recorded("torch", marks, {GUILTY: weights[..., ::-1]})], {})
    shown = view(recording, "float64 full/padded", {"source": [["5", "6"]], "target": [["7"]]})
    place = ("torch", "float64", "full/padded", "activations")
    fates = [Fate("a.kernel", "transposed", NASTY), Fate("b", "used")]
    diagnosis = Diagnosis("torch does not scale the scores", "exact", ("scores not scaled",))
    reports = [
        FailureReport(*place, blame_of({GUILTY}), diagnosis, shown),
        FailureReport("torch", "float32", *place[2:], blame_of({GUILTY}, "float32"), None),
    ]
    ports = ports_of(findings, reports=reports, fates=fates)
    return result_of(findings, ports=ports, cases=CASES, not_tested=["gpu (ask for it with --device gpu)"])


# The dict, JSON and the schema


def test_result_fits_the_schema(result, tmp_path):
    write_json(tmp_path / "result.json", result)
    read = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert read == result  # plain values, and none of them lost
    assert violations(read) == []
    assert violations(result_of([])) == []


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (lambda result: result["result"].pop("taps"), ("$.result", "required")),
        (lambda result: result["result"].update(extra=1), ("$.result", "additionalProperties")),
        (lambda result: result["result"]["failures"][0].update(error="far"), ("$.result.failures[0].error", "anyOf")),
        (
            lambda result: result["result"]["blames"][0]["marks"][3].update(verdict="bad"),
            ("$.result.blames[0].marks[3].verdict", "enum"),
        ),
        (lambda result: result["result"]["fingerprint"].update(sha256="?"), ("$.result.fingerprint.sha256", "pattern")),
    ],
)
def test_schema_refuses(result, change, violation):
    broken = json.loads(json.dumps(result))
    change(broken)
    assert violations(broken) == [violation]


def test_result_counts_skips_apart(result):
    assert (result["verdict"], result["exit_code"]) == ("DIVERGE", 1)
    assert result["result"]["skipped"] == len(result["result"]["skips"]) == 1
    wrong = len(TAPS) - TAPS.index(GUILTY)
    assert len(result["result"]["failures"]) == 2 * wrong + 2 + 1  # full/padded twice; logits and output; the gradient
    assert result["result"]["comparisons"] == 6 * len(TAPS) + 3
    assert {failure["error"] for failure in result["result"]["failures"]} == {0.25, "inf"}
    alone = result_of([replace(SIMPLE, verdict=SKIPPED)])
    assert (alone["verdict"], alone["result"]["comparisons"], alone["result"]["skipped"]) == ("INCOMPLETE", 0, 1)


def test_cases_have_their_stage_and_their_first_failure(result):
    rows = {(row["backend"], row["dtype"], row["case"]): row for row in result["result"]["cases"]}
    assert rows["torch", "float64", "full/padded"]["finding"]["tap"] == GUILTY
    assert rows["torch", "float32", "full/padded"]["verdict"] == IMPRECISE
    assert rows["jax", "float64", "gradients/padded"]["stage"] == "gradients"  # and not of the round trip before it
    assert rows["jax", "float64", "decode/beam"]["skips"] == ["no search"]


def test_taps_are_of_the_main_case_and_of_what_failed(result):
    order = [(row["backend"], row["dtype"], row["case"]) for row in result["result"]["taps"]]
    assert ("jax", "float64", "full/untied") in order  # beside the port that failed there
    assert [row["tap"] for row in result["result"]["taps"]][: len(TAPS)] == TAPS
    agreeing = result_of([*run_of("jax", "float64"), *run_of("jax", "float64", "full/untied")])
    assert {row["case"] for row in agreeing["result"]["taps"]} == {"full/padded"}
    preset = result_of(
        [replace(finding, component="presets", case="preset/t5") for finding in run_of("jax", "float64")]
    )
    assert {row["case"] for row in preset["result"]["taps"]} == {"preset/t5"}


def test_fingerprint_is_of_what_matters(tmp_path):
    def fingerprint(finding=SIMPLE, setting=SETTING, environment=ENVIRONMENT, cases=CASES, weights=None):
        common = {"reference": environment["numpy"], "machine": MACHINE, "cases": cases, "weights": weights}
        made = build(CheckResult(setting=setting, ports=ports_of([finding], environment), **common))
        return made["result"]["fingerprint"]["sha256"]

    usual = fingerprint()
    assert usual == fingerprint(replace(SIMPLE, error=0.0))  # what came out is not what went in
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "two").write_bytes(b"2")
    other = {name: ids[::-1] for name, ids in CASES[0].inputs.items()}
    changed = [
        fingerprint(setting=replace(SETTING, precision="fast")),
        fingerprint(environment={**ENVIRONMENT, "torch": {"version": "2"}}),
        fingerprint(environment={**ENVIRONMENT, "torch": {**ENVIRONMENT["torch"], "threads": "2"}}),
        fingerprint(cases=[replace(CASES[0], config=tiny(d_ff=41)), *CASES[1:]]),
        fingerprint(cases=[replace(CASES[0], inputs=other), *CASES[1:]]),
        fingerprint(cases=[replace(CASES[0], seed=1), *CASES[1:]]),
        fingerprint(weights=tmp_path / "one"),
        fingerprint(weights=tmp_path / "two"),
    ]
    assert len({usual, *changed}) == 1 + len(changed)


@pytest.mark.parametrize(("place", "step"), [(Path, "write_text"), (os, "replace")], ids=["write", "replace"])
@pytest.mark.parametrize("write", [write_json, write_html])
def test_a_report_is_written_whole_or_not_at_all(write, place, step, result, tmp_path, monkeypatch):
    path = tmp_path / "report"
    write(path, result)
    old = path.read_bytes()

    def full(self, *args):
        open(self, "wb").close()  # what a full disk leaves
        raise OSError("no space left")

    monkeypatch.setattr(place, step, full)
    with pytest.raises(OSError, match="no space left"):
        write(path, result)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


# The page


class Page(HTMLParser):
    """Counts elements by name and class, and keeps text and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.addresses, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, (attributes.get("class") or "").split(), attributes))
        self.addresses += [attributes[name] for name in ("src", "href", "srcset", "action") if name in attributes]

    def handle_data(self, data):
        self.text += data

    def count(self, tag, kind=None):
        return sum(name == tag and (kind is None or kind in kinds) for name, kinds, _ in self.elements)


def rows_of(result) -> int:
    cases = {row["case"] for row in result["result"]["taps"]}
    return sum(len({row["tap"] for row in result["result"]["taps"] if row["case"] == case}) for case in cases)


def check_page(page: Page, result: dict) -> None:
    """Fail unless everything of the result is there."""
    assert page.count("tr", "fails") + page.count("tr", "fine") == rows_of(result) == 2 * len(TAPS)
    assert page.count("tr", "fails") == len(TAPS) - TAPS.index(GUILTY) + 2
    assert page.count("em", "introduced") == 2  # float64 and float32
    assert page.count("path", "origin") == 2
    assert page.count("li", "introduced") == 2 * 3  # the layer, its attention, the scores; in both trees
    assert page.count("article", "port") == 2
    assert page.count("div", "explorer") == 1
    assert page.count("h2") == 8
    rows = [attributes for tag, kinds, attributes in page.elements if tag == "td" and "imprecise" in kinds]
    assert page.count("table", "components") == 1
    assert len(rows) == 1  # the full model in float32
    for words in (
        "Diverge",
        "torch does not scale the scores",
        "jax: no search",
        "gpu (ask for it with --device gpu)",
        "1 of 2 weights is not used as it should be",
        result["result"]["fingerprint"]["sha256"],
    ):
        assert words in " ".join(page.text.split()), words


def test_page_holds_everything(result):
    page = Page(html(result))
    check_page(page, result)
    assert "object at 0x" not in page.text


def test_numbers_of_cases_and_comparisons_agree(result):
    """However many dtypes a case was run in, it is one case; what was skipped was not compared."""
    text = " ".join(Page(html(result)).text.split())
    assert "2 ports4 cases" in text  # two items of a list
    assert "3 cases diverging" in text  # full/padded, full/untied, gradients
    assert "3 cases agreeing, 1 case skipped" in text
    of_all, *of_ports = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) comparisons", text)]
    assert of_all == sum(of_ports[:2]) == result["result"]["comparisons"]


def test_page_needs_no_network(result):
    text = html(result)
    assert all(address.startswith("data:") for address in Page(text).addresses)
    assert re.findall(r"url\(|@import|https?://|fetch\(", text) == []


def test_page_escapes_what_ports_say(result):
    text = html(result)
    assert text.count("&lt;script&gt;alert(") == 1  # the audit's detail
    assert "<script>alert" not in text


def test_page_of_nothing_compared():
    page = Page(html(result_of([])))
    assert "Incomplete" in page.text
    assert page.count("tr") == 0
    for words in ("No tap of a whole model was compared.", "The weights were not audited.", "Nothing was skipped."):
        assert words in page.text


def test_page_of_agreement(result):
    text = html(result_of([*run_of("jax", "float64"), *run_of("torch", "float64")]))
    page = Page(text)
    assert page.count("tr", "fine") == len(TAPS)
    assert page.count("tr", "fails") == 0
    assert "Where it was introduced" not in page.text
    assert page.count("div", "explorer") == page.count("canvas") == 0
    assert f"full/padded: all {len(TAPS)} taps are within tolerance" in page.text


def test_page_from_the_file_is_the_same(result, tmp_path):
    write_json(tmp_path / "result.json", result)
    assert html(json.loads((tmp_path / "result.json").read_text("utf-8"))) == html(result)


@pytest.mark.parametrize(
    ("share", "step"),
    [(0.0, 0), (0.01, 1), (0.011, 2), (0.5, 3), (1.0, 3), (1.01, 4), (1e6, 6), (1e12, 7), (math.nan, 7)],
)
def test_colour_is_the_share_on_a_logarithmic_scale(share, step):
    verdict = AGREES if share <= 1.0 else DIVERGES
    page = Page(html(result_of([replace(SIMPLE, error=share, tolerance=1.0, verdict=verdict)])))
    cells = [kinds for tag, kinds, _ in page.elements if tag == "td" and kinds and kinds[0] != verdict]
    assert cells == [[f"s{step}"]]


PROBE = """
<script>
const rows = () => [...document.querySelectorAll("#matrix .scroll")][0]
  .querySelectorAll("tbody tr").values().filter(row => row.offsetHeight > 0).toArray().length;
const said = {wide: document.documentElement.scrollWidth - document.documentElement.clientWidth};
said.tall = document.documentElement.scrollHeight;
const ready = setInterval(() => {
  const explorers = [...document.querySelectorAll(".explorer")];
  if (explorers.some(one => !one.dataset.ready)) return;
  clearInterval(ready);
  said.maps = document.querySelectorAll(".maps canvas").length;
  said.clipped = [...document.querySelectorAll(".scroll")].every(box =>
    !box.clientWidth || (box.scrollWidth > box.clientWidth + 1) === "clipped" in box.dataset);
  document.querySelector("#matrix").open = true;
  said.all = rows();
  document.querySelector(".only")?.click();
  said.failing = rows();
  parent.postMessage(JSON.stringify(said), "*");
}, 50);
</script>
"""
FRAME = """<body><iframe src="page.html" style="width: %dpx; height: 900px; border: 0"></iframe><pre></pre>
<script>addEventListener("message", event => document.querySelector("pre").textContent = event.data)</script></body>"""


def open_page(browser: str, path: Path, *more: str) -> tuple[str, str]:
    """Return the DOM after rendering, and what the browser's console was told."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'profile'}", *more]
    command = [browser, *options, "--timeout=20000", "--virtual-time-tolerance=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_page_in_a_browser(browser, result, tmp_path):
    write_html(tmp_path / "page.html", result)
    text, console = open_page(browser, tmp_path / "page.html")
    assert console == ""
    check_page(Page(text), result)


def probed(browser, result, tmp_path, width):
    """Return what a page says of itself at a width."""
    (tmp_path / "page.html").write_text(html(result).replace("</body>", f"{PROBE}</body>"), "utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, "utf-8")
    text, console = open_page(
        browser, tmp_path / "frame.html", "--virtual-time-budget=20000", f"--window-size={width + 40},1000"
    )
    assert console == ""
    return json.loads(re.search(r"<pre>(.*)</pre>", text)[1])


def test_page_on_a_phone_and_its_filter(browser, result, tmp_path):
    said = probed(browser, result, tmp_path, 400)
    assert said.pop("tall") > 900
    failing = len(TAPS) - TAPS.index(GUILTY)
    assert said == {"all": len(TAPS), "wide": 0, "failing": failing, "maps": 3, "clipped": True}


def test_a_passing_page_has_two_screens_and_no_map(browser, tmp_path):
    components = [f"part {i}" for i in range(18)]  # as many as a whole check has
    findings = [finding for name in ("torch", "jax") for dtype in SETTING.dtypes for finding in run_of(name, dtype)]
    findings += [
        replace(finding, component=part, path="fast") for finding in findings[:: len(TAPS)] for part in components
    ]
    said = probed(browser, result_of(findings, not_tested=["gpu", "tf", "decode", "steps"]), tmp_path, 1280)
    assert said.pop("tall") <= 2 * 900
    assert said == {"all": len(TAPS), "wide": 0, "failing": len(TAPS), "maps": 0, "clipped": True}


def test_an_error_in_the_browser_would_be_seen(browser, tmp_path):
    (tmp_path / "page.html").write_text("<script>console.error('broken')</script>", "utf-8")
    assert "broken" in open_page(browser, tmp_path / "page.html")[1]


@pytest.mark.parametrize("write", [write_html, write_json])
def test_what_utf_8_cannot_hold_is_written_all_the_same(write, tmp_path):
    write(tmp_path / "report", result_of([replace(SIMPLE, verdict=FAILED, detail="a \ud800 b")]))
    assert "a " in (tmp_path / "report").read_text("utf-8")


# What a terminal is told


FORGED = "[bold]x[/] :smile: \x1b[2J\x9b31m\r\nAGREE  3 ports\x85\u2028AGREE" + 200 * " " + "AGREE"


def test_nothing_from_outside_is_markup_or_a_line_of_its_own():
    """Names, reasons and what is missing, in every line that quotes them."""
    file = io.StringIO()
    console = PlainConsole(file=file, width=140, force_terminal=True, color_system="standard")
    wrong = replace(SIMPLE, backend=FORGED, verdict=FAILED, detail=FORGED, error=math.inf)
    findings = [wrong, replace(wrong, verdict=SKIPPED), replace(wrong, verdict=AGREES, tap=TOKENS, error=0.0)]
    verdict = Verdict.of(findings, [Coverage(FORGED, ("steps",), ("float64",), True, {})])
    print_problems(console, findings, verdict)
    print_skips(console, findings)
    print_near_ties(console, findings)
    print_coverage(console, verdict, [FORGED])
    print_audit(console, "torch", [Fate(FORGED, "unused", FORGED)])
    print_failure_report(
        console, FailureReport("torch", "float64", "a", "activations", None, Diagnosis(FORGED, "likely", (), (FORGED,)))
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines()
    assert len([line for line in lines if "[bold]x[/] :smile: \N{REPLACEMENT CHARACTER}[2J" in line]) >= 6
    assert not [line for line in lines if line.lstrip().startswith("AGREE")]
    assert "\x1b[2J" not in file.getvalue()
    assert "\x9b" not in file.getvalue()


def test_a_table_keeps_its_colours_and_no_others():
    file = io.StringIO()
    console = PlainConsole(file=file, width=140, force_terminal=True, color_system="standard")
    print_summary(console, [replace(SIMPLE, tap="\x1b[31mred")], ["torch"])
    assert "\x1b[32m" in file.getvalue()
    assert "\x1b[31m" not in file.getvalue()
    assert "\N{REPLACEMENT CHARACTER}[31mre" in file.getvalue()


def test_the_table_says_whose_comparison_is_the_closest():
    file = io.StringIO()
    findings = [SIMPLE, replace(SIMPLE, backend="jax", tap="output", path="fast", error=2 * SIMPLE.error)]
    print_summary(PlainConsole(file=file, width=140), findings, ["torch", "jax"])
    row = next(line for line in file.getvalue().splitlines() if SIMPLE.component in line)
    assert row.rstrip().endswith(f"jax: {SIMPLE.case} output without taps")


# The tree in a terminal


def drawn(blame: Blame) -> list[str]:
    console = Console(file=io.StringIO(), width=140, color_system=None)
    print_blame(console, blame)
    return console.file.getvalue().splitlines()


def test_tree_folds_what_is_fine():
    lines = drawn(blame_of({"decoder.layers.0.feed_forward.inner"}))
    assert lines[0] == "torch float64 full/padded"
    assert [line for line in lines if "encoder.layers.0 to 1  fine, 24 tensors" in line]
    guilty = [line for line in lines if "<-" in line]
    assert [line.strip("│├└─ ") for line in guilty] == ["inner  error 2.5e-01, tolerance 1e-12  <- introduced here"]
    assert any(line.endswith("decoder.layers.1  inherited, 20 of 20, error up to 2.5e-01") for line in lines)
    assert len(lines) <= LINES


def test_tree_says_the_same_only_once():
    scores = {tap for tap in TAPS if tap.endswith(".scores")}
    lines = drawn(blame_of(scores))
    assert sum("<- introduced here, and the same in 5 other places" in line for line in lines) == 1
    too = [line for line in lines if "<- introduced here too: self_attention.scores" in line]
    assert [line.strip("│├└─ ").partition("  ")[0] for line in too] == ["encoder.layers.1", "decoder.layers.0 to 1"]
    assert len(lines) <= LINES


def test_tree_of_gradients():
    config = tiny(attention_bias=True)
    names = [f"at {tap}" for tap in reversed(TAPS[:-1])]
    names += [f"of {name}" for name in reversed(parameter_shapes(config))]
    guilty = "of decoder.layers.0.cross_attention.key_proj.bias"
    lines = drawn(blame_of({guilty}, names=names))
    assert any("gradients at the taps, from the logits backwards  fine, 69 tensors" in line for line in lines)
    assert [line.strip("│├└─ ").partition("  ")[0] for line in lines if "<-" in line] == ["key_proj.bias"]
    assert any("decoder.layers.0" in line and "fine" not in line for line in lines)
    assert len(lines) <= LINES


def test_tree_stays_short_whatever_fails():
    config = tiny(num_encoder_layers=6, num_decoder_layers=6)
    taps = [*tap_shapes(config, 4, 9, 7), OUTPUT]
    for guilty in (set(taps), set(taps[::3]), {tap for tap in taps if ".layers.3." in tap}, {taps[0]}):
        lines = drawn(blame_of(guilty, names=taps))
        assert len(lines) <= LINES + 1, "\n".join(lines)  # the title has two lines
        assert any("<- introduced here" in line for line in lines)


def test_tree_of_nothing_wrong():
    assert drawn(blame_of(set()))[-1] == f"fine: all {len(TAPS)} tensors"
