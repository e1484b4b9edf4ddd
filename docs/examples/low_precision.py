"""Compare int8 and bfloat16 inference with float32 in PyTorch, JAX, and TensorFlow, on real sentences.

    python docs/examples/low_precision.py en-de.safetensors test.en test.de

The weight file must contain a vocabulary, as the files that `parity train` writes do. A variant is a quantized model or
a bfloat16 model. For each variant, the script prints the number of translations that are the same as in float32, the
BLEU score, the speed relative to float32, and the size of the weights. The float32 model and the variant translate each
batch one after the other, and the speed is the median ratio over the batches. `--markdown` and `--json` write files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from numpy import ndarray

from transformer_parity.apps.train.corpora import HeldOut
from transformer_parity.apps.translate.trained import Trained, read_trained
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.transformer.decoding.prefixes import tokens_of
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.vocabulary import pad

BATCH = 16  # sentences
ROUNDS = 3  # minimum number of batches, even if they take longer than the time limit
MB = 1e6  # bytes
SEARCHES: dict[str, Callable[..., Any]] = {
    "greedy": lambda package, model, ids: package.greedy_search(model, ids),
    "beam 4": lambda package, model, ids: package.beam_search(model, ids, beam_size=4),
}
LIBRARIES = ("torch", "torchao", "jax", "flax", "tensorflow", "keras", "sacrebleu")

Load = Callable[..., Any]  # Transformer.from_weights with the config and the weights already specified


# --- Variants ---


def torch_bfloat16(load: Load) -> Any:
    """Return a PyTorch model with bfloat16 weights."""
    import torch

    return load().to(torch.bfloat16)


def torch_dynamic(load: Load) -> Any:
    """Return a PyTorch model in which dynamically quantized layers replace the linear layers."""
    import torch

    with warnings.catch_warnings():  # PyTorch has deprecated this function in favor of torchao
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(load(), {torch.nn.Linear}, dtype=torch.qint8)


def torchao(configuration: str, load: Load) -> Any:
    """Return a PyTorch model that torchao has quantized with the given configuration."""
    from torchao import quantization

    model = load()
    quantization.quantize_(model, getattr(quantization, configuration)())
    return model


def jax_int8(load: Load) -> Any:
    """Return a JAX model that stores int8 matrices and converts them to float32 in each call."""
    sys.path.insert(0, str(Path(__file__).parent))
    from int8_linear import quantize

    model = load()
    quantize(model)
    return model


def keras_int8(load: Load) -> Any:
    """Return a TensorFlow model that Keras has quantized."""
    model = load()
    with warnings.catch_warnings():  # Keras warns about layers without matrices, such as dropout
        warnings.filterwarnings("ignore", "Layer .* does not have a `quantize` method")
        model.quantize("int8")
    return model


def own_bfloat16(load: Load) -> Any:
    """Return a bfloat16 model in JAX or Keras, where the dtype must be specified when the layers are created."""
    return load(dtype="bfloat16")


VARIANTS: dict[str, dict[str, Callable[[Load], Any]]] = {
    "torch": {
        "bfloat16": torch_bfloat16,
        "int8, quantize_dynamic": torch_dynamic,
        "int8, torchao Int8WeightOnlyConfig": partial(torchao, "Int8WeightOnlyConfig"),
        "int8, torchao Int8DynamicActivationInt8WeightConfig": partial(
            torchao, "Int8DynamicActivationInt8WeightConfig"
        ),
    },
    "jax": {"bfloat16": own_bfloat16, "int8, Int8Linear": jax_int8},
    "tf": {"bfloat16": own_bfloat16, 'int8, quantize("int8")': keras_int8},
}


# --- Size ---


def stored_bytes(backend: str, model: Any) -> dict[str, int]:
    """Return the size in bytes of a model's weights in each dtype. A matrix with two names is counted only once."""
    found: dict[str, int] = {}
    for dtype, size in {"torch": _of_torch, "jax": _of_jax, "tf": _of_tf}[backend](model):
        found[dtype] = found.get(dtype, 0) + size
    return found


def _of_torch(model: Any) -> Iterator[tuple[str, int]]:
    # quantize_dynamic stores the matrix and bias in a child of the layer, so ``parameters()`` doesn't include them.
    quantized = (module for module in model.modules() if "_packed_params" in module._modules)
    packed = [x for module in quantized for x in module._weight_bias()]
    for tensor in (*model.parameters(), *packed):
        for plain in () if tensor is None else _plain(tensor):
            yield str(plain.dtype).removeprefix("torch.").removeprefix("q"), plain.numel() * plain.element_size()


def _plain(tensor: Any) -> list[Any]:
    """Return the plain tensors of which a torchao tensor consists, or the tensor itself if it's a plain tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def _of_jax(model: Any) -> Iterator[tuple[str, int]]:
    import jax
    from flax import nnx

    for array in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState))):
        yield array.dtype.name, array.nbytes


def _of_tf(model: Any) -> Iterator[tuple[str, int]]:
    import tensorflow as tf

    for variable in model.weights:
        dtype = tf.as_dtype(variable.dtype)
        yield dtype.name, dtype.size * variable.shape.num_elements()


# --- Comparison ---


@dataclass(frozen=True)
class Row:
    """The results for one variant, which are one row of the table.

    Attributes:
        backend: The package.
        variant: A name in ``VARIANTS``, or ``float32`` for the model with which the variants are compared.
        problem: The reason why the variant was not measured, or an empty string.
        sentences: Number of sentences that both models translated.
        bytes: Size of the weights in bytes, by dtype.
        same: Number of translations that are the same as in float32, by search.
        bleu: The variant's BLEU score, by search.
        bleu_float32: The float32 model's BLEU score on the same sentences, by search.
        speed: Median over batches of the sentences per second relative to float32, by search.
    """

    backend: str
    variant: str
    problem: str = ""
    sentences: int = 0
    bytes: Mapping[str, int] | None = None
    same: Mapping[str, int] | None = None
    bleu: Mapping[str, float] | None = None
    bleu_float32: Mapping[str, float] | None = None
    speed: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Texts:
    """A trained model, source sentences, and their reference translations."""

    trained: Trained
    sources: Sequence[str]
    references: Sequence[str]

    def batches(self) -> list[ndarray]:
        """Return batches of padded IDs with the same length, so that JAX and TensorFlow compile for only one shape."""
        ids = pad([self.trained.vocabulary.ids(line) for line in self.sources], self.trained.config)
        return [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]

    def bleu(self, translations: Sequence[Sequence[int]]) -> float:
        """Return the BLEU score for translations of the first sentences, computed as in `parity evaluate`."""
        lines = [self.trained.vocabulary.text(tokens) for tokens in translations]
        held_out = list(zip(self.sources, self.references, strict=True))
        return HeldOut("text", held_out).score(lines, self.references[: len(lines)])


def compare(backend: str, variant: str, texts: Texts, base: Any, seconds: float) -> Row:
    """Translate each batch with a variant and with the float32 model, and return the comparison of the results.

    Args:
        backend: The package.
        variant: A name in ``VARIANTS``.
        texts: The trained model and the sentences to translate.
        base: The float32 model.
        seconds: Time in seconds after which no new batch starts. At least ``ROUNDS`` batches run in any case.

    Raises:
        RuntimeError: If a variant doesn't store weights in the dtype that its name specifies.
    """
    package, config = PORTS[backend].import_package(), texts.trained.config
    if "torchao" in variant and not find_spec("torchao"):
        return Row(backend, variant, "not installed: pip install torchao")
    load = partial(package.Transformer.from_weights, config, texts.trained.weights)
    models = {"float32": base, variant: VARIANTS[backend][variant](load)}
    size = stored_bytes(backend, models[variant])
    kind = variant.partition(",")[0]
    if kind not in size:
        raise RuntimeError(f"{backend} {variant} must store {kind}: got {', '.join(size)}")
    batches = texts.batches()
    first = batches[0][:1] if backend == "torch" else batches[0]  # JAX and TensorFlow compile for this shape
    for search in SEARCHES.values():
        for model in models.values():
            search(package, model, first)
    found: dict[tuple[str, str], list[list[int]]] = {(kind, name): [] for kind in SEARCHES for name in models}
    speeds: dict[str, list[float]] = {kind: [] for kind in SEARCHES}
    end = time.perf_counter() + seconds
    for number, batch in enumerate(batches, 1):
        for kind, search in SEARCHES.items():
            taken = {}
            for name, model in models.items():
                start = time.perf_counter()
                ids = search(package, model, batch).ids
                taken[name] = time.perf_counter() - start
                found[kind, name] += [tokens_of(row, config) for row in ids]
            speeds[kind].append(taken["float32"] / taken[variant])
        if number >= ROUNDS and time.perf_counter() > end:
            break
    return Row(
        backend,
        variant,
        sentences=len(found["greedy", variant]),
        bytes=size,
        same={
            kind: sum(a == b for a, b in zip(found[kind, variant], found[kind, "float32"], strict=True))
            for kind in SEARCHES
        },
        bleu={kind: texts.bleu(found[kind, variant]) for kind in SEARCHES},
        bleu_float32={kind: texts.bleu(found[kind, "float32"]) for kind in SEARCHES},
        speed={kind: statistics.median(ratios) for kind, ratios in speeds.items()},
    )


def compare_all(backend: str, texts: Texts, seconds: float) -> Iterator[Row]:
    """Yield one row with the size of a backend's float32 model, and one row per variant."""
    transformer = PORTS[backend].import_package().Transformer
    base = transformer.from_weights(texts.trained.config, texts.trained.weights)
    yield Row(backend, "float32", bytes=stored_bytes(backend, base))
    for variant in VARIANTS[backend]:
        print(f"{backend} {variant} ...", file=sys.stderr, flush=True)
        row = compare(backend, variant, texts, base, seconds)
        print(*list(table([row]))[2:], file=sys.stderr, flush=True)
        yield row


# --- Output ---


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table that contains the rows."""
    titles = [f"{title}, {kind}" for title in ("same", "BLEU", "speed") for kind in SEARCHES]
    yield f"| | | sentences | {' | '.join(titles)} | MB |"
    yield "|---|---|" + "---:|" * 8
    for row in rows:
        size = sum((row.bytes or {}).values()) / MB
        if row.problem:
            cells = [row.problem, *[""] * 7]
        elif row.same is None:
            cells = [*[""] * 7, f"{size:.1f}"]
        else:
            bleu = [f"{row.bleu[kind]:.1f} ({row.bleu_float32[kind]:.1f})" for kind in SEARCHES]
            speed = [f"{row.speed[kind]:.2f}" for kind in SEARCHES]
            cells = [str(row.sentences), *(str(row.same[kind]) for kind in SEARCHES), *bleu, *speed, f"{size:.1f}"]
        yield f"| {row.backend} | {row.variant} | {' | '.join(cells)} |"


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def page(report: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the Markdown source of the page on the site that shows the results."""
    machine = report["machine"]
    libraries = ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    lines = [
        "---",
        "html_theme.sidebar_secondary.remove: true",
        "---",
        "",
        "# int8 and bfloat16",
        "",
        "The table compares the translations of int8 and bfloat16 models with the translations of the same model in",
        "float32. [Use int8 or bfloat16](../how-to/low-precision.md) shows the code for each row.",
        "",
        "- *same* is the number of translations whose tokens are the same as in float32.",
        "- *BLEU* shows the BLEU score, followed by the float32 model's score on the same sentences in parentheses.",
        "- *speed* is the number of sentences per second relative to float32, so a value above 1 means that the model",
        f"  is faster. The script translates each batch of {BATCH} sentences with both models, one after the other,",
        "  and the table shows the median ratio over the batches.",
        "- *MB* is the size of the weights in memory, in units of 10^6 bytes.",
        "",
        f"A variant that takes longer than {report['seconds']:g} s translates fewer sentences than the others.",
        "",
        *table(rows),
        "",
        f"Measured on {report['date'][:10]}: {machine['processor']}, {machine['cpus']} CPUs, {machine['platform']}; "
        f"Python {machine['python']}, {libraries}.",
        "",
        "To reproduce the results, run:",
        "",
        "```console",
        f"$ {report['command']}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all variants, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="weight file with a vocabulary")
    parser.add_argument("source", type=Path, help="source sentences, one per line")
    parser.add_argument("reference", type=Path, help="reference translations, one per line")
    parser.add_argument("--sentences", type=int, default=128, help="maximum number of sentences (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="time after which a variant stops (default: %(default)s)"
    )
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=list(VARIANTS),
        help="comma-separated list (default: torch,jax,tf)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the results as a Markdown page")
    options = parser.parse_args(arguments)
    if not find_spec("sacrebleu"):
        parser.error("BLEU requires sacrebleu, which is not installed: pip install sacrebleu")
    if unknown := set(options.backends) - set(VARIANTS):
        parser.error(f"--backends must be some of {', '.join(VARIANTS)}: got {', '.join(sorted(unknown))}")
    prepare_environment()
    lines = [
        list(islice(path.read_text("utf-8").splitlines(), options.sentences))
        for path in (options.source, options.reference)
    ]
    if len(lines[0]) != len(lines[1]):
        parser.error(
            f"source and reference must have the same number of lines: got {len(lines[0])} and {len(lines[1])}"
        )
    texts = Texts(read_trained(options.weights), *lines)
    given = [options.weights.name, options.source.name, options.reference.name]
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python docs/examples/low_precision.py {' '.join(given)} --sentences {options.sentences} "
        f"--seconds {options.seconds:g}",
        "machine": describe_machine(),
        "versions": versions(),
        "seconds": options.seconds,
    }
    print(json.dumps({**report["machine"], **report["versions"]}), file=sys.stderr)
    rows = [row for backend in options.backends for row in compare_all(backend, texts, options.seconds)]
    print("\n".join(table(rows)))
    if options.json:
        options.json.write_text(json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(page(report, rows), "utf-8")


if __name__ == "__main__":
    main()
