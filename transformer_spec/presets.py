"""Presets: the values of ``TransformerConfig`` fields for published models.

Each preset lists the fields that differ from ``paper_base``, whose values are the defaults. The comments in ``config``
explain the assumptions about details that the paper omits.
"""

from __future__ import annotations

from typing import Any

_ALL_SITES = {"attention": 0.1, "feed_forward": 0.1}  # in addition to the paper's two dropout rates
_BIASES = {"attention_bias": True, "output_bias": True}
_T2T_POSITIONS = {"position_layout": "split", "position_timescale": "m_minus_1"}
_MARIAN = {"position_layout": "split", **_BIASES, "activation": "swish", "pad_id": 1, "bos_id": 1, "eos_id": 0}
_FAIRSEQ = {  # the toolkit in which BART was developed
    "layer_norm_epsilon": 1e-5,
    "position_offset": 2,
    "attention_bias": True,
    "pad_id": 1,
    "bos_id": 2,
    "eos_id": 2,
    "label_smoothing_kind": "off_target",
}
_BART = {
    **_FAIRSEQ,
    "position_encoding": "learned",
    "max_length": 1026,
    "embedding_norm": True,
    "output_bias": True,
    "activation": "gelu",
}
_PRE_NORM = {"norm_order": "pre", "final_norm": True}
_T5 = {
    **_PRE_NORM,
    "layer_norm_kind": "rms",
    "position_encoding": "relative",
    "scale_embedding": False,
    "feed_forward_bias": False,
    "scale_scores": False,
    "dropout": {**_ALL_SITES, "final": 0.1},
    **{"pad_id": 0, "bos_id": 0, "eos_id": 1},
    "label_smoothing": 0.0,
}
_T5_V1_1 = {
    **_T5,
    "tie_embeddings": "source_target",
    "activation": "gelu_tanh",
    "gated_feed_forward": True,
    **{"num_heads": 6, "d_k": 64, "d_v": 64, "d_ff": 1024, "num_encoder_layers": 8, "num_decoder_layers": 8},
}

# Table 3 of the paper, one preset per row. The letter in each comment is the label of the row in Table 3.
TABLE_3: dict[str, dict[str, Any]] = {
    "paper_base": {},  # the defaults
    "paper_h1": {"num_heads": 1},  # A
    "paper_h4": {"num_heads": 4},  # A
    "paper_h16": {"num_heads": 16},  # A
    "paper_h32": {"num_heads": 32},  # A
    "paper_dk16": {"d_k": 16},  # B
    "paper_dk32": {"d_k": 32},  # B
    "paper_n2": {"num_encoder_layers": 2, "num_decoder_layers": 2},  # C
    "paper_n4": {"num_encoder_layers": 4, "num_decoder_layers": 4},  # C
    "paper_n8": {"num_encoder_layers": 8, "num_decoder_layers": 8},  # C
    "paper_d256": {"d_model": 256, "d_k": 32, "d_v": 32},  # C
    "paper_d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},  # C
    "paper_ff1024": {"d_ff": 1024},  # C
    "paper_ff4096": {"d_ff": 4096},  # C
    "paper_dropout_0.0": {"dropout": {"embedding": 0.0, "residual": 0.0}},  # D
    "paper_dropout_0.2": {"dropout": {"embedding": 0.2, "residual": 0.2}},  # D
    "paper_smoothing_0.0": {"label_smoothing": 0.0},  # D
    "paper_smoothing_0.2": {"label_smoothing": 0.2},  # D
    "paper_learned": {"position_encoding": "learned"},  # E
    "paper_big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": {"embedding": 0.3, "residual": 0.3}},
}

# Published implementations. The tests compare each preset with the published code, or with a transcription of the
# formulas in that code.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    # The first release of tensor2tensor (June 2017), which is the code closest to the paper. This preset omits the
    # release's target-space embedding. The release sets the embedding of padding to zero only on lookup. Therefore,
    # this preset can't exactly represent a checkpoint in which the stored embedding of padding is nonzero.
    "t2t_2017": {
        **_T2T_POSITIONS,
        "attention_bias": True,
        "bos_id": 0,
        "eos_id": 1,
        "label_smoothing_kind": "off_target",
    },
    # The Annotated Transformer (Harvard NLP, 2022). Its text describes post-norm, but its code is pre-norm.
    "annotated": {
        "norm_order": "pre",
        "final_norm": True,
        "layer_norm_kind": "annotated",
        "tie_embeddings": "none",
        **_BIASES,
        "dropout": _ALL_SITES,
        "pad_id": 2,
        "bos_id": 0,
        "eos_id": 1,
        "label_smoothing_kind": "off_target_and_pad",
    },
    # The defaults of torch.nn.Transformer: post-norm with a final norm. This class contains neither embeddings nor an
    # output layer.
    "torch": {
        "final_norm": True,
        "layer_norm_epsilon": 1e-5,
        "tie_embeddings": "none",
        **_BIASES,
        "dropout": _ALL_SITES,
    },
    # Hugging Face's MarianMTModel, as configured in the OPUS-MT checkpoints. Decoding starts with PAD.
    "marian": {**_MARIAN, "layer_norm_epsilon": 1e-5, "max_length": 512},
    # Marian NMT, the C++ program that trains these checkpoints. It uses different frequencies in the positional
    # encodings and a different layer norm epsilon. Like tensor2tensor, it starts decoding with a zero vector. This
    # preset represents the vector as a BOS token with a zero embedding.
    "marian_cpp": {**_MARIAN, "position_timescale": "m_minus_1"},
    # The `transformer` architecture of fairseq. The first position has the index pad_id + 1. Decoding starts with EOS.
    "fairseq": {**_FAIRSEQ, **_T2T_POSITIONS, "tie_embeddings": "none"},
    # The following presets match Hugging Face's classes of the same names, as configured in published checkpoints.
    # BART (Lewis et al., 2020) adds a layer norm after the embeddings. Its first two positional embeddings are unused.
    # Decoding starts with EOS.
    "bart": {**_BART, "scale_embedding": False, "dropout": _ALL_SITES},
    # PLBART (Ahmad et al., 2021), a variant of BART for source code. It scales the embeddings. Decoding starts with a
    # language token.
    "plbart": {**_BART, "dropout": {"attention": 0.1}, "bos_id": 0},
    # mBART (Liu et al., 2020), a BART with pre-norm. Decoding starts with a language token or, in some models, with EOS
    # and a language token.
    "mbart": {**_BART, **_PRE_NORM},
    # M2M-100 (Fan et al., 2021) and NLLB-200: fairseq with pre-norm. Decoding starts with EOS and a language token.
    "m2m_100": {**_FAIRSEQ, **_T2T_POSITIONS, **_PRE_NORM, "dropout": {"attention": 0.1}},
    # PEGASUS (Zhang et al., 2020). Decoding starts with PAD.
    "pegasus": {
        **_PRE_NORM,
        **{"position_layout": "split", **_BIASES, "layer_norm_epsilon": 1e-5, "dropout": _ALL_SITES},
        **{"pad_id": 0, "bos_id": 0, "eos_id": 1},
    },
    # The large Blenderbot models (Roller et al., 2021). Decoding starts with BOS.
    "blenderbot": {
        **_PRE_NORM,
        **{"position_encoding": "learned", "max_length": 128, **_BIASES, "layer_norm_epsilon": 1e-5},
        "activation": "gelu",
    },
    # T5 (Raffel et al., 2020), with the sizes of T5 Small. Decoding starts with PAD.
    "t5": {**_T5, "scale_logits": True},
    # T5 v1.1 and FLAN-T5, with the sizes of the small models. The feed-forward networks are gated (Shazeer, 2020), and
    # the output projection isn't tied.
    "t5_v1_1": _T5_V1_1,
    # mT5 (Xue et al., 2021): T5 v1.1 with a multilingual vocabulary, here with the sizes of mT5 Base.
    "mt5": {
        **_T5_V1_1,
        **{"d_model": 768, "num_heads": 12, "d_ff": 2048, "num_encoder_layers": 12, "num_decoder_layers": 12},
    },
    # ByT5 (Xue et al., 2022): T5 v1.1 with bytes as tokens and a deeper encoder, here with the sizes of ByT5 Small.
    "byt5": {
        **_T5_V1_1,
        **{"d_model": 1472, "d_ff": 3584, "num_encoder_layers": 12, "num_decoder_layers": 4},
    },
    # Flax's WMT example. The embedding weights in Flax's checkpoints are larger than the weights of an equivalent model
    # with this preset, by a factor of sqrt(d_model). Flax divides the logits by sqrt(d_model).
    "flax_wmt": {
        "norm_order": "pre",
        "final_norm": True,
        **_T2T_POSITIONS,
        "dropout": _ALL_SITES,
        "bos_id": 0,
        "label_smoothing_kind": "off_target",
    },
    # TransformerEncoder, TransformerDecoder, and TokenAndPositionEmbedding of keras_hub.
    "keras_hub": {
        "layer_norm_epsilon": 1e-5,
        "position_encoding": "learned",
        "scale_embedding": False,
        "tie_embeddings": "none",
        **_BIASES,
        "dropout": {"embedding": 0.0, "attention": 0.1},
        "label_smoothing": 0.0,
    },
}

PRESETS: dict[str, dict[str, Any]] = {**TABLE_3, **IMPLEMENTATIONS}
