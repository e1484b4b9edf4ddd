"""The configuration of a Transformer.

Each field exists because at least two published implementations of this model use different values for the field.
``presets`` lists the values that each implementation uses.
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
    "layer_norm_kind": ("standard", "annotated", "rms"),
    "position_encoding": ("sinusoidal", "learned", "relative"),
    "position_layout": ("interleaved", "split"),
    "position_timescale": ("m", "m_minus_1"),
    "tie_embeddings": ("none", "target_output", "source_target", "all"),
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
    "gated_feed_forward",
    "scale_scores",
    "scale_logits",
)
FARTHEST = 1_000_000  # largest position_offset; rounding makes adjacent positions equal at much larger offsets
# Fields that files written by earlier versions don't contain. The default values describe the models in these files.
LATER_FIELDS = ("relative_buckets", "relative_max_distance", "gated_feed_forward", "scale_scores", "scale_logits")
DECODER_SIZES = ("num_heads", "d_k", "d_v", "d_ff")  # sizes that can have a separate value in the decoder


def check_sinusoids(d_model: int, layout: str, timescale: str) -> None:
    """Raise a ValueError unless sinusoidal encodings support this width, layout, and timescale."""
    check_choice("position_layout", layout, CHOICES["position_layout"])
    check_choice("position_timescale", timescale, CHOICES["position_timescale"])
    if d_model % 2:
        raise ValueError(f"sinusoidal positional encodings require an even d_model: got {d_model}")
    if timescale == "m_minus_1" and d_model < 4:
        raise ValueError(f"position_timescale='m_minus_1' requires d_model to be at least 4: got {d_model}")


@dataclass(frozen=True, kw_only=True)
class DropoutRates:
    """Dropout probabilities, each in [0, 1). Frozen; the constructor validates all fields.

    Attributes:
        embedding: Dropout rate for the sum of embedding and positional encoding (section 5.4).
        attention: Dropout rate for the attention weights (not in the paper).
        residual: Dropout rate for the output of each sublayer, before the residual connection (section 5.4).
        feed_forward: Dropout rate for the activations inside the feed-forward network (not in the paper).
        final: Dropout rate for the outputs of the encoder stack and the decoder stack (T5).

    Raises:
        TypeError: If a rate is not a number.
        ValueError: If a rate is not in [0, 1).
    """

    embedding: float = 0.1  # section 5.4
    attention: float = 0.0  # not in the paper
    residual: float = 0.1  # section 5.4
    feed_forward: float = 0.0  # not in the paper
    final: float = 0.0  # not in the paper; T5

    def __post_init__(self) -> None:
        for site in dataclasses.fields(self):
            rate = check_number(f"dropout.{site.name}", getattr(self, site.name), "in [0, 1)", lambda x: 0 <= x < 1)
            object.__setattr__(self, site.name, rate)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Complete configuration of a Transformer. Frozen; the constructor validates all fields.

    The default is ``paper_base``, the base model from "Attention Is All You Need" (Table 3).

    Attributes:
        source_vocab_size: Size of the source vocabulary.
        target_vocab_size: Size of the target vocabulary, which is also the number of logits.
        d_model: Size of the embeddings and layer outputs.
        num_heads: Number of attention heads.
        d_k: Size of queries and keys per head. If None, the size is d_model / num_heads.
        d_v: Size of values per head. If None, the size is d_model / num_heads.
        d_ff: Inner size of the feed-forward networks.
        num_encoder_layers: Number of encoder layers.
        num_decoder_layers: Number of decoder layers.
        max_length: Number of learned positional embeddings. It limits neither sinusoidal nor relative positions.
        norm_order: Order of layer norm and residual connection. ``post`` is ``LayerNorm(x + Sublayer(x))``, and ``pre``
            is ``x + Sublayer(LayerNorm(x))``.
        final_norm: Whether to add a layer norm after each stack.
        layer_norm_epsilon: Number in (0, 1] that is added to the variance, or to the standard deviation if
            ``layer_norm_kind`` is ``annotated``.
        layer_norm_kind: Formula of layer norms. The divisor of ``standard`` is sqrt(biased variance + epsilon), and the
            divisor of ``annotated`` is unbiased standard deviation + epsilon. ``rms`` divides by
            sqrt(mean of squares + epsilon), and neither subtracts the mean nor adds a bias.
        position_encoding: Type of positional encoding in the encoder and decoder. ``sinusoidal`` and ``learned``
            encodings are added to the embeddings. ``relative`` adds a bias to the scores of self-attention instead. The
            bias is learned and depends on the distance between query and key.
        position_layout: Order of sinusoidal channels. ``interleaved`` is sin, cos, sin, cos; ``split`` is all sines,
            then all cosines.
        position_timescale: Timescales of the sinusoids: 10000^(i/m) for ``m``, and 10000^(i/(m-1)) for ``m_minus_1``,
            where m = d_model / 2.
        position_offset: Index of the first position.
        scale_embedding: Whether to multiply embeddings by sqrt(d_model).
        tie_embeddings: Weight sharing between embeddings and the output projection. ``none`` uses three separate
            matrices, ``target_output`` uses one matrix for the target embedding and the output projection,
            ``source_target`` uses one matrix for both embeddings, and ``all`` uses one matrix for all three.
        attention_bias: Whether to add biases to the four projections of each attention layer.
        feed_forward_bias: Whether to add biases to the projections of each feed-forward network.
        output_bias: Whether to add a bias to the logits.
        activation: Activation function of the feed-forward networks: ``relu``, ``gelu``, ``gelu_tanh``, or ``swish``.
        dropout: Dropout rates, as ``DropoutRates`` or a dict of its fields.
        pad_id: ID of the padding token, which attention and the loss ignore.
        bos_id: ID of the token with which the decoder starts.
        eos_id: ID of the token that ends a sequence.
        label_smoothing: Probability in [0, 0.99] that label smoothing takes from the correct token and redistributes.
        label_smoothing_kind: Tokens among which this probability is distributed: all tokens (``uniform``), all
            incorrect tokens (``off_target``), or all incorrect tokens except padding (``off_target_and_pad``).
        embedding_norm: Whether to add a layer norm after the sum of embedding and positional encoding.
        decoder_num_heads: Number of heads in the decoder. If None, ``num_heads`` is used.
        decoder_d_k: Size of queries and keys per head in the decoder. If None, the size is d_model / decoder_num_heads
            if ``decoder_num_heads`` is set, and ``d_k`` otherwise.
        decoder_d_v: Size of values per head in the decoder. If None, the size is d_model / decoder_num_heads if
            ``decoder_num_heads`` is set, and ``d_v`` otherwise.
        decoder_d_ff: Inner size of the decoder's feed-forward networks. If None, ``d_ff`` is used.
        skip_first_self_attention: Whether to omit the self-attention of the first decoder layer.
        relative_buckets: Number of buckets of distances if ``position_encoding`` is ``relative``. Distances in the same
            bucket have the same bias. The encoder uses half of the buckets for keys after the query. The decoder uses
            all buckets for the query's own position and for keys before the query.
        relative_max_distance: All keys at this distance in tokens or farther are in the last bucket.
        gated_feed_forward: Whether feed-forward networks multiply the output of the activation function by a second
            linear projection of the input.
        scale_scores: Whether to divide the scores by sqrt(d_k), as in equation (1).
        scale_logits: Whether to divide the decoder's output by sqrt(d_model) before the output projection.

    Raises:
        TypeError: If a field has the wrong type.
        ValueError: If a field has an invalid value, or fields contradict each other.
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
    max_length: int = 1024  # number of learned positional embeddings; no limit for other positions

    norm_order: str = "post"  # post: LayerNorm(x + Sublayer(x)), section 3.1; pre: x + Sublayer(LayerNorm(x))
    final_norm: bool = False  # additional layer norm after each stack
    layer_norm_epsilon: float = 1e-6  # not in the paper; 1e-6 in the first release of tensor2tensor
    layer_norm_kind: str = "standard"  # annotated: (x - mean) / (unbiased std + epsilon); rms: T5

    position_encoding: str = "sinusoidal"
    position_layout: str = "interleaved"  # interleaved: sin, cos, sin, cos; split: all sines, then all cosines
    position_timescale: str = "m"  # m: 10000^(i/m), section 3.5; m_minus_1: 10000^(i/(m-1)), tensor2tensor
    position_offset: int = 0  # index of the first position
    scale_embedding: bool = True  # multiply by sqrt(d_model), section 3.4
    tie_embeddings: str = "all"  # section 3.4: both embeddings and the output projection share one matrix

    attention_bias: bool = False  # the projections in section 3.2.2 have no biases
    feed_forward_bias: bool = True  # equation (2)
    output_bias: bool = False
    activation: str = "relu"
    dropout: DropoutRates = field(default_factory=DropoutRates)

    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    label_smoothing: float = 0.1
    label_smoothing_kind: str = "uniform"  # the method of Szegedy et al., whom the paper cites

    embedding_norm: bool = False  # additional layer norm on the sum of embedding and positional encoding (BART)
    decoder_num_heads: int | None = None  # if None, num_heads is used
    decoder_d_k: int | None = None  # if None, d_model / decoder_num_heads, or d_k if decoder_num_heads is also None
    decoder_d_v: int | None = None  # if None, d_model / decoder_num_heads, or d_v if decoder_num_heads is also None
    decoder_d_ff: int | None = None  # if None, d_ff is used
    skip_first_self_attention: bool = False  # the first decoder layer has no self-attention
    relative_buckets: int = 32  # the number in all T5 models
    relative_max_distance: int = 128  # the distance in all T5 models
    gated_feed_forward: bool = False  # activation(x W_gate) * (x W_inner), as in T5 v1.1
    scale_scores: bool = True  # divide by sqrt(d_k), equation (1)
    scale_logits: bool = False  # divide decoder outputs by sqrt(d_model) before the output projection (T5)

    def __post_init__(self) -> None:
        if isinstance(self.dropout, Mapping):
            sites = {site.name for site in dataclasses.fields(DropoutRates)}
            check_fields("dropout sites", {*sites, *self.dropout}, sites)
            object.__setattr__(self, "dropout", DropoutRates(**self.dropout))
        if not isinstance(self.dropout, DropoutRates):
            raise TypeError(f"dropout must be a DropoutRates or a dict: got {type(self.dropout).__name__}")
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
            # Beyond these limits, logits hardly depend on the input, and the loss hardly depends on the labels.
            ("layer_norm_epsilon", "in (0, 1]", lambda x: 0 < x <= 1),
            ("label_smoothing", "in [0, 0.99]", lambda x: 0 <= x <= 0.99),
        ):
            self._keep(name, check_number(name, getattr(self, name), needed, holds))
        self._check_ids()
        self._check_positions()
        if self.skip_first_self_attention and self.num_decoder_layers == 1:
            raise ValueError(
                "skip_first_self_attention requires num_decoder_layers to be at least 2: with one layer, no target "
                "position could attend to earlier positions"
            )
        if self.layer_norm_kind == "annotated" and self.d_model < 2:
            raise ValueError(f"layer_norm_kind='annotated' requires d_model to be at least 2: got {self.d_model}")
        others = {"uniform": 0, "off_target": 1, "off_target_and_pad": 2}[self.label_smoothing_kind]
        if self.label_smoothing and self.target_vocab_size <= others:
            raise ValueError(
                f"label_smoothing_kind={self.label_smoothing_kind!r} requires target_vocab_size to be at "
                f"least {others + 1}: got {self.target_vocab_size}"
            )
        if self.shares_embedding and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                f"tie_embeddings={self.tie_embeddings!r} requires equal vocabulary sizes: got source_vocab_size "
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
        elif self.position_encoding == "sinusoidal":
            check_sinusoids(self.d_model, self.position_layout, self.position_timescale)
        # The encoder uses half of the buckets for each direction, and half of these buckets contain only one distance.
        buckets = self._keep("relative_buckets", check_integer("relative_buckets", self.relative_buckets, minimum=4))
        distance = check_integer("relative_max_distance", self.relative_max_distance, buckets // 2 + 1, FARTHEST)
        self._keep("relative_max_distance", distance)

    def _keep(self, name: str, value: Any) -> Any:
        """Set a field of the frozen config and return its value. Only the constructor calls this method."""
        object.__setattr__(self, name, value)
        return value

    @property
    def in_decoder(self) -> TransformerConfig:
        """Config for the decoder's layers, with the decoder's ``num_heads``, ``d_k``, ``d_v``, and ``d_ff``."""
        heads, d_k, d_v, d_ff = (getattr(self, f"decoder_{name}") for name in DECODER_SIZES)
        width = None if heads is None else self.d_model // heads
        own = {"num_heads": heads, "d_k": d_k or width, "d_v": d_v or width, "d_ff": d_ff}
        changes = {name: size for name, size in own.items() if size is not None}
        return self.replace(**changes, **dict.fromkeys(f"decoder_{name}" for name in DECODER_SIZES))

    @property
    def shares_embedding(self) -> bool:
        """Whether the source and target embeddings are the same matrix."""
        return self.tie_embeddings in ("all", "source_target")

    @property
    def ties_output(self) -> bool:
        """Whether the output projection uses the matrix of the target embedding."""
        return self.tie_embeddings in ("all", "target_output")

    def has_self_attention(self, layer: int) -> bool:
        """Return whether the decoder layer with index ``layer`` (counted from 0) has self-attention."""
        return layer > 0 or not self.skip_first_self_attention

    @property
    def max_positions(self) -> int | None:
        """Maximum length of a sequence in tokens, or None if there is no limit."""
        return self.max_length - self.position_offset if self.position_encoding == "learned" else None

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TransformerConfig:
        """Return a published configuration.

        Args:
            name: Name of the preset, which must be a key of ``PRESETS``.
            overrides: Fields to set. Both vocabulary sizes are required, because presets don't define them.

        Raises:
            TypeError: If a field is unknown or has the wrong type.
            ValueError: If the preset is unknown, a field has an invalid value, or fields contradict each other.
        """
        check_choice("preset", name, tuple(PRESETS))
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> TransformerConfig:
        """Return a copy with some fields changed.

        Args:
            changes: Fields to change. ``d_k`` and ``d_v`` keep their values if ``d_model`` or ``num_heads`` changes.

        Raises:
            TypeError: If a field is unknown or has the wrong type.
            ValueError: If a field has an invalid value, or fields contradict each other.
        """
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict that can be converted to JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """Create a config from the result of ``to_dict``.

        Args:
            fields: All fields, keyed by name. If one of the ``LATER_FIELDS`` is missing, its default value is used.

        Raises:
            TypeError: If a field has the wrong type.
            ValueError: If a field is missing or unknown, has an invalid value, or contradicts other fields.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"a config must be a mapping of field names to values: got {type(fields).__name__}")
        names = [entry.name for entry in dataclasses.fields(cls)]
        check_fields("config fields", {*fields, *LATER_FIELDS}, names)
        return cls(**fields)
