"""``parity golden`` and ``parity compare``: write a model's results to files ("golden vectors") and compare the files.

Use these files to compare implementations that can't run in one process, for example because they are written in
different languages or run on different machines.
"""

from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from transformer_parity.cli.options import one_or_more
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.findings import Finding
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.report.result import compared
from transformer_parity.engine.report.tables import (
    print_coverage,
    print_near_ties,
    print_problems,
    print_skips,
    print_summary,
    verdict_line,
)
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.verdict import Verdict
from transformer_parity.pairs.directories import compare_arrays, is_pair
from transformer_parity.pairs.report import document, print_result
from transformer_parity.transformer.cases.case import in_stages, tiny
from transformer_parity.transformer.cases.for_ports import port_config
from transformer_parity.transformer.check.known_numbers import check_reference
from transformer_parity.transformer.diagnose.investigate import FailureReport
from transformer_parity.transformer.golden import writer
from transformer_parity.transformer.golden.compare import DirectoryPair, compare_directories, investigate, read_pairs
from transformer_parity.transformer.golden.produce import PRESETS, compute, describe, golden_cases, words
from transformer_parity.transformer.golden.vectors import DTYPES, GoldenDirectory
from transformer_parity.transformer.ports.exceptions import import_port
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import MissingFrameworkError
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.ports.user import PluginPort
from transformer_parity.transformer.report.diagnoses import print_failure_report, print_undiagnosed
from transformer_parity.transformer.report.tables import TITLES
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.config import TransformerConfig

EXAMPLES = """
examples:
  parity golden --out truth                          run the reference with the conventions of the paper
  parity golden --preset marian,fairseq --out truth  write one subdirectory for each of these two presets
  parity golden --backend torch --device gpu --out mine
  parity golden --for mymodel:Port --out truth       run the reference with the conventions of your port
  parity golden --port mymodel:Port --out mine       run your port
  parity golden --port mymodel:Port --stage activations --out mine
  parity compare truth mine                          compare the two directories

docs/reference/golden-vectors.md describes the file format, so that you can write the files in any language.

exit code: 0 written, 3 not written
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "golden",
        help="write golden vectors: the inputs, weights, and results of a model, as files",
        description="Run a small model and write golden vectors, a directory of safetensors and JSON files. The files "
        "contain the inputs, the weights, every intermediate value, every gradient, the results of twenty optimizer "
        "steps, and the results of greedy and beam search. Use the files to check a port that is not written in Python "
        "or that runs on a different machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the files to this directory")
    parser.add_argument("--force", action="store_true", help="overwrite existing golden vectors")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--preset",
        action=one_or_more(PRESETS),
        metavar="NAME[,NAME]",
        help=f"use a small model with the conventions of each of these presets (default: paper_base): "
        f"{', '.join(PRESETS)}",
    )
    model.add_argument(
        "--for", dest="meant_for", metavar="MODULE:CLASS", help="run the reference with the conventions of your port"
    )
    model.add_argument("--port", metavar="MODULE:CLASS", help="run your port, using the port's conventions")
    parser.add_argument("--backend", choices=PORTS, help="run this backend (default: numpy, the reference)")
    parser.add_argument(
        "--dtype",
        action=one_or_more(DTYPES),
        default=list(DTYPES),
        metavar=",".join(DTYPES),
        help="run in these dtypes (default: both)",
    )
    parser.add_argument(
        "--stage",
        action=one_or_more(STAGES),
        default=list(STAGES),
        metavar=",".join(STAGES),
        help="write only the results of these stages (default: all)",
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), help="run the backend on this device (default: cpu)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write golden vectors and return the exit code."""
    check_reference()
    if options.port and (options.backend or options.device):
        raise UsageError(
            "--port cannot be combined with --backend or --device, because the port determines both; remove these "
            "options"
        )
    expected = (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError)
    with refusals(*expected), quiet_frameworks() as terminal:
        try:
            port = import_port(options.port) if options.port else PORTS.get(options.backend, DEFINITION)
            said = _write(options, port, _configs(options), terminal)
        except SystemExit as error:
            raise UsageError(f"the port called sys.exit({error.code!r})") from error
    print("\n".join(said))
    return 0


def _configs(options: argparse.Namespace) -> dict[str, TransformerConfig]:
    """Return a dict from subdirectories to the configs of the models to write.

    If there is only one model, the key is an empty string, because the model is written to the directory itself.
    """
    if own := options.port or options.meant_for:
        return {"": port_config(import_port(own))}
    presets = options.preset or ["paper_base"]
    configs = [tiny(name, d_k=None, d_v=None) for name in presets]
    return dict(zip(presets if len(presets) > 1 else [""], configs, strict=True))


def _write(
    options: argparse.Namespace,
    port: PackagePort | PluginPort,
    configs: Mapping[str, TransformerConfig],
    terminal: TextIO,
) -> list[str]:
    """Write one directory per config, and return a summary as a list of lines.

    If an error occurs, no directory is written.
    """
    said = []
    chosen = {name: in_stages(golden_cases(config), options.stage) for name, config in configs.items()}
    with writer.replaced(options.out, force=options.force) as directory:
        total = sum(dtype in case.dtypes for cases in chosen.values() for case in cases for dtype in options.dtype)
        device = options.device or "cpu"
        producer = describe(port, options.dtype, device)
        with Progress([port.name], total, terminal) as progress:
            advance = partial(progress.update, port.name, advance=1)
            for name, cases in chosen.items():
                computed, left_out = compute(port, cases, options.dtype, device, advance)
                dtypes = [dtype for dtype in options.dtype if any(dtype in tensors for _, tensors in computed)]
                if not computed:
                    reasons = ", ".join(dict.fromkeys(entry.reason for entry in left_out))
                    raise ValueError(f"{port.name} has no results to write: {reasons}")
                (directory / name).mkdir(exist_ok=True)
                config, weights = cases[0].config, cases[0].load_weights()
                writer.write(directory / name, producer, config, weights, computed, dtypes, left_out)
                tensors = sum(len(tensors) for _, by_dtype in computed for tensors in by_dtype.values())
                where = options.out / name
                said.append(f"{where}: {len(computed)} cases, {' and '.join(dtypes)}, {tensors:,} tensors")
                said += [f"  omitted: {words(entry)}" for entry in left_out]
    return said


COMPARE_EXAMPLES = """
examples:
  parity golden --out truth
  parity compare truth mine                      compare your results (mine) with the reference
  parity compare truth mine --stage activations  compare only the activations
  parity compare truth mine --json result.json
  parity compare truth mine --names names.toml   compare arrays of any model (`parity pair --out truth`)

For golden vectors, the command reruns the NumPy reference on A's weights and inputs and compares both directories with
the reference's results. For each result that is missing from B, the command reports a skipped result if B's manifest
declares the omission, and a failure otherwise. B must contain at least half of the cases in every stage.
docs/reference/golden-vectors.md describes the file format.

If `parity pair --out` wrote A, the command compares B with the tensors in A, within the tolerances in A. Nothing is
rerun. docs/how-to/compare-files.md describes the files.

exit code: 0 all results agree, 1 the math differs, 2 only precision was lost, 3 not everything was compared
"""


def add_parser_compare(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "compare",
        help="compare two directories of golden vectors, which can be written in any programming language",
        description="Compare two directories, tensor by tensor. They contain golden vectors, or the arrays of a model "
        "that `parity pair --out` wrote and the arrays of its port. Directory A supplies the weights and inputs.",
        epilog=COMPARE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("truth", type=Path, metavar="A", help="use the model and cases in this directory")
    parser.add_argument("candidate", type=Path, metavar="B", help="check the results in this directory")
    parser.add_argument(
        "--stage",
        action=one_or_more(STAGES),
        metavar=",".join(STAGES),
        help="compare only these stages of golden vectors (default: all stages in A)",
    )
    parser.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="use this .toml file as the map from A's taps to B's, if A was written by `parity pair --out`",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.set_defaults(run=run_compare)


def run_compare(options: argparse.Namespace) -> int:
    """Compare two directories of golden vectors, and return the exit code."""
    console = make_console()
    started = time.monotonic()
    check_writable(options.json)
    if is_pair(options.truth):
        if options.stage is not None:
            raise UsageError(f"{options.truth} was written by `parity pair --out`, which has no stages; remove --stage")
        return _compare_arrays(options, console)
    if options.names is not None:
        raise UsageError(f"{options.truth} contains golden vectors, whose names are fixed; remove --names")
    check_reference()
    findings: list[Finding] = []
    reports: list[FailureReport] = []
    with refusals(OSError, ValueError):
        pairs = read_pairs(options.truth, options.candidate, options.stage or tuple(STAGES))
        with console.status("running the reference") as status:
            for pair in pairs:
                of_model = list(compare_directories(pair, lambda what: status.update(Text(what))))
                findings += of_model
                reports += investigate(pair, of_model)
    backends = [pair.backend for pair in pairs]
    verdict = Verdict.of(findings, [pair.asked for pair in pairs])
    not_tested = [what for pair in pairs for what in pair.not_tested]
    print_summary(console, findings, backends, TITLES)
    print_near_ties(console, findings)
    print_skips(console, findings)
    print_problems(console, findings, verdict)
    for report in reports:
        print_failure_report(console, report)
    print_undiagnosed(console, findings, reports)
    print_coverage(console, verdict, not_tested)
    console.print(verdict_line(verdict, findings, backends, time.monotonic() - started))
    if options.json is not None:
        result = _result(options, pairs, findings, verdict)
        result["not_tested"] = not_tested
        result["blames"] = [report.blame.to_dict() for report in reports if report.blame]
        result["diagnoses"] = [report.to_dict() for report in reports]
        document = envelope("compare", result, exit_code=verdict.exit_code, seconds=time.monotonic() - started)
        write_results(document, (options.json, write_json))
    return verdict.exit_code


def _compare_arrays(options: argparse.Namespace, console: Console) -> int:
    """Compare two directories of arrays of any model."""
    with refusals(OSError, ValueError):
        given = {} if options.names is None else tomllib.loads(options.names.read_text("utf-8"))
        result = compare_arrays(options.truth, options.candidate, given)
    print_result(console, result)
    if options.json is not None:
        write_results(document(result, "compare"), (options.json, write_json))
    return result.verdict.exit_code


def _result(
    options: argparse.Namespace, pairs: Sequence[DirectoryPair], findings: Sequence[Finding], verdict: Verdict
) -> dict[str, Any]:
    """Return the verdict, the findings, and the producers of the directories as JSON-compatible values."""
    producers = [sorted({directory.producer for directory in side}) for side in zip(*map(_sides, pairs), strict=True)]
    return {
        **compared(findings, verdict),
        "truth": {"path": str(options.truth), "producers": producers[0]},
        "candidate": {"path": str(options.candidate), "producers": producers[1]},
    }


def _sides(pair: DirectoryPair) -> tuple[GoldenDirectory, GoldenDirectory]:
    return pair.truth, pair.candidate
