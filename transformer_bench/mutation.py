"""Mutation testing: measure how many small changes to this project's packages `parity check` detects.

    python -m transformer_bench.mutation --backends numpy,torch --results mutation.jsonl

Each mutant runs twice: as a user's port on the cases for ports, and as a package on the standard cases. It is caught if
a comparison fails, if it raises an exception, or if its process exits or hangs. The results file contains one line per
result. After Ctrl-C, the same command resumes with the remaining mutants.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from transformer_bench import tables
from transformer_bench.mutants import Mutant, mutants_of, sample
from transformer_bench.mutation_work import CHECK, COLUMNS, ColumnResult
from transformer_parity.cli.options import add_backends, check_installed, positive
from transformer_parity.cli.progress import Progress, make_console
from transformer_parity.engine.processes.child import Child, ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.system.files import check_writable, write_json, write_results
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.transformer.ports.registry import PORTS

WORK = "transformer_bench.mutation_work:work"  # the function that each process runs
# Maximum number of mutants per process. It is limited because the modified copies of a package stay in memory.
MOST = {"numpy": 400, "torch": 400, "jax": 40, "tf": 60}
PATIENCE = 30.0  # maximum time in seconds for a case or an import; a mutant that takes longer is considered to hang
# Maximum time in seconds for the unmodified package, including the compilation of operations that mutants reuse.
START = 300.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the mutants that don't have results yet, and print how many mutants are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_backends(parser, list(PORTS))
    parser.add_argument(
        "--results", type=Path, required=True, metavar="FILE", help="append results to this file, as JSON lines"
    )
    parser.add_argument(
        "--sample", type=positive, metavar="N", help="run N randomly chosen mutants of each package (default: all)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="set the random seed for choosing the mutants (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write a summary of all results and the machine as JSON"
    )
    parser.add_argument(
        "--only", metavar="FILE", type=Path, help="run only the mutants that survived according to this results file"
    )
    options = parser.parse_args(arguments)
    check_installed(options.backends)
    check_writable(options.results, options.json)
    prepare_environment()
    by_backend = {name: chosen(name, options.sample, options.seed) for name in options.backends}
    if options.only:
        surviving = {row["key"] for row in read(options.only) if not row["caught"]}
        by_backend = {name: [one for one in mine if one.key in surviving] for name, mine in by_backend.items()}
    rows = read(options.results)
    known = {key for key, count in Counter(row["key"] for row in rows).items() if count == len(COLUMNS)}
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["key"] in known)
    options.results.write_text(kept, "utf-8")  # removes a line that was only partially written
    with (
        Progress(options.backends) as progress,
        options.results.open("a", encoding="utf-8") as file,
        Children({**os.environ, "OMP_NUM_THREADS": "1"}) as children,
    ):
        for backend, mutants in by_backend.items():
            due = [mutant for mutant in mutants if mutant.key not in known]
            progress.update(backend, "unmodified package", completed=len(mutants) - len(due), total=len(mutants))
            for results in run(children, backend, due, options.results.with_suffix(f".{backend}.lines.json")):
                file.writelines(json.dumps(result.to_dict()) + "\n" for result in results)
                file.flush()
                progress.update(backend, results[0].key[:60], advance=1)
    rows = read(options.results)
    print_score(make_console(), by_backend, rows)
    write_results(summary(by_backend, rows), (options.json, write_json))


def summary(by_backend: Mapping[str, Sequence[Mutant]], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of mutants caught in each column, and the surviving mutants, as built-in Python types."""
    found = {(row["key"], row["column"]): row for row in rows}
    packages: dict[str, Any] = {}
    for backend, mutants in by_backend.items():
        done = [mutant for mutant in mutants if (mutant.key, CHECK) in found]
        packages[backend] = {"mutants": len(mutants_of(PORTS[backend].package)), "run": len(done), "columns": {}}
        for column in COLUMNS:
            pairs = [(mutant, found[mutant.key, column]) for mutant in done]
            packages[backend]["columns"][column] = {
                "caught": dict(Counter(row["caught"] for _, row in pairs if row["caught"])),
                "survivors": [{**asdict(mutant), "cases": row["cases"]} for mutant, row in pairs if not row["caught"]],
            }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "machine": describe_machine(), "packages": packages}


def chosen(backend: str, count: int | None, seed: int) -> Sequence[Mutant]:
    """Return all mutants of a package or, if ``count`` is not None, a random sample of this size."""
    mutants = mutants_of(PORTS[backend].package)
    return mutants if count is None else sample(mutants, count, seed)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results in a file, or an empty list if the file doesn't exist. Incomplete lines are ignored."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def run(children: Children, backend: str, mutants: Sequence[Mutant], file: Path) -> Iterator[list[ColumnResult]]:
    """For each mutant, yield a list with one result per column.

    Args:
        children: The object that starts and stops child processes.
        backend: The backend of the package.
        mutants: The mutants to run.
        file: A file to cache the source lines that each trial executes, because determining these lines takes minutes.

    Raises:
        ChildEndedError: If the unmodified package doesn't run.
    """
    due = list(mutants)
    while due:
        child = children.start(WORK)
        child.send((backend, json.loads(file.read_text("utf-8")) if file.is_file() else None))
        lines = next(message for message in _messages(children, child, START) if isinstance(message, dict))
        write_json(file, lines)
        if wrong := [trial for trial, ran in lines.items() if not ran]:
            print(f"skipped, because the unmodified package does not agree: {', '.join(wrong)}")
        for _ in range(MOST[backend]):
            if not due:
                break
            mutant = due.pop(0)
            child.send(mutant)
            try:
                yield next(message for message in _messages(children, child, PATIENCE) if isinstance(message, list))
            except ChildEndedError as error:
                yield [ColumnResult(mutant.key, column, "end", str(error)[:300], 0, 0.0) for column in COLUMNS]
                break
        children.stop(child)


def _messages(children: Children, child: Child, patience: float) -> Iterator[Any]:
    """Yield the messages of a child.

    Raises:
        ChildEndedError: If the child exits or is silent for too long.
    """
    for _, message in children.listen([child], patience=patience):
        if isinstance(message, ChildEndedError):
            raise message
        yield message


def print_score(
    console: Console, by_backend: Mapping[str, Sequence[Mutant]], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print the number of caught mutants in each column, and a list of the surviving mutants."""
    table = tables.table("mutants", *COLUMNS)
    for backend, mutants in by_backend.items():
        cells = []
        for column in COLUMNS:
            found = {row["key"]: row for row in rows if row["column"] == column}
            mine = [found[mutant.key] for mutant in mutants if mutant.key in found]
            cells.append(f"{sum(bool(row['caught']) for row in mine):,} of {len(mine):,}")
        table.add_row(backend, f"{len(mutants):,}", *cells)
    console.print(table)
    surviving = {(row["key"], row["column"]) for row in rows if not row["caught"]}
    for mutants in by_backend.values():
        for mutant in mutants:
            missed = [column for column in COLUMNS if (mutant.key, column) in surviving]
            if missed:
                console.print(
                    f"{mutant.place} {mutant.kind}: {mutant.old} -> {mutant.new}  survives: {', '.join(missed)}"
                )


if __name__ == "__main__":
    main()
