"""``parity translate``: translate lines of text in any backend, or compare the translations of multiple backends."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.translate.agreement import TranslationComparison, scorers
from transformer_parity.apps.translate.lines import Line, Translation
from transformer_parity.apps.translate.report import Tally, answers, differences
from transformer_parity.apps.translate.trained import Trained, read_trained
from transformer_parity.apps.translate.translator import WINDOW, Translator
from transformer_parity.cli.options import (
    FALLBACK,
    FALLBACK_HELP,
    add_backends,
    add_languages,
    add_machine,
    add_search,
    check_installed,
    described,
    directed,
    installed_backend,
    positive,
    search_options,
)
from transformer_parity.cli.progress import Progress
from transformer_parity.engine.report.envelope import envelope
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, printable, refusals
from transformer_parity.engine.system.interrupts import ctrl_c_waits
from transformer_parity.engine.tolerances import EPS
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.pairs import open_text, read_lines
from transformer_parity.transformer.sentences.vocabulary import most_tokens

COMMAND = "parity translate"
INCOMPLETE = 3

EXAMPLES = """\
examples:
  parity translate --text "Freitag, 3. Mai 2024"                              use the included date model
  parity translate --weights model.safetensors test.en > test.de
  echo "A dog runs." | parity translate --weights model.safetensors --backend jax
  parity translate --weights model.safetensors --beam 4 test.en               use the paper's beam size
  parity translate --weights model.safetensors --beam 4 --nbest 4 test.en     print all four hypotheses
  parity translate --weights model.safetensors --search rules=fairseq --search max_length=90 --beam 5 test.en
  parity translate --weights nllb.safetensors --from eng_Latn --to deu_Latn test.en
  parity translate --weights model.safetensors --compare --beam 4 test.en     compare all backends

To draw the attention weights of a translation, use `parity show attention --weights FILE --source TEXT`.

input: UTF-8 text with one sentence per line; a file can be gzipped

output: one line per input line, in the same order
  by default   the translation
  --nbest N    N lines per input line, best hypothesis first: line number<TAB>score<TAB>translation
  --json       one JSON object per input line, with the keys line, source, and hypotheses (each with text, score,
               pieces, and ids), followed by one line with the result of the command (see docs/result.schema.json)
The score is the log-probability in nats, divided by the length penalty if --beam is used. If there is no hypothesis,
the score is -inf. The translation of a blank line is an empty line. If a line is longer than the model's learned
positional encodings allow, or longer than 4,096 tokens, its translation is also empty; in this case, a warning
identifies the line, and the exit code is 3. If you press Ctrl-C, the output contains only complete lines, and standard
error shows how many input lines were translated. If a program that reads the output, such as `head`, exits early, the
command stops and exits with 3.

With --compare, the command prints only the lines that the backends translate differently. For each of these lines,
it uses the float64 reference to classify the difference as a near-tie (rounding may change the decision) or a
divergence. The last line shows the totals.

exit code: 0 everything translated, or no differences except near-ties; 1 a divergence; 3 not everything translated or
compared
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "translate",
        description="Translate text with a weight file written by `parity train` or `parity import`, using the "
        "vocabulary and search settings in the file. If the file contains no search settings, the command uses greedy "
        "search.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--weights",
        default=SHIPPED,
        type=Path,
        metavar="FILE",
        help="use this weight file, which must contain a vocabulary (default: the included model, which converts dates "
        "to ISO 8601)",
    )
    parser.add_argument("--text", metavar="LINE", help="translate this text instead of a file")
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="translate this file (default: standard input)"
    )
    add_backends(parser, None, f"all four for --compare, otherwise {FALLBACK_HELP}")
    add_search(parser)
    add_languages(parser)
    what = parser.add_argument_group("output")
    what.add_argument(
        "--nbest",
        type=positive,
        metavar="N",
        help="print the N best hypotheses with their scores; N > 1 requires beam search with a beam of at least N",
    )
    what.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per input line, followed by one JSON object with the result of the command",
    )
    what.add_argument(
        "--compare",
        action="store_true",
        help="print only the lines that the backends translate differently, with the reason for each difference",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype", choices=EPS, default="float32", help="set the dtype of weights and computation (default: float32)"
    )
    add_machine(machine)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Translate or compare the input, and return the exit code."""
    _check_options(options)
    backends = options.backends or (list(PORTS) if options.compare else [installed_backend(COMMAND)])
    check_installed(backends, 2 if options.compare else 1)
    with refusals(OSError, TypeError, ValueError):
        trained = directed(read_trained(options.weights), options)
        search = search_options(options, trained.search, options.nbest)
        trained = replace(trained, search=search)
        longest, most = search.max_length, most_tokens(trained.config)
        if "max_length" in dict(options.search) and longest is not None and longest > most:
            raise UsageError(f"max_length must be at most {most:,} for this model: got {longest:,}")
        total = _count_lines(options.file) if options.text is None else None
    output = _Output()
    try:
        with quiet_frameworks() as terminal, _failures(), _open(options) as file:
            is_typed = options.file is None and file.isatty()
            lines = read_lines(file, "--text" if options.text is not None else str(options.file or "standard input"))
            translator = Translator(trained.config, trained.vocabulary, search, 1 if is_typed else WINDOW)
            # If the translations are printed to the terminal, a progress bar would interfere with them.
            hidden = is_typed or (sys.stdout.isatty() and not options.compare)
            with _TranslationLog(terminal, backends, total, hidden=hidden) as show:
                ports = _load(options, trained, backends)
                if is_typed:
                    show.say("Enter one sentence per line. Press Ctrl-D to finish.")
                if options.compare:
                    found = translator.compare(ports, scorers(trained, options.dtype), lines, show.advance)
                    return _compare(options, found, show, output)
                (port,) = ports.values()
                return _translate(options, translator.translate(port, lines), show, output)
    except KeyboardInterrupt:
        print(f"{COMMAND}: interrupted: {output}", file=sys.stderr)
        return INCOMPLETE
    except UsageError as error:
        if output.answered:
            raise UsageError(f"{error} ({output})") from error
        raise


def _check_options(options: argparse.Namespace) -> None:
    """Raise a UsageError if any of the options would have no effect, or if the input file doesn't exist."""
    if options.text is not None and options.file is not None:
        raise UsageError(f"--text cannot be combined with a file; remove either --text or {options.file}")
    if options.file is not None and not os.path.exists(options.file):
        line = shlex.quote(str(options.file))
        raise UsageError(f"there is no file {options.file}; to translate the argument itself, use --text {line}")
    if not options.compare:
        if options.backends and len(options.backends) > 1:
            raise UsageError("without --compare, exactly one backend is required; specify only one, or add --compare")
        return
    if options.backends and len(options.backends) == 1:
        (one,) = options.backends
        other = "numpy" if one != "numpy" else FALLBACK[0]
        raise UsageError(
            f"--compare requires at least two backends; use, for example, --backends {one},{other}, or remove "
            "--backends to compare all four"
        )
    if options.nbest:
        raise UsageError("--compare prints only differences; remove --nbest")
    if options.dtype == "bfloat16" or options.precision == "fast":
        raise UsageError(
            "--compare supports only float64 and float32 with --precision highest; remove --dtype bfloat16 or "
            "--precision fast"
        )


@contextmanager
def _open(options: argparse.Namespace) -> Iterator[BinaryIO]:
    """Yield a binary stream that reads the text, the file (decompressed if necessary), or standard input."""
    if options.text is not None:
        yield io.BytesIO(options.text.encode("utf-8", "surrogateescape"))
        return
    if options.file is None:
        if sys.stdin is None:
            raise UsageError("standard input is closed; specify the file to translate")
        yield sys.stdin.buffer
        return
    with open_text(options.file) as file:
        yield file


@contextmanager
def _failures() -> Iterator[None]:
    """Convert exceptions to a UsageError if they are caused by the input, a file, a device, or a lack of memory."""
    with refusals(OSError, RuntimeError, ValueError):
        try:
            yield
        except MemoryError as error:
            raise UsageError(str(error) or "out of memory") from error


class _Output:
    """A writer for standard output that never leaves a line incomplete.

    Attributes:
        answered: The number of input lines whose output has been written.
    """

    def __init__(self) -> None:
        self.answered = 0

    def write(self, lines: Sequence[str]) -> None:
        """Write the output lines for one input line; control characters are escaped on a terminal."""
        if sys.stdout.isatty():
            lines = ["\t".join(map(printable, line.split("\t"))) for line in lines]
        with ctrl_c_waits():
            sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
            sys.stdout.buffer.flush()
            self.answered += 1

    def __str__(self) -> str:
        return f"stopped after input line {self.answered}" if self.answered else "nothing was written"


class _TranslationLog:
    """The progress display: bars with the number of translated lines, and warnings about lines that are too long."""

    def __init__(self, terminal: TextIO, backends: Sequence[str], total: int | None, *, hidden: bool) -> None:
        self.backends = backends
        self.progress = Progress(backends, total, terminal, hidden=hidden)
        self.say = self.progress.say
        self.left_empty = 0

    def __enter__(self) -> _TranslationLog:
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def advance(self, backend: str, lines: int) -> None:
        """Add the number of lines that a backend has just translated."""
        self.progress.update(backend, advance=lines)

    def pass_over(self, line: Line) -> None:
        """Count a line that isn't translated, and print a warning if it is too long."""
        for backend in self.backends:
            self.advance(backend, 1)
        if line.is_too_long:
            self.left_empty += 1
            lengths = f"the line has {len(line.ids):,} tokens, but at most {line.most:,} are supported"
            self.say(f"{COMMAND}: warning: the translation of line {line.number} is empty: {lengths}")


def _count_lines(path: Path | None) -> int | None:
    """Return the number of lines in a file, or None for inputs that can be read only once, such as a pipe."""
    if path is None or not path.is_file():
        return None
    with open_text(path) as file:
        return sum(1 for _ in read_lines(file, str(path)))


def _load(options: argparse.Namespace, trained: Trained, backends: Sequence[str]) -> dict[str, LoadedPort]:
    """Load the model in each backend, and return a dict from backend names to loaded ports."""
    loaded: dict[str, LoadedPort] = {}
    for name in backends:
        device = "cpu" if options.compare and name == "numpy" else options.device
        placement = Placement(options.dtype, device, options.precision)
        with ctrl_c_waits():  # frameworks may suppress a KeyboardInterrupt while they are being imported
            loaded[name] = PORTS[name].load(trained.config, trained.weights, placement)
    return loaded


def _translate(
    options: argparse.Namespace, translations: Iterable[Translation], show: _TranslationLog, output: _Output
) -> int:
    """Write the translations and return the exit code."""
    start = time.monotonic()
    for translation in translations:
        if not translation.hypotheses:
            show.pass_over(translation.line)
        else:
            show.advance(show.backends[0], 1)
        output.write(answers(translation, options.nbest, as_json=options.json))
    exit_code = INCOMPLETE if show.left_empty else 0
    if options.json:
        result = {"backends": show.backends, "lines": output.answered, "left_empty": show.left_empty}
        output.write([_envelope(result, exit_code, start, compares=False)])
    return exit_code


def _compare(
    options: argparse.Namespace, comparisons: Iterable[TranslationComparison], show: _TranslationLog, output: _Output
) -> int:
    """Write the lines that differ and the verdict, and return the exit code."""
    report: list[str] = []
    tally = Tally(show.backends, options.dtype)
    start = time.monotonic()
    for found in comparisons:
        if found.line.can_be_translated:
            tally.add(found)
            report += differences(found, as_json=options.json) if found.said else []
        else:
            show.pass_over(found.line)
    tally.left_empty, tally.seconds = show.left_empty, time.monotonic() - start
    show.progress.stop()
    last = _envelope(tally.to_dict(), tally.exit_code, start) if options.json else tally.verdict_line()
    output.write([*report, last])
    return tally.exit_code


def _envelope(result: dict[str, Any], exit_code: int, start: float, *, compares: bool = True) -> str:
    """Return the last line of the JSON output, which contains the result of the command."""
    environment, seconds = described(result["backends"]), time.monotonic() - start
    document = envelope(
        "translate", result, exit_code=exit_code, compares=compares, environment=environment, seconds=seconds
    )
    return json.dumps(document, ensure_ascii=False, allow_nan=False)
