"""The settings of Hugging Face's ``generate`` as a search of ours, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import SearchRules
from transformer_parity.ports.protocol import SearchOptions

MAX_LENGTH = 20  # tokens, the start symbol included: what ``generate`` takes where nothing is said
LONGEST = 512  # likewise, what is written for a search whose limit follows the source
STOPS = {False: "current", True: "first", "never": "attainable"}
NEUTRAL = {  # what has no place here, and the value that changes nothing
    **{"do_sample": False, "num_beam_groups": 1, "penalty_alpha": None, "repetition_penalty": 1.0},
    **{"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "suppress_tokens": None},
    **{"begin_suppress_tokens": None, "exponential_decay_length_penalty": None, "diversity_penalty": 0.0},
    **{"sequence_bias": None, "constraints": None, "force_words_ids": None, "forced_decoder_ids": None},
}


def read_search(fields: Mapping[str, Any], config: TransformerConfig) -> tuple[SearchOptions, list[str]]:
    """Return the search that a generation_config.json asks for, and what of it has no place here.

    Args:
        fields: What stands there; or in config.json, where older checkpoints have it.
        config: The model.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting makes no sense.
    """
    notes = [
        f"{name} is {fields[name]!r:.60} in the settings of generate: it has no place here and is left out"
        for name, value in NEUTRAL.items()
        if fields.get(name) not in (None, value)
    ]
    beams = _or(fields.get("num_beams"), 1)
    penalty = _or(fields.get("length_penalty"), 1.0)
    if isinstance(penalty, int | float) and penalty < 0:
        notes.append(f"length_penalty is {penalty}: it must be at least 0 here, and is taken as 0")
        penalty = 0.0
    early = _or(fields.get("early_stopping"), False)
    if not isinstance(early, bool | str) or early not in STOPS:
        raise ValueError(f"early_stopping must be true, false or 'never': got {early!r:.60}")
    ends, said = _or(fields.get("forced_eos_token_id"), None), f"end symbol {config.eos_id}"
    if ends not in (None, config.eos_id, [config.eos_id]):
        notes.append(f"forced_eos_token_id is {ends!r:.60}, and not the {said}: it is left out")
        ends = None
    banned, several = [], 0
    for ids in _or(fields.get("bad_words_ids"), []):
        if isinstance(ids, list) and len(ids) == 1:
            banned += [] if ids == [config.pad_id] else ids  # padding is never said anyway
        else:
            several += 1
    if several:
        notes.append(f"bad_words_ids has {several} words of several tokens: only single tokens can be banned here")
    forced, start = fields.get("forced_bos_token_id"), fields.get("decoder_start_token_id")
    if "max_length" not in fields and "max_new_tokens" not in fields:
        notes.append(f"no maximum length is given: generate stops after {MAX_LENGTH} tokens, and so does this search")
    least = max(_or(fields.get("min_length"), 0), 1)
    if (more := _or(fields.get("min_new_tokens"), 0)) > 0:
        least = more + 1  # without the end symbol
    rules = SearchRules.preset(
        "hf",
        stop=STOPS[early],
        at_limit="cut" if ends is None else "forced",
        forced_ids=() if forced is None else (forced,),
        banned_ids=tuple(banned),
        renormalize=_or(fields.get("renormalize_logits"), False),
        no_repeat_ngram_size=_or(fields.get("no_repeat_ngram_size"), 0),
    )
    longest = _longest(fields, config)
    options = {"max_length": longest, "min_length": min(least, longest), "rules": rules}
    options |= {"beam_size": None if beams == 1 else beams, "length_penalty": float(penalty)}
    return SearchOptions.preset("hf", start_id=None if start in (None, config.bos_id) else start, **options), notes


def _longest(fields: Mapping[str, Any], config: TransformerConfig) -> int:
    """Return the most tokens that ``generate`` says, the start symbol not included."""
    longest = fields.get("max_new_tokens")
    if longest is None:
        longest = _or(fields.get("max_length"), MAX_LENGTH) - 1
    return max(min(longest, config.max_positions or longest), 1)


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


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
        "early_stopping": {stop: early for early, stop in STOPS.items()}[rules.stop],
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
