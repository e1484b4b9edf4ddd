"""``parity translate``: lines in, translations out, in any backend; or what all backends say, compared."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy import ndarray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

import reference_numpy as ref
from reference_numpy.checks import check_positions
from transformer_parity.cli.options import add_backends, add_search, positive, search_options
from transformer_parity.compare.near_ties import PrefixScorer, Tokens, summary
from transformer_parity.compare.tolerances import EPS
from transformer_parity.figures.attention import TAPS, draw_heads
from transformer_parity.figures.style import FORMATS, STYLE, write
from transformer_parity.ports.protocol import LoadedPort, MissingFrameworkError, Placement
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.environment import quiet_frameworks
from transformer_parity.system.interrupts import ctrl_c_waits
from transformer_parity.text.pairs import read_lines
from transformer_parity.translate.agreement import DIVERGENCE, NEAR_TIE, SAME, Comparison
from transformer_parity.translate.lines import Line, Translation
from transformer_parity.translate.trained import Trained, read_trained
from transformer_parity.translate.translator import WINDOW, Translator

COMMAND = "parity translate"
INCOMPLETE = 3

EXAMPLES = """\
examples:
  parity translate --weights model.safetensors test.en > test.de
  echo "A dog runs." | parity translate --weights model.safetensors --backend jax
  parity translate --weights model.safetensors --beam 4 test.en               as in the paper
  parity translate --weights model.safetensors --beam 4 --nbest 4 test.en     every hypothesis that was kept
  parity translate --weights model.safetensors --compare --beam 4 test.en     do all backends say the same?
  echo "A dog runs." | parity translate --weights model.safetensors --attention dog.png

input: one sentence a line, UTF-8 (a file may be gzipped). As many lines come out, in the same order:
  by default   the translation
  --scores     score<TAB>translation
  --nbest N    line number<TAB>score<TAB>translation, N lines for each line of the input, best first
  --json       one object a line: line, source, hypotheses (each with text, score, pieces, ids)
A score is the log-probability in nats; with --beam, over the length penalty. It is -inf where there is no hypothesis.
A blank line yields an empty line. So does a line that is longer than the model's learned positions; a warning on
standard error says which, and the exit code is 3. After Ctrl-C, what has been written is complete lines from the first
on, and standard error says how many lines of the input they answer.

--compare prints no translations, but each line of which the backends do not say the same, with the verdict of the
float64 reference: a near-tie, where rounding may turn the decision, or a divergence. The last line counts them.

exit code: 0 all translated, or the same but for near-ties; 1 a divergence; 3 not everything translated or compared
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "translate",
        help="translate lines of text in any backend, or compare what all of them say",
        description="Translate text with weights that `parity train` wrote, a checkpoint or the final ones: "
        "greedily, or with beam search.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights", required=True, type=Path, metavar="FILE", help="weights with their vocabulary")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the text (default: standard input)")
    add_backends(parser, None, "torch; all of them with --compare")
    add_search(parser)
    parser.add_argument(
        "--max-length", type=positive, metavar="N", help="tokens of a translation (default: source length + 50)"
    )
    what = parser.add_argument_group("output")
    what.add_argument("--scores", action="store_true", help="put its score before each translation")
    what.add_argument("--nbest", type=positive, metavar="N", help="the N best hypotheses of --beam, with their scores")
    what.add_argument("--json", action="store_true", help="one JSON object a line")
    what.add_argument("--compare", action="store_true", help="say where backends differ, and why; no translations")
    what.add_argument(
        "--attention", type=Path, metavar="FILE", help="also draw what the first translation attends to: .png or .svg"
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=EPS, default="float32", help="(default: float32)")
    machine.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="(default: cpu)")
    machine.add_argument("--precision", choices=["highest", "fast"], default="highest", help="(default: highest)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Translate or compare, and return the exit code."""
    output = _Output()
    try:
        _check_options(options)
        backends = options.backends or (list(PORTS) if options.compare else ["torch"])
        for name in backends:
            PORTS[name].check_installed()
        trained = read_trained(options.weights)
        search = search_options(options, options.max_length, options.nbest or 1)
        if options.max_length:
            check_positions("--max-length", options.max_length, trained.config.max_positions)
        total = _count_lines(options.file)
        with _open(options.file) as file, _quiet() as terminal:
            is_typed = options.file is None and file.isatty()
            lines = read_lines(file, str(options.file or "standard input"))
            translator = Translator(trained.config, trained.vocabulary, search, 1 if is_typed else WINDOW)
            # Translations that appear on the terminal are progress enough, and a bar would get in between.
            hidden = is_typed or (sys.stdout.isatty() and not options.compare)
            with _Show(terminal, backends, total, hidden=hidden) as show:
                ports = _load(options, trained, backends)
                if is_typed:
                    show.say("One sentence a line; Ctrl-D ends.")
                work = _compare if options.compare else _translate
                return work(options, trained, translator, ports, lines, show, output)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print(f"{COMMAND}: interrupted: {output}", file=sys.stderr)
    except (MissingFrameworkError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        stopped = f" ({output})" * (output.answered > 0)
        print(f"{COMMAND}: error: {error or 'out of memory'}{stopped}", file=sys.stderr)
    return INCOMPLETE


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options of which one would be ignored."""
    if options.nbest and options.nbest > (options.beam or 0):
        raise ValueError(f"--nbest {options.nbest} needs a beam that is as wide: add --beam {max(options.nbest, 4)}")
    if options.attention and options.attention.suffix.lower().removeprefix(".") not in FORMATS:
        raise ValueError(f"--attention must end in .png or .svg: got {options.attention}")
    if not options.compare:
        if options.backends and len(options.backends) > 1:
            raise ValueError("one backend translates: name one, or let them be compared with --compare")
        return
    if options.backends and len(options.backends) == 1:
        raise ValueError("--compare needs at least two backends")
    if given := [f"--{name}" for name in ("scores", "nbest", "attention") if getattr(options, name)]:
        raise ValueError(f"--compare prints no translations: leave out {', '.join(given)}")
    if options.dtype == "bfloat16" or options.precision == "fast":
        raise ValueError("--compare knows the rounding of full float64 and float32 only: leave out bfloat16 and fast")


@contextmanager
def _open(path: Path | None) -> Iterator[BinaryIO]:
    if path is None:
        yield sys.stdin.buffer
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield file  # type: ignore[misc]  # gzip's is one but for its class


class _Output:
    """Standard output, in whole lines."""

    def __init__(self) -> None:
        self.answered = 0  # lines of the input

    def write(self, lines: Sequence[str]) -> None:
        """Write what answers a line of the input."""
        with ctrl_c_waits():
            sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
            sys.stdout.buffer.flush()
            self.answered += 1

    def __str__(self) -> str:
        return f"stopped after line {self.answered}" if self.answered else "nothing was written"


@contextmanager
def _quiet() -> Iterator[TextIO]:
    """Hold back what frameworks print, also where it explains nothing: after Ctrl-C, and after an error of our own."""
    stopped = None
    with quiet_frameworks() as terminal:
        try:
            yield terminal
        except (KeyboardInterrupt, OSError, ValueError) as error:
            stopped = error
    if stopped is not None:
        raise stopped


class _Show:
    """Shows, on a terminal, how far each backend is; and says what is left out, also elsewhere."""

    def __init__(self, terminal: TextIO, backends: Sequence[str], total: int | None, *, hidden: bool) -> None:
        console = Console(file=terminal)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        hidden = hidden or not console.is_terminal
        self.progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self.bars = {name: self.progress.add_task(name, total=total) for name in backends}
        self.left_empty = 0

    def __enter__(self) -> _Show:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bars."""
        self.progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def advance(self, backend: str, lines: int) -> None:
        """Note that a backend has done some lines."""
        self.progress.advance(self.bars[backend], lines)

    def pass_over(self, line: Line) -> None:
        """Note a line that no backend was given; say so if it should not be."""
        for backend in self.bars:
            self.advance(backend, 1)
        if line.is_too_long:
            self.left_empty += 1
            lengths = f"{len(line.ids)} tokens long, and the model has {line.positions} positions"
            self.say(f"{COMMAND}: line {line.number} is left empty: it is {lengths}")


def _count_lines(path: Path | None) -> int | None:
    """Return how many lines a file has, once all of it has been read; None for what can be read only once."""
    if path is None or not path.is_file():
        return None
    with _open(path) as file:
        return sum(1 for _ in read_lines(file, str(path)))


def _load(options: argparse.Namespace, trained: Trained, backends: Sequence[str]) -> dict[str, LoadedPort]:
    loaded: dict[str, LoadedPort] = {}
    for name in backends:
        device = "cpu" if options.compare and name == "numpy" else options.device
        placement = Placement(options.dtype, device, options.precision)
        with ctrl_c_waits():  # which the import of a framework may swallow
            loaded[name] = PORTS[name].load(trained.config, trained.weights, placement)
    return loaded


def _translate(
    options: argparse.Namespace,
    trained: Trained,
    translator: Translator,
    ports: Mapping[str, LoadedPort],
    lines: Iterator[str],
    show: _Show,
    output: _Output,
) -> int:
    """Write translations, and return the exit code."""
    ((backend, port),) = ports.items()
    to_draw = options.attention
    for translation in translator.translate(port, lines):
        if not translation.hypotheses:
            show.pass_over(translation.line)
        else:
            show.advance(backend, 1)
            if to_draw:
                _draw(port, trained, translation, to_draw)
                to_draw = None
        output.write(_format(translation, options))
    if to_draw:
        raise ValueError("no line was translated: there is nothing to draw")
    return INCOMPLETE if show.left_empty else 0


def _format(translation: Translation, options: argparse.Namespace) -> list[str]:
    """Return the lines that answer one line."""
    line, hypotheses = translation.line, list(translation.hypotheses)
    if options.json:
        found = [vars(hypothesis) for hypothesis in hypotheses]
        answer = {"line": line.number, "source": line.text, "hypotheses": found}
        return [json.dumps(answer, ensure_ascii=False, allow_nan=False)]
    wanted = options.nbest or 1
    scored = [f"{hypothesis.score:.4f}\t{hypothesis.text}" for hypothesis in hypotheses]
    scored += ["-inf\t"] * (wanted - len(hypotheses))
    if options.nbest:
        return [f"{line.number}\t{answer}" for answer in scored]
    return scored if options.scores else [translation.text]


def _compare(
    options: argparse.Namespace,
    trained: Trained,
    translator: Translator,
    ports: Mapping[str, LoadedPort],
    lines: Iterator[str],
    show: _Show,
    output: _Output,
) -> int:
    """Write what differs, and the verdict; and return the exit code."""

    @cache
    def reference(dtype: str) -> ref.Transformer:
        return ref.Transformer.from_weights(trained.config, trained.weights, dtype)

    def judge(source: ndarray) -> PrefixScorer:
        rounded = None if options.dtype == "float64" else reference(options.dtype)
        return PrefixScorer(reference("float64"), rounded, source)

    report: list[str] = []
    counts = dict.fromkeys((SAME, NEAR_TIE, DIVERGENCE), 0)
    start = time.monotonic()
    for found in translator.compare(ports, judge, lines, show.advance):
        if found.line.can_be_translated:
            counts[found.verdict] += 1
            report += _describe(found, options) if found.said else []
        else:
            show.pass_over(found.line)
    code = 1 if counts[DIVERGENCE] else INCOMPLETE if show.left_empty or not any(counts.values()) else 0
    show.progress.stop()
    report.append(_verdict(code, counts, show, time.monotonic() - start, options))
    output.write(report)
    return code


def _describe(found: Comparison, options: argparse.Namespace) -> list[str]:
    """Return the lines that say who says what, and why."""
    if options.json:
        doubts = [
            {"backend": backend, "token": doubt.step, "what": doubt.what}
            | {"margin": doubt.margin if doubt.margin < math.inf else "inf", "noise": doubt.noise}
            for backend, doubts in found.doubts.items()
            for doubt in doubts
        ]
        said = {backend: vars(hypothesis) for backend, hypothesis in found.said.items()}
        answer = {"line": found.line.number, "verdict": found.verdict, "source": found.line.text}
        return [json.dumps({**answer, "said": said, "doubts": doubts}, ensure_ascii=False, allow_nan=False)]
    by_ids: dict[Tokens, list[str]] = {}
    for backend, hypothesis in found.said.items():
        by_ids.setdefault(hypothesis.ids, []).append(backend)
    texts = {"source": found.line.text}
    texts |= {", ".join(backends): found.said[backends[0]].text for backends in by_ids.values()}
    width = max(map(len, texts))
    return [
        f"line {found.line.number}: {found.verdict}",
        *(f"  {who:{width}}  {text}" for who, text in texts.items()),
        *(f"  {backend} in {summary(doubts)}" for backend, doubts in found.doubts.items() if doubts),
    ]


def _verdict(code: int, counts: Mapping[str, int], show: _Show, seconds: float, options: argparse.Namespace) -> str:
    """Return the last line: one word, and what it stands on."""
    word = {0: "AGREE", 1: "DIVERGE", INCOMPLETE: "INCOMPLETE"}[code]
    if options.json:
        numbers = {"lines": sum(counts.values()), **counts, "left_empty": show.left_empty, "seconds": round(seconds, 1)}
        return json.dumps({"verdict": word.lower(), "backends": list(show.bars), "dtype": options.dtype, **numbers})
    counted = ", ".join(f"{count:,} {what}" + "s" * (what != SAME and count != 1) for what, count in counts.items())
    counted += f", {show.left_empty:,} too long" * (show.left_empty > 0)
    lines = sum(counts.values())
    who = ", ".join(show.bars)
    return f"{word}  {who} in {options.dtype}, {lines:,} line{'s' * (lines != 1)}: {counted}; {seconds:.0f} s."


def _draw(port: LoadedPort, trained: Trained, translation: Translation, path: Path) -> None:
    """Draw what the heads of the last decoder layer attend to while they say each token."""
    import matplotlib

    config, line, said = trained.config, translation.line, translation.hypotheses[0]
    inputs = {"source_ids": np.array([line.ids]), "target_ids": np.array([[config.bos_id, *said.ids[:-1]]])}
    last = config.num_decoder_layers - 1
    heads = port.run("", inputs, taps=True).taps[TAPS["cross"].format(last)][0].astype(np.float64)  # [H, T, S]
    source = [*trained.vocabulary.pieces(line.text), "</s>"]
    title = f"Cross-attention of decoder layer {last}, the last one; {trained.path.name}"
    with matplotlib.rc_context(STYLE):
        write(draw_heads(heads, said.pieces, source, title), path)
