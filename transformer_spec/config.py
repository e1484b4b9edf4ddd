"""The configuration of a Transformer.

Every field exists because two published implementations of this very model differ in it; ``presets`` names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformer_spec.checks import check_choice, check_fields, check_integer, check_number
from transformer_spec.presets import PRESETS

CHOICES = {
    "norm_order": ("post", "pre"),
    "layer_norm_kind": ("standard", "annotated"),
    "position_encoding": ("sinusoidal", "learned"),
    "position_layout": ("interleaved", "split"),
    "position_timescale": ("m", "m_minus_1"),
    "tie_embeddings": ("none", "target_output", "all"),
    "activation": ("relu", "gelu", "gelu_tanh", "swish"),
    "label_smoothing_kind": ("uniform", "off_target", "off_target_and_pad"),
}
SIZES = ("source_vocab_size", "target_vocab_size", "d_model", "num_heads", "d_k", "d_v", "d_ff", "max_length")
DEPTHS = ("num_encoder_layers", "num_decoder_layers")
SWITCHES = (
    "final_norm",
    "scale_embedding",
    "attention_bias",
    "feed_forward_bias",
    "output_bias",
    "embedding_norm",
    "skip_first_self_attention",
)
FARTHEST = 1_000_000  # the largest position_offset: sines of much larger numbers no longer tell positions apart
DECODER_SIZES = ("num_heads", "d_k", "d_v", "d_ff")  # of which the decoder may have its own


def check_sinusoids(d_model: int, layout: str, timescale: str) -> None:
    """Raise ValueError unless there are sinusoids of a width, a layout and a timescale."""
    check_choice("position_layout", layout, CHOICES["position_layout"])
    check_choice("position_timescale", timescale, CHOICES["position_timescale"])
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model: got {d_model}")
    if timescale == "m_minus_1" and d_model < 4:
        raise ValueError(f"position_timescale='m_minus_1' needs d_model of at least 4: got {d_model}")


@dataclass(frozen=True, kw_only=True)
class DropoutRates:
    """The probability of dropping an element, in [0, 1), at each of the four sites in use.

    Attributes:
        embedding: Of the sum of embedding and position.
        attention: Of the attention weights.
        residual: Of each sub-layer's output, before it is added.
        feed_forward: Behind the inner activation.
    """

    embedding: float = 0.1  # after the sum of embedding and position (section 5.4)
    attention: float = 0.0  # on the attention weights (not in the paper)
    residual: float = 0.1  # on each sub-layer's output, before it is added (section 5.4)
    feed_forward: float = 0.0  # after the inner activation (not in the paper)

    def __post_init__(self) -> None:
        for site in dataclasses.fields(self):
            rate = check_number(f"dropout.{site.name}", getattr(self, site.name), "in [0, 1)", lambda x: 0 <= x < 1)
            object.__setattr__(self, site.name, rate)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """One Transformer, described completely. Frozen; an impossible description raises on construction.

    The defaults are ``paper_base``: the base model of "Attention Is All You Need", Table 3.

    Attributes:
        source_vocab_size: Rows of the source's embedding table.
        target_vocab_size: Rows of the target's embedding table, and the number of logits.
        d_model: Width of embeddings and layers.
        num_heads: Heads of each attention.
        d_k: Width of queries and keys of one head; None is d_model / num_heads.
        d_v: Width of values of one head; None is d_model / num_heads.
        d_ff: Inner width of the feed-forward blocks.
        num_encoder_layers: Depth of the encoder.
        num_decoder_layers: Depth of the decoder.
        max_length: Rows of a learned table of positions; sinusoids have no limit.
        norm_order: Where the norms are; post: LayerNorm(x + Sublayer(x)), pre: x + Sublayer(LayerNorm(x)).
        final_norm: One more LayerNorm after each stack.
        layer_norm_epsilon: Added to the variance; annotated: to the standard deviation. In (0, 1].
        layer_norm_kind: As usual (standard), or annotated: (x - mean) / (unbiased std + epsilon).
        position_encoding: Of both sides: sinusoidal or learned.
        position_layout: Of sinusoids: interleaved (sin, cos, sin, cos) or split (all sines, then all cosines).
        position_timescale: Of sinusoids: m is 10000^(i/m), m_minus_1 is 10000^(i/(m-1)).
        position_offset: The number of the first position.
        scale_embedding: Whether embeddings are multiplied by sqrt(d_model).
        tie_embeddings: Which tables are one: none, target_output (target embedding and output projection) or all.
        attention_bias: Whether the four projections of each attention have biases.
        feed_forward_bias: Whether the two projections of each feed-forward block have biases.
        output_bias: Whether the logits have a bias.
        activation: Of the feed-forward blocks: relu, gelu, gelu_tanh or swish.
        dropout: The rate at each site, ``DropoutRates``.
        pad_id: Padding, which no attention attends to and no loss counts.
        bos_id: What the decoder starts with.
        eos_id: What ends a sentence.
        label_smoothing: The probability that is spread over other classes, in [0, 0.99].
        label_smoothing_kind: Over which: uniform (all), off_target or off_target_and_pad (all but these).
        embedding_norm: One more LayerNorm on each sum of embedding and position.
        decoder_num_heads: Heads of the decoder; None is ``num_heads``.
        decoder_d_k: As ``d_k``, of the decoder; None as in the encoder.
        decoder_d_v: As ``d_v``, of the decoder; None as in the encoder.
        decoder_d_ff: As ``d_ff``, of the decoder; None as in the encoder.
        skip_first_self_attention: Whether the decoder's first layer has no self-attention.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field's value, or a combination of fields, describes no model.
    """

    source_vocab_size: int
    target_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    d_k: int = None  # type: ignore[assignment]  # per head; None becomes d_model / num_heads
    d_v: int = None  # type: ignore[assignment]  # per head; None becomes d_model / num_heads
    d_ff: int = 2048
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    max_length: int = 1024  # the rows of a learned position table; sinusoids have no limit

    norm_order: str = "post"  # post: LayerNorm(x + Sublayer(x)), section 3.1; pre: x + Sublayer(LayerNorm(x))
    final_norm: bool = False  # one more LayerNorm after each stack
    layer_norm_epsilon: float = 1e-6  # the paper gives none; the first tensor2tensor release has 1e-6
    layer_norm_kind: str = "standard"  # annotated: (x - mean) / (unbiased std + epsilon)

    position_encoding: str = "sinusoidal"
    position_layout: str = "interleaved"  # interleaved: sin, cos, sin, cos; split: all sines, then all cosines
    position_timescale: str = "m"  # m: 10000^(i/m), section 3.5; m_minus_1: 10000^(i/(m-1)), tensor2tensor
    position_offset: int = 0  # the number of the first position
    scale_embedding: bool = True  # times sqrt(d_model), section 3.4
    tie_embeddings: str = "all"  # section 3.4: both embeddings and the output projection share one matrix

    attention_bias: bool = False  # section 3.2.2 writes matrices only
    feed_forward_bias: bool = True  # equation (2)
    output_bias: bool = False
    activation: str = "relu"
    dropout: DropoutRates = field(default_factory=DropoutRates)

    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    label_smoothing: float = 0.1
    label_smoothing_kind: str = "uniform"  # the paper cites Szegedy et al., who spread it over all classes

    embedding_norm: bool = False  # one more LayerNorm on each sum of embedding and position, before dropout (BART)
    decoder_num_heads: int | None = None  # None: as many as in the encoder
    decoder_d_k: int | None = None  # None: as in the encoder, or d_model / decoder_num_heads where that is given
    decoder_d_v: int | None = None  # likewise
    decoder_d_ff: int | None = None  # None: as in the encoder
    skip_first_self_attention: bool = False  # of the decoder, whose first layer then is cross-attention, feed-forward

    def __post_init__(self) -> None:
        if isinstance(self.dropout, Mapping):
            sites = {site.name for site in dataclasses.fields(DropoutRates)}
            check_fields("dropout sites", {*sites, *self.dropout}, sites)
            object.__setattr__(self, "dropout", DropoutRates(**self.dropout))
        if not isinstance(self.dropout, DropoutRates):
            raise TypeError(f"dropout must be DropoutRates: got {type(self.dropout).__name__}")
        self._resolve_head_sizes()
        for name in (*SIZES, *DEPTHS):
            self._keep(name, check_integer(name, getattr(self, name), minimum=1))
        for name in DECODER_SIZES:
            if (size := getattr(self, f"decoder_{name}")) is not None:
                self._keep(f"decoder_{name}", check_integer(f"decoder_{name}", size, minimum=1))
        self._check_decoder_heads()
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False: got {getattr(self, name)!r}")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name, needed, holds in (
            # Beyond these, logits hardly depend on the sentences, and the loss hardly on the labels.
            ("layer_norm_epsilon", "in (0, 1]", lambda x: 0 < x <= 1),
            ("label_smoothing", "in [0, 0.99]", lambda x: 0 <= x <= 0.99),
        ):
            self._keep(name, check_number(name, getattr(self, name), needed, holds))
        self._check_ids()
        self._check_positions()
        if self.skip_first_self_attention and self.num_decoder_layers == 1:
            raise ValueError(
                "skip_first_self_attention needs num_decoder_layers of at least 2, so that a position sees earlier ones"
            )
        if self.layer_norm_kind == "annotated" and self.d_model < 2:
            raise ValueError(f"layer_norm_kind='annotated' needs d_model of at least 2: got {self.d_model}")
        others = {"uniform": 0, "off_target": 1, "off_target_and_pad": 2}[self.label_smoothing_kind]
        if self.label_smoothing and self.target_vocab_size <= others:
            raise ValueError(
                f"label_smoothing_kind={self.label_smoothing_kind!r} needs a target_vocab_size of at least "
                f"{others + 1}: got {self.target_vocab_size}"
            )
        if self.tie_embeddings == "all" and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                "tie_embeddings='all' needs one vocabulary: got source_vocab_size "
                f"{self.source_vocab_size} and target_vocab_size {self.target_vocab_size}"
            )

    def _resolve_head_sizes(self) -> None:
        if self.d_k is not None and self.d_v is not None:
            return
        d_model = check_integer("d_model", self.d_model, minimum=1)
        num_heads = check_integer("num_heads", self.num_heads, minimum=1)
        if d_model % num_heads:
            raise ValueError(
                f"num_heads must divide d_model unless d_k and d_v are given: got {num_heads} and {d_model}"
            )
        for name in ("d_k", "d_v"):
            if getattr(self, name) is None:
                self._keep(name, d_model // num_heads)

    def _check_decoder_heads(self) -> None:
        heads = self.decoder_num_heads
        if heads is not None and None in (self.decoder_d_k, self.decoder_d_v) and self.d_model % heads:
            raise ValueError(
                "decoder_num_heads must divide d_model unless decoder_d_k and decoder_d_v are given: "
                f"got {heads} and {self.d_model}"
            )

    def _check_ids(self) -> None:
        for name, vocab_size in (
            ("pad_id", min(self.source_vocab_size, self.target_vocab_size)),
            ("bos_id", self.target_vocab_size),
            ("eos_id", self.target_vocab_size),
        ):
            token = self._keep(name, check_integer(name, getattr(self, name), minimum=0))
            if token >= vocab_size:
                raise ValueError(f"{name} must be below the vocabulary size {vocab_size}: got {token}")

    def _check_positions(self) -> None:
        self._keep("position_offset", check_integer("position_offset", self.position_offset, 0, FARTHEST))
        if self.position_encoding == "learned":
            if self.position_offset >= self.max_length:
                raise ValueError(
                    f"position_offset must be below max_length {self.max_length}: got {self.position_offset}"
                )
        else:
            check_sinusoids(self.d_model, self.position_layout, self.position_timescale)

    def _keep(self, name: str, value: Any) -> Any:
        """Set a field of the frozen config on construction: a number of NumPy's as Python's, which JSON can hold."""
        object.__setattr__(self, name, value)
        return value

    @property
    def in_decoder(self) -> TransformerConfig:
        """The same config with the decoder's sizes as those of every layer: what a layer of the decoder is built from.

        Its own ``in_decoder`` is itself.
        """
        heads, d_k, d_v, d_ff = (getattr(self, f"decoder_{name}") for name in DECODER_SIZES)
        width = None if heads is None else self.d_model // heads
        own = {"num_heads": heads, "d_k": d_k or width, "d_v": d_v or width, "d_ff": d_ff}
        changes = {name: size for name, size in own.items() if size is not None}
        return self.replace(**changes, **dict.fromkeys(f"decoder_{name}" for name in DECODER_SIZES))

    def has_self_attention(self, layer: int) -> bool:
        """Return whether a layer of the decoder, counted from 0, has self-attention."""
        return layer > 0 or not self.skip_first_self_attention

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens; None where there is no limit."""
        return self.max_length - self.position_offset if self.position_encoding == "learned" else None

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TransformerConfig:
        """Return a published configuration by name, with any field replaced.

        Args:
            name: One of ``PRESETS``.
            overrides: Fields to set; both vocabulary sizes are needed, because no preset has them.

        Raises:
            ValueError: There is no such preset.
        """
        check_choice("preset", name, tuple(PRESETS))
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> TransformerConfig:
        """Return a copy with some fields changed; ``d_k`` and ``d_v`` stay as they are unless named."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """Rebuild a config from ``to_dict``.

        Raises:
            TypeError: A field has the wrong type.
            ValueError: A field is missing or unknown, or describes no model.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"a config must be a mapping of field names: got {type(fields).__name__}")
        check_fields("config fields", fields, (entry.name for entry in dataclasses.fields(cls)))
        return cls(**fields)
