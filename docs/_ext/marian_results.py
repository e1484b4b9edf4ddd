"""Tables generated from the committed results of the comparison with Marian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from panes import TITLES
from results import RESULTS, read, stamp


def marian(part: str) -> Iterator[str]:
    """Yield the lines of the text and tables of one part: ``summary``, ``combinations``, ``batches``, ``training``."""
    report = read(RESULTS / "marian.json")
    yield from PARTS[part](report)


def summary(report: dict[str, Any]) -> Iterator[str]:
    """Yield sentences with the totals and the versions."""
    rows = report["combinations"]
    verdicts = {name: [row for row in rows if row["verdict"] == name] for name in ("agrees", "decoder differs")}
    compared = [row for rows in verdicts.values() for row in rows]
    agreeing = verdicts["agrees"]
    searches = [one for row in agreeing for result in row["backends"].values() for one in result["searches"]]
    lists, equal = (sum(one[name] for one in searches) for name in ("sentences", "equal_lists"))
    pairs = max(result["score_error"] for row in compared for result in row["backends"].values())
    yield (
        f"Marian's scorer and `parity` agree in all {len(compared)} combinations of options that were compared. The "
        f"largest relative difference between two scores is {pairs:.1e}. In {len(agreeing)} combinations, Marian's "
        f"decoder also agrees: {equal:,} of {lists:,} lists of translations are equal. The largest relative difference "
        f"between the scores of these translations is {max(one['score_error'] for one in searches):.1e}, because "
        "Marian prints six digits."
    )
    yield ""
    yield stamp(report, {"pymarian": f"{report['versions']['pymarian']} (Marian {report['versions']['marian']})"})


def combinations(report: dict[str, Any]) -> Iterator[str]:
    """Yield one table of the compared combinations, and one of the rejected ones."""
    yield "| combination | Marian's options | backends | largest difference of scores | equal lists | verdict |"
    yield "|---|---|---|---:|---|---|"
    for row in report["combinations"]:
        if "backends" not in row:
            continue
        results = row["backends"]
        error = max(result["score_error"] for result in results.values())
        searches = [one for result in results.values() for one in result["searches"]]
        lists, equal = (sum(one[name] for one in searches) for name in ("sentences", "equal_lists"))
        names = ", ".join(TITLES[name] for name in results)
        options = f"`{row['options']}`" if row["options"] else ""
        said = row["verdict"]
        if "with_marians_decoder" in row:
            reproduced = row["with_marians_decoder"]
            total, same = (sum(one[name] for one in reproduced) for name in ("sentences", "equal_lists"))
            said += f"; {same} of {total} with Marian's keys"
        yield f"| {row['name']} | {options} | {names} | {error:.1e} | {equal} of {lists} | {said} |"
    yield ""
    yield from ("| not compared | reason |", "|---|---|")
    for row in report["combinations"]:
        if "backends" not in row:
            said = {"rejected": "`parity import` rejects it", "not run": "Marian can't run it"}
            detail = row["detail"].removeprefix("-m pymarian score: ").partition(" Aborted")[0].replace("|", "\\|")
            yield f"| {row['name']} | {said.get(row['verdict'], row['verdict'])}: {detail} |"


def batches(report: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the translations in batches."""
    found = report["batches"]
    total, size = found["sentences"], found["batch"]
    yield f"| compared (beam size {found['beam']}, `--normalize {found['normalize']}`) | equal translations |"
    yield "|---|---:|"
    for title, name in (
        ("Marian with `--mini-batch 1`, and `parity`", "ours_and_single"),
        (f"Marian with `--mini-batch {size}`, and Marian with `--mini-batch 1`", "single_and_batched"),
        (f"Marian with `--mini-batch {size}`, and `parity`", "ours_and_batched"),
        (
            f"Marian with `--mini-batch {size}`, and `parity` with three times the longest length in the batch as "
            "`max_length`",
            "widest_and_batched",
        ),
    ):
        yield f"| {title} | {found[name]} of {total} |"


def training(report: dict[str, Any]) -> Iterator[str]:
    """Yield tables of the gradients and of the steps of Adam."""
    found = report["training"]
    scales = {"equal": "all 1", "trained": "trained"}
    yield from ("| scales of the layer norms | backward pass of layer norm | relative error of the gradient |",)
    yield "|---|---|---:|"
    for one in found["gradients"]:
        yield f"| {scales[one['scales']]} | {one['backward']} | {one['error']:.1e} |"
    yield ""
    steps = " | ".join(f"step {step}" for step in range(1, len(found["steps"][0]["errors"]) + 1))
    yield f"| scales of the layer norms | options | backward pass of layer norm | {steps} |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for one in found["steps"]:
        errors = " | ".join(f"{error:.1e}" for error in one["errors"])
        yield f"| {scales[one['scales']]} | `{one['options']}` | {one['backward']} | {errors} |"


PARTS = {"summary": summary, "combinations": combinations, "batches": batches, "training": training}
