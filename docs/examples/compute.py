"""Compute the values in the site's examples: the taps of a small model in each of the four backends, in float64.

    python docs/examples/compute.py                       write all examples
    python docs/examples/compute.py attention positions   write only these examples

A tap is a named intermediate value. The script writes JSON files to this directory, and the site shows their values.
tests/test_site.py recomputes the values and checks that they agree to 1e-12.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy import DropoutRates, TrainingConfig, TransformerConfig, causal_mask, init_weights
from transformer_parity.transformer.ports.package import LoadedPackage
from transformer_parity.transformer.ports.protocol import Decoded, Placement
from transformer_parity.transformer.ports.registry import PORTS

SEED = 834  # With these weights, greedy search misses the best sentence.
DIRECTORY = Path(__file__).parent
SOURCE_IDS = np.array([[5, 3, 8, 2]])
TARGET_IDS = np.array([[1, 7, 4]])
LABELS = np.array([[7, 4, 2]])
PADDED_IDS = np.array([[5, 3, 2, 0]])

Values = dict[str, ndarray]


def config() -> TransformerConfig:
    """Return the config of a model that is so small that a page can show all its values."""
    return TransformerConfig(
        source_vocab_size=9,
        target_vocab_size=9,
        d_model=4,
        num_heads=2,
        d_ff=6,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout=DropoutRates(embedding=0.0, residual=0.0),
    )


def weights() -> dict[str, ndarray]:
    """Return weights with one digit after the decimal point, so that readers can check the results by hand."""
    drawn = init_weights(config(), seed=SEED).items()
    return {name: w if name.endswith("scale") else np.round(2.0 * w, 1) for name, w in drawn}


def floats(name: str, *shape: int) -> ndarray:
    """Return random numbers with one digit after the decimal point, seeded by the name."""
    return np.round(np.random.default_rng(list(name.encode())).normal(size=shape), 1) + 0.0  # converts -0.0 to 0.0


def block(path: str, **inputs: ndarray) -> Callable[[LoadedPackage], Values]:
    """Return a function that runs a block of a model and returns the inputs and the values at all taps."""

    def run(model: LoadedPackage) -> Values:
        found = model.run(path, inputs, taps=True)
        taps = found.taps or {"output": found.output}
        return {**{name: value for name, value in inputs.items() if "mask" not in name}, **taps}

    return run


def masks(model: LoadedPackage) -> Values:
    """Return the padding mask, the causal mask, and the decoder's mask for a sentence with padding."""
    package, ids = model.package, model.to_array(PADDED_IDS)
    padding = model.to_numpy(package.masks.padding_mask(ids, 0))[0]
    causal = model.to_numpy(package.masks.causal_mask(4))
    return {"ids": PADDED_IDS[0], "padding": padding, "causal": causal, "decoder": causal & padding}


def embeddings(model: LoadedPackage) -> Values:
    """Return the embeddings of a sentence, with and without positional encodings, and the logits."""
    ids = {"ids": SOURCE_IDS}
    looked_up = model.run("source_embedding", ids, taps=True).output
    seen = model.run("", {"source_ids": SOURCE_IDS, "target_ids": TARGET_IDS}, taps=True).taps
    return {**ids, "embedded": looked_up, **{name: seen[name] for name in ("source_embedding.output", "logits")}}


def positions(model: LoadedPackage) -> Values:
    """Return the positional encodings of the first 12 positions in both layouts."""
    encode = model.package.sinusoidal_encoding
    return {
        "interleaved": model.to_numpy(encode(12, 8)),
        "split": model.to_numpy(encode(12, 8, layout="split")),
    }


def training(model: LoadedPackage) -> Values:
    """Return the learning rate, loss, and gradient norm for eight training steps."""
    settings = TrainingConfig(warmup_steps=4, learning_rate_factor=0.02)
    trainer = model.trainer(settings)
    batch = [model.to_array(ids) for ids in (SOURCE_IDS, TARGET_IDS, LABELS)]
    results = [trainer.train_step(*batch) for _ in range(8)]
    return {
        "learning_rate": np.array([settings.learning_rate(step, 4) for step in range(1, 9)]),
        "loss": np.array([float(result.loss) for result in results]),
        "gradient_norm": np.array([float(result.gradient_norm) for result in results]),
    }


def search(model: LoadedPackage) -> Values:
    """Return the results of greedy search and beam search, and the prefixes after each step of beam search."""
    greedy = model.package.greedy_search(model.model, SOURCE_IDS, 5)
    beam = Decoded.by(
        lambda on_step: model.package.beam_search(model.model, SOURCE_IDS, 3, 0.6, 5, num_hypotheses=3, on_step=on_step)
    )
    return {
        "greedy.ids": greedy.ids,
        "greedy.scores": greedy.scores,
        **{f"beam.step {step}": shown for step, shown in enumerate(beam.shown, start=1)},
        "beam.ids": beam.result.nbest_ids,
        "beam.scores": beam.result.nbest_scores,
    }


HEADS = {"query": floats("query", 1, 1, 3, 4), "key": floats("key", 1, 1, 3, 4), "value": floats("value", 1, 1, 3, 4)}
CAUSAL = causal_mask(3)[None, None]
STATE = floats("state", 1, 3, 4)
MEMORY = floats("memory", 1, 4, 4)

EXAMPLES: dict[str, Callable[[LoadedPackage], Values]] = {
    "attention": block("scaled_dot_product_attention", **HEADS),
    "attention_causal": block("scaled_dot_product_attention", **HEADS, mask=CAUSAL),
    "multi_head": block("encoder.layers.0.self_attention", query=STATE, memory=STATE),
    "cross_attention": block("decoder.layers.0.cross_attention", query=STATE, memory=MEMORY),
    "masks": masks,
    "feed_forward": block("encoder.layers.0.feed_forward", x=STATE),
    "layer_norm": block("encoder.layers.0.self_attention_norm", x=STATE),
    "encoder_layer": block("encoder.layers.0", x=STATE),
    "decoder_layer": block("decoder.layers.0", x=STATE, memory=MEMORY, self_mask=CAUSAL),
    "embeddings": embeddings,
    "positions": positions,
    "training": training,
    "search": search,
}


def compute(name: str, backend: str) -> dict[str, Any]:
    """Return the values that a backend computes in an example, as nested lists."""
    model = PORTS[backend].load(config(), weights(), Placement("float64"))
    return {tap: np.asarray(value).tolist() for tap, value in EXAMPLES[name](model).items()}


def main(names: list[str]) -> None:
    """Write the examples with the given names, or all examples if there are no names."""
    for name in names or EXAMPLES:
        by = {backend: compute(name, backend) for backend in PORTS}
        versions = {backend: PORTS[backend].import_package().describe()["version"] for backend in PORTS}
        report = {"command": f"python docs/examples/compute.py {name}", "versions": versions, "values": by}
        (DIRECTORY / f"{name}.json").write_text(one_tap_a_line(report) + "\n", "utf-8")
        print(name)


def one_tap_a_line(report: dict[str, Any]) -> str:
    """Return JSON with one line per tap, so that a diff shows which taps have changed."""
    text = json.dumps(report, indent=1)
    return re.sub(r"\[[^\"{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)


if __name__ == "__main__":
    main(sys.argv[1:])
