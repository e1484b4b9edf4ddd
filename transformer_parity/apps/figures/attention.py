"""Plots of attention weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from rich.console import Console

import reference_numpy as ref
from transformer_parity.apps.figures.labels import label
from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.text.kinds import build_vocabulary
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.engine.style import MINUS, PLUS, ZERO
from transformer_parity.engine.system.environment import quiet_frameworks
from transformer_parity.engine.system.errors import UsageError
from transformer_parity.transformer.cases.inputs import hard_weights
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import SPECIAL, VOCAB_SIZE, Subwords
from transformer_parity.transformer.sentences.vocabulary import Vocabulary, batch
from transformer_spec.config import DEPTHS, TransformerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = Mapping[str, ndarray]

MOST_COLUMNS = 8  # maximum number of heads per row
TAPS = {
    "encoder": "encoder.layers.{}.self_attention.weights",
    "decoder": "decoder.layers.{}.self_attention.weights",
    "cross": "decoder.layers.{}.cross_attention.weights",
}
# Sizes of the random model. The preset specifies all other fields of the config, except the vocabulary sizes.
SMALL = {"d_model": 48, "num_heads": 4, "d_k": 12, "d_v": 12, "d_ff": 96, **dict.fromkeys(DEPTHS, 2)}
SOURCE, TARGET = "The shoes are under the bed.", "Die Schuhe stehen unter dem Bett."  # from the included text
DATE = "Freitag, 3. Mai 2024", "2024-05-03"


@dataclass(frozen=True)
class Asked:
    """The attention weights to draw.

    Attributes:
        backends: Backends to compare. The figure has separate rows of heads for each backend.
        source: Source sentence. If None, an example that suits the model is used.
        target: Target sentence. If None, the model's translation of ``source`` is used, or the example's translation if
            ``source`` is also None.
        which: Type of attention, which must be a key of ``TAPS``.
        layer: Zero-based index of the layer.
        dtype: Dtype of the models.
        preset: Preset of a small random model to use, or None.
        weights: Weight file of the model. If None and no preset is specified, the included dates model is used.
    """

    backends: Sequence[str] = ("numpy",)
    source: str | None = None
    target: str | None = None
    which: str = "cross"
    layer: int = 0
    dtype: str = "float32"
    preset: str | None = None
    weights: Path | None = None


def draw_attention(asked: Asked) -> Figure:
    """Draw the attention weights of each backend's heads and, below them, the differences from the first backend.

    Raises:
        MissingFrameworkError: If the framework of a backend is not installed.
        OSError: If a file cannot be read.
        UsageError: If the layer does not exist or has no self-attention.
        ValueError: If a file is damaged or a sentence does not fit the model.
    """
    from matplotlib.figure import Figure

    asked, pair = _completed(asked)
    config, weights, vocabulary, model = _model(asked)
    inputs = batch([pair], vocabulary, config)
    source = vocabulary.pieces(pair[0])
    target = ["<s>", *vocabulary.pieces(pair[1], source=False)[:-1]]
    block, queries, keys = {
        "encoder": ("Self-attention of encoder", source, source),
        "decoder": ("Self-attention of decoder", target, target),
        "cross": ("Cross-attention of decoder", target, source),
    }[asked.which]
    depth = config.num_encoder_layers if asked.which == "encoder" else config.num_decoder_layers
    if not 0 <= asked.layer < depth:
        raise UsageError(f"--layer must be from 0 to {depth - 1} for this model: got {asked.layer}")
    sizes = config if asked.which == "encoder" else config.in_decoder
    if asked.which == "decoder" and not config.has_self_attention(asked.layer):
        raise UsageError("--layer must not be 0 because the first decoder layer of this model has no self-attention")
    tap = TAPS[asked.which].format(asked.layer)
    ports = [PORTS[name] for name in asked.backends]
    seen = attention_weights(config, weights, inputs, tap, ports, asked.dtype)

    rows = [*seen.items(), *differences(seen).items()]
    lines = math.ceil(sizes.num_heads / MOST_COLUMNS)  # number of rows in which the heads of each backend are arranged
    columns = math.ceil(sizes.num_heads / lines)
    width, height = (max(1.5, 0.19 * len(tokens)) for tokens in (keys, queries))
    size = max(7.0, 1.8 + columns * (width + 0.1)), 2.0 + len(rows) * lines * (height + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows) * lines, columns, squeeze=False)
    for unused in grid.reshape(len(rows), -1)[:, sizes.num_heads :].flat:
        unused.remove()
    scales = _scales(seen)
    for number, (name, heads) in enumerate(rows):
        for head, shown in enumerate(heads):
            line, column = divmod(head, columns)
            axes = grid[number * lines + line, column]
            image = axes.imshow(shown, **scales[name not in seen], aspect="auto", interpolation="nearest")
            last = number == len(rows) - 1 and head + columns >= sizes.num_heads
            label(axes, queries if column == 0 else [], keys if last else [])
            if number == 0 or lines > 1:
                axes.set_title(f"head {head}")
            if column == 0:
                axes.set_ylabel(name, fontweight="bold")
        if number in (len(seen) - 1, len(rows) - 1):
            above = grid[: len(seen) * lines] if name in seen else grid[len(seen) * lines :]
            what = "attention weight" if name in seen else "difference"
            figure.colorbar(image, ax=[axes for axes in above.flat if axes.figure], label=what, aspect=4 * size[1])
    figure.suptitle(f"{block} layer {asked.layer}, {asked.dtype}\n{model}", fontsize=11)
    figure.supylabel("query", fontsize=9)
    figure.supxlabel(f"key\n\n{agreement(seen)}", fontsize=9)
    return figure


def attention_weights(
    config: TransformerConfig, weights: Arrays, inputs: Arrays, tap: str, ports: Sequence[PackagePort], dtype: str
) -> dict[str, ndarray]:
    """Return each backend's attention weights [H, L, M] at one tap, for one sentence pair.

    Raises:
        MissingFrameworkError: If the framework of a backend is not installed.
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


def differences(seen: Arrays) -> dict[str, ndarray]:
    """Return the difference between each backend's weights and the first backend's weights.

    Backends whose weights are bitwise identical to the first backend's weights are omitted.
    """
    first, *others = seen
    apart = {f"{name} − {first}": seen[name] - seen[first] for name in others}  # noqa: RUF001  a minus sign
    return {name: heads for name, heads in apart.items() if heads.any()}


def _scales(seen: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return one color scale for all rows of weights, and one color scale for all rows of differences."""
    from matplotlib.colors import LinearSegmentedColormap

    largest = max(heads.max() for heads in seen.values())
    apart = max((np.abs(heads).max() for heads in differences(seen).values()), default=1.0)
    colors = LinearSegmentedColormap.from_list("difference", [MINUS, ZERO, PLUS])
    return {"cmap": "Blues", "vmin": 0, "vmax": largest}, {"cmap": colors, "vmin": -apart, "vmax": apart}


def agreement(seen: Arrays) -> str:
    """Return a sentence that reports the largest difference between two backends and its location."""
    if len(seen) == 1:
        return f"Only {', '.join(seen)} was run. To compare backends, specify at least two with --backends."
    apart = {pair: np.abs(seen[pair[0]] - seen[pair[1]]) for pair in itertools.combinations(seen, 2)}
    pair = max(apart, key=lambda pair: apart[pair].max())
    head, query, key = np.unravel_index(apart[pair].argmax(), apart[pair].shape)
    return (
        f"Largest difference between two backends: {apart[pair].max():.1e} "
        f"({pair[0]} and {pair[1]}; head {head}, query {query}, key {key}, counting from 0)"
    )


def _completed(asked: Asked) -> tuple[Asked, tuple[str, str]]:
    """Set unspecified options to their defaults.

    Returns:
        A copy of ``asked`` with all defaults, and the source and target sentence to draw. By default, the sentences for
        the included model are a date and its ISO 8601 form.
    """
    ships = asked.weights is None and asked.preset is None
    source, target = DATE if ships else (SOURCE, TARGET)
    if asked.source and not asked.target and (ships or asked.weights is not None):
        target = _own_translation(asked.source, asked.weights or SHIPPED) or target
    pair = asked.source or source, asked.target or target
    return (replace(asked, weights=SHIPPED) if ships else asked), pair


def _own_translation(source: str, weights: Path) -> str | None:
    """Translate a sentence with a model.

    Return None if the file has no vocabulary, or if the model requires language codes.
    """
    config, _ = ref.load_weights(weights)
    stored = ref.load_vocabulary(weights)
    if stored is None or build_vocabulary(stored, config).needs_direction:
        return None
    trained = read_trained(weights)
    return trained.vocabulary.text(trained.translation(source))


def _model(asked: Asked) -> tuple[TransformerConfig, Arrays, Vocabulary, str]:
    """Return the model's config, weights, vocabulary, and title."""
    lines = [line for pair in read_pairs() for line in pair]
    if asked.weights is None:
        preset = asked.preset or "paper_base"
        subwords = Subwords.train(lines)
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), subwords.size + SPECIAL)
        config = TransformerConfig.preset(preset, **SMALL, **sizes)
        title = f"a small random model, not trained, preset {preset}"
        return config, hard_weights(config), subwords.numbered(config), title
    config, weights = ref.load_weights(asked.weights)
    stored = ref.load_vocabulary(asked.weights)
    if stored is not None and not (vocabulary := build_vocabulary(stored, config)).needs_direction:
        return config, weights, vocabulary, f"{asked.weights.name}, using its vocabulary"
    size = min(config.source_vocab_size, config.target_vocab_size) - SPECIAL
    vocabulary = Subwords.train(lines, min(size, VOCAB_SIZE)).numbered(config)
    return config, weights, vocabulary, f"{asked.weights.name}, using subwords learned from the included text"
