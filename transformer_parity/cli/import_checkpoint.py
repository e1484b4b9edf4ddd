"""``parity import`` and ``parity export``: convert checkpoints from and to the formats of other software."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.checkpoints.importer import (
    EXPORTS,
    FORMATS,
    check_empty,
    export_checkpoint,
    import_checkpoint,
    load,
    save,
)
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.proof import Agreement, check_against_transformers, prove
from transformer_parity.apps.checkpoints.summary import describe, print_model
from transformer_parity.cli.options import add_backends, check_installed, field
from transformer_parity.cli.progress import PlainConsole, make_console
from transformer_parity.engine.findings import AGREES, FAILED, SKIPPED
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, printable, refusals
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.verdict import EXIT_CODES, LAST_WORDS, SEVERITY, WORDS
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.files import open_file
from transformer_spec.names import FLOAT_DTYPES

CHECKED = "hf"  # the format that --check requires, because transformers loads only this format

FORMATS_LISTED = "\n  ".join(f"{name:12} {title}" for name, (_, title) in FORMATS.items())
IMPORT_EXAMPLES = f"""\
examples:
  parity import opus-mt-en-de/                            only describe the checkpoint
  parity import opus-mt-en-de/ --out en-de.safetensors    convert weights, vocabulary, and search settings to one file
  parity translate --weights en-de.safetensors --backend jax test.en
  parity import opus-mt-en-de/ --out en-de.safetensors --check    also compare with transformers

formats:
  {FORMATS_LISTED}

The command never executes code from a checkpoint, reads only files that you specify and files in the checkpoint's
directory, and never downloads anything. If a checkpoint's flags contradict its tensors, the command uses the tensors
and prints a note. If a checkpoint uses an unsupported feature, the command stops with an error that identifies the
feature.

After writing the file, the command computes a few logits from it, in float64 and float32 in every installed backend,
and compares them with the reference. This verifies that the model works the same in all backends. For a Hugging Face
checkpoint, --check also compares logits and translations with transformers, which must be installed.

exit code: 0 described or imported, and every comparison agrees; 1 a comparison differs; 2 float32 differs, but float64
agrees; 3 not imported, or a requested comparison was not possible
"""
EXPORT_EXAMPLES = f"""\
examples:
  parity export model.safetensors --format hf --out model-hf/     write a directory for `from_pretrained`

formats: {", ".join(EXPORTS)}

If the target software does not support the model, the command reports the reason and does not write anything.

exit code: 0 written, 3 not written
"""


def add_parser(commands: Any) -> None:
    """Add ``parity import`` and its options to the parser."""
    parser = commands.add_parser(
        "import",
        description="Read a checkpoint from other software, describe it, and convert it to one weight file that every "
        "backend can load.",
        epilog=IMPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="import this directory or file")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the weight file here (default: only describe the checkpoint)"
    )
    parser.add_argument(
        "--as", dest="format", choices=FORMATS, help="read the checkpoint in this format (default: detect the format)"
    )
    parser.add_argument(
        "--dtype", choices=FLOAT_DTYPES, help="store the weights in this dtype (default: the dtype of the checkpoint)"
    )
    ask = parser.add_argument_group("information that checkpoints in some formats do not contain")
    ask.add_argument(
        "--vocab",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="read the vocabulary from these files; specify the source file before the target file",
    )
    ask.add_argument("--names", type=Path, metavar="FILE", help="read the tensor names from this TOML file")
    ask.add_argument(
        "--set",
        dest="fields",
        action="append",
        default=[],
        type=field,
        metavar="FIELD=VALUE",
        help="set a field of the config, such as num_heads=8; can be repeated",
    )
    proof = parser.add_argument_group("verification")
    proof.add_argument(
        "--check", action="store_true", help="also compare with transformers (Hugging Face checkpoints only)"
    )
    add_backends(proof, None, "all that are installed")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the description and the comparisons as JSON"
    )
    parser.set_defaults(run=run)


def add_parser_export(commands: Any) -> None:
    """Add ``parity export`` and its options to the parser."""
    parser = commands.add_parser(
        "export",
        description="Convert a weight file written by `parity train` or `parity import` to a format that other "
        "software can load.",
        epilog=EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", type=Path, metavar="FILE", help="export this weight file or training checkpoint")
    parser.add_argument("--format", choices=EXPORTS, required=True, help="convert to this format")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="write to this directory, which must be new or empty"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.set_defaults(run=run_export)


def run(options: argparse.Namespace) -> int:
    """Import a checkpoint and return the exit code."""
    check_writable(options.out, options.json)
    started = time.monotonic()
    _check_out(options.out)
    check_installed(options.backends or ())
    asked = ReadOptions(vocab=tuple(options.vocab), names=options.names, fields=dict(options.fields))
    proof: list[Agreement] = []
    with quiet_frameworks() as terminal, refusals(OSError, RuntimeError, TypeError, ValueError):
        console = PlainConsole(file=terminal)
        with _saying(console, f"reading {options.path}"):
            imported = import_checkpoint(options.path, options.format, asked)
        if options.check and imported.origin.format != CHECKED:
            what = f"--check requires {FORMATS[CHECKED][1]}"
            raise UsageError(f"{what}, but {options.path} has the format {imported.origin.format}; remove --check")
        make_console().print(printable(str(options.path)), soft_wrap=True)
        print_model(make_console(), imported)
        if options.out:
            with _saying(console, f"writing {options.out}"):
                save(options.out, imported, options.dtype)
            print(f"wrote {printable(str(options.out))} ({options.out.stat().st_size / 1e6:,.1f} MB)")
            with _saying(console, "logits") as say:
                proof = _prove(options, say)
        if options.check:
            with _saying(console, "loading transformers") as say:
                proof += check_against_transformers(options.path, imported, say)
    _print_proof(proof)
    if not options.out:
        print("No file was written. To convert the checkpoint, add --out FILE.")
    exit_code = _verdict(options, proof)
    if options.json is not None:
        result = _summary(options, imported, proof)
        compares, seconds = bool(proof) or options.check, time.monotonic() - started
        document = envelope("import", result, exit_code=exit_code, compares=compares, seconds=seconds)
        write_results(document, (options.json, write_json))
    return exit_code


def _check_out(out: Path | None) -> None:
    """Ensure that ``--out`` overwrites only weight files.

    Raises:
        UsageError: If ``--out`` already exists and isn't a weight file.
    """
    if out is None or not out.is_file() or not out.stat().st_size:
        return
    try:
        with open_file(out, "weight file"):
            return
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--out must be a new file or an existing weight file: got {out}, which is not a weight file"
        ) from error


def _prove(options: argparse.Namespace, say: Any) -> list[Agreement]:
    """Compute logits from the written file in each backend, and compare the logits with the reference's logits.

    If the user presses Ctrl-C, print a message that the file is complete but hasn't been verified.
    """
    installed = [name for name, port in PORTS.items() if port.missing() is None]
    try:
        return prove(options.out, options.backends or installed, say)
    except KeyboardInterrupt:
        out = printable(str(options.out))
        print(f"parity import: {out} is complete, but has not been compared with the reference", file=sys.stderr)
        raise


def run_export(options: argparse.Namespace) -> int:
    """Export a weight file and return the exit code."""
    check_writable(options.json)
    started = time.monotonic()
    with quiet_frameworks() as terminal, refusals(OSError, RuntimeError, TypeError, ValueError):
        check_empty(options.out)
        with _saying(PlainConsole(file=terminal), f"writing {options.out}"):
            model = load(options.weights)
            notes = export_checkpoint(model, options.format, options.out)
        if model.vocabulary is None:
            notes = (f"{options.weights} contains no vocabulary, so no tokenizer was written", *notes)
        for note in notes:
            print(printable(f"note: {note}"))
        files = sorted(path.name for path in options.out.iterdir())
        print(f"wrote {printable(str(options.out))}: {', '.join(files)}")
    if options.json is not None:
        result = {"path": str(options.weights), "out": str(options.out), "format": options.format}
        result |= {"files": files, "notes": list(notes)}
        document = envelope("export", result, compares=False, seconds=time.monotonic() - started)
        write_results(document, (options.json, write_json))
    return 0


@contextmanager
def _saying(console: PlainConsole, text: str) -> Iterator[Any]:
    """Show a status text on a terminal, and yield a function that replaces the text."""
    with console.status(Text(printable(text))) as status:
        yield lambda text: status.update(Text(printable(text)))


def _print_proof(proof: list[Agreement]) -> None:
    """Print one row per comparison."""
    if not proof:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("logits of", "dtype", "error", "tolerance", "result"):
        table.add_column(column, justify="right" if column in ("error", "tolerance") else "left", overflow="fold")
    for one in proof:
        error = "-" if one.error is None else f"{one.error:.1e}"
        verdict = {SKIPPED: "NOT CHECKED", AGREES: "agrees"}.get(one.verdict, WORDS[one.verdict])
        why = f"{verdict}: {one.why}" if one.why else verdict
        table.add_row(printable(one.name), one.dtype, error, f"{one.allowed:.1e}", printable(why))
    make_console().print(table)


def _verdict(options: argparse.Namespace, proof: list[Agreement]) -> int:
    """Print the verdict on all comparisons, and return the exit code."""
    compared = [one for one in proof if one.verdict != SKIPPED]
    worst = max((one.verdict for one in compared), key=SEVERITY.index, default=AGREES)
    if worst == AGREES and options.check and not {one.name for one in compared} - set(PORTS):
        print("INCOMPLETE  --check requested a comparison with transformers, but none was made")
        return EXIT_CODES[FAILED]
    if compared:
        names = dict.fromkeys(printable(one.name) for one in compared if one.verdict == worst)
        print(f"{LAST_WORDS[worst]}  {', '.join(names)}")
    return EXIT_CODES[worst]


def _summary(options: argparse.Namespace, imported: Imported, proof: list[Agreement]) -> dict[str, Any]:
    """Return the description and the comparisons for the JSON file."""
    return {
        "path": str(options.path),
        "out": str(options.out) if options.out else None,
        **describe(imported),
        "proof": [
            {"name": one.name, "dtype": one.dtype, "error": one.error, "allowed": one.allowed, "why": one.why}
            for one in proof
        ],
    }
