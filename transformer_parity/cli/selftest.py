"""``parity selftest``: check that every bug in the bug catalog is caught, located, and named."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_parity.cli.options import check_installed, one_or_more
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.findings import FAILED
from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.report.envelope import WORDS, envelope
from transformer_parity.engine.report.tables import print_line
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.verdict import EXIT_CODES
from transformer_parity.transformer.bugs.bug import ALL
from transformer_parity.transformer.bugs.catalog import parts
from transformer_parity.transformer.check.known_numbers import check_reference
from transformer_parity.transformer.selftest.trials import Trial, all_trials

NAMED = 0.9  # minimum fraction of the identifiable bugs that the diagnosis must name
DESCRIPTION = """\
Inject the bugs of the bug catalog into a copy of each port, one at a time, and compare the copy with the reference
(mutation testing). A bug is caught if the comparison fails. It is located if the first failure and the replay of
individual blocks both point to the block with the bug. It is named if the diagnosis selects this bug from all
candidates. A bug whose failure is self-explanatory, such as a wrong shape, doesn't need to be named.
"""


EXAMPLES = """\
examples:
  parity selftest                                  inject all bugs (takes 15 minutes on two cores)
  parity selftest --backends torch --part norm     inject one part of the bug catalog into one port
  parity selftest --json selftest.json             also write the result for each bug as JSON

exit code: 0 all bugs are caught and located, and at least 90% are named; 1 otherwise; 3 not all bugs were tried
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its options to the parser."""
    parser = commands.add_parser(
        "selftest",
        help="inject known bugs into the ports and check that each is detected",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        action=one_or_more(ALL),
        default=list(ALL),
        metavar="NAME[,NAME]",
        help=f"inject bugs into these ports, given as a comma-separated list of {', '.join(ALL)} (default: all)",
    )
    names = [name.replace(" ", "-") for name in parts()]
    parser.add_argument(
        "--part",
        action=one_or_more(names),
        default=names,
        metavar="NAME[,NAME]",
        help=f"inject only the bugs in these parts of the bug catalog (default: all): {', '.join(names)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for each bug as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Inject every selected bug and return the exit code."""
    console = make_console(120)
    check_writable(options.json)
    check_reference()
    chosen = [name for name in parts() if name.replace(" ", "-") in options.part]
    check_installed(options.backends)
    expected = sum(backend in m.edits for name in chosen for m in parts()[name] for backend in options.backends)
    started = time.monotonic()
    found: list[Trial] = []
    with Progress(["bugs"]) as progress:
        try:
            for trial in all_trials(options.backends, chosen):
                found.append(trial)
                progress.update("bugs", f"{trial.backend}: {trial.part}", advance=1, total=expected)
                progress.log(f"{trial.backend}: {trial.part}")
        except KeyboardInterrupt:
            console.print("interrupted before all bugs were tried")
        except ChildEndedError as error:
            console.print(f"not all bugs could be tried: {error}", soft_wrap=True)
    order = {(backend, part): i for i, (backend, part) in enumerate((b, p) for b in options.backends for p in chosen)}
    found.sort(key=lambda trial: order[trial.backend, trial.part])
    _print(console, found, options.backends, chosen)
    code = _exit_code(found) if found and len(found) == expected else EXIT_CODES[FAILED]
    nameable = [trial for trial in found if trial.named is not None]
    said = (
        f"{len(found):,} of {expected:,} bugs injected: {sum(trial.caught for trial in found):,} caught, "
        f"{sum(trial.located for trial in found):,} located, "
        f"{sum(bool(trial.named) for trial in nameable):,} of {len(nameable):,} named; "
        f"{time.monotonic() - started:.0f} s."
    )
    console.print(Text(WORDS[code], "bold green" if code == 0 else "bold red") + Text(f"  {said}", "default"))
    if options.json is not None:
        rows = {"backends": options.backends, "expected": expected, "trials": [trial.to_dict() for trial in found]}
        result = envelope("selftest", rows, exit_code=code, seconds=time.monotonic() - started)
        write_results(result, (options.json, write_json))
    return code


def _exit_code(found: Sequence[Trial]) -> int:
    named = [trial.named for trial in found if trial.named is not None]
    good = all(trial.caught and trial.located for trial in found) and sum(named) >= NAMED * len(named)
    return 0 if good else 1


def _print(console: Console, found: Sequence[Trial], backends: Sequence[str], chosen: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for backend in backends:
        table.add_column(f"{backend}\ncaught", justify="right")
        table.add_column("\nlocated", justify="right")
        table.add_column("\nnamed", justify="right")
    for part in chosen:
        row = [part]
        for backend in backends:
            group = [trial for trial in found if trial.part == part and trial.backend == backend]
            named = [trial for trial in group if trial.named is not None]
            row.append(f"{sum(trial.caught for trial in group)}/{len(group)}")
            row.append(f"{sum(trial.located for trial in group)}/{len(group)}")
            row.append(f"{sum(bool(trial.named) for trial in named)}/{len(named)}" if named else "-")
        table.add_row(*row)
    console.print(table)
    for trial in found:
        if not (trial.caught and trial.located and trial.named is not False):
            what = "not caught" if not trial.caught else "not located" if not trial.located else "not named"
            print_line(console, f"{what:11}", "bold red", f" {trial.backend}, {trial.bug}: {trial.said}")
