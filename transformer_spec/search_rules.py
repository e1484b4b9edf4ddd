"""Where published searches differ, and the rules of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformer_spec.checks import check_choice, check_fields, check_integer, check_number
from transformer_spec.config import TransformerConfig

STOPS = ("attainable", "current", "first")
POOLS = ("num_hypotheses", "beam", "first")
LIMITS = ("cut", "forced", "scored")
LONGEST = 2**31 - 1  # maximum length in tokens; positions are int32


@dataclass(frozen=True, kw_only=True)
class SearchRules:
    """Where published searches differ. The defaults are the paper's; ``preset`` has those of other programs.

    Sources: the paper, section 6.1; Hugging Face ``generate`` (transformers 5); fairseq ``SequenceGenerator``; Marian
    ``BeamSearch`` and ``History``.

    Attributes:
        stop: When the beam search of a sentence ends, at the latest where nothing is unfinished. ``attainable``: no
            unfinished hypothesis could still enter the pool, even if all its further tokens were certain.
            ``current``: none would enter it as long as it is now (Hugging Face, ``early_stopping=False``). ``first``:
            the pool is full (fairseq; Hugging Face, ``early_stopping=True``).
        pool: Which finished hypotheses are kept. ``num_hypotheses``: the best that are asked for. ``beam``: the best
            ``beam_size`` (Hugging Face). ``first``: the first ``beam_size`` (fairseq).
        at_limit: How a hypothesis ends at its maximum length. ``cut``: with the token that is best there. ``forced``:
            with the end symbol, as if it were certain (Hugging Face, ``forced_eos_token_id``). ``scored``: with the
            end symbol and its own log-probability (fairseq).
        beam_shrinks: Whether each finished hypothesis takes up a place of the beam for good (Marian). Then only the
            places that are left are filled: an end outside them does not count.
        forced_ids: What every hypothesis begins with, such as the language to translate into.
        score_forced: Whether it counts with its own log-probability (fairseq), or with 0 (Hugging Face).
        banned_ids: Tokens that are never generated, besides padding.
        renormalize: Whether the probabilities of the tokens that are allowed are scaled to a sum of 1.
        no_repeat_ngram_size: Of the n-grams that no hypothesis contains twice, its start symbol included; 0 is none.
        max_length_factor: Where no maximum length is given, so much times the source length ...
        max_length_extra: ... plus so much.
    """

    stop: str = "attainable"
    pool: str = "num_hypotheses"
    at_limit: str = "cut"
    beam_shrinks: bool = False
    forced_ids: tuple[int, ...] = ()
    score_forced: bool = False
    banned_ids: tuple[int, ...] = ()
    renormalize: bool = False
    no_repeat_ngram_size: int = 0
    max_length_factor: float = 1.0
    max_length_extra: int = 50  # section 6.1: the longest translation is the input length + 50

    def __post_init__(self) -> None:
        """Refuse what is no rule.

        Raises:
            TypeError: A size or an id is no integer, the factor no number, or a switch no bool.
            ValueError: A choice is unknown, a number is negative, or the rules contradict each other.
        """
        for name, choices in (("stop", STOPS), ("pool", POOLS), ("at_limit", LIMITS)):
            check_choice(name, getattr(self, name), choices)
        for name in ("beam_shrinks", "score_forced", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: got {getattr(self, name)!r}")
        for name in ("forced_ids", "banned_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple):
                raise TypeError(f"{name} must be a list of ids: got {ids!r}")
            object.__setattr__(self, name, tuple(check_integer(name, token, minimum=0) for token in ids))
        for name in ("no_repeat_ngram_size", "max_length_extra"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=0))
        factor = check_number("max_length_factor", self.max_length_factor, "at least 0", lambda number: number >= 0.0)
        object.__setattr__(self, "max_length_factor", factor)
        if self.beam_shrinks and self.pool == "num_hypotheses":
            raise ValueError("a beam that shrinks needs a pool of its size: got pool 'num_hypotheses'")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> SearchRules:
        """Return the rules of a program: ``paper``, ``hf``, ``fairseq`` or ``marian``.

        What a model's own settings add, such as the ids that are forced or banned, is given as overrides.

        Raises:
            TypeError: An override is no rule, or has the wrong type.
            ValueError: The name is unknown, or an override makes no sense.
        """
        check_choice("rules", name, tuple(SEARCH_PRESETS))
        return cls(**{**SEARCH_PRESETS[name], **overrides})

    def check_ids(self, config: TransformerConfig) -> None:
        """Refuse ids that a model's vocabulary lacks, or that end or pad a sentence.

        Raises:
            ValueError: An id is outside the vocabulary, or is that of the end symbol or of padding.
        """
        check_generated("forced_ids", self.forced_ids, config)
        check_generated("banned_ids", (token for token in self.banned_ids if token != config.pad_id), config)

    def max_lengths(self, source_lengths: Any) -> Any:
        """Return the most tokens of a hypothesis, ``eos_id`` included, where no maximum length is given."""
        beyond = 2 * LONGEST  # a search refuses it
        factor = min(float(self.max_length_factor), float(beyond))
        multiplied = np.minimum(factor * np.asarray(source_lengths), beyond).astype(int)
        return np.maximum(multiplied + min(self.max_length_extra, beyond), 1)

    def to_dict(self) -> dict[str, Any]:
        """Return every rule as plain values that JSON can hold."""
        return {**dataclasses.asdict(self), "forced_ids": list(self.forced_ids), "banned_ids": list(self.banned_ids)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SearchRules:
        """Rebuild rules from ``to_dict``; what is missing is as by default.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is unknown, or makes no sense.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"rules must be a mapping of field names: got {type(fields).__name__}")
        known = [entry.name for entry in dataclasses.fields(cls)]
        check_fields("rules of a search", fields, [name for name in known if name in fields])
        return cls(**fields)


def check_generated(name: str, tokens: Iterable[int], config: TransformerConfig) -> None:
    """Refuse ids that no hypothesis holds before it ends.

    Raises:
        ValueError: An id is outside the vocabulary, or is that of the end symbol or of padding.
    """
    for token in tokens:
        if token >= config.target_vocab_size:
            raise ValueError(f"{name} must lie in [0, {config.target_vocab_size}): got {token}")
        if token in (config.eos_id, config.pad_id):
            raise ValueError(f"{name} must hold neither end symbol nor padding: got {token}")


SEARCH_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "hf": {"stop": "current", "pool": "beam"},
    # Its limit is of 200 tokens and the end symbol.
    "fairseq": {
        **{"stop": "first", "pool": "first", "at_limit": "scored", "score_forced": True},
        **{"max_length_factor": 0.0, "max_length_extra": 201},
    },
    # Of K places, each hypothesis that ends takes one: as many end as are kept.
    "marian": {
        **{"stop": "first", "pool": "beam", "beam_shrinks": True, "score_forced": True},
        **{"max_length_factor": 3.0, "max_length_extra": 0},
    },
}
