"""Evaluate a trained model on held-out sentences."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_parity.apps.train import corpora
from transformer_parity.apps.train.batches import Batches, number
from transformer_parity.apps.train.corpora import HeldOut
from transformer_parity.apps.train.learner import Learner, Where
from transformer_parity.apps.train.run import longest_translation
from transformer_parity.apps.translate.trained import Trained
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.sentences.vocabulary import LONGEST
from transformer_spec.search import Search
from transformer_spec.training_config import TrainingConfig

SEED = 19171  # seed of the held-out dates, which differ from the dates that training runs use for validation
DATES = 1000  # default number of dates
TOKENS = 2048  # maximum number of positions per batch


def held_out(text: Sequence[Path] | None, sentences: int | None) -> HeldOut:
    """Return the sentence pairs to evaluate on.

    Args:
        text: Source file and target file, or None for generated dates.
        sentences: Number of sentence pairs to use, starting with the first pair. If None, the entire text or 1,000
            dates are used.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If the files are not line-aligned text.
    """
    if text is None:
        return corpora.held_out_dates(SEED, sentences or DATES)
    return corpora.held_out(text, sentences)


def evaluate(trained: Trained, corpus: HeldOut, backend: str, device: str, search: Search) -> dict[str, Any]:
    """Evaluate a model in one backend. Return loss, perplexity, score, and time as JSON-compatible values."""
    config = trained.config
    learner = Learner(backend, config, trained.weights, TrainingConfig(), 0, Where(Placement("float32", device)))
    start_id = trained.vocabulary.start_id
    # The decoder's BOS token may be the target language's token.
    begun = config if start_id is None else config.replace(bos_id=start_id)
    batches = Batches(number(corpus.held_out, trained.vocabulary), begun, TOKENS, max_length=LONGEST)
    loss = learner.validate(batches.once())
    sources = [source for source, _ in corpus.held_out]
    start = time.perf_counter()
    lines = learner.translate(sources, trained.vocabulary, longest_translation(batches), search)
    seconds = time.perf_counter() - start
    return {
        "file": str(trained.path),
        "step": trained.step,
        "backend": backend,
        "sentences": len(lines),
        "beam": search.beam_size,
        "length_penalty": search.length_penalty if search.beam_size else None,
        "loss": loss,
        "perplexity": math.exp(loss),
        corpus.metric: corpus.score(lines, [target for _, target in corpus.held_out]),
        "seconds": seconds,
    }
