"""The cases for user ports. In every stage, they use the full model with the port's conventions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.optimizer import global_norm
from reference_numpy.search import beam_search, greedy_search
from reference_numpy.training import gradients
from reference_numpy.transformer import Transformer
from transformer_parity.transformer.cases.case import ACTIVATIONS, DECODE, GRADIENTS, TOKENS, Case, in_stages, tiny
from transformer_parity.transformer.cases.dependence import why_nothing_shows
from transformer_parity.transformer.cases.inputs import (
    BATCH,
    SOURCE,
    ending_weights,
    generator,
    hard_weights,
    model_batches,
    padded_ids,
    token_ids,
    with_labels,
)
from transformer_parity.transformer.cases.searches import LONGEST, searches
from transformer_parity.transformer.cases.standard import CALLS, SHORT, large_vocabulary, step_case
from transformer_parity.transformer.cases.variety import longest, variants
from transformer_parity.transformer.ports.user import PluginPort
from transformer_spec.config import TransformerConfig
from transformer_spec.names import tap_shapes
from transformer_spec.search import Search
from transformer_spec.taps import matches
from transformer_spec.training_config import TrainingConfig

MANY = 33  # sentences per search; many, so that a small change to a rule affects at least one of them
TIMES = 4  # number of copies of the MANY sentences in the largest batch
SMALL_PENALTY = 1.5
LONG = 1030  # number of tokens in a sentence; larger than the common limits of 512 and 1024
SEEDS = 32  # number of seeds to try; the seed that leads to the most varied search results is used
LIKELY, ENOUGH = 18, (3, 5, 5)  # the first seed to try; no more seeds are tried once the variety is at least ENOUGH
CLIP, FAR = 0.45, 1e6  # all gradient norms are between CLIP and FAR; float32 can't represent CLIP exactly
STILL = 1e-30  # learning rate factor so small that no weight changes
RESTART = 7  # step after which training restarts
UNLABELED = 1  # index of the row that has no labels in some of the training cases
PENALTY = 4.0  # length penalty with which long hypotheses often have higher scores than short ones
WIDEST, WIDE, NARROW = 20, 4, 3  # beam sizes; 2 * WIDEST exceeds the vocabulary size
# Beam sizes, each with a tuple of values for the length penalty. Two consecutive penalties must lead to different
# hypotheses. The last two penalties differ by only 10%. This difference changes the scores by about the same amount as
# counting EOS in the length.
PREFERENCES = ((WIDE, (0.0, 0.6, SMALL_PENALTY, PENALTY)), (NARROW, (SMALL_PENALTY, 1.1 * SMALL_PENALTY)))
LIKELY_TO_END, ENDING_SEEDS = 18, 20  # the first seed to try for ``ending_weights``, and the number of seeds after it


def model_cases(config: TransformerConfig) -> list[Case]:
    """Return the basic cases of all stages for a user's port.

    No source consists only of padding, because some implementations don't define the result of attention for fully
    masked rows. A target starts with padding only if the BOS token is the padding token.
    """
    seed = _varied_seed(config)
    starts = ("starts_with_padding",) if config.bos_id == config.pad_id else ()
    names = ("padded", "source_as_long_as_target", "one_token", "one_sentence", *starts)
    batches = {name: inputs for name, inputs in model_batches(config).items() if name in names}
    cases = [Case(f"full/{name}", "full model", config, "", inputs, seed=seed) for name, inputs in batches.items()]
    for name in ("padded", "one_token", *starts):
        inputs = with_labels(batches[name], config)
        dtypes = ("float64",)
        cases.append(
            Case(f"gradients/{name}", "gradients", config, "", inputs, seed=seed, dtypes=dtypes, stage=GRADIENTS)
        )
    return [
        *cases,
        *(replace(case, seed=seed) for case in _steps(config)),
        *searches("port", config, ("float64",), seed, length_penalty=PENALTY, num_hypotheses=1),
    ]


def _steps(config: TransformerConfig) -> Iterator[Case]:
    """Yield training runs of 20 steps. Runs whose names start with ``port_clipped`` clip the gradient."""
    usual, unlabeled = with_labels(token_ids(config), config), np.arange(BATCH)[:, None] == UNLABELED
    some_rows = {"inputs": {**usual, "labels": np.where(unlabeled, config.pad_id, usual["labels"])}}
    cooldown: dict[str, Any] = {"cooldown_steps": 10}
    micro_batches, clipped, far_below = {"accumulation_steps": 2}, {"clip_norm": CLIP}, {"clip_norm": FAR}
    noticed = {**clipped, "epsilon": 1e-3}  # with the default epsilon, Adam's step barely depends on the gradient norm
    # This limit is above the norm of the mean gradient and below the norm of the gradient summed over tokens.
    below = {"clip_norm": _limit_above(config)}
    unlike_the_paper = {"learning_rate_factor": 0.03, "warmup_steps": 5, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}
    between: dict[str, Any] = {"calls": CALLS}
    at_the_end: dict[str, Any] = {"snapshots": (20,)}  # any earlier difference also affects the final weights
    runs: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("port", cooldown, between),
        ("port/changing_micro_batches", micro_batches, {**at_the_end, **some_rows, "rows": (4, 2), "restart": RESTART}),
        ("port/one_sentence", {**cooldown, **far_below}, {**at_the_end, **some_rows, **between, "rows": (4, 1, 3)}),
        ("port/small_gradient", {**micro_batches, **below, **unlike_the_paper}, at_the_end),
        ("port_clipped", {**cooldown, **clipped, **micro_batches}, {}),
        ("port_clipped/unlabeled_rows", clipped, {**at_the_end, **some_rows}),
        (
            "port_clipped/changing_micro_batches",
            {**cooldown, **noticed, **micro_batches},
            {**at_the_end, "rows": (2, 4)},
        ),
    )
    for name, settings, changes in runs:
        yield replace(step_case(name, config, TrainingConfig(**{**SHORT, **settings})), **changes)


@cache
def _limit_above(config: TransformerConfig) -> float:
    """Return a clip norm that is 2 to 4 times the initial gradient norm of the full batch.

    The result is a power of 2, so it doesn't depend on how a specific machine rounds.
    """
    model = Transformer.from_weights(config, hard_weights(config, _varied_seed(config)), "float64", fast=False)
    batch = with_labels(token_ids(config), config)
    norm = global_norm(gradients(model, batch["source_ids"], batch["target_ids"], batch["labels"]).parameters)
    return 2.0 ** math.ceil(1.0 + math.log2(norm))


@cache
def _varied_seed(config: TransformerConfig) -> int:
    """Return a seed for weights that lead to hypotheses of different lengths.

    Most models with random weights generate the same token over and over, so most bugs in a search would have no
    effect.
    """
    ids = token_ids(config)["source_ids"]
    variety = {}
    for seed in sorted(range(SEEDS), key=lambda seed: seed != LIKELY):
        model = Transformer.from_weights(config, hard_weights(config, seed), "float64", fast=False)
        greedy = greedy_search(model, ids, LONGEST).ids
        beam, unpenalized = (beam_search(model, ids, 4, alpha, LONGEST).ids for alpha in (PENALTY, 0.0))
        lengths = [(found != config.pad_id).sum(1).tolist() for found in (greedy, beam, unpenalized)]
        ends = sum(int((found == config.eos_id).any(1).sum()) for found in (greedy, beam))
        # Prefer seeds for which the length penalty, the beam size, and EOS change the results. Among these seeds,
        # prefer seeds that lead to hypotheses of many different lengths.
        decisions = (lengths[1] != lengths[2]) + (lengths[0] != lengths[1]) + (ends > 0)
        variety[seed] = (decisions, len(set(lengths[0])) + len(set(lengths[1])), ends)
        if variety[seed] >= ENOUGH:
            break
    return max(sorted(variety), key=variety.__getitem__)


@cache
def _ending_seed(config: TransformerConfig) -> int:
    """Return the first seed for which the length penalty changes the hypotheses of a model with ``ending_weights``.

    Any two consecutive penalties in ``PREFERENCES`` must lead to different hypotheses. If there is no such seed, return
    the seed for which the largest number of these pairs lead to different hypotheses.
    """
    ids, variety = _many_sources(config), {}
    for seed in (LIKELY_TO_END, *range(ENDING_SEEDS)):
        model = Transformer.from_weights(config, ending_weights(config, seed), "float64", fast=True)
        differs = []
        for beam_size, penalties in PREFERENCES:
            found = [beam_search(model, ids, beam_size, alpha, LONGEST).ids for alpha in penalties]
            differs += [not np.array_equal(one, other) for one, other in pairwise(found)]
        variety[seed] = sum(differs)
        if all(differs):
            break
    return max(variety, key=variety.__getitem__)


def _many_sources(config: TransformerConfig) -> ndarray:
    """Return source ids [MANY, SOURCE]. The first half of the rows is padded."""
    lengths = [SOURCE] * (MANY // 2) + [1 + i % (SOURCE - 1) for i in range(MANY - MANY // 2)]
    ids = padded_ids(generator("searches"), config.source_vocab_size, config.pad_id, lengths, SOURCE)
    return np.roll(ids, MANY // 2, axis=0)


@cache
def _seed_that_says_padding(config: TransformerConfig) -> int:
    """Return the first seed for which padding is the most likely token at some position.

    With such weights, a search must explicitly exclude padding.
    """
    source_ids = token_ids(config)["source_ids"]
    for seed in range(SEEDS):
        model = Transformer.from_weights(config, hard_weights(config, seed), "float64", fast=False)
        said = greedy_search(model, source_ids, LONGEST).ids
        if (model(source_ids, said).argmax(-1) == config.pad_id)[said != config.pad_id].any():
            return seed
    return _varied_seed(config)


def port_config(port: PluginPort) -> TransformerConfig:
    """Return a config with the conventions of a port and the sizes of the standard cases.

    Raises:
        ValueError: If the port's ``overrides``, ``taps``, or ``left_out`` contain an unknown name. This error is also
            raised if ``left_out`` contains all cases with padding in a stage but not all cases in the stage, if the
            model has too few positions for the cases, or if comparisons with the model would be meaningless (see
            ``why_nothing_shows``).
    """
    known = [entry.name for entry in fields(TransformerConfig)]
    if unknown := [name for name in port.kind.overrides if name not in known]:
        raise ValueError(
            f"overrides of {port.name} must be fields of TransformerConfig: got {unknown[0]!r}; "
            f"the fields are {', '.join(known)}"
        )
    config = tiny(port.kind.preset, **{"d_k": None, "d_v": None, **port.kind.overrides})
    if (config.max_positions or LONGEST) < LONGEST:
        raise ValueError(f"{port.name} must have at least {LONGEST} positions: got {config.max_positions}")
    if why := why_nothing_shows(config, hard_weights(config)):
        raise ValueError(f"overrides of {port.name}: {why}")
    for pattern in port.kind.taps:
        if not any(matches(pattern, tap) for tap in tap_shapes(config, 1, 1, 1)):
            raise ValueError(
                f"each pattern in taps of {port.name} must match the name of a tap: got {pattern!r}; "
                "run `parity info --names` to list all taps"
            )
    if port.left_out:
        cases = port_cases(config)
        names = [case.name for case in cases]
        if unknown := [name for name in port.left_out if name not in names]:
            raise ValueError(
                f"left_out of {port.name} must contain names of cases: got {unknown[0]!r}; "
                f"the cases are {', '.join(names)}"
            )
        kept = [case for case in cases if case.name not in port.left_out]
        padded = {case.stage for case in kept if (case.inputs["source_ids"] == config.pad_id).any()}
        if unpadded := [case.stage for case in kept if case.stage not in padded]:
            raise ValueError(
                f"left_out of {port.name} omits every case with padding in the stage {unpadded[0]}; "
                "remove one of these cases from left_out, or add all other cases of this stage"
            )
    return config


def _searches_of_many(config: TransformerConfig) -> Iterator[Case]:
    """Yield searches for many sentences, so that even a small change to a rule affects the tokens of some sentences."""
    source_ids, ending, most = _many_sources(config), _ending_seed(config), longest(config)
    inputs = {"source_ids": source_ids, "target_ids": np.full((MANY, 1), config.bos_id)}
    turned = {**inputs, "source_ids": np.roll(source_ids, 1, axis=0)}
    says_padding, forward = _seed_that_says_padding(config), {"stage": ACTIVATIONS, "search": None}
    for name, search, seed, earlier in (
        ("greedy", Search(max_length=most), says_padding, forward),
        ("greedy_ends", Search(max_length=LONGEST), ending, {"seed": ending + 1}),
        ("more_greedy", Search(max_length=LONGEST), ending, {"seed": ending + 1}),  # for ports without beam search
        ("beam", Search(WIDE, PENALTY, LONGEST), ending, {"inputs": turned}),
        ("narrow_beam", Search(NARROW, SMALL_PENALTY, LONGEST), ending, {"seed": ending + 1}),
        ("beam_without_penalty", Search(WIDE, 0.0, LONGEST), ending, {"inputs": turned}),
        ("widest_beam", Search(WIDEST, PENALTY, LONGEST), says_padding, forward),
    ):
        names, dtypes = (f"decode/many_{name}", "decoding"), ("float64",)
        case = Case(*names, config, "", inputs, seed=seed, dtypes=dtypes, stage=DECODE, search=search)
        case = case if earlier is forward else replace(case, magnitude="ending")
        if name == "more_greedy":  # use a large batch, because a port may process sentences in smaller groups
            case = replace(case, inputs={each: np.tile(array, (TIMES, 1)) for each, array in inputs.items()})
        changes: dict[str, Any] = {**earlier}
        yield replace(case, before=(replace(case, **changes),))


def _unlike_the_first(config: TransformerConfig) -> Iterator[Case]:
    """Yield forward passes that differ from the first case in padding, weights, earlier calls, or shapes.

    The cases with different padding and weights detect ports that cache a mask, positional encodings, a result, or
    weights. The case after training detects dropout that remains enabled. The other cases have different shapes. They
    detect tables and masks that are too short, and code that identifies an axis by its size.
    """
    seed, ids = _varied_seed(config), token_ids(config)
    turned = {name: np.roll(array, 1, axis=0) for name, array in ids.items()}
    first = Case("full/padded", "full model", config, "", ids, seed=seed)
    yield replace(first, name="full/other_padding", inputs=turned, before=(first,))
    yield replace(first, name="full/other_weights", seed=seed + 1, before=(first,))
    training = TrainingConfig(**{**SHORT, "learning_rate_factor": STILL})
    trained = replace(step_case("port", config, training), config=config, seed=seed + 1)  # keep the config's dropout
    yield replace(first, name="full/after_training", dtypes=("float64",), seed=seed + 1, before=(trained,))
    yield replace(first, name="full/longest", inputs=token_ids(config, longest(config), longest(config)))
    if config.max_positions is None:  # the port must not have a table or mask with a fixed size
        long = {name: array[:1] for name, array in token_ids(config, LONG, LONG).items()}
        yield replace(first, name="full/longest/of_a_thousand_tokens", inputs=long, dtypes=("float64",))
    yield replace(
        first, name="full/as_many_sentences_as_tokens", inputs=token_ids(config, BATCH, BATCH), dtypes=("float64",)
    )


def port_cases(config: TransformerConfig, stages: Collection[str] | None = None) -> list[Case]:
    """Return all cases for a user port with the given config.

    Args:
        config: Config with the conventions of the port.
        stages: Stages to include; None for all.
    """
    cases = [*model_cases(config), *_unlike_the_first(config), *_searches_of_many(config)]
    cases += variants(config, _varied_seed(config))
    if config.source_vocab_size == config.target_vocab_size == TOKENS:  # the port doesn't override the vocabulary size
        cases.append(large_vocabulary(config))
    cases = [replace(case, compares_padding=False) for case in cases]
    return cases if stages is None else in_stages(cases, stages)
