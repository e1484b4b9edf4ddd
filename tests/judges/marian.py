"""Compare imported models with Marian itself, which trains the models, scores sentence pairs, and translates.

The PyPI package `pymarian` contains Marian's C++ program for CPython 3.11. Install it in a separate environment:

    python3.11 -m venv marian-env
    marian-env/bin/pip install pymarian
    python -m tests.judges.marian --python marian-env/bin/python --json docs/results/marian.json

For each combination of options, Marian trains a tiny model on the parallel text in transformer_parity/data. Then both
programs score the same sentence pairs and translate the same sentences. docs/results/marian.md shows the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.transformer.ports.protocol import LoadedPort, Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.search import Search, SearchResult

from .marian_program import (
    BASE,
    COMBINATIONS,
    KEYS,
    Combination,
    Marian,
    MarianError,
    Trained,
    flags,
    learn_positions,
    padded,
    read,
)
from .marian_training import compare_training

DATA = Path(__file__).parents[2] / "transformer_parity" / "data"
TEXTS = [DATA / "parallel.en", DATA / "parallel.de"]
SENTENCES = 40  # number of sentence pairs to score and of sentences to translate
UPDATES = 100
IN_BATCHES, BATCH = 200, 8  # number of sentences and sentences per batch in the comparison of batches
SCORE = 1e-5  # largest relative difference between two equal scores; Marian computes in float32 and prints six digits

OF_BEAM = ("beam_size", "length_penalty", "length_penalty_kind", "max_length", "num_hypotheses", "rules")
Run = Callable[[ndarray, Search], SearchResult]  # searches for translations of source token IDs


# Settings of each search: the beam size and the exponent of the length penalty, Marian's --normalize.
SEARCHES = ((1, 0.0), (4, 0.6), (12, 1.0))
OF_PORTS = SEARCHES[1:2]  # searches for all backends except NumPy


class UnnormalizedKeys:
    """The self-attention of Marian's decoder if ``--transformer-preprocess n`` is set.

    ``LayerAttention`` in src/models/transformer.h normalizes keys and values only if they are the same expression as
    the queries. In all decoding steps except the first, they aren't, because the step concatenates its input with the
    inputs of all previous steps. Training and scoring process all positions at once, so they normalize the keys.
    """

    def __init__(self, layer: Any) -> None:
        self.norm, self.attention = layer.self_attention_norm, layer.self_attention

    def normalize(self, x: ndarray) -> ndarray:
        """Normalize the queries, and keep the values without the norm."""
        self.raw = x
        return self.norm(x)

    def attend(self, x: ndarray, _: ndarray, mask: ndarray, *rest: Any) -> ndarray:
        """Attend to normalized keys and values in the first position, and to unnormalized ones in all others."""
        first = self.attention(x[:, :1], x[:, :1], mask[..., :1, :1], *rest)
        return np.concatenate([first, self.attention(x, self.raw, mask, *rest)[:, 1:]], axis=1)


def with_unnormalized_keys(model: Any) -> None:
    """Change a NumPy model so that it computes the same as Marian's decoder in a pre-norm model."""
    for layer in model.decoder.layers:
        changed = UnnormalizedKeys(layer)
        layer.self_attention_norm, layer.self_attention = changed.normalize, changed.attend


DECODERS = {KEYS: with_unnormalized_keys}


class Judge:
    """Both programs, and the sentences on which they are compared.

    Args:
        marian: Marian's commands.
        directory: Directory for all files.
        sentences: Number of sentence pairs.
        updates: Number of updates in each training.
    """

    def __init__(self, marian: Marian, directory: Path, sentences: int = SENTENCES, updates: int = UPDATES) -> None:
        self.marian, self.directory, self.updates = marian, directory, updates
        lines = [path.read_text("utf-8").splitlines() for path in TEXTS]
        chosen = np.linspace(0, len(lines[0]) - 1, sentences).astype(int)
        self.sources, self.targets = ([side[i] for i in chosen] for side in lines)
        self.files = [directory / "test.en", directory / "test.de"]
        for path, side in zip(self.files, (self.sources, self.targets), strict=True):
            path.write_text("\n".join(side) + "\n", "utf-8")

    def vocabularies(self, kind: str) -> tuple[Path, Path]:
        """Return the vocabulary files. Marian trains a SentencePiece model in the first training that requires it."""
        if kind == "spm":
            return (self.directory / "vocab.spm",) * 2
        found = []
        for text in TEXTS:
            found.append(path := self.directory / f"{text.suffix[1:]}.yml")
            if not path.exists():
                path.write_text(self.marian.run("vocab", "--max-size", 350, given=text.read_text("utf-8")), "utf-8")
        return found[0], found[1]

    def train(self, name: str, combination: Combination, *options: Any) -> Trained:
        """Let Marian train a model."""
        directory = self.directory / "".join(letter if letter.isalnum() else "-" for letter in name)
        shutil.rmtree(directory, ignore_errors=True)  # Marian would resume the training of an existing model
        directory.mkdir()
        vocabularies = self.vocabularies(combination.vocabulary)
        sizes = ("--dim-vocabs", 400, 400) if combination.vocabulary == "spm" else ()
        self.marian.run(
            "train",
            *("--model", directory / "model.npz", "--vocabs", *vocabularies, *sizes, "--train-sets", *TEXTS),
            *("--cpu-threads", 1, "--workspace", 256, "--seed", 1, "--mini-batch", 32, "--maxi-batch", 10),
            *(
                "--after-batches",
                1 if combination.reason else self.updates,
                "--max-length",
                100,
                "--overwrite",
                "--quiet",
                *options,
            ),
            *flags({**BASE, **combination.options}),
        )
        if combination.learned:
            learn_positions(directory / "model.npz")
        return Trained(self.marian, directory / "model.npz", vocabularies)

    def compare(self, name: str, combination: Combination) -> dict[str, Any]:
        """Train a model and compare all results. Return them in a form that can be written as JSON."""
        started = time.monotonic()
        row: dict[str, Any] = {
            "name": name,
            "options": combination.shown,
            "vocabulary": combination.vocabulary,
            "decoder": combination.decoder,
        }
        try:
            trained = self.train(name, combination)
        except MarianError as error:
            return {**row, "verdict": "not trained", "detail": str(error)}
        try:
            imported = read(trained)
        except ValueError as error:
            is_expected = bool(combination.reason) and combination.reason in str(error)
            detail = str(error).partition("cannot be imported: ")[2]  # without the path of the file
            return {**row, "verdict": "rejected" if is_expected else "not imported", "detail": detail}
        if combination.reason:
            return {**row, "verdict": "not rejected", "detail": f"expected an error about {combination.reason}"}
        try:
            theirs = trained.scores(*self.files)
        except MarianError as error:
            return {**row, "verdict": "not run", "detail": str(error)}
        searched = {
            (beam, penalty): trained.translations(self.files[0], len(self.sources), beam, penalty, raw=beam > 1)
            for beam, penalty in SEARCHES
        }
        row["notes"] = list(imported.notes)
        row["distinct"] = len({found[0][0] for found in searched[SEARCHES[1]]})
        row["backends"] = {}
        for backend in combination.backends:
            port = load(imported, backend)
            scores = score(port, imported, self.sources, self.targets)
            of_backend = SEARCHES if backend == "numpy" else OF_PORTS
            row["backends"][backend] = {
                "scores": len(scores),
                "score_error": relative(scores, theirs),
                "searches": [self._search(port.search, imported, key, searched[key]) for key in of_backend],
            }
        if combination.decoder:
            row["with_marians_decoder"] = [
                self._search(as_decoder(imported, combination.decoder), imported, key, searched[key])
                for key in SEARCHES[:2]
            ]
        if combination.vocabulary == "yml":  # the text of a translation determines its tokens
            row["own_difference"] = self._rescored(trained, searched[SEARCHES[0]])
        single = score(load(imported, "numpy", "float32"), imported, self.sources, self.targets)
        double = score(load(imported, "numpy"), imported, self.sources, self.targets)
        row["float32_error"] = relative(single, double)
        row["verdict"] = verdict(row)
        row["seconds"] = round(time.monotonic() - started, 1)
        return row

    def compare_batches(self, combination: Combination) -> dict[str, Any]:
        """Compare translations in batches of one sentence and of several sentences, in the order of the sentences.

        Marian's maximum length depends on the longest sentence of a batch.
        """
        trained = self.train("batches", combination)
        imported = read(trained)
        port = load(imported, "numpy")
        lines = TEXTS[0].read_text("utf-8").splitlines()[:IN_BATCHES]
        path = self.directory / "batches.en"
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        beam, penalty = SEARCHES[1]
        single, batched = (trained.translations(path, len(lines), beam, penalty, batch=size) for size in (1, BATCH))
        ours = search(port.search, imported, lines, beam, penalty)
        widest: list[list[tuple[str, float, float]]] = []
        assert imported.vocabulary is not None
        for start in range(0, len(lines), BATCH):
            batch = lines[start : start + BATCH]
            longest = 3 * max(len(imported.vocabulary.ids(line)) for line in batch)
            widest += search(port.search, imported, batch, beam, penalty, longest)

        def same(found: list[list[Any]], expected: list[list[Any]]) -> int:
            return sum(a[0][0] == b[0][0] for a, b in zip(found, expected, strict=True))

        return {
            "sentences": len(lines),
            "batch": BATCH,
            "beam": beam,
            "normalize": penalty,
            "ours_and_single": same(ours, single),
            "ours_and_batched": same(ours, batched),
            "single_and_batched": same(single, batched),
            "widest_and_batched": same(widest, batched),
        }

    def _rescored(self, trained: Trained, searched: list[list[Any]]) -> float:
        """Return the largest difference between the scores of Marian's decoder and of its scorer."""
        chosen = [i for i, found in enumerate(searched) if len(found[0][0].split()) < self._longest(i)]
        paths = [self.directory / f"rescored{path.suffix}" for path in self.files]
        for path, lines in zip(paths, (self.sources, [found[0][0] for found in searched]), strict=True):
            path.write_text("".join(f"{lines[i]}\n" for i in chosen), "utf-8")
        return relative(trained.scores(*paths), np.array([searched[i][0][1] for i in chosen]))

    def _longest(self, i: int) -> int:
        """Return the maximum length of a translation in words. A longer one doesn't end with EOS."""
        return 3 * (len(self.sources[i].split()) + 1)

    def _search(
        self, run: Run, imported: Imported, key: tuple[float, float], expected: list[list[Any]]
    ) -> dict[str, Any]:
        """Compare the hypotheses of one search."""
        beam, penalty = int(key[0]), key[1]
        found = search(run, imported, self.sources, beam, penalty, raw=beam > 1)
        texts = [[text for text, *_ in side] for side in found], [[text for text, *_ in side] for side in expected]
        errors = [
            relative(np.array([one[i] for one in ours]), np.array([one[i] for one in theirs]))
            for ours, theirs in zip(found, expected, strict=True)
            if [one[0] for one in ours] == [one[0] for one in theirs]
            for i in (1, 2)
        ]
        return {
            "beam": beam,
            "normalize": penalty,
            "sentences": len(expected),
            "equal_best": sum(a[:1] == b[:1] for a, b in zip(*texts, strict=True)),
            "equal_lists": sum(a == b for a, b in zip(*texts, strict=True)),
            "hypotheses": sum(map(len, expected)),
            "score_error": max(errors, default=None),
            "different": [
                {"source": self.sources[i], "ours": found[i][:2], "marian": expected[i][:2]}
                for i, (a, b) in enumerate(zip(*texts, strict=True))
                if a != b
            ][:3],
        }


def load(imported: Imported, backend: str, dtype: str = "float64") -> LoadedPort:
    """Load an imported model with one of the four packages."""
    return PORTS[backend].load(imported.config, imported.weights, Placement(dtype))


def relative(found: ndarray, expected: ndarray) -> float:
    """Return the largest difference between two arrays of scores, divided by the expected score."""
    return float((np.abs(found - expected) / np.maximum(np.abs(expected), 1.0)).max())


def equal(searches: list[dict[str, Any]]) -> bool:
    """Return whether all hypotheses of all searches are equal."""
    return all(one["equal_lists"] == one["sentences"] and one["score_error"] <= SCORE for one in searches)


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict on a combination.

    ``agrees``: all scores and hypotheses are equal. ``decoder differs``: the scores are equal, and the hypotheses are
    equal after a change that reproduces a difference between Marian's decoder and its own scorer. ``differs``: other.
    """
    results = row["backends"].values()
    if any(one["score_error"] > SCORE for one in results):
        return "differs"
    if all(equal(one["searches"]) for one in results):
        return "agrees"
    return "decoder differs" if row["decoder"] and equal(row["with_marians_decoder"]) else "differs"


def score(port: LoadedPort, imported: Imported, sources: list[str], targets: list[str]) -> ndarray:
    """Return the log-probability of each sentence pair."""
    config, vocabulary = imported.config, imported.vocabulary
    assert vocabulary is not None
    source_ids = padded([vocabulary.ids(line) for line in sources], config.pad_id)
    labels = padded([vocabulary.target_ids(line) for line in targets], config.pad_id)
    target_ids = np.concatenate([np.full((len(labels), 1), config.bos_id), labels[:, :-1]], axis=1)
    logits = port.run("", {"source_ids": source_ids, "target_ids": target_ids}, taps=False).output.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    log_probabilities = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    of_labels = np.take_along_axis(log_probabilities, labels[..., None], -1)[..., 0]
    return np.where(labels != config.pad_id, of_labels, 0.0).sum(-1)


def as_decoder(imported: Imported, change: str) -> Run:
    """Return a function that searches like Marian's decoder, with the reference and a change from ``DECODERS``."""
    model = ref.Transformer.from_weights(imported.config, imported.weights, dtype="float64", fast=False)
    DECODERS[change](model)

    def run(source_ids: ndarray, options: Search) -> SearchResult:
        given = {field.name: getattr(options, field.name) for field in fields(options)}
        given = {name: given[name] for name in OF_BEAM}
        return ref.beam_search(model, source_ids, **given, use_cache=False)

    return run


def search(
    run: Run,
    imported: Imported,
    sources: list[str],
    beam: int,
    penalty: float,
    max_length: int | None = None,
    *,
    raw: bool = True,
) -> list[list[tuple[str, float, float]]]:
    """Return the translations of each sentence, with log-probability and score, best first."""
    config, vocabulary = imported.config, imported.vocabulary
    assert vocabulary is not None
    options = replace(
        imported.search, beam_size=beam, length_penalty=penalty, num_hypotheses=beam, max_length=max_length
    )
    result = run(padded([vocabulary.ids(line) for line in sources], config.pad_id), options)
    found: list[list[tuple[str, float, float]]] = []
    for row, scores in zip(result.nbest_ids, result.nbest_scores, strict=True):
        found.append([])
        for ids, one in zip(row, scores, strict=True):
            if np.isfinite(one):
                length = int((ids != config.pad_id).sum())
                tokens = [int(token) for token in ids[:length] if token != config.eos_id]
                text = " ".join(vocabulary.names(tokens)) if raw else vocabulary.text(tokens)
                found[-1].append((text, float(one) * length**penalty, float(one)))
    return found


def main() -> int:
    """Compare all combinations, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"compare only these combinations, or {' and '.join(PARTS)}")
    parser.add_argument("--python", required=True, help="Python interpreter of the environment that contains pymarian")
    parser.add_argument("--json", type=Path, help="write the results to this file, and replace only the compared ones")
    parser.add_argument("--keep", type=Path, help="write the models to this directory, and don't delete them")
    options = parser.parse_args()
    names = options.names or [*COMBINATIONS, *PARTS]
    if unknown := set(names) - {*COMBINATIONS, *PARTS}:
        parser.error(f"names must be among {', '.join([*COMBINATIONS, *PARTS])}: got {', '.join(sorted(unknown))}")
    try:
        marian = Marian(options.python)
    except MarianError as error:
        parser.error(str(error))
    kept = options.json is not None and options.json.exists()
    report = json.loads(options.json.read_text("utf-8")) if kept else {"combinations": []}
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for current in judged(Judge(marian, directory), names, report):
            if options.json:
                options.json.write_text(json.dumps(current, indent=1, ensure_ascii=False) + "\n", "utf-8")
    allowed = ("agrees", "decoder differs", "rejected", "not run")
    return int(any(row["verdict"] not in allowed for row in report["combinations"]))


def judged(both: Judge, names: Sequence[str], report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the report after each comparison. Results that it contains already are replaced."""
    order = [*COMBINATIONS]
    for name in names:
        report |= {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": {"pymarian": both.marian.version, "marian": both.marian.build, "numpy": np.__version__},
        }
        if name in PARTS:
            report[name] = PARTS[name](both)
            print(name, json.dumps(report[name]), flush=True)
        else:
            row = both.compare(name, COMBINATIONS[name])
            rows = {one["name"]: one for one in [*report["combinations"], row] if one["name"] in order}
            report["combinations"] = sorted(rows.values(), key=lambda one: order.index(one["name"]))
            results = row.get("backends", {}).values()
            errors = [one["score_error"] for result in results for one in (result, *result["searches"])]
            worst = f"{max(error for error in errors if error is not None):.1e}" if errors else row.get("detail", "")
            print(f"{row['verdict']:15} {name}: {worst}", flush=True)
        yield report


PARTS: dict[str, Callable[[Judge], dict[str, Any]]] = {
    "batches": lambda both: both.compare_batches(COMBINATIONS["defaults, all embeddings tied"]),
    "training": lambda both: compare_training(both, COMBINATIONS["no tied embeddings"]),
}


if __name__ == "__main__":
    sys.exit(main())
