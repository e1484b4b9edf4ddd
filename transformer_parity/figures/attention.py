"""Plots of attention weights."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy import ndarray
from rich.console import Console

import reference_numpy as ref
from reference_numpy.config import DEPTHS, TransformerConfig
from transformer_parity.cases.inputs import hard_weights
from transformer_parity.ports.package import PackagePort
from transformer_parity.ports.protocol import Placement
from transformer_parity.ports.registry import PORTS
from transformer_parity.system.environment import quiet_frameworks
from transformer_parity.text.pairs import read_pairs
from transformer_parity.text.vocabulary import SPECIAL, VOCAB_SIZE, Vocabulary

if TYPE_CHECKING:
    from matplotlib.figure import Figure
from transformer_parity.figures.style import label

Arrays = Mapping[str, ndarray]


MOST_COLUMNS = 8  # of heads beside each other
WIDEST = 16.0  # inches of heads beside each other, where sentences may be of any length
CELL = 0.2  # inches of a token there: room for its letters, in sentences of up to 200
TAPS = {
    "encoder": "encoder.layers.{}.self_attention.weights",
    "decoder": "decoder.layers.{}.self_attention.weights",
    "cross": "decoder.layers.{}.cross_attention.weights",
}
# The random model: a preset's conventions, and few enough heads to look at each.
SMALL = {"d_model": 48, "num_heads": 4, "d_k": 12, "d_v": 12, "d_ff": 96, **dict.fromkeys(DEPTHS, 2)}
SOURCE, TARGET = "The shoes are under the bed.", "Die Schuhe stehen unter dem Bett."  # from the text that ships


def draw_attention(options: argparse.Namespace) -> Figure:
    """Draw the heads of each backend, and say how far the backends are apart."""
    from matplotlib.figure import Figure

    config, weights, vocabulary, model = _model(options)
    source = [*vocabulary.pieces(options.source), "</s>"]
    target = ["<s>", *vocabulary.pieces(options.target)]
    block, queries, keys = {
        "encoder": ("Self-attention of encoder", source, source),
        "decoder": ("Self-attention of decoder", target, target),
        "cross": ("Cross-attention of decoder", target, source),
    }[options.which]
    depth = config.num_encoder_layers if options.which == "encoder" else config.num_decoder_layers
    if not 0 <= options.layer < depth:
        raise ValueError(f"--layer must be 0 to {depth - 1} in this model: got {options.layer}")
    inputs = {
        "source_ids": np.array([vocabulary.ids(options.source, config)]),
        "target_ids": np.array([vocabulary.ids(options.target, config, start=True, end=False)]),
    }
    tap = TAPS[options.which].format(options.layer)
    ports = [PORTS[name] for name in options.backends]
    seen = attention_weights(config, weights, inputs, tap, ports, options.dtype)

    lines = math.ceil(config.num_heads / MOST_COLUMNS)  # of heads, per backend
    columns = math.ceil(config.num_heads / lines)
    width, height = (max(1.5, 0.19 * len(tokens)) for tokens in (keys, queries))
    size = max(7.0, 1.8 + columns * (width + 0.1)), 2.0 + len(seen) * lines * (height + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(seen) * lines, columns, squeeze=False)
    for unused in grid.reshape(len(seen), -1)[:, config.num_heads :].flat:
        unused.remove()
    largest = max(heads.max() for heads in seen.values())
    for number, (backend, heads) in enumerate(seen.items()):
        for head, shown in enumerate(heads):
            line, column = divmod(head, columns)
            axes = grid[number * lines + line, column]
            image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=largest, aspect="auto", interpolation="nearest")
            last = number == len(seen) - 1 and head + columns >= config.num_heads
            label(axes, queries if column == 0 else [], keys if last else [])
            if number == 0 or lines > 1:
                axes.set_title(f"head {head}")
            if column == 0:
                axes.set_ylabel(backend, fontweight="bold")
    figure.colorbar(image, ax=figure.axes, label="attention weight", aspect=4 * size[1])
    figure.suptitle(f"{block} layer {options.layer}, {options.dtype}\n{model}", fontsize=11)
    figure.supylabel("query", fontsize=9)
    figure.supxlabel(f"key\n\n{agreement(seen)}", fontsize=9)
    return figure


def draw_heads(heads: ndarray, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """Draw the mean of the heads and each of them, on one scale."""
    from matplotlib.figure import Figure

    panels = {"mean of the heads": heads.mean(0)} | {f"head {number}": head for number, head in enumerate(heads)}
    width, height = (min(max(1.6, CELL * len(tokens)), 200 * CELL) for tokens in (keys, queries))
    columns = min(len(panels), max(1, int(WIDEST / width)))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.0 + columns * (width + 0.1), 1.8 + rows * (height + 0.3)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.remove()
    for number, ((name, weights), axes) in enumerate(zip(panels.items(), grid.flat, strict=False)):
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=heads.max(), aspect="auto", interpolation="nearest")
        axes.set_title(name, fontweight="bold" if number == 0 else "normal")
        label(axes, queries if number % columns == 0 else [], keys if number + columns >= len(panels) else [])
    figure.colorbar(image, ax=figure.axes, label="attention weight", aspect=4 * figure.get_figheight())
    figure.suptitle(title, fontsize=11)
    figure.supylabel("says", fontsize=9)
    figure.supxlabel("while it attends to", fontsize=9)
    return figure


def attention_weights(
    config: TransformerConfig, weights: Arrays, inputs: Arrays, tap: str, ports: Sequence[PackagePort], dtype: str
) -> dict[str, ndarray]:
    """Return the weights [H, L, M] of one attention block for one sentence pair, by backend.

    Raises:
        MissingFrameworkError: The framework of a backend is not installed.
    """
    for port in ports:
        port.check_installed()
    seen = {}
    with quiet_frameworks() as terminal, Console(file=terminal).status("") as spinner:
        for port in ports:
            spinner.update(f"running {port.package}")
            loaded = port.load(config, weights, Placement(dtype))
            seen[port.name] = loaded.run("", inputs, taps=True).taps[tap][0].astype(np.float64)
    return seen


def agreement(seen: Arrays) -> str:
    """Say how far apart the two backends are that differ the most."""
    if len(seen) == 1:
        return f"Only {', '.join(seen)} was run: name more with --backends to compare them."
    apart = {pair: np.abs(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
    pair = max(apart, key=lambda pair: apart[pair].max())
    head, query, key = np.unravel_index(apart[pair].argmax(), apart[pair].shape)
    return (
        f"Largest difference between two backends: {apart[pair].max():.1e} "
        f"({pair[0]} and {pair[1]}; head {head}, query {query}, key {key}; counted from 0)"
    )


def _model(options: argparse.Namespace) -> tuple[TransformerConfig, Arrays, Vocabulary, str]:
    """Return the model to look into, its subwords, and its name."""
    lines = [line for pair in read_pairs(*(options.text or ())) for line in pair]
    if options.weights is None:
        vocabulary = Vocabulary.train(lines)
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary.size + SPECIAL)
        config = TransformerConfig.preset(options.preset, **SMALL, **sizes)
        return config, hard_weights(config), vocabulary, f"a small random model, not trained, built as {options.preset}"
    config, weights = ref.load_weights(options.weights)
    size = min(config.source_vocab_size, config.target_vocab_size) - SPECIAL
    vocabulary = Vocabulary.train(lines, min(size, VOCAB_SIZE))
    text = "the text that ships" if options.text is None else options.text[0].name
    return config, weights, vocabulary, f"{options.weights.name}, with subwords learned from {text}"
