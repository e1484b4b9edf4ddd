"""``parity show``: pictures of positions, masks and attention weights."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from rich.console import Console

import reference_numpy as ref
from reference_numpy.config import DEPTHS, PRESETS, TransformerConfig
from transformer_parity.commands import add_backends, one_or_more
from transformer_parity.hard_inputs import hard_weights
from transformer_parity.ports import PORTS, MissingFrameworkError, PackagePort, quiet_frameworks
from transformer_parity.text import SPECIAL, VOCAB_SIZE, Vocabulary, read_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Arrays = Mapping[str, ndarray]
FORMATS = ("png", "svg")
DPI = 150
ALLOWED, FORBIDDEN = "#4a90c8", "#e9edf2"
# The same picture on every machine: text as shapes, ids from a fixed salt.
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "parity"}
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

EXAMPLES = """\
examples:
  parity show positions --preset paper_base,t2t_2017
  parity show masks --out pictures
  parity show attention --backends numpy,torch,jax,tf
  parity show attention --weights model.safetensors --which cross --layer 5 \\
      --source "The cat sleeps." --target "Die Katze schläft." --out cat.svg
"""


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "show",
        help="pictures of positions, masks and attention weights",
        description="Draw the positional encoding, the masks, or the attention weights of a sentence pair.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    pictures = parser.add_subparsers(title="pictures", metavar="PICTURE", required=True)

    say = "the positional encoding, position by channel"
    positions = pictures.add_parser("positions", help=say, description=f"Draw {say}, one preset below the other.")
    positions.add_argument(
        "--preset",
        type=one_or_more(PRESETS),
        default=["paper_base", "t2t_2017"],
        metavar="NAME[,NAME]",
        help="whose layout, timescale and offset (default: paper_base,t2t_2017); `parity info` lists them",
    )
    positions.add_argument("--length", type=int, default=50, metavar="N", help="positions (default: %(default)s)")
    positions.add_argument("--d-model", type=int, default=64, metavar="N", help="channels (default: %(default)s)")
    positions.set_defaults(run=run, picture="positions", draw=draw_positions)

    say = "which query may attend to which key, for a padded sentence pair"
    masks = pictures.add_parser("masks", help=say, description=f"Draw {say}.")
    masks.set_defaults(run=run, picture="masks", draw=draw_masks)

    attention = pictures.add_parser(
        "attention",
        help="the attention weights of every head, backend by backend",
        description="Draw the attention weights of every head for one pair of sentences, one row per backend, and "
        "say how far the backends are apart.",
    )
    add_backends(attention, ["numpy"])
    attention.add_argument("--weights", type=Path, metavar="FILE", help="your model (default: a small random one)")
    attention.add_argument(
        "--preset",
        choices=PRESETS,
        default="paper_base",
        metavar="NAME",
        help="of the random one (default: paper_base)",
    )
    attention.add_argument("--source", default=SOURCE, metavar="TEXT", help="default: %(default)s")
    attention.add_argument("--target", default=TARGET, metavar="TEXT", help="default: %(default)s")
    files, learn = ("SOURCE", "TARGET"), "line-aligned files to learn subwords from (default: the text that ships)"
    attention.add_argument("--text", type=Path, nargs=2, metavar=files, help=learn)
    attention.add_argument("--which", choices=TAPS, default="cross", help="whose attention (default: %(default)s)")
    attention.add_argument("--layer", type=int, default=0, metavar="N", help="counted from 0 (default: %(default)s)")
    attention.add_argument("--dtype", choices=("float64", "float32"), default="float32", help="default: %(default)s")
    attention.set_defaults(run=run, picture="attention", draw=draw_attention)

    for picture in (positions, masks, attention):
        picture.add_argument(
            "--out", default=".", metavar="FILE|FOLDER", help="a .png or .svg file, or a folder (default: this one)"
        )
        picture.add_argument("--format", choices=FORMATS, help="default: as the file is called, or png")


def run(options: argparse.Namespace) -> int:
    """Draw one picture, print where it is, and return the exit code."""
    import matplotlib

    try:
        path = destination(options.out, options.format, options.picture)
        with matplotlib.rc_context(STYLE):
            figure = options.draw(options)
            write(figure, path)
    except (MissingFrameworkError, ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"parity show {options.picture}: error: {error}", file=sys.stderr)
        return 3
    print(path)
    return 0


def destination(out: str, file_format: str | None, picture: str) -> Path:
    """Return the file to write.

    Raises:
        ValueError: It is to be of a kind that is not drawn here, or of two kinds.
    """
    path = Path(out)
    kind = path.suffix.lower().removeprefix(".")
    if out.endswith(("/", os.sep)) or path.is_dir() or not kind:
        return path / f"{picture}.{file_format or 'png'}"
    if kind not in FORMATS:
        raise ValueError(f"--out must be a folder or end in .png or .svg: got {out}")
    if file_format not in (None, kind):
        raise ValueError(f"--out {out} and --format {file_format} contradict each other")
    return path


def write(figure: Figure, path: Path) -> None:
    """Write a picture to a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    kind = path.suffix.lower().removeprefix(".")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metadata = {"Date": None} if kind == "svg" else None  # no date: the same picture is the same file
            figure.savefig(temporary, format=kind, dpi=DPI, metadata=metadata)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if any("missing from font" in str(warning.message) for warning in caught):
        print("note: the font lacks some of the characters; boxes stand for them", file=sys.stderr)


def draw_positions(options: argparse.Namespace) -> Figure:
    """Draw the encoding of each preset, one below the other, so that channels stand above channels."""
    from matplotlib.figure import Figure

    if options.length < 1:
        raise ValueError(f"--length must be at least 1: got {options.length}")
    sizes = {"source_vocab_size": 8, "target_vocab_size": 8, "d_model": options.d_model, "d_k": 1, "d_v": 1}
    configs = {name: TransformerConfig.preset(name, **sizes) for name in options.preset}
    if learned := [name for name, config in configs.items() if config.position_encoding == "learned"]:
        raise ValueError(f"{', '.join(learned)} learns its positions: there is no formula to draw")
    figure = Figure(figsize=(8.0, 0.9 + 3.4 * len(configs)), layout="constrained")
    rows = figure.subplots(len(configs), 1, squeeze=False)[:, 0]
    for axes, (name, config) in zip(rows, configs.items(), strict=True):
        convention = config.position_layout, config.position_timescale, config.position_offset
        encoding = ref.sinusoidal_encoding(options.length, config.d_model, *convention)
        image = axes.imshow(encoding, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(f"{name}: {position_formula(config)}", loc="left")
        axes.set_ylabel("position in the sentence")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    rows[-1].set_xlabel("channel")
    figure.colorbar(image, ax=list(rows), label="value", ticks=[-1, -0.5, 0, 0.5, 1], aspect=30 * len(configs))
    figure.suptitle(f"Positional encoding, d_model = {options.d_model}", fontsize=12)
    return figure


def position_formula(config: TransformerConfig) -> str:
    """Say how a config encodes positions."""
    half = config.d_model // 2
    steps = half if config.position_timescale == "m" else half - 1
    layout = f"{half} sines, then {half} cosines" if config.position_layout == "split" else "sine and cosine take turns"
    angles = f"p / 10000^(i / {steps}), i = 0 ... {half - 1}; the first position is p = {config.position_offset}"
    return f"{layout}\nof {angles}"


def draw_masks(options: argparse.Namespace) -> Figure:
    """Draw the four masks of one padded sentence pair, as the model builds them."""
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
        ("Causal mask:\nitself and what came before", causal, target, target),
        ("Decoder self-attention:\ncausal and target padding", causal & target_mask, target, target),
        ("Cross-attention:\nsource padding", source_mask, target, source),
    )
    figure = Figure(figsize=(8.4, 8.2), layout="constrained")
    for axes, (title, mask, queries, keys) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        allowed = np.broadcast_to(mask, (1, 1, len(queries), len(keys)))[0, 0]
        axes.imshow(allowed, cmap=ListedColormap([FORBIDDEN, ALLOWED]), vmin=0, vmax=1)
        axes.set_title(title)
        axes.set(xlabel="key", ylabel="query")
        _label(axes, queries, keys)
        axes.set_xticks(np.arange(len(keys) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(queries) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    legend = [Patch(color=ALLOWED, label="True: may attend"), Patch(color=FORBIDDEN, label="False: may not")]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False)
    padding = "A query that is padding attends too; nobody uses what it gathers."
    figure.suptitle(f"Masks of one padded sentence pair\n{padding}", fontsize=11)
    return figure


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
            _label(axes, queries if column == 0 else [], keys if last else [])
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
        _label(axes, queries if number % columns == 0 else [], keys if number + columns >= len(panels) else [])
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
            loaded = port.load(config, weights, dtype, "cpu", "highest")
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


def _label(axes: Axes, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Write the tokens along the axes: an underscore begins a word, and a dollar sign is no formula."""
    shown = {token: token.replace("\u2581", "_").replace("$", r"\$") for token in (*queries, *keys)}
    along: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center_baseline"}
    axes.set_xticks(range(len(keys)), [shown[key] for key in keys], **along)
    axes.set_yticks(range(len(queries)), [shown[query] for query in queries])
