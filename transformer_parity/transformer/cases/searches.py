"""Cases that run a search. Both the standard cases and the cases for ports contain such cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from transformer_parity.transformer.cases.case import DECODE, Case, preset_config, tiny
from transformer_parity.transformer.cases.inputs import SOURCE, token_ids
from transformer_parity.transformer.ports.package import SCORE
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

LONGEST, MOST = 12, 32  # maximum lengths of hypotheses in tokens; MOST equals max_length in the config
STEPWISE = 4  # number of positions that are decoded one at a time
SEVERAL_BLOCKS = 2400  # vocabulary size; a beam of 3 has 7200 / 32 = 225 blocks, which can't be grouped evenly by 32
OTHER_DECODER: dict[str, Any] = {  # decoder sizes that don't change the shapes of the attention parameters
    "decoder_num_heads": 2,
    "decoder_d_k": 12,
    "decoder_d_v": 15,
    "decoder_d_ff": 56,
}


def search_cases(preset: str) -> Iterator[Case]:
    """Yield a greedy search and a beam search with a small version of a preset's model."""
    yield from searches(preset, preset_config(preset), dtypes=("float64",))


def standard_searches() -> Iterator[Case]:
    """Yield searches with post-norm and pre-norm, with padding as the BOS token, and with many competing hypotheses.

    Most models with random weights generate the same token over and over. With seed 58, the hypotheses have different
    lengths, and a length penalty of 1.5 gives long and short hypotheses similar scores.
    """
    yield from search_cases("paper_base")
    yield from search_cases("t5")
    greedy, beam = searches("marian", preset_config("marian"), dtypes=("float64",), num_hypotheses=1)
    yield from (greedy, replace(beam, formulas=True))
    config = tiny(norm_order="pre", final_norm=True, tie_embeddings="none", output_bias=True)
    config = config.replace(source_vocab_size=13, target_vocab_size=13)
    dtypes = ("float64", "float32")  # bfloat16 is too coarse to rank the hypotheses
    other = tiny(**OTHER_DECODER, skip_first_self_attention=True, embedding_norm=True)
    greedy, beam = searches("other_decoder", other, dtypes=("float64",), seed=140)  # so that all rules have an effect
    rules = SearchRules(no_repeat_ngram_size=3, banned_ids=(10,), at_limit="scored")
    limits: dict[str, Any] = {"min_length": 4, "start_id": 3}
    yield replace(greedy, search=replace(greedy.options, rules=rules, **limits))
    yield replace(beam, search=replace(beam.options, **limits))
    yield from searches("ends_apart", config, dtypes, seed=58, length_penalty=1.5, limit=MOST)
    yield from _prefixes_and_samples(config)
    yield _search_in_blocks()
    yield from _searches_by_rules(config)


def _prefixes_and_samples(config: TransformerConfig) -> Iterator[Case]:
    """Yield searches with prefixes, a search with sampling, and a case that scores two translations per sentence."""
    ids = token_ids(config)
    inputs = {"source_ids": ids["source_ids"]}
    prefix_ids = tuple((5, 9, 4)[: row % 4] for row in range(len(inputs["source_ids"])))  # 0 to 3 tokens per sentence
    scored = SearchRules(score_forced=True)
    for name, search in {
        "prefix_greedy": Search(max_length=LONGEST, prefix_ids=prefix_ids),
        "prefix_beam": Search(3, max_length=LONGEST, num_hypotheses=2, prefix_ids=prefix_ids, rules=scored),
        "samples": Search(max_length=LONGEST, num_hypotheses=3, temperature=1.5, top_k=9, top_p=0.9, seed=1),
    }.items():
        names = f"decode/{name}", "decoding"
        yield Case(*names, config, "", inputs, seed=58, dtypes=("float64",), stage=DECODE, search=search)
    translations = np.stack([ids["target_ids"], ids["target_ids"][::-1]], 1)  # [B, 2, T]
    source_mask = (inputs["source_ids"] != config.pad_id) & (np.arange(SOURCE) != 1)  # also mask one token
    scored_inputs = {**inputs, "target_ids": translations, "source_mask": source_mask}
    exact = ("float64", "float32")  # bfloat16 models return float32 scores
    yield Case("scores/translations", "scores", config, SCORE, scored_inputs, seed=58, fast=False, dtypes=exact)


def _search_in_blocks() -> Case:
    """Return a beam search with a vocabulary that is too large for any package to sort at once.

    With seed 35, the hypotheses differ, and some contain a token from the last block.
    """
    sizes: dict[str, Any] = {
        "d_model": 8,
        "num_heads": 2,
        "d_k": 3,
        "d_v": 5,
        "d_ff": 6,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
    }
    config = tiny(norm_order="pre", final_norm=True, tie_embeddings="none", output_bias=True, **sizes)
    config = config.replace(source_vocab_size=SEVERAL_BLOCKS, target_vocab_size=SEVERAL_BLOCKS)
    inputs, search = {"source_ids": token_ids(config)["source_ids"]}, Search(3, max_length=5, num_hypotheses=2)
    names = "decode/blocks_beam", "decoding"
    return Case(*names, config, "", inputs, seed=35, dtypes=("float64",), stage=DECODE, search=search)


def _searches_by_rules(config: TransformerConfig) -> Iterator[Case]:
    """Yield beam searches that use the rules of other programs. The weights are such that every rule has an effect."""
    inputs, sizes = {"source_ids": token_ids(config)["source_ids"]}, {"beam_size": 4, "max_length": LONGEST}
    forced_end = SearchRules.preset("hf", at_limit="forced")
    opus = replace(forced_end, renormalize=True, banned_ids=(7,))
    bart = replace(forced_end, stop="first", forced_ids=(5,), no_repeat_ngram_size=2)
    for name, seed, search in (
        ("opus", 83, Search.preset("hf", rules=opus, length_penalty=1.5, num_hypotheses=2, **sizes)),
        ("bart", 21, Search.preset("hf", rules=bart, length_penalty=2.0, num_hypotheses=2, **sizes)),
        ("fairseq", 14, Search.preset("fairseq", {"forced_ids": (5,)}, num_hypotheses=4, **sizes)),
        ("marian", 78, Search.preset("marian", {"banned_ids": (7,)}, num_hypotheses=4, **sizes)),
    ):
        names = f"decode/rules_of_{name}", "decoding"
        yield Case(*names, config, "", inputs, seed=seed, dtypes=("float64",), stage=DECODE, search=search)


def searches(
    name: str,
    config: TransformerConfig,
    dtypes: tuple[str, ...],
    seed: int = 0,
    length_penalty: float = 0.6,
    num_hypotheses: int = 3,
    limit: int = LONGEST,
) -> Iterator[Case]:
    """Yield a greedy search and a beam search with the full model of a config."""
    ids = token_ids(config)
    target_ids = ids["target_ids"][:, :STEPWISE].copy()
    target_ids[:, 0] = config.bos_id
    for kind, search in {
        "greedy": Search(max_length=limit),
        "beam": Search(4, length_penalty, limit, num_hypotheses),
    }.items():
        yield Case(
            f"decode/{name}_{kind}",
            "decoding",
            config,
            "",
            {"source_ids": ids["source_ids"], "target_ids": target_ids},
            seed=seed,
            dtypes=dtypes,
            stage=DECODE,
            search=search,
        )
