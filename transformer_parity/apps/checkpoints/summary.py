"""Summaries of weight files, checkpoints, and imports, printed as a table or returned as JSON-compatible values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.checkpoints.importer import FORMATS, OURS, differences
from transformer_parity.engine.system.errors import printable
from transformer_spec.config import TransformerConfig
from transformer_spec.names import count_parameters
from transformer_spec.presets import PRESETS
from transformer_spec.search import Search

TIED = {
    "none": "nothing: source embedding, target embedding, and output projection are separate",
    "target_output": "target embedding and output projection; the source embedding is separate",
    "source_target": "source embedding and target embedding; the output projection is separate",
    "all": "source embedding, target embedding, and output projection",
}
MOST_LANGUAGES = 8  # maximum number of languages to list in the table


def describe(model: Imported) -> dict[str, Any]:
    """Return a description of a model as JSON-compatible values."""
    preset = _preset(model)
    different = differences(model.config, preset)
    vocabulary = model.vocabulary
    return {
        "config": model.config.to_dict(),
        "preset": preset,
        "differences": {name: list(values) for name, values in different.items()},
        "parameters": _parameters(model),
        "dtypes": _dtypes(model),
        "part": model.part,
        "step": model.step,
        "vocabulary": vocabulary
        and {
            "kind": vocabulary.kind,
            "sizes": list(vocabulary.sizes),
            "source_languages": list(vocabulary.source_languages),
            "target_languages": list(vocabulary.target_languages),
        },
        "search": model.search.to_dict(),
        "origin": model.origin.to_dict(),
        "notes": list(model.notes),
    }


def print_model(console: Console, model: Imported, *, files: bool = False) -> None:
    """Print a description of a model as a table.

    Args:
        console: Console to print to.
        model: Model to describe.
        files: Whether to list the files that the model was imported from, with their SHA-256 hashes.
    """
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(model).items():
        table.add_row(name, printable(text))
    if files:
        for name, digest in model.origin.files.items():
            table.add_row("from", printable(f"{name}, SHA-256 {digest}"))
    for note in model.notes:
        table.add_row("note", printable(note))
    console.print(table)


def _rows(model: Imported) -> dict[str, str]:
    config, origin = model.config, model.origin
    preset = _preset(model)
    changed = (f"{name} {mine} instead of {usual}" for name, (usual, mine) in differences(config, preset).items())
    family = "this project"
    if origin.format != OURS:
        family = f"{origin.family} ({FORMATS[origin.format][1]})" if origin.format in FORMATS else origin.family
    rows = {
        "family": family,
        "step": None if model.step is None else f"{model.step:,} of a training run",
        "part": model.part,
        "preset": preset,
        "differs in": ", ".join(changed) or "nothing",
        "tied": TIED[config.tie_embeddings],
        "size": f"{_parameters(model):,} parameters in {' and '.join(_dtypes(model))}: {_sizes(config)}",
        **_vocabulary(model),
        "search": search_line(model.search),
        "license": None if origin.format == OURS else origin.license or "not specified in the files",
    }
    return {name: text for name, text in rows.items() if text is not None}


def _vocabulary(model: Imported) -> Mapping[str, str | None]:
    vocabulary = model.vocabulary
    if vocabulary is None:
        return {"vocabulary": "none"}
    source, target = vocabulary.sizes
    entries = f"{source:,} entries" if source == target else f"{source:,} and {target:,} entries"
    into, out_of = _some(vocabulary.target_languages), _some(vocabulary.source_languages)
    directions = [f"from {out_of}"] * bool(out_of) + [f"to {into}"] * bool(into)
    if out_of == into:
        directions = [out_of] * bool(out_of)
    return {"vocabulary": f"{vocabulary.kind}, {entries}", "languages": "; ".join(directions) or None}


def _some(codes: Sequence[str]) -> str:
    """Return the first language codes and the number of omitted codes, as text."""
    listed = ", ".join(codes[:MOST_LANGUAGES])
    return f"{listed} and {len(codes) - MOST_LANGUAGES:,} others" if len(codes) > MOST_LANGUAGES else listed


def _sizes(config: TransformerConfig) -> str:
    heads, widths = str(config.num_heads), f"{config.d_ff:,}"
    if config.decoder_num_heads is not None:
        heads += f" and {config.decoder_num_heads}"
    if config.decoder_d_ff is not None:
        widths += f" and {config.decoder_d_ff:,}"
    return (
        f"d_model {config.d_model}, {heads} heads, d_ff {widths}, {config.num_encoder_layers} + "
        f"{config.num_decoder_layers} layers, vocabularies of {config.source_vocab_size:,} and "
        f"{config.target_vocab_size:,}"
    )


def _preset(model: Imported) -> str:
    """Return the preset of an imported model, or the most similar preset for a model trained with this project."""
    if model.origin.format != OURS:
        return model.origin.preset
    return min(PRESETS, key=lambda name: len(differences(model.config, name)))  # in a tie, min returns the first preset


def _parameters(model: Imported) -> int:
    if model.part:
        return sum(array.size for array in model.weights.values())
    return count_parameters(model.config)


def _dtypes(model: Imported) -> list[str]:
    return sorted({array.dtype.name for array in model.weights.values()})


def search_line(search: Search) -> str:
    """Return the search settings as one line, omitting settings with default values."""
    usual, rules = Search(), search.rules.to_dict()
    parts = ["greedy" if search.beam_size is None else f"beam {search.beam_size}"]
    if search.beam_size is not None:
        parts.append(f"length penalty {search.length_penalty:g} ({search.length_penalty_kind})")
    if search.max_length is not None:
        parts.append(f"at most {search.max_length:,} tokens")
    if search.min_length != usual.min_length:
        parts.append(f"at least {search.min_length}")
    if search.start_id is not None:
        parts.append(f"starts with {search.start_id}")
    parts += [f"{name} {value}" for name, value in rules.items() if value != usual.rules.to_dict()[name]]
    return ", ".join(parts)
