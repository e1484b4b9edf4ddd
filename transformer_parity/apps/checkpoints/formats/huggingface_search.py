"""Convert between the settings for Hugging Face's ``generate`` and a ``Search``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformer_spec.checks import check_integer
from transformer_spec.config import TransformerConfig
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

NEW_TOKENS = 20  # maximum number of new tokens if no maximum length is specified (transformers 5)
# Settings without an equivalent in this project, with the values that disable them.
UNKNOWN: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (None, False),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "penalty_alpha": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "guidance_scale": (None, 1.0),
    **dict.fromkeys(("force_words_ids", "constraints", "sequence_bias", "stop_strings"), (None,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "max_time", "dola_layers", "watermarking_config"), (None,)),
    "begin_suppress_tokens": (None, []),
    "remove_invalid_values": (None, False),
}
INTEGERS = ("num_beams", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size")
# Stopping rule for each value of early_stopping.
STOPS = {None: "current", False: "current", True: "first", "never": "attainable"}
LONGEST = 512  # max_length to write if the search limits the length relative to the source; includes the BOS token


def read_search(fields: Mapping[str, Any], config: TransformerConfig) -> tuple[Search, list[str]]:
    """Return the search settings in a generation_config.json. Unsupported settings are ignored.

    Args:
        fields: Content of generation_config.json or, for older checkpoints, of config.json.
        config: Config of the model.

    Returns:
        The search settings, and one sentence for each ignored setting.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting has an invalid value.
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
        f"{name} is {fields[name]!r:.60} in the generation config, but this setting is not supported and is ignored"
        for name in sorted(left_out)
    ]
    if fields.get("max_length") is None and fields.get("max_new_tokens") is None:
        notes.append(
            f"no maximum length is specified, so translations end after {NEW_TOKENS} tokens, as in transformers"
        )
    search = generation_search({name: value for name, value in fields.items() if name not in left_out}, config)
    if search.start_id == config.bos_id:
        search = replace(search, start_id=None)
    longest = search.max_length or search.min_length
    return replace(search, min_length=min(search.min_length, longest), num_hypotheses=1), notes


def generation_search(fields: Mapping[str, Any], config: TransformerConfig) -> Search:
    """Convert the fields of a ``generation_config.json``, or of an old ``config.json``, to search settings.

    Hugging Face's ``max_length`` includes the BOS token, so a ``max_length`` of 512 becomes 511. ``min_length`` is not
    changed, because transformers counts the BOS token but not the EOS token, whereas this project counts the EOS token
    but not the BOS token. The length penalty is not changed, because transformers and this project both count the EOS
    token and a forced first token.

    Args:
        fields: Dict with the JSON content of the file. Fields that do not affect the search are ignored.
        config: Config of the model.

    Raises:
        TypeError: If a setting has the wrong type.
        ValueError: If a setting (such as ``repetition_penalty``) has no equivalent or contradicts the config.
    """
    for name, usual in UNKNOWN.items():
        if fields.get(name) not in usual:
            raise ValueError(f"{name} in a generation config is not supported: got {fields[name]!r}")
    for name in ("eos_token_id", "forced_eos_token_id"):
        if fields.get(name) is not None and _ids(fields[name]) != [config.eos_id]:
            raise ValueError(f"{name} must be the model's EOS token, {config.eos_id}: got {fields[name]!r}")
    for name in INTEGERS:
        if fields.get(name) is not None:
            check_integer(name, fields[name], minimum=0)
    for name in ("bad_words_ids", "suppress_tokens"):
        if not isinstance(fields.get(name), list | None):
            raise TypeError(f"{name} must be a list: got {fields[name]!r:.60}")
    early = fields.get("early_stopping")
    if not isinstance(early, bool | str | None) or early not in STOPS:
        raise ValueError(f"early_stopping must be false, true, or 'never': got {early!r}")
    rules = SearchRules.preset(
        "hf",
        stop=STOPS[early],
        at_limit="cut" if fields.get("forced_eos_token_id") is None else "forced",
        forced_ids=_ids(fields.get("forced_bos_token_id")),
        banned_ids=_banned(fields, config),
        renormalize=bool(fields.get("renormalize_logits")),
        no_repeat_ngram_size=fields.get("no_repeat_ngram_size") or 0,
    )
    beams = fields.get("num_beams") or 1
    penalty = fields.get("length_penalty")
    return Search(
        beam_size=None if beams == 1 else beams,
        length_penalty=1.0 if penalty is None else penalty,
        max_length=_max_length(fields, config),
        # If num_return_sequences exceeds num_beams, Transformers must sample, which is not supported.
        num_hypotheses=min(fields.get("num_return_sequences") or 1, beams),
        length_penalty_kind="power",
        min_length=_min_length(fields),
        start_id=fields.get("decoder_start_token_id"),
        rules=rules,
    )


def _ids(value: Any) -> list[Any]:
    """Convert an ID, a list of IDs, or None to a list of IDs."""
    return [] if value is None else list(value) if isinstance(value, Sequence) else [value]


def _banned(fields: Mapping[str, Any], config: TransformerConfig) -> list[Any]:
    """Return the IDs that must not be generated. ``pad_id`` is omitted because the search never generates padding."""
    words = [_ids(word) for word in fields.get("bad_words_ids") or []]
    if long := [word for word in words if len(word) != 1]:
        raise ValueError(f"every entry of bad_words_ids must be a single token: got {long[0]}")
    banned = [*(word[0] for word in words if word != [config.eos_id]), *_ids(fields.get("suppress_tokens"))]
    return [token for token in banned if token != config.pad_id]


def _max_length(fields: Mapping[str, Any], config: TransformerConfig) -> int:
    new, whole = fields.get("max_new_tokens"), fields.get("max_length")
    length = new if new is not None else NEW_TOKENS if whole is None else whole - 1
    return min(length, config.max_positions or length)


def _min_length(fields: Mapping[str, Any]) -> int:
    """Return the minimum number of tokens, including the EOS token. ``min_new_tokens`` excludes the EOS token."""
    new = fields.get("min_new_tokens")
    return max(fields.get("min_length") or 1, 1) if new is None else new + 1


def write_search(search: Search, config: TransformerConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a generation_config.json, and one sentence for each setting that this file cannot store."""
    rules, notes = search.rules, []
    beams = search.beam_size or 1
    if beams > 1 and (search.length_penalty_kind != "power" or rules.pool != "beam"):
        notes.append("`generate` uses different search rules, so its translations may differ when it uses a beam")
    if unsaid := [name for name in ("score_forced", "beam_shrinks") if getattr(rules, name)]:
        notes.append(f"settings that `generate` does not support are not written: {', '.join(unsaid)}")
    if rules.at_limit == "scored":
        notes.append("`generate` does not add the score of EOS to translations that reach the maximum length")
    longest = LONGEST if search.max_length is None else search.max_length + 1
    fields = {
        "num_beams": beams,
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
    if beams > 1:  # with greedy search, transformers warns if these settings are present
        fields["length_penalty"] = search.length_penalty
        fields["early_stopping"] = {stop: early for early, stop in STOPS.items() if early is not None}[rules.stop]
    if len(rules.forced_ids) > 1:
        notes.append(f"`generate` can force only one token, so only the first of {list(rules.forced_ids)} is written")
    return fields, notes
