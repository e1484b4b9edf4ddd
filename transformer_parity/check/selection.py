"""Which cases a run compares, and what it leaves out."""

from __future__ import annotations

import argparse
from itertools import chain

from rich.console import Console

import reference_numpy as ref
from reference_numpy.config import TransformerConfig
from transformer_parity.cases.case import ACTIVATIONS, SENTENCES, STAGES, Case
from transformer_parity.cases.standard import gradient_case, preset_case, search_cases, standard_cases
from transformer_parity.compare.tolerances import EPS
from transformer_parity.ports.package import COMPILED_IN_FULL
from transformer_parity.ports.registry import PORTS
from transformer_parity.text.pairs import read_pairs
from transformer_parity.text.vocabulary import SPECIAL, VOCAB_SIZE, Vocabulary, batch, pick


def choose_cases(options: argparse.Namespace, console: Console) -> list[Case]:
    cases: list[Case] = []
    if options.only != "text" and options.weights is None:
        if options.preset:
            cases += [preset_case(name, thorough=True) for name in options.preset]
            cases += map(gradient_case, options.preset)
            cases += chain.from_iterable(map(search_cases, options.preset))
        else:
            cases += standard_cases()
        cases = [case for case in cases if case.stage in options.stage]
    if options.only != "cases" and ACTIVATIONS in options.stage:
        with console.status("learning subwords from the text"):
            cases += _sentence_cases(options)
    return cases


def _sentence_cases(options: argparse.Namespace) -> list[Case]:
    if options.sentences < 1:
        raise ValueError(f"--sentences must be at least 1: got {options.sentences}")
    pairs = read_pairs(*(options.text or ()))
    lines = [line for pair in pairs for line in pair]
    if options.weights is not None:
        config, _ = ref.load_weights(options.weights)
        smaller = min(config.source_vocab_size, config.target_vocab_size)
        vocabulary = Vocabulary.train(lines, min(smaller - SPECIAL, VOCAB_SIZE))
        configs = {options.weights.name: config}
    else:
        vocabulary = Vocabulary.train(lines)
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary.size + SPECIAL)
        configs = {name: TransformerConfig.preset(name, **sizes) for name in options.preset or ["paper_base"]}
    chosen = pick(pairs, options.sentences)
    return [
        Case(f"{SENTENCES}/{name}", SENTENCES, config, "", batch(chosen, vocabulary, config), options.weights)
        for name, config in configs.items()
    ]


def left_out(options: argparse.Namespace) -> list[str]:
    """Return what this run did not look at, and how to ask for it."""
    left_out = []
    if options.backends:
        left_out += [f"{name} (left out of --backends)" for name in PORTS if name not in ("numpy", *options.backends)]
    left_out += [f"{dtype} (left out of --dtype)" for dtype in EPS if dtype not in options.dtype]
    if COMPILED_IN_FULL not in options.dtype:
        left_out.append(f"what XLA makes of a program for users (compiled in full in {COMPILED_IN_FULL})")
    if options.weights or options.only == "text":
        left_out.append("the standard cases (left out by --weights or --only text)")
    elif not options.backends:
        left_out.append("sentences, fully masked rows and parts of the model alone (ask for them with --backends)")
    elif options.preset:
        left_out.append("the other cases (left out by --preset)")
    left_out += [f"{stage} (left out of --stage)" for stage in STAGES if stage not in options.stage]
    if options.only == "cases":
        left_out.append("sentences (left out by --only cases)")
    other = "cpu" if options.device == "gpu" else "gpu"
    return [*left_out, f"{other} (ask for it with --device {other})"]
