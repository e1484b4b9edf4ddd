"""Marian's own program, the options with which it trains models, and the import of these models."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy import ndarray

from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import npz
from transformer_parity.transformer.ports.registry import PORTS

INSTALL = "python3.11 -m venv marian-env && marian-env/bin/pip install pymarian"
# The options of all models, unless a combination changes them.
BASE = {
    "type": "transformer",
    "dim-emb": 32,
    "transformer-heads": 4,
    "transformer-dim-ffn": 64,
    "enc-depth": 2,
    "dec-depth": 2,
    "tied-embeddings-all": True,
    "learn-rate": 0.003,
}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
UNTIED = {"tied-embeddings-all": False}


@dataclass(frozen=True)
class Combination:
    """Options of Marian that determine a model.

    Attributes:
        options: Options of ``marian train``, in addition to ``BASE``.
        vocabulary: ``spm`` for a SentencePiece model, ``yml`` for one table of words per language.
        backends: Names of the backends to compare.
        reason: A part of the message with which the import rejects the model. Empty if it accepts the model.
        decoder: Difference between Marian's decoder and Marian's own scorer for this model, a key of ``DECODERS``.
            Empty if there is none.
        learned: Whether to replace the sinusoids of the trained model by a matrix of learned positions.
    """

    options: dict[str, Any]
    vocabulary: str = "spm"
    backends: tuple[str, ...] = ("numpy",)
    reason: str = ""
    decoder: str = ""
    learned: bool = False

    @property
    def shown(self) -> str:
        """The options as text, including ``--tied-embeddings-all``, without the sizes of the model."""
        tied = {"tied-embeddings-all": BASE["tied-embeddings-all"]}
        return shlex.join(map(str, flags({**tied, **self.options})))


ALL = tuple(PORTS)
KEYS = "keys not normalized"
COMBINATIONS = {
    "defaults, all embeddings tied": Combination({}, backends=ALL),
    "target embedding and output tied": Combination({**UNTIED, "tied-embeddings": True}, "yml"),
    "source and target embedding tied": Combination({**UNTIED, "tied-embeddings-src": True}),
    "no tied embeddings": Combination(UNTIED, "yml", ALL),
    "final norm": Combination({"transformer-postprocess-top": "n"}, backends=ALL),
    "norm after the embeddings": Combination({"transformer-postprocess-emb": "nd"}),
    "norm after the embeddings, final norm, no tied embeddings": Combination(
        {**UNTIED, "transformer-postprocess-emb": "dn", "transformer-postprocess-top": "dn"}, "yml"
    ),
    "ReLU": Combination({"transformer-ffn-activation": "relu"}),
    "no output bias": Combination({"output-omit-bias": True}),
    "no output bias, no tied embeddings": Combination({**UNTIED, "output-omit-bias": True}, "yml"),
    "3 encoder layers, 1 decoder layer": Combination({"enc-depth": 3, "dec-depth": 1}),
    "1 encoder layer, 3 decoder layers": Combination({"enc-depth": 1, "dec-depth": 3}),
    "wider feed-forward block in the decoder": Combination({"transformer-decoder-dim-ffn": 96}),
    "1 head": Combination({"transformer-heads": 1}),
    "8 heads, other widths": Combination({"transformer-heads": 8, "dim-emb": 40, "transformer-dim-ffn": 50}),
    "dropout and label smoothing": Combination(
        {"transformer-dropout": 0.1, "transformer-dropout-attention": 0.1, "label-smoothing": 0.1}
    ),
    "`--transformer-train-position-embeddings`": Combination({"transformer-train-position-embeddings": True}),
    "pre-norm with final norm": Combination(PRE, backends=ALL, decoder=KEYS),
    "pre-norm without final norm": Combination({**PRE, "transformer-postprocess-top": ""}, decoder=KEYS),
    "pre-norm, 1 layer per stack, ReLU, no tied embeddings": Combination(
        {**PRE, **UNTIED, "enc-depth": 1, "dec-depth": 1, "transformer-ffn-activation": "relu"}, "yml", decoder=KEYS
    ),
    "learned positions": Combination({}, learned=True),
    "Marian's `gelu`": Combination({"transformer-ffn-activation": "gelu"}, reason="--transformer-ffn-activation"),
    "norm before the addition": Combination({"transformer-postprocess": "dna"}, reason="--transformer-preprocess"),
    "feed-forward block with 3 layers": Combination({"transformer-ffn-depth": 3}, reason="--transformer-ffn-depth"),
    "average attention": Combination(
        {"transformer-decoder-autoreg": "average-attention"}, reason="--transformer-decoder-autoreg"
    ),
    "SSRU": Combination(
        {"transformer-decoder-autoreg": "rnn", "dec-cell": "ssru"}, reason="--transformer-decoder-autoreg"
    ),
    "tied layers": Combination({"transformer-tied-layers": [1, 1]}, reason="--transformer-tied-layers"),
    "no output projection in attention": Combination(
        {"transformer-no-projection": True}, reason="--transformer-no-projection"
    ),
    "no biases": Combination({"transformer-no-bias": True}, reason="--transformer-no-bias"),
}


class MarianError(Exception):
    """Marian is not installed, or one of its commands failed."""


class Marian:
    """Marian's commands, run by the Python interpreter of an environment that contains `pymarian`.

    Raises:
        MarianError: If the interpreter can't import `pymarian`.
    """

    def __init__(self, python: str | Path) -> None:
        self.python = str(python)
        self.version = self._call("-c", "import pymarian; print(pymarian.__version__)").strip()
        code = "import os, _pymarian; os.dup2(1, 2); raise SystemExit(_pymarian.main(['train', '--version']))"
        self.build = self._call("-c", code).strip()

    def run(self, command: str, *arguments: Any, given: str | None = None) -> str:
        """Run a command of Marian, and return its standard output.

        Args:
            command: ``train``, ``score``, ``decode``, or ``vocab``.
            arguments: Arguments of the command.
            given: Text to pass as standard input, or None.

        Raises:
            MarianError: If the command fails. The message contains the last lines of its output.
        """
        return self._call("-m", "pymarian", command, *map(str, arguments), given=given)

    def _call(self, *arguments: str, given: str | None = None) -> str:
        try:
            done = subprocess.run([self.python, *arguments], input=given, capture_output=True, encoding="utf-8")
        except OSError as error:
            raise MarianError(f"--python must name a Python interpreter: got {self.python} ({error})") from error
        if "No module named 'pymarian'" in done.stderr:
            raise MarianError(f"{self.python} can't import pymarian; create an environment with it: {INSTALL}")
        if done.returncode:
            errors = [line.partition("Error: ")[2] for line in done.stderr.splitlines() if "Error: " in line]
            errors = [error for error in errors if not error.startswith("Aborted from")]  # a place in Marian's source
            raise MarianError(f"{' '.join(arguments[:3])}: {' '.join(errors[:2] or done.stderr.splitlines()[-3:])}")
        return done.stdout


@dataclass(frozen=True)
class Trained:
    """A model that Marian trained, and its vocabularies."""

    marian: Marian
    path: Path
    vocabularies: tuple[Path, Path]

    @property
    def _common(self) -> list[Any]:
        return ["--vocabs", *self.vocabularies, "--cpu-threads", 1, "--workspace", 256]

    def scores(self, sources: Path, targets: Path) -> ndarray:
        """Return the log-probability of each sentence pair in two files."""
        said = self.marian.run(
            *("score", *self._common, "--model", self.path, "--train-sets", sources, targets),
            *("--mini-batch", 1, "--maxi-batch", 1),
        )
        return np.array([float(line.split()[0]) for line in said.split("\n") if line])

    def translations(
        self, sources: Path, count: int, beam: int, penalty: float, *options: Any, batch: int = 1, raw: bool = True
    ) -> list[list[tuple[str, float, float]]]:
        """Return the translations of each sentence in a file, with log-probability and score, best first.

        Args:
            sources: File with one sentence per line.
            count: Number of sentences in the file.
            beam: Beam size.
            penalty: Exponent of the length penalty.
            options: Additional options of ``marian decode``.
            batch: Number of sentences per batch.
            raw: True to return SentencePiece pieces instead of text. Spaces at the end of a text are removed, as in
                Hugging Face's tokenizer. Marian prints a space if a translation that was cut off ends with a space.
        """
        said = self.marian.run(
            *("decode", *self._common, "--models", self.path, "--input", sources, "--n-best", "--beam-size", beam),
            *("--normalize", penalty, "--mini-batch", batch, "--maxi-batch", 1, *["--no-spm-decode"][:raw], *options),
        )
        found: list[list[tuple[str, float, float]]] = [[] for _ in range(count)]
        for line in said.split("\n"):
            if line:
                number, text, total, score = line.split(" ||| ")
                found[int(number)].append((text.rstrip(" "), float(total.split("=")[1]), float(score)))
        return found


def flags(options: dict[str, Any]) -> list[Any]:
    """Return the arguments that set options of Marian."""
    found: list[Any] = []
    for name, value in options.items():
        if value is not False:
            found += [f"--{name}", *([] if value is True else value if isinstance(value, list) else [value])]
    return found


def learn_positions(path: Path) -> None:
    """Replace the sinusoids of a model by a matrix of learned positions, with random values.

    ``marian train`` can't train such a model: its command line sets ``transformer-train-position-embeddings``, but
    src/models/transformer.h reads ``transformer-train-positions``. With this option in the model file, Marian 1.12.42
    stops with "Required option 'inference' has not been set".
    """
    arrays = npz.read(path)
    options = yaml.safe_load(arrays["special:model.yml"].tobytes().rstrip(b"\0"))
    options |= {"transformer-train-positions": True, "transformer-train-position-embeddings": True}
    width = arrays["Wemb"].shape[1]
    arrays["Wpos"] = np.random.default_rng(0).normal(0, 1, (300, width)).astype(np.float32)
    arrays["Wemb"] = arrays["Wemb"] * np.float32(np.sqrt(width))  # learned positions disable this factor
    text = yaml.safe_dump(options).encode() + b"\0"
    npz.write(path, {**arrays, "special:model.yml": np.frombuffer(text, np.int8)})


def read(trained: Trained) -> Imported:
    """Import a model that Marian trained."""
    return import_checkpoint(trained.path, options=ReadOptions(vocab=tuple(dict.fromkeys(trained.vocabularies))))


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> ndarray:
    """Return lists of IDs as one padded array."""
    ids = np.full((len(rows), max(map(len, rows))), pad_id)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    return ids
