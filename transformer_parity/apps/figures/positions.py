"""Plots of positional encodings and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import reference_numpy as ref
from transformer_parity.apps.figures.labels import label
from transformer_parity.engine.style import ALLOWED, FORBIDDEN
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.system.machine import check_memory
from transformer_spec.config import TransformerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_positions(presets: Sequence[str], length: int, d_model: int) -> Figure:
    """Draw the positional encodings of multiple presets, one below the other, with aligned channels.

    Raises:
        UsageError: If the length is less than 1 or a preset uses learned positions.
        ValueError: If ``d_model`` is odd.
    """
    from matplotlib.figure import Figure

    if length < 1:
        raise UsageError(f"length must be at least 1: got {length}")
    check_memory(8 * length * d_model, f"a figure of {length:,} by {d_model:,} values")
    sizes = {"source_vocab_size": 8, "target_vocab_size": 8, "d_model": d_model, "d_k": 1, "d_v": 1}
    configs = {name: TransformerConfig.preset(name, **sizes) for name in presets}
    if learned := [name for name, config in configs.items() if config.position_encoding == "learned"]:
        raise UsageError(f"presets must have sinusoidal positions: got learned positions for {', '.join(learned)}")
    figure = Figure(figsize=(8.0, 0.9 + 3.4 * len(configs)), layout="constrained")
    rows = figure.subplots(len(configs), 1, squeeze=False)[:, 0]
    for axes, (name, config) in zip(rows, configs.items(), strict=True):
        convention = config.position_layout, config.position_timescale, config.position_offset
        encoding = ref.sinusoidal_encoding(length, config.d_model, *convention)
        image = axes.imshow(encoding, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(f"{name}: {position_formula(config)}", loc="left")
        axes.set_ylabel("position in the sentence")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    rows[-1].set_xlabel("channel")
    figure.colorbar(image, ax=list(rows), label="value", ticks=[-1, -0.5, 0, 0.5, 1], aspect=30 * len(configs))
    figure.suptitle(f"Positional encoding, d_model = {d_model}", fontsize=12)
    return figure


def position_formula(config: TransformerConfig) -> str:
    """Return a two-line description of a config's positional encoding."""
    half = config.d_model // 2
    steps = half if config.position_timescale == "m" else half - 1
    layout = (
        f"{half} sines, then {half} cosines" if config.position_layout == "split" else "alternating sines and cosines"
    )
    angles = f"p / 10000^(i / {steps}), i = 0 ... {half - 1}; the first position is p = {config.position_offset}"
    return f"{layout}\nof {angles}"


def draw_masks() -> Figure:
    """Draw the four masks of a padded sentence pair, using the mask functions of the reference."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    source = ["we", "are", "at", "home", "</s>", "<pad>", "<pad>"]
    target = ["<s>", "wir", "sind", "zuhause", "<pad>"]
    source_ids, target_ids = (np.array([[token != "<pad>" for token in side]], int) for side in (source, target))
    source_mask = ref.padding_mask(source_ids, pad_id=0)[:, None, None, :]  # [B, 1, 1, S]
    target_mask = ref.target_padding_mask(target_ids, pad_id=0)[:, None, None, :]  # [B, 1, 1, T]
    causal = ref.causal_mask(len(target))
    panels = (
        ("Encoder self-attention:\nsource padding", source_mask, source, source),
        ("Causal mask:\nthe position itself and those before", causal, target, target),
        ("Decoder self-attention:\ncausal and target padding", causal & target_mask, target, target),
        ("Cross-attention:\nsource padding", source_mask, target, source),
    )
    figure = Figure(figsize=(8.4, 8.2), layout="constrained")
    for axes, (title, mask, queries, keys) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        allowed = np.broadcast_to(mask, (1, 1, len(queries), len(keys)))[0, 0]
        axes.imshow(allowed, cmap=ListedColormap([FORBIDDEN, ALLOWED]), vmin=0, vmax=1)
        axes.set_title(title)
        axes.set(xlabel="key", ylabel="query")
        label(axes, queries, keys)
        axes.set_xticks(np.arange(len(keys) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(queries) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    legend = [Patch(color=ALLOWED, label="True: may attend"), Patch(color=FORBIDDEN, label="False: may not")]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False)
    padding = "Padded queries also attend to keys, but their context is not used."
    figure.suptitle(f"Masks of one padded sentence pair\n{padding}", fontsize=11)
    return figure
