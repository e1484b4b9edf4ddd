"""Evaluate a trained model on held-out sentences."""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from reference_numpy.training_config import TrainingConfig
from transformer_parity.ports.protocol import Placement, SearchOptions
from transformer_parity.text.vocabulary import Vocabulary
from transformer_parity.train import corpora
from transformer_parity.train.batches import Batches, number
from transformer_parity.train.corpora import Corpus
from transformer_parity.train.learner import Learner
from transformer_parity.train.run import longest_translation
from transformer_parity.translate.trained import Trained

SEED = 19171  # of the held-out dates: others than those a run was validated on
TOKENS = 2048  # of a batch


def held_out(vocabulary: Vocabulary, options: argparse.Namespace) -> Corpus:
    if options.task:
        return corpora.held_out_dates(SEED, vocabulary, options.sentences or 1000)
    return corpora.held_out(options.text, vocabulary, options.sentences)


def evaluate(trained: Trained, corpus: Corpus, backend: str, device: str, search: SearchOptions) -> dict[str, Any]:
    config = trained.config
    learner = Learner(backend, config, trained.weights, TrainingConfig(), 0, Placement("float32", device))
    batches = Batches(number(corpus.held_out, corpus.vocabulary, config), config, TOKENS)
    loss = learner.validate(batches.once())
    sources = [source for source, _ in corpus.held_out]
    start = time.perf_counter()
    lines = learner.translate(sources, corpus.vocabulary, longest_translation(batches), search)
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
