"""Corpora: the generated dates, or two files of text; with settings that work for each."""

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
MOST_HELD_OUT = 1_000  # pairs of a text, where none are given for validation


@dataclass(frozen=True)
class Recipe:
    """Settings for a task: every one of them can be changed on the command line."""

    steps: int
    tokens_per_batch: int
    vocab_size: int
    average: int  # how many of the last checkpoints make the final weights
    model: Mapping[str, Any]
    dropout: float
    training: Mapping[str, Any]


RECIPES = {
    # The cool-down is what takes the exact matches from 98 to above 99 in a hundred.
    "dates": Recipe(
        steps=2400,
        tokens_per_batch=1536,
        vocab_size=0,  # characters, as many as there are
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
    """Sentence pairs to evaluate on."""

    task: str
    held_out: Pairs

    @property
    def metric(self) -> str:
        """The metric of translations."""
        return "exact match" if self.task == "dates" else "BLEU"

    def score(self, translations: Sequence[str], references: Sequence[str]) -> float:
        """Return the score of translations: the share of exact matches, in percent, or BLEU by sacrebleu."""
        if self.task == "dates":
            right = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
            return 100.0 * right / len(references)
        import sacrebleu

        return sacrebleu.corpus_bleu(list(translations), [list(references)]).score


@dataclass(frozen=True)
class Corpus(HeldOut):
    """Sentence pairs to learn from as well, and the subwords of both."""

    training: Pairs
    vocabulary: Subwords
    origin: dict[str, Any]  # what it takes to build it again, in JSON's types


@cache
def date_vocabulary() -> Subwords:
    """Return the characters that dates are written in."""
    return Subwords.train(date_lines(), kind="char")


def dates(seed: int, vocabulary: Subwords | None = None) -> Corpus:
    """Return human-written dates and their ISO 8601 form, character by character."""
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
    """Return the sentences of two line-aligned files, in subwords learned from them.

    Args:
        files: Source and target.
        held_out: Likewise, to validate on; None holds back one pair in fifty, at most a thousand, chosen by content.
        vocab_size: How many subwords to learn.
        vocabulary: The subwords, where they are known already.

    Raises:
        OSError: A file cannot be read.
        ValueError: The files are no line-aligned text, or hold too little of it.
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
            raise ValueError(f"{files[0]} and {files[1]} hold one pair of sentences only: nothing is left to learn")
    vocabulary = vocabulary or Subwords.train((line for pair in training for line in pair), vocab_size)
    origin = {
        "task": "text",
        "files": [str(Path(path).resolve()) for path in files],
        "held_out": held_out and [str(Path(path).resolve()) for path in held_out],
        "checksum": _checksum(training + validation),
    }
    return Corpus("text", validation, training, vocabulary, origin)


def held_out_dates(seed: int, count: int) -> HeldOut:
    """Return dates on days that are in no training set."""
    return HeldOut("dates", date_pairs(count, seed, held_out=True))


def held_out(files: Sequence[str | Path], sentences: int | None) -> HeldOut:
    """Return the first sentences of two files, for evaluation.

    Raises:
        OSError: A file cannot be read.
        ValueError: The files are no line-aligned text.
    """
    return HeldOut("text", read_pairs(*files)[:sentences])


def rebuild(origin: Any, vocabulary: Subwords, moved: Mapping[str, Sequence[Path] | None]) -> Corpus:
    """Return the corpus that a run was trained on.

    Args:
        origin: Of that corpus, as a checkpoint has it.
        vocabulary: Of that corpus.
        moved: Where its text is now, by entry of the origin; None is where it was.

    Raises:
        KeyError: An entry of the origin is missing.
        TypeError: The origin is of the wrong type.
        OSError: The files cannot be read any more.
        ValueError: They have changed, or the way that dates are generated has, or the origin makes no sense.
    """
    if not isinstance(origin, dict):
        raise TypeError(f"its corpus must be an object with named fields: got {type(origin).__name__}")
    check_choice("task", origin["task"], list(RECIPES))
    if origin["task"] == "dates":
        if any(moved.values()):
            raise ValueError("it learned dates: leave out --text and --held-out")
        corpus, what = dates(origin["seed"], vocabulary), "the dates that are generated now"
    else:
        recorded, recorded_held_out = origin["files"], origin["held_out"]
        files = moved["files"] or _recorded(recorded)
        held_out = moved["held_out"] or (None if recorded_held_out is None else _recorded(recorded_held_out))
        corpus = text(files, held_out, 0, vocabulary)
        what = " and ".join(map(str, files))
    if corpus.origin["checksum"] != origin["checksum"]:
        raise ValueError(f"{what} are not the text that this run began with")
    return corpus


def _recorded(files: Any) -> list[str]:
    """Return the files that a checkpoint names, without opening them: it may name a pipe or a device."""
    if not isinstance(files, list) or [type(file) for file in files] != [str, str]:
        raise ValueError(f"its text must be two files: got {files}")
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"the run's text {file} is no file: name what has moved with --text and --held-out")
    return files


def _checksum(pairs: Pairs) -> int:
    return zlib.crc32("\n".join(line for pair in pairs for line in pair).encode())
