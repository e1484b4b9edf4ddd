"""``parity golden``: write down what a model computes, for ports in other languages and on other machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from reference_numpy.config import IMPLEMENTATIONS, DropoutRates, TransformerConfig
from reference_numpy.names import tap_shapes
from transformer_parity import vectors
from transformer_parity.cases import ACTIVATIONS, DECODE, GRADIENTS, STEPS, Case, port_deck, tiny
from transformer_parity.commands import one_or_more
from transformer_parity.commands.info import describe_machine
from transformer_parity.compare import OUTPUT, SCORES, TOKENS, observe_training
from transformer_parity.observe import WHOLE
from transformer_parity.plugin import PluginPort
from transformer_parity.ports import (
    PORTS,
    LoadedPort,
    MissingAbilityError,
    MissingFrameworkError,
    PackagePort,
    quiet_frameworks,
)
from transformer_parity.vectors import DTYPES, LeftOut

INCOMPLETE = 3
PRESETS = ("paper_base", "paper_learned", *IMPLEMENTATIONS)  # the others differ from these in sizes and rates
NO_DROPOUT = DropoutRates(embedding=0.0, residual=0.0)
OPTIONAL = {  # what a port need not show
    GRADIENTS: {"at *": "gradients at taps are not shown"},
    STEPS: {"* norm of the gradient": "norms of the gradient are not shown", "* moment *": "moments are not shown"},
}
Tensors = dict[str, ndarray]

EXAMPLES = """
examples:
  parity golden --out truth                          the reference, with the conventions of the paper
  parity golden --preset marian,fairseq --out truth  one folder for each of two published conventions
  parity golden --backend torch --device gpu --out mine
  parity golden --for mymodel:Port --out truth       the reference, with the conventions of a port of yours
  parity golden --port mymodel:Port --out mine       what that port computes
  parity compare truth mine

docs/golden.md describes the files, for a port that is not written in Python.

exit code: 0 written, 3 not
"""


def add_parser(commands: Any) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "golden",
        help="write inputs, weights and everything computed from them to files",
        description="Write down what a small model computes: every intermediate value, every gradient, twenty "
        "optimizer steps, greedy and beam search, with inputs and weights, as safetensors and JSON.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace golden vectors that are there already")
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--preset",
        type=one_or_more(PRESETS),
        metavar="NAME[,NAME]",
        help=f"whose conventions, at small sizes: {', '.join(PRESETS)} (default: paper_base)",
    )
    model.add_argument(
        "--for", dest="meant_for", metavar="MODULE:CLASS", help="with the conventions of a port of yours instead"
    )
    model.add_argument("--port", metavar="MODULE:CLASS", help="a port of yours, with its own conventions, computes")
    parser.add_argument("--backend", choices=PORTS, help="which package computes (default: numpy)")
    parser.add_argument(
        "--dtype", type=one_or_more(DTYPES), default=list(DTYPES), metavar=",".join(DTYPES), help="default: both"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), help="of the package (default: cpu)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write golden vectors and return the exit code."""
    try:
        if options.port and (options.backend or options.device):
            raise ValueError("a --port computes by itself, where it likes: leave out --backend and --device")
        with quiet_frameworks() as terminal:
            port = PluginPort(options.port) if options.port else PORTS[options.backend or "numpy"]
            configs = _configs(options)
            said = _write(options, port, configs, Console(file=terminal))
    except SystemExit as error:
        print(f"parity golden: error: the port called sys.exit({error.code!r})", file=sys.stderr)
        return INCOMPLETE
    except (MissingFrameworkError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"parity golden: error: {error}", file=sys.stderr)
        return INCOMPLETE
    print("\n".join(said))
    return 0


def _configs(options: argparse.Namespace) -> dict[str, TransformerConfig]:
    """Return the models to write by the names of their folders; a single one lies in the folder itself."""
    if own := options.port or options.meant_for:
        return {"": PluginPort(own).config()}
    presets = options.preset or ["paper_base"]
    configs = [tiny(name, d_k=None, d_v=None) for name in presets]
    return dict(zip(presets if len(presets) > 1 else [""], configs, strict=True))


def _write(
    options: argparse.Namespace,
    port: PackagePort | PluginPort,
    configs: Mapping[str, TransformerConfig],
    console: Console,
) -> list[str]:
    """Write all folders at once, or nothing, and return what there is to say about them."""
    said = []
    decks = {name: _deck(config) for name, config in configs.items()}
    with vectors.replaced(options.out, force=options.force) as folder:
        total = sum(dtype in case.dtypes for cases in decks.values() for case in cases for dtype in options.dtype)
        device = options.device or "cpu"
        producer = _describe(port, options.dtype, device)
        with _progress(console, port.name, total) as advance:
            for name, cases in decks.items():
                computed, left_out = _compute(port, cases, options.dtype, device, advance)
                dtypes = [dtype for dtype in options.dtype if any(dtype in tensors for _, tensors in computed)]
                if not computed:
                    reasons = ", ".join(dict.fromkeys(entry.reason for entry in left_out))
                    raise ValueError(f"{port.name} offers nothing that could be written: {reasons}")
                (folder / name).mkdir(exist_ok=True)
                config, weights = cases[0].config, cases[0].load_weights()
                vectors.write(folder / name, producer, config, weights, computed, dtypes, left_out)
                tensors = sum(len(tensors) for _, by_dtype in computed for tensors in by_dtype.values())
                where = options.out / name
                said.append(f"{where}: {len(computed)} cases, {' and '.join(dtypes)}, {tensors:,} tensors")
                said += [f"  left out: {_words(entry)}" for entry in left_out]
    return said


def _words(entry: LeftOut) -> str:
    what = " ".join(part for part in (entry.dtype, entry.case) if part != "*") or "everything"
    if entry.tensors != ("*",):
        what += f", {entry.tensors[0] if len(entry.tensors) == 1 else f'{len(entry.tensors)} tensors'}"
    return f"{what}: {entry.reason}"


def _deck(config: TransformerConfig) -> list[Case]:
    """Return the cases, without dropout in their config, and with nothing among the inputs that has no part in it."""
    cases = port_deck(config.replace(dropout=NO_DROPOUT))
    return [
        replace(case, inputs={"source_ids": case.inputs["source_ids"]}) if case.rung == DECODE else case
        for case in cases
    ]


def _describe(port: PackagePort | PluginPort, dtypes: Sequence[str], device: str) -> dict[str, Any]:
    """Return who computes, after making sure that it can do so here."""
    if isinstance(port, PluginPort):
        return {"name": port.name, "versions": port.describe(), "machine": describe_machine()}
    package = port.import_package()
    for dtype in dtypes:
        package.runtime.check_placement(dtype, device)
    return {"name": port.name, "device": device, "versions": package.describe(), "machine": describe_machine()}


def _compute(
    port: PackagePort | PluginPort,
    cases: Sequence[Case],
    dtypes: Sequence[str],
    device: str,
    advance: Callable[[str], None],
) -> tuple[list[tuple[Case, dict[str, Tensors]]], list[LeftOut]]:
    """Run all cases; return the tensors of each by dtype, and what the port does not offer."""
    weights = cases[0].load_weights()
    without = port.kind.left_out if isinstance(port, PluginPort) else {}
    left_out = [LeftOut(case.name, without[case.name]) for case in cases if case.name in without]
    computed: dict[str, dict[str, Tensors]] = {case.name: {} for case in cases}
    for dtype in dtypes:
        loaded: LoadedPort | None = None
        for case in cases:
            if dtype not in case.dtypes or case.name in without:
                continue
            advance(f"{dtype} {case.name}")
            try:
                if loaded is None or case.rung == STEPS:  # which have a model of their own: training changes it
                    loaded = port.load(case.config, weights, dtype, device, "highest")
                tensors = _run(case, loaded, dtype)
                left_out += [LeftOut(case.name, why, names) for names, why in _hidden(case, loaded, tensors)]
                computed[case.name][dtype] = tensors
            except MissingAbilityError as error:
                left_out.append(LeftOut(case.name, str(error), dtype=dtype))
            except Exception as error:
                raise RuntimeError(f"{port.name}, {dtype} {case.name}: {type(error).__name__}: {error}") from error
            if case.rung == STEPS:
                loaded = None
    return [(case, computed[case.name]) for case in cases if computed[case.name]], list(dict.fromkeys(left_out))


def _run(case: Case, loaded: LoadedPort, dtype: str) -> Tensors:
    """Return what a case computes, in the order of computation."""
    inputs = {name: array.copy() for name, array in case.inputs.items()}
    if case.rung == ACTIVATIONS:
        result = loaded.run(case.block, inputs, taps=True)
        return {**result.taps, OUTPUT: result.output}
    if case.rung == DECODE:
        if case.search is None:
            raise ValueError("a search needs its options")
        found = loaded.search(inputs["source_ids"], case.search)
        if found.nbest_ids.dtype.kind not in "iu":
            raise TypeError(f"tokens must be integers: got {found.nbest_ids.dtype}")
        scores = {} if found.nbest_scores is None else {SCORES: found.nbest_scores}
        return {TOKENS: found.nbest_ids.astype(np.int64), **scores}
    shown = observe_training(case, loaded, inputs, dtype)
    shown.pop(WHOLE, None)  # which is the others, one after another
    return shown


def _hidden(case: Case, loaded: LoadedPort, tensors: Tensors) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of what a port does not promise to show, and why."""
    unseen = [tap for tap in tap_shapes(case.config, 1, 1, 1) if not loaded.shows(tap)]
    if case.rung == ACTIVATIONS and unseen:
        yield tuple(unseen), "these taps are not shown"
    if case.rung == GRADIENTS and unseen and any(name.startswith("at ") for name in tensors):
        yield tuple(f"at {tap}" for tap in unseen), "gradients at these taps are not shown"
    if case.rung == DECODE and SCORES not in tensors:
        yield (SCORES,), "scores are not shown"
    for pattern, why in OPTIONAL.get(case.rung, {}).items():
        if not any(fnmatchcase(name, pattern) for name in tensors):
            yield (pattern,), why


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (
        SpinnerColumn(),
        "{task.fields[backend]}",
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=total, backend=name)
        begun = iter(range(total))

        def advance(doing: str) -> None:
            progress.update(bar, description=f"{name} {doing}", completed=next(begun))

        yield advance
