"""The published models as points in the space of ``TransformerConfig``: for each, the fields that are not the default.

What a preset does not name is as in ``paper_base``, which says what it assumes where the paper is silent.
"""

from __future__ import annotations

from typing import Any

_ALL_SITES = {"attention": 0.1, "feed_forward": 0.1}  # beside the paper's two
_BIASES = {"attention_bias": True, "output_bias": True}
_T2T_POSITIONS = {"position_layout": "split", "position_timescale": "m_minus_1"}
_MARIAN = {"position_layout": "split", **_BIASES, "activation": "swish", "pad_id": 1, "bos_id": 1, "eos_id": 0}
_FAIRSEQ = {  # in which BART was written
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

# Table 3 of the paper, one preset a row; the letter in the comment is the table's.
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

# What published code does. Each is compared with that code, or with a transcription of its formulas, in the tests.
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    # tensor2tensor's first release (June 2017), the code nearest to the paper; its target-space embedding is left out.
    # It zeroes the padding row on lookup only, so a checkpoint whose row is not zero has no exact equal here.
    "t2t_2017": {
        **_T2T_POSITIONS,
        "attention_bias": True,
        "bos_id": 0,
        "eos_id": 1,
        "label_smoothing_kind": "off_target",
    },
    # The Annotated Transformer (Harvard NLP, 2022): its prose is post-norm, its code is not.
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
    # torch.nn.Transformer's defaults: post-norm, and still a final norm. Embeddings and output are the user's.
    "torch": {
        "final_norm": True,
        "layer_norm_epsilon": 1e-5,
        "tie_embeddings": "none",
        **_BIASES,
        "dropout": _ALL_SITES,
    },
    # Hugging Face's MarianMTModel as the OPUS-MT checkpoints configure it; decoding starts with PAD.
    "marian": {**_MARIAN, "layer_norm_epsilon": 1e-5, "max_length": 512},
    # Marian NMT, the C++ program that trains those checkpoints: other frequencies, other epsilon. Like tensor2tensor,
    # it starts decoding from a zero vector: here, from a start symbol whose row of the table is zero.
    "marian_cpp": {**_MARIAN, "position_timescale": "m_minus_1"},
    # fairseq's `transformer` architecture: positions start behind the padding id; decoding starts with EOS.
    "fairseq": {**_FAIRSEQ, **_T2T_POSITIONS, "tie_embeddings": "none"},
    # What follows is as Hugging Face's classes of these names compute it, and as published checkpoints configure them.
    # BART (Lewis et al., 2020): a norm on the embeddings, positions behind two rows that are never read; decoding
    # starts with EOS.
    "bart": {**_BART, "scale_embedding": False, "dropout": _ALL_SITES},
    # PLBART (Ahmad et al., 2021), of programs: scaled embeddings. Decoding starts with a language.
    "plbart": {**_BART, "dropout": {"attention": 0.1}, "bos_id": 0},
    # mBART (Liu et al., 2020): BART with the norms in front. Decoding starts with EOS, then a language, or with that.
    "mbart": {**_BART, **_PRE_NORM},
    # M2M-100 (Fan et al., 2021), NLLB-200: fairseq with the norms in front; decoding starts with EOS, then a language.
    "m2m_100": {**_FAIRSEQ, **_T2T_POSITIONS, **_PRE_NORM, "dropout": {"attention": 0.1}},
    # PEGASUS (Zhang et al., 2020); decoding starts with PAD.
    "pegasus": {
        **_PRE_NORM,
        **{"position_layout": "split", **_BIASES, "layer_norm_epsilon": 1e-5, "dropout": _ALL_SITES},
        **{"pad_id": 0, "bos_id": 0, "eos_id": 1},
    },
    # Blenderbot (Roller et al., 2021), the large ones; decoding starts with BOS.
    "blenderbot": {
        **_PRE_NORM,
        **{"position_encoding": "learned", "max_length": 128, **_BIASES, "layer_norm_epsilon": 1e-5},
        "activation": "gelu",
    },
    # Flax's WMT example. It keeps its table sqrt(d_model) times larger and divides the logits instead.
    "flax_wmt": {
        "norm_order": "pre",
        "final_norm": True,
        **_T2T_POSITIONS,
        "dropout": _ALL_SITES,
        "bos_id": 0,
        "label_smoothing_kind": "off_target",
    },
    # keras_hub's TransformerEncoder and TransformerDecoder under its TokenAndPositionEmbedding.
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
