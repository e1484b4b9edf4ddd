"""Tables and trees of a report in a terminal."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

from report_runs import SIMPLE, TAPS, blame_of
from rich.console import Console

from transformer_parity.cli.progress import PlainConsole
from transformer_parity.engine.findings import AGREES, FAILED, SKIPPED
from transformer_parity.engine.localization import Blame
from transformer_parity.engine.outputs import OUTPUT
from transformer_parity.engine.report.tables import (
    print_coverage,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
)
from transformer_parity.engine.report.tree import LINES, print_blame
from transformer_parity.engine.verdict import Coverage, Verdict
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.diagnose.diagnosis import Diagnosis
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.diagnose.weight_audit import Fate
from transformer_parity.transformer.report.diagnoses import print_audit, print_failure_report
from transformer_parity.transformer.stages.decode import TOKENS
from transformer_spec.names import parameter_shapes, tap_shapes

# Text that a terminal might interpret
FORGED = "[bold]x[/] :smile: \x1b[2J\x9b31m\r\nAGREE  3 ports\x85\u2028AGREE" + 200 * " " + "AGREE"


def test_quoted_text_is_never_interpreted_as_markup_or_line_breaks():
    """Names, reasons, and missing stages are quoted literally in every line that contains them."""
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


def test_table_escapes_color_codes_in_quoted_text():
    file = io.StringIO()
    console = PlainConsole(file=file, width=140, force_terminal=True, color_system="standard")
    print_summary(console, [replace(SIMPLE, tap="\x1b[31mred")], ["torch"])
    assert "\x1b[32m" in file.getvalue()
    assert "\x1b[31m" not in file.getvalue()
    assert "\N{REPLACEMENT CHARACTER}[31mre" in file.getvalue()


def test_table_names_the_comparison_closest_to_its_tolerance():
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


def test_tree_collapses_correct_tensors():
    lines = drawn(blame_of({"decoder.layers.0.feed_forward.inner"}))
    assert lines[0] == "torch float64 full/padded"
    assert [line for line in lines if "encoder.layers.0 to 1  within tolerance, 24 tensors" in line]
    guilty = [line for line in lines if "<-" in line]
    assert [line.strip("│├└─ ") for line in guilty] == ["inner  error 2.5e-01, tolerance 1e-12  <- introduced here"]
    assert any(line.endswith("decoder.layers.1  inherited, 20 of 20, error up to 2.5e-01") for line in lines)
    assert len(lines) <= LINES


def test_tree_groups_repeated_findings():
    scores = {tap for tap in TAPS if tap.endswith(".scores")}
    lines = drawn(blame_of(scores))
    assert sum("<- introduced here, and in 5 similar places" in line for line in lines) == 1
    too = [line for line in lines if "<- introduced here too: self_attention.scores" in line]
    assert [line.strip("│├└─ ").partition("  ")[0] for line in too] == ["encoder.layers.1", "decoder.layers.0 to 1"]
    assert len(lines) <= LINES


def test_tree_marks_the_wrong_gradient():
    config = tiny(attention_bias=True)
    names = [f"at {tap}" for tap in reversed(TAPS[:-1])]
    names += [f"of {name}" for name in reversed(parameter_shapes(config))]
    guilty = "of decoder.layers.0.cross_attention.key_proj.bias"
    lines = drawn(blame_of({guilty}, names=names))
    assert any(
        "gradients at the taps, starting from the logits  within tolerance, 69 tensors" in line for line in lines
    )
    assert [line.strip("│├└─ ").partition("  ")[0] for line in lines if "<-" in line] == ["key_proj.bias"]
    assert any("decoder.layers.0" in line and "within tolerance" not in line for line in lines)
    assert len(lines) <= LINES


def test_tree_stays_short_for_any_failure():
    config = tiny(num_encoder_layers=6, num_decoder_layers=6)
    taps = [*tap_shapes(config, 4, 9, 7), OUTPUT]
    for guilty in (set(taps), set(taps[::3]), {tap for tap in taps if ".layers.3." in tap}, {taps[0]}):
        lines = drawn(blame_of(guilty, names=taps))
        assert len(lines) <= LINES + 1, "\n".join(lines)  # the title has two lines
        assert any("<- introduced here" in line for line in lines)


def test_gradients_outside_layers_keep_their_names_in_a_shared_line():
    config = tiny(num_encoder_layers=6, num_decoder_layers=6)
    taps = [f"of {tap}" for tap in (*tap_shapes(config, 4, 9, 7), OUTPUT)]
    lines = drawn(blame_of(set(taps), names=taps))
    assert not any("too: ," in line or line.endswith("too: ") for line in lines)


def test_tree_without_errors_ends_with_the_number_of_tensors():
    assert drawn(blame_of(set()))[-1] == f"within tolerance: {len(TAPS)} tensors"
