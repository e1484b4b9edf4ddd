"""Training data (generated dates or text from two files), and default settings for both tasks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformer_parity.apps.text.dates import date_lines, date_pairs
from transformer_parity.transformer.sentences.pairs import Pairs, read_pairs
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_spec.checks import check_choice

DATES_TRAINED, DATES_HELD_OUT = 100_000, 2_000
MOST_HELD_OUT = 1_000  # maximum number of pairs to hold out if the user specifies no validation text


@dataclass(frozen=True)
class Recipe:
    """Default settings for a task, which command-line options can override.

    Attributes:
        steps: Number of steps.
        tokens_per_batch: Maximum number of positions per batch.
        vocab_size: Number of subwords to learn. If 0, each character is a token.
        average: Number of most recent checkpoints to average for the final weights.
        model: Fields of the model config.
        dropout: Dropout rate.
        training: Fields of the training config.
    """

    steps: int
    tokens_per_batch: int
    vocab_size: int
    average: int
    model: Mapping[str, Any]
    dropout: float
    training: Mapping[str, Any]


RECIPES = {
    # The cool-down increases exact matches from 98% to more than 99%.
    "dates": Recipe(
        steps=2400,
        tokens_per_batch=1536,
        vocab_size=0,
        average=1,
        model={"d_model": 128, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 2, "num_decoder_layers": 2},
        dropout=0.1,
        training={"learning_rate_factor": 0.4, "warmup_steps": 400, "cooldown_steps": 800},
    ),
    "text": Recipe(
        steps=5000,
        tokens_per_batch=1280,
        vocab_size=4000,
        average=5,
        model={"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3},
        dropout=0.2,
        training={"learning_rate_factor": 1.0, "warmup_steps": 1000, "cooldown_steps": 0},
    ),
}


@dataclass(frozen=True)
class HeldOut:
    """Sentence pairs for evaluation."""

    task: str
    held_out: Pairs

    @property
    def metric(self) -> str:
        """Name of the metric for translation quality."""
        return "exact match" if self.task == "dates" else "BLEU"

    def score(self, translations: Sequence[str], references: Sequence[str]) -> float:
        """Score translations. The score is the percentage of exact matches for dates, and BLEU (sacrebleu) for text."""
        if self.task == "dates":
            right = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
            return 100.0 * right / len(references)
        import sacrebleu

        return sacrebleu.corpus_bleu(list(translations), [list(references)]).score


@dataclass(frozen=True)
class Corpus(HeldOut):
    """Sentence pairs for training and evaluation, with their vocabulary.

    Attributes:
        training: Sentence pairs for training.
        vocabulary: Subwords of the source and the target.
        origin: JSON-compatible description, which ``rebuild`` uses to recreate the corpus.
    """

    training: Pairs
    vocabulary: Subwords
    origin: dict[str, Any]


@cache
def date_vocabulary() -> Subwords:
    """Return the character vocabulary for the dates task."""
    return Subwords.train(date_lines(), kind="char")


def dates(seed: int, vocabulary: Subwords | None = None) -> Corpus:
    """Return the corpus for the dates task, in which each token is a character."""
    vocabulary = vocabulary or date_vocabulary()
    training = date_pairs(DATES_TRAINED, seed, held_out=False)
    origin = {"task": "dates", "seed": seed, "checksum": _checksum(training)}
    return Corpus("dates", date_pairs(DATES_HELD_OUT, seed, held_out=True), training, vocabulary, origin)


def text(
    files: Sequence[str | Path],
    held_out: Sequence[str | Path] | None,
    vocab_size: int,
    vocabulary: Subwords | None = None,
) -> Corpus:
    """Build a corpus from two line-aligned files. The subwords are learned from the training data.

    Args:
        files: Source file and target file.
        held_out: Source file and target file for validation. If None, 2% of the distinct pairs (at most 1,000) are held
            out. A hash of the source sentence determines which pairs are held out.
        vocab_size: Number of subwords to learn.
        vocabulary: Existing subwords to use, or None to learn new subwords.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the files are not line-aligned text or contain too little text.
    """
    pairs = read_pairs(*files)
    if held_out is not None:
        training, validation = pairs, read_pairs(*held_out)
    else:
        by_content = sorted(dict.fromkeys(pairs), key=lambda pair: zlib.crc32(pair[0].encode()))
        validation = by_content[: max(1, min(len(by_content) // 50, MOST_HELD_OUT))]
        chosen = set(validation)
        training = [pair for pair in pairs if pair not in chosen]
        if not training:
            raise ValueError(
                f"{files[0]} and {files[1]} must contain at least two distinct sentence pairs, because one pair is "
                "held out for validation: got only one pair"
            )
    vocabulary = vocabulary or Subwords.train((line for pair in training for line in pair), vocab_size)
    origin = {
        "task": "text",
        "files": [str(Path(path).resolve()) for path in files],
        "held_out": held_out and [str(Path(path).resolve()) for path in held_out],
        "checksum": _checksum(training + validation),
    }
    return Corpus("text", validation, training, vocabulary, origin)


def held_out_dates(seed: int, count: int) -> HeldOut:
    """Return dates on held-out days, which never occur in the training data."""
    return HeldOut("dates", date_pairs(count, seed, held_out=True))


def held_out(files: Sequence[str | Path], sentences: int | None) -> HeldOut:
    """Read two files, and return their sentence pairs for evaluation.

    Args:
        files: Source file and target file.
        sentences: Number of pairs to use, starting with the first pair. If None, all pairs are used.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the files are not line-aligned text.
    """
    return HeldOut("text", read_pairs(*files)[:sentences])


def rebuild(origin: Any, vocabulary: Subwords, moved: Mapping[str, Sequence[Path] | None]) -> Corpus:
    """Recreate a run's corpus from a checkpoint.

    Args:
        origin: ``Corpus.origin``, as stored in the checkpoint.
        vocabulary: Subwords stored in the checkpoint.
        moved: New paths of the text files, with the keys ``files`` and ``held_out``. None means
            that the paths in ``origin`` are still valid.

    Raises:
        KeyError: If an entry is missing from ``origin``.
        TypeError: If ``origin`` has the wrong type.
        OSError: If a file cannot be read.
        ValueError: If the content of the corpus has changed or ``origin`` is invalid.
    """
    if not isinstance(origin, dict):
        raise TypeError(f"the entry 'corpus' must be a JSON object: got {type(origin).__name__}")
    check_choice("task", origin["task"], list(RECIPES))
    if origin["task"] == "dates":
        if any(moved.values()):
            raise ValueError("the run was trained on dates, not on text; remove --text and --held-out")
        corpus, what = dates(origin["seed"], vocabulary), "the generated dates"
    else:
        recorded, recorded_held_out = origin["files"], origin["held_out"]
        files = moved["files"] or _recorded(recorded)
        held_out = moved["held_out"] or (None if recorded_held_out is None else _recorded(recorded_held_out))
        corpus = text(files, held_out, 0, vocabulary)
        what = " and ".join(map(str, files))
    if corpus.origin["checksum"] != origin["checksum"]:
        raise ValueError(f"{what} have changed since the run started")
    return corpus


def _recorded(files: Any) -> list[str]:
    """Return the paths of the text files in a checkpoint, after checking that the files are regular files, not pipes.

    The function does not open the files.
    """
    if not isinstance(files, list) or [type(file) for file in files] != [str, str]:
        raise ValueError(f"the text must consist of two files: got {files}")
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(
                f"the run's text file {file} must be a regular file; if you moved the file, specify its new path with "
                "--text or --held-out"
            )
    return files


def _checksum(pairs: Pairs) -> int:
    return zlib.crc32("\n".join(line for pair in pairs for line in pair).encode())
