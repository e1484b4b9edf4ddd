"""The presets as a table: sizes, parameters, and what differs from the paper."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from reference_numpy import PRESETS, TransformerConfig, count_parameters
from transformer_spec.presets import IMPLEMENTATIONS

PAPER_VOCABULARY = 37_000  # section 5.1: "about 37000 tokens"
BEST_VOCABULARY = 41_096  # one of those that explain the most of Table 3

# Table 3 of the paper, in millions of parameters; its other rows print no number.
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
    """Return each preset's parameter count, the paper's where it prints one, and how it differs from the base model.

    Raises:
        ValueError: There is no model with such a vocabulary.
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
    """Return how many parameters a preset has at a vocabulary, which both sides have in common."""
    return count_parameters(
        TransformerConfig.preset(preset, source_vocab_size=vocab_size, target_vocab_size=vocab_size)
    )


def reproduced(vocab_size: int) -> int:
    """Return how many of the paper's printed counts a vocabulary yields, rounded to millions."""
    return sum(round(count(name, vocab_size) / 1e6) == printed for name, printed in PRINTED_MILLIONS.items())


def differences(preset: str) -> dict[str, Any]:
    """Return the fields in which a preset is not the base model; a dropout rate as ``dropout.<site>``.

    ``d_k`` and ``d_v`` count as different only where they are not d_model / num_heads.
    """
    base, other = (
        TransformerConfig.preset(name, source_vocab_size=PAPER_VOCABULARY, target_vocab_size=PAPER_VOCABULARY)
        for name in ("paper_base", preset)
    )
    found: dict[str, Any] = {}
    for field in dataclasses.fields(TransformerConfig):
        ours, theirs = getattr(base, field.name), getattr(other, field.name)
        if field.name in ("d_k", "d_v") and theirs == other.d_model // other.num_heads:
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
    """Print a table of presets: sizes, parameters, and what differs from the paper."""
    console.print()
    title = f"Presets at a vocabulary of {vocab_size:,}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("parameters", justify="right")
    table.add_column("paper", justify="right")
    table.add_column("differs from paper_base in")
    for name, preset in presets.items():
        if name == next(iter(IMPLEMENTATIONS)):
            table.add_section()
        printed = preset["printed_millions"]
        millions = "" if printed is None else f"{printed} M"
        differs = ", ".join(f"{field}={value}" for field, value in preset["differs"].items())
        table.add_row(name, f"{preset['parameters']:,}", millions, differs)
    console.print(table)
    tried = dict.fromkeys((vocab_size, PAPER_VOCABULARY, BEST_VOCABULARY))
    hits = "; ".join(f"{size:,} yields {reproduced(size)}" for size in tried)
    console.print(
        f"paper: as printed in Table 3. No single vocabulary reproduces all {len(PRINTED_MILLIONS)} numbers: {hits}.",
        style="dim",
    )
