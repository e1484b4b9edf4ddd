"""``parity selftest``: whether every known mistake is caught, located and named."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_parity.attacks.attack import TOLERATED
from transformer_parity.attacks.table import FAMILIES, Outcome, possible, trials
from transformer_parity.check.selftest import Trial, all_trials
from transformer_parity.cli.options import check_installed, one_or_more
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.compare.findings import FAILED
from transformer_parity.compare.verdict import EXIT_CODES
from transformer_parity.mistakes.catalogue import parts
from transformer_parity.mistakes.mistake import ALL
from transformer_parity.report.tables import print_line
from transformer_parity.system.child import ChildEndedError
from transformer_parity.system.files import check_writable, write_json, write_results

NAMED = 0.9  # of those that have a name
ATTACKS = "attacks"
DESCRIPTION = """\
Plant every known mistake in a copy of each port, one at a time, and compare it with the reference. Caught: the
comparison fails. Located: it fails first where the mistake is, and blame puts it there. Named: the diagnosis chooses
this mistake among all hypotheses; some have no name, because the failure itself says what it is.
Then try every attack on the verdict AGREE: none may end with that word, unless it is harmless.
"""


EXAMPLES = """\
examples:
  parity selftest                                  everything; a quarter of an hour on two cores
  parity selftest --backends torch --part norm     one part of the catalogue, in one port
  parity selftest --part attacks                   attacks on the verdict; no framework is needed
  parity selftest --json selftest.json             every mistake by name, for machines

exit code: 0 all caught and located, nine of ten named, every attack as expected; 1 not; 3 not everything could be tried
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Describe the options."""
    parser = commands.add_parser(
        "selftest",
        help="plant every known mistake: is it caught, located and named?",
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
        help=f"which ports, of {', '.join(ALL)} (default: all)",
    )
    names = [ATTACKS, *(name.replace(" ", "-") for name in parts())]
    parser.add_argument(
        "--part", action=one_or_more(names), default=names, metavar="NAME[,NAME]", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result for machines")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Try every mistake and every attack, and return the exit code."""
    console = make_console(120)
    check_writable(options.json)
    chosen = [name for name in parts() if name.replace(" ", "-") in options.part]
    attacks = possible() if ATTACKS in options.part else []
    if chosen:
        check_installed(options.backends)
    expected = sum(backend in m.edits for name in chosen for m in parts()[name] for backend in options.backends)
    started = time.monotonic()
    found: list[Trial] = []
    outcomes: list[Outcome] = []
    with Progress(["mistakes"] * bool(chosen) + [ATTACKS] * bool(attacks)) as progress:
        try:
            for trial in all_trials(options.backends, chosen) if chosen else ():
                found.append(trial)
                progress.update("mistakes", f"{trial.backend}: {trial.part}", advance=1, total=expected)
                progress.log(f"{trial.backend}: {trial.part}")
            for outcome in trials(attacks):
                outcomes.append(outcome)
                progress.update(ATTACKS, outcome.name, advance=1, total=len(attacks))
                progress.log(f"attacks: {outcome.family}")
        except KeyboardInterrupt:
            console.print("interrupted before everything was tried")
        except ChildEndedError as error:
            console.print(f"not everything could be tried: {error}", soft_wrap=True)
    order = {(backend, part): i for i, (backend, part) in enumerate((b, p) for b in options.backends for p in chosen)}
    found.sort(key=lambda trial: order[trial.backend, trial.part])
    if chosen:
        _print(console, found, options.backends, chosen)
    if attacks:
        print_attacks(console, outcomes)
    complete = len(found) == expected and len(outcomes) == len(attacks) and bool(found or outcomes)
    code = _exit_code(found, outcomes) if complete else EXIT_CODES[FAILED]
    nameable = [trial for trial in found if trial.named is not None]
    counts = []
    if chosen:
        counts = [
            f"{len(found):,} of {expected:,} mistakes planted: {sum(trial.caught for trial in found):,} caught, "
            f"{sum(trial.located for trial in found):,} located, "
            f"{sum(bool(trial.named) for trial in nameable):,} of {len(nameable):,} named"
        ]
    if attacks:
        right = sum(outcome.is_as_expected for outcome in outcomes)
        counts.append(f"{right:,} of {len(attacks):,} attacks end as expected")
    word = {0: "PASS", 1: "FAIL", 3: "INCOMPLETE"}[code]
    said = f"  {'; '.join(counts)}; {time.monotonic() - started:.0f} s."
    console.print(Text(word, "bold green" if code == 0 else "bold red") + Text(said, "default"))
    rows = {"trials": [trial.to_dict() for trial in found], "attacks": [one.to_dict() for one in outcomes]}
    write_results({"format": 2, "exit_code": code, **rows}, (options.json, write_json))
    return code


def print_attacks(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print how many attacks of each family end as expected, and every one that does not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attacks on AGREE", no_wrap=True)
    for column in ("tried", "as expected", "tolerated, rightly"):
        table.add_column(column, justify="right")
    for family in dict.fromkeys(outcome.family for outcome in outcomes):
        group = [outcome for outcome in outcomes if outcome.family == family]
        right = [outcome for outcome in group if outcome.is_as_expected]
        tolerated = sum(outcome.expected == TOLERATED for outcome in right)
        table.add_row(Text(FAMILIES[family]), str(len(group)), str(len(right)), str(tolerated))
    console.print(table)
    for outcome in outcomes:
        if not outcome.is_as_expected:
            said = f" {outcome.family}, {outcome.name}: expected {outcome.expected}, got {outcome.got}: {outcome.said}"
            print_line(console, "unexpected", "bold red", said)


def _exit_code(found: Sequence[Trial], outcomes: Sequence[Outcome]) -> int:
    named = [trial.named for trial in found if trial.named is not None]
    good = all(trial.caught and trial.located for trial in found) and sum(named) >= NAMED * len(named)
    return 0 if good and all(outcome.is_as_expected for outcome in outcomes) else 1


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
            print_line(console, f"{what:11}", "bold red", f" {trial.backend}, {trial.mistake}: {trial.said}")
