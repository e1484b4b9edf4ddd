"""``parity translate``: lines in, translations out, in any backend; or a comparison of the backends' translations."""

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
  parity translate --text "Freitag, 3. Mai 2024"                              the model that ships, which reads dates
  parity translate --weights model.safetensors test.en > test.de
  echo "A dog runs." | parity translate --weights model.safetensors --backend jax
  parity translate --weights model.safetensors --beam 4 test.en               as in the paper
  parity translate --weights model.safetensors --beam 4 --nbest 4 test.en     every hypothesis that was kept
  parity translate --weights model.safetensors --search rules=fairseq --search max_length=90 --beam 5 test.en
  parity translate --weights nllb.safetensors --from eng_Latn --to deu_Latn test.en
  parity translate --weights model.safetensors --compare --beam 4 test.en     do all backends translate alike?
  parity show attention --weights model.safetensors --source "A dog runs." --out dog.png    the attention of a
                                                                               translation

input: one sentence a line, UTF-8 (a file may be gzipped). As many lines come out, in the same order:
  by default   the translation
  --nbest N    line number<TAB>score<TAB>translation, N lines for each line of the input, best first; N may be 1
  --json       one object a line: line, source, hypotheses (each with text, score, pieces, ids); then one more line
               with the result of the command, as docs/result.schema.json describes it
A score is the log-probability in nats; with --beam, over the length penalty. It is -inf where there is no hypothesis.
A blank line yields an empty line. So does a line that is too long (for the model's learned positions, or over 4,096
tokens); a warning on standard error says which, and the exit code is 3. After Ctrl-C, what has been written is complete
lines from the first on, and standard error says how many lines of the input they answer. If the output is closed early,
as by `head`, the rest is not translated, and the exit code is 3 too.

--compare prints no translations, but each line that the backends translate differently, with the verdict by the
float64 reference: a near-tie, where rounding may change the decision, or a divergence. The last line counts them.

exit code: 0 all translated, or the same but for near-ties; 1 a divergence; 3 not everything translated or compared
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "translate",
        description="Translate text with a weight file that `parity train` or `parity import` wrote, with the "
        "vocabulary and the search settings in it; greedily, where it has none.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--weights",
        default=SHIPPED,
        type=Path,
        metavar="FILE",
        help="weights with their vocabulary (default: the model that ships, which turns dates into ISO 8601)",
    )
    parser.add_argument("--text", metavar="LINE", help="translate this, and no file")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the text (default: standard input)")
    add_backends(parser, None, f"{FALLBACK_HELP}; with --compare all four")
    add_search(parser)
    add_languages(parser)
    what = parser.add_argument_group("output")
    what.add_argument(
        "--nbest", type=positive, metavar="N", help="the N best hypotheses, with their scores; above 1 with --beam"
    )
    what.add_argument("--json", action="store_true", help="one JSON object a line, and one of the result at the end")
    what.add_argument("--compare", action="store_true", help="print where backends differ, and why; no translations")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype", choices=EPS, default="float32", help="of weights and computation (default: float32)"
    )
    add_machine(machine)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Translate or compare, and return the exit code."""
    _check_options(options)
    backends = options.backends or (list(PORTS) if options.compare else [installed_backend(COMMAND)])
    check_installed(backends, 2 if options.compare else 1)
    with refusals(OSError, TypeError, ValueError):
        trained = directed(read_trained(options.weights), options)
        search = search_options(options, trained.search, options.nbest)
        trained = replace(trained, search=search)
        longest, most = search.max_length, most_tokens(trained.config)
        if "max_length" in dict(options.search) and longest is not None and longest > most:
            raise UsageError(f"max_length must be at most {most:,} with this model: got {longest:,}")
        total = _count_lines(options.file) if options.text is None else None
    output = _Output()
    try:
        with quiet_frameworks() as terminal, _failures(), _open(options) as file:
            is_typed = options.file is None and file.isatty()
            lines = read_lines(file, "--text" if options.text is not None else str(options.file or "standard input"))
            translator = Translator(trained.config, trained.vocabulary, search, 1 if is_typed else WINDOW)
            # Translations that appear on the terminal are progress enough, and a bar would get in between.
            hidden = is_typed or (sys.stdout.isatty() and not options.compare)
            with _TranslationLog(terminal, backends, total, hidden=hidden) as show:
                ports = _load(options, trained, backends)
                if is_typed:
                    show.say("One sentence a line; Ctrl-D ends.")
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
    """Raise UsageError for options of which one would be ignored."""
    if options.text is not None and options.file is not None:
        raise UsageError(f"--text is translated instead of a file: leave out one of --text and {options.file}")
    if options.file is not None and not os.path.exists(options.file):
        line = shlex.quote(str(options.file))
        raise UsageError(f"there is no file {options.file}; to translate the text itself, write --text {line}")
    if not options.compare:
        if options.backends and len(options.backends) > 1:
            raise UsageError("one backend translates: name one, or compare several with --compare")
        return
    if options.backends and len(options.backends) == 1:
        (one,) = options.backends
        other = "numpy" if one != "numpy" else FALLBACK[0]
        raise UsageError(
            f"--compare needs at least two backends, such as --backends {one},{other}; without --backends, all four"
        )
    if options.nbest:
        raise UsageError("--compare prints no translations: leave out --nbest")
    if options.dtype == "bfloat16" or options.precision == "fast":
        raise UsageError("--compare measures the rounding of float64 and float32 only: leave out bfloat16 and fast")


@contextmanager
def _open(options: argparse.Namespace) -> Iterator[BinaryIO]:
    """Yield the bytes of a line, of a file, unpacked if it is gzipped, or of standard input."""
    if options.text is not None:
        yield io.BytesIO(options.text.encode("utf-8", "surrogateescape"))
        return
    if options.file is None:
        if sys.stdin is None:
            raise UsageError("standard input is closed: name the file to translate")
        yield sys.stdin.buffer
        return
    with open_text(options.file) as file:
        yield file


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of text, files, devices and memory into a UsageError."""
    with refusals(OSError, RuntimeError, ValueError):
        try:
            yield
        except MemoryError as error:
            raise UsageError(str(error) or "out of memory") from error


class _Output:
    """Standard output, in whole lines."""

    def __init__(self) -> None:
        self.answered = 0  # lines of the input

    def write(self, lines: Sequence[str]) -> None:
        """Write the lines that answer one line of the input; to a terminal, without control characters."""
        if sys.stdout.isatty():
            lines = ["\t".join(map(printable, line.split("\t"))) for line in lines]
        with ctrl_c_waits():
            sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
            sys.stdout.buffer.flush()
            self.answered += 1

    def __str__(self) -> str:
        return f"stopped after line {self.answered}" if self.answered else "nothing was written"


class _TranslationLog:
    """Shows, on a terminal, how many lines each backend has translated; and everywhere which lines are left empty."""

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
        """Count lines that a backend has translated."""
        self.progress.update(backend, advance=lines)

    def pass_over(self, line: Line) -> None:
        """Count a line that no backend is given; print a warning if it is too long."""
        for backend in self.backends:
            self.advance(backend, 1)
        if line.is_too_long:
            self.left_empty += 1
            lengths = f"{len(line.ids):,} tokens long, and may have at most {line.most:,}"
            self.say(f"{COMMAND}: line {line.number} is left empty: it is {lengths}")


def _count_lines(path: Path | None) -> int | None:
    """Return the number of lines of a file, which is read whole; None for what can be read only once."""
    if path is None or not path.is_file():
        return None
    with open_text(path) as file:
        return sum(1 for _ in read_lines(file, str(path)))


def _load(options: argparse.Namespace, trained: Trained, backends: Sequence[str]) -> dict[str, LoadedPort]:
    """Return the model in each backend."""
    loaded: dict[str, LoadedPort] = {}
    for name in backends:
        device = "cpu" if options.compare and name == "numpy" else options.device
        placement = Placement(options.dtype, device, options.precision)
        with ctrl_c_waits():  # which the import of a framework may swallow
            loaded[name] = PORTS[name].load(trained.config, trained.weights, placement)
    return loaded


def _translate(
    options: argparse.Namespace, translations: Iterable[Translation], show: _TranslationLog, output: _Output
) -> int:
    """Write translations, and return the exit code."""
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
    """Write the lines that differ, and the verdict; and return the exit code."""
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
    """Return the last line of the output for programs."""
    environment, seconds = described(result["backends"]), time.monotonic() - start
    document = envelope(
        "translate", result, exit_code=exit_code, compares=compares, environment=environment, seconds=seconds
    )
    return json.dumps(document, ensure_ascii=False, allow_nan=False)
