"""The table of presets, with their parameter counts and their differences from the paper's base model."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from reference_numpy import PRESETS, TransformerConfig, count_parameters
from transformer_spec.presets import IMPLEMENTATIONS

PAPER_VOCABULARY = 37_000  # section 5.1: "about 37000 tokens"
BEST_VOCABULARY = 41_096  # one of the vocabulary sizes that reproduce the largest number of counts in Table 3

# Parameter counts in Table 3 of the paper, in millions. The other rows of Table 3 have no entry in this column.
PRINTED_MILLIONS = {
    "paper_base": 65,
    "paper_dk16": 58,
    "paper_dk32": 60,
    "paper_n2": 36,
    "paper_n4": 50,
    "paper_n8": 80,
    "paper_d256": 28,
    "paper_d1024": 168,
    "paper_ff1024": 53,
    "paper_ff4096": 90,
    "paper_big": 213,
}


def describe_presets(vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return each preset's number of parameters, the number in the paper, and the differences from the base model.

    ``printed_millions`` has the value None if Table 3 of the paper doesn't list the number of parameters.

    Raises:
        ValueError: If no model can have a vocabulary of this size.
    """
    return {
        name: {
            "parameters": count(name, vocab_size),
            "printed_millions": PRINTED_MILLIONS.get(name),
            "differs": differences(name),
        }
        for name in PRESETS
    }


def count(preset: str, vocab_size: int) -> int:
    """Return a preset's parameter count if the source and target share a vocabulary of the given size."""
    return count_parameters(
        TransformerConfig.preset(preset, source_vocab_size=vocab_size, target_vocab_size=vocab_size)
    )


def reproduced(vocab_size: int) -> int:
    """Return the number of presets whose parameter count matches Table 3 of the paper.

    The parameters are counted for the given vocabulary size. The count is rounded to millions, as in Table 3.
    """
    return sum(round(count(name, vocab_size) / 1e6) == printed for name, printed in PRINTED_MILLIONS.items())


def differences(preset: str) -> dict[str, Any]:
    """Return the fields of a preset that differ from the base model. Dropout rates are named ``dropout.<site>``.

    ``d_k`` and ``d_v`` are included only if they differ from ``d_model / num_heads``.
    """
    base, other = (
        TransformerConfig.preset(name, source_vocab_size=PAPER_VOCABULARY, target_vocab_size=PAPER_VOCABULARY)
        for name in ("paper_base", preset)
    )
    found: dict[str, Any] = {}
    for field in dataclasses.fields(TransformerConfig):
        ours, theirs = getattr(base, field.name), getattr(other, field.name)
        if field.name in ("d_k", "d_v"):
            if theirs != other.d_model / other.num_heads:
                found[field.name] = theirs
            continue
        if field.name == "dropout":
            rates = {
                site.name: (getattr(ours, site.name), getattr(theirs, site.name)) for site in dataclasses.fields(ours)
            }
            found |= {f"dropout.{site}": rate for site, (before, rate) in rates.items() if rate != before}
        elif theirs != ours:
            found[field.name] = theirs
    return found


def print_presets(console: Console, presets: dict[str, dict[str, Any]], vocab_size: int) -> None:
    """Print the table of presets, with their parameter counts and their differences from the base model."""
    console.print()
    title = f"Presets with a vocabulary of {vocab_size:,}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("parameters", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("differences from paper_base")
    for name, preset in presets.items():
        if name == next(iter(IMPLEMENTATIONS)):
            table.add_section()
        printed = preset["printed_millions"]
        millions = "" if printed is None else f"{printed} M"
        differs = ", ".join(f"{field}={value}" for field, value in preset["differs"].items())
        table.add_row(name, f"{preset['parameters']:,}", millions, differs)
    console.print(table)
    tried = dict.fromkeys((vocab_size, PAPER_VOCABULARY, BEST_VOCABULARY))
    hits = ", ".join(f"{size:,} reproduces {reproduced(size)}" for size in tried)
    console.print(
        f"The paper column shows the counts in Table 3. No vocabulary size reproduces all {len(PRINTED_MILLIONS)} of "
        f"them: {hits}.",
        style="dim",
    )
