"""The settings of Hugging Face's ``generate`` as a search of ours, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reference_numpy.config import TransformerConfig
from transformer_parity.ports.generation import NEW_TOKENS, STOPS, UNKNOWN, generation_search
from transformer_parity.ports.protocol import SearchOptions

LONGEST = 512  # tokens, the start symbol included: what is written for a search whose limit follows the source


def read_search(fields: Mapping[str, Any], config: TransformerConfig) -> tuple[SearchOptions, list[str]]:
    """Return the search that a generation_config.json asks for, and what of it has no place here and is left out.

    Args:
        fields: What stands there; or in config.json, where older checkpoints have it.
        config: The model.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting makes no sense.
    """
    left_out = {name for name, usual in UNKNOWN.items() if fields.get(name) not in usual}
    if fields.get("forced_eos_token_id") not in (None, config.eos_id, [config.eos_id]):
        left_out.add("forced_eos_token_id")
    words = fields.get("bad_words_ids")
    if isinstance(words, list) and any(isinstance(word, list) and len(word) > 1 for word in words):
        left_out.add("bad_words_ids")
    penalty = fields.get("length_penalty")
    if isinstance(penalty, int | float) and penalty < 0:
        left_out.add("length_penalty")
    notes = [
        f"{name} of generate is {fields[name]!r:.60}: no search here has that, and it is left out"
        for name in sorted(left_out)
    ]
    if fields.get("max_length") is None and fields.get("max_new_tokens") is None:
        notes.append(f"no maximum length is given: generate stops after {NEW_TOKENS} tokens, and so does this search")
    search = generation_search({name: value for name, value in fields.items() if name not in left_out}, config)
    if search.start_id == config.bos_id:
        search = replace(search, start_id=None)
    longest = search.max_length or search.min_length
    return replace(search, min_length=min(search.min_length, longest), num_hypotheses=1), notes


def write_search(search: SearchOptions, config: TransformerConfig) -> tuple[dict[str, Any], list[str]]:
    """Return what stands in a generation_config.json, and what of a search cannot be said there."""
    rules, notes = search.rules, []
    beams = search.beam_size or 1
    if beams > 1 and (search.length_penalty_kind != "power" or rules.pool != "beam"):
        notes.append("the search is not one of Hugging Face's: generate finds other translations with a beam")
    if unsaid := [name for name in ("score_forced", "beam_shrinks") if getattr(rules, name)]:
        notes.append(f"generate has no {', '.join(unsaid)}: it is left out")
    if rules.at_limit == "scored":
        notes.append("generate ends a translation at its limit for nothing, and not with the end symbol's own score")
    longest = LONGEST if search.max_length is None else search.max_length + 1
    fields = {
        "num_beams": beams,
        "length_penalty": search.length_penalty,
        "early_stopping": {stop: early for early, stop in STOPS.items() if early is not None}[rules.stop],
        "max_length": min(longest, (config.max_positions or longest) + (search.max_length is not None)),
        "min_length": search.min_length if search.min_length > 1 else 0,
        "bad_words_ids": [[token] for token in (config.pad_id, *rules.banned_ids)],
        "forced_bos_token_id": rules.forced_ids[0] if rules.forced_ids else None,
        "forced_eos_token_id": None if rules.at_limit == "cut" else config.eos_id,
        "renormalize_logits": rules.renormalize,
        "no_repeat_ngram_size": rules.no_repeat_ngram_size,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id if search.start_id is None else search.start_id,
    }
    if len(rules.forced_ids) > 1:
        notes.append(f"generate forces one first token: of {list(rules.forced_ids)}, the first is kept")
    return fields, notes
