"""Search rules that differ between published implementations, and presets for several programs."""

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
    """Search rules that differ between published implementations. Frozen; the constructor validates all fields.

    The defaults are the paper's rules. ``preset`` returns the rules that other programs use.

    Sources: section 6.1 of the paper; Hugging Face's ``generate`` (transformers 5); fairseq's ``SequenceGenerator``;
    Marian's ``BeamSearch`` and ``History``.

    Attributes:
        stop: Condition that ends the beam search for a sequence. The search also ends if all hypotheses are finished.
            ``attainable``: no unfinished hypothesis can enter the pool, even if its further tokens have probability 1.
            ``current``: no unfinished hypothesis would enter the pool at its current length (Hugging Face,
            ``early_stopping=False``). ``first``: the pool is full (fairseq; Hugging Face, ``early_stopping=True``).
        pool: Finished hypotheses to store. ``num_hypotheses``: the best ``num_hypotheses`` hypotheses. ``beam``: the
            best ``beam_size`` hypotheses (Hugging Face). ``first``: the first ``beam_size`` hypotheses (fairseq).
        at_limit: Last token of a hypothesis that reaches its maximum length. ``cut``: any token, which the search
            selects by the same rule as all earlier tokens. ``forced``: EOS, as if it had probability 1 (Hugging Face,
            ``forced_eos_token_id``). ``scored``: EOS, with the probability that the model predicts (fairseq).
        beam_shrinks: True if each finished hypothesis permanently reduces the beam size by 1 (Marian). If the beam size
            is reduced to N, each step keeps the N best hypotheses. All other hypotheses are dropped, even if they end
            with EOS.
        forced_ids: First tokens of every hypothesis, such as a token that selects the target language.
        score_forced: Score of forced tokens. True: their log-probability (fairseq). False: 0 (Hugging Face).
        banned_ids: Tokens that are never generated, in addition to padding.
        renormalize: Whether to rescale the probabilities of the allowed tokens to a sum of 1.
        no_repeat_ngram_size: Size of the n-grams that a hypothesis must not repeat. N-grams can contain the start
            token. 0 allows repetitions.
        max_length_factor: Factor that determines the maximum length of a search without ``max_length``: the source
            length times ``max_length_factor``, plus ``max_length_extra``.
        max_length_extra: Number of tokens to add to the product of source length and ``max_length_factor``.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an invalid value, or fields contradict each other.
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
    max_length_extra: int = 50  # section 6.1: the maximum output length is the input length + 50

    def __post_init__(self) -> None:
        """Validate all fields."""
        for name, choices in (("stop", STOPS), ("pool", POOLS), ("at_limit", LIMITS)):
            check_choice(name, getattr(self, name), choices)
        for name in ("beam_shrinks", "score_forced", "renormalize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: got {getattr(self, name)!r}")
        for name in ("forced_ids", "banned_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple):
                raise TypeError(f"{name} must be a list of IDs: got {ids!r}")
            object.__setattr__(self, name, tuple(check_integer(name, token, minimum=0) for token in ids))
        for name in ("no_repeat_ngram_size", "max_length_extra"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=0))
        factor = check_number("max_length_factor", self.max_length_factor, "at least 0", lambda number: number >= 0.0)
        object.__setattr__(self, "max_length_factor", factor)
        if self.beam_shrinks and self.pool == "num_hypotheses":
            raise ValueError("beam_shrinks=True requires pool to be 'beam' or 'first': got 'num_hypotheses'")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> SearchRules:
        """Return the rules that a program uses.

        Args:
            name: ``paper``, ``hf`` (Hugging Face), ``fairseq``, or ``marian``.
            overrides: Fields to set, such as the forced or banned IDs from a model's generation settings.

        Raises:
            TypeError: If a field is unknown or has the wrong type.
            ValueError: If the name is unknown, or a field has an invalid value.
        """
        check_choice("rules", name, tuple(SEARCH_PRESETS))
        return cls(**{**SEARCH_PRESETS[name], **overrides})

    def check_ids(self, config: TransformerConfig) -> None:
        """Check the forced and banned IDs.

        Args:
            config: Model configuration.

        Raises:
            ValueError: If an ID is outside the vocabulary, or is EOS or padding.
        """
        check_generated("forced_ids", self.forced_ids, config)
        check_generated("banned_ids", (token for token in self.banned_ids if token != config.pad_id), config)

    def max_lengths(self, source_lengths: Any) -> Any:
        """Return the maximum number of tokens, including EOS, for searches without ``max_length``.

        Args:
            source_lengths: Number of source tokens; a number or an array.
        """
        beyond = 2 * LONGEST  # a length that is larger than LONGEST, so a search raises an error
        factor = min(float(self.max_length_factor), float(beyond))
        multiplied = np.minimum(factor * np.asarray(source_lengths), beyond).astype(int)
        return np.maximum(multiplied + min(self.max_length_extra, beyond), 1)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that can be converted to JSON."""
        return {**dataclasses.asdict(self), "forced_ids": list(self.forced_ids), "banned_ids": list(self.banned_ids)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SearchRules:
        """Create rules from the result of ``to_dict``. Missing fields get default values.

        Args:
            fields: Fields, keyed by name.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If a field is unknown or has an invalid value.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"rules must be a mapping of field names to values: got {type(fields).__name__}")
        known = [entry.name for entry in dataclasses.fields(cls)]
        check_fields("search rules", fields, [name for name in known if name in fields])
        return cls(**fields)


def check_generated(name: str, tokens: Iterable[int], config: TransformerConfig) -> None:
    """Check the IDs of tokens that a hypothesis may contain before its last token.

    Raises:
        ValueError: If an ID is outside the vocabulary, or is EOS or padding.
    """
    for token in tokens:
        if token >= config.target_vocab_size:
            raise ValueError(f"{name} must be in [0, {config.target_vocab_size}): got {token}")
        if token in (config.eos_id, config.pad_id):
            raise ValueError(f"{name} must contain neither EOS nor padding: got {token}")


SEARCH_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "hf": {"stop": "current", "pool": "beam"},
    # The limit is 200 tokens plus EOS.
    "fairseq": {
        **{"stop": "first", "pool": "first", "at_limit": "scored", "score_forced": True},
        **{"max_length_factor": 0.0, "max_length_extra": 201},
    },
    # Each finished hypothesis reduces the beam size by 1, so at most ``beam_size`` hypotheses finish.
    "marian": {
        **{"stop": "first", "pool": "beam", "beam_shrinks": True, "score_forced": True},
        **{"max_length_factor": 3.0, "max_length_extra": 0},
    },
}


def prefix_rows(rows: Any) -> tuple[tuple[int, ...], ...]:
    """Return the rows of ``prefix_ids`` [B, P] as tuples, which may have different lengths."""
    if not hasattr(rows, "__iter__"):
        raise TypeError(f"prefix_ids must have one row of IDs per sequence: got {rows!r}")
    rows = [np.asarray(row) if hasattr(row, "__array__") and not hasattr(row, "tolist") else row for row in rows]
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    for i, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            got = f"{type(row).__name__} in row {i}; use [] for no prefix" if i or row is None else "a single row"
            raise TypeError(f"prefix_ids must have one row of IDs per sequence: got {got}")
    return tuple(tuple(check_integer("prefix_ids", token, minimum=0) for token in row) for row in rows)
