"""Hugging Face checkpoints that are rejected, and the names in the error messages."""

from __future__ import annotations

import json
import time
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import pytest
import vocabulary_files
from hf_checkpoints import Form, saved
from hf_checkpoints import directory as directory  # a fixture

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats import huggingface, torch_nn
from transformer_parity.apps.checkpoints.importer import differences, import_checkpoint
from transformer_parity.apps.checkpoints.name_mapping import same
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import tensors


def changed(directory: Path, drop=(), fields=None, **arrays) -> Path:
    """Change tensors and fields of config.json in a checkpoint directory."""
    found = tensors.read(directory / "model.safetensors")
    found = {name: array for name, array in found.items() if name not in drop} | arrays
    tensors.write(directory / "model.safetensors", found)
    config = json.loads((directory / "config.json").read_text()) | (fields or {})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


OUTPUT, SHARED = "lm_head.weight", "model.shared.weight"
SAYS_NO = f"tie_word_embeddings is false, but {OUTPUT}"


def test_contradictory_embedding_ties_follow_the_tensors_with_a_note(tmp_path):
    """transformers itself has loaded the wrong embedding matrices five times."""
    saved(Form("m2m_100"), tmp_path / "tied")
    saved(Form("m2m_100", {"tie_word_embeddings": False}), tmp_path / "apart")
    table = tensors.read(tmp_path / "tied/model.safetensors")[SHARED]

    def notes_of(directory):
        found = import_checkpoint(directory)
        return found.config.tie_embeddings, found.notes[0], found.weights

    tied, note, weights = notes_of(changed(tmp_path / "tied", **{OUTPUT: table + 1}))
    assert (tied, note.split(",")[0]) == ("none", "tie_word_embeddings is true")
    assert same(weights["output_proj.kernel"].T, table + 1)
    tied, note, _ = notes_of(changed(tmp_path / "tied", fields={"tie_word_embeddings": False}, **{OUTPUT: table}))
    assert (tied, note) == (
        "all",
        f"{SAYS_NO} equals the target embedding, so the target embedding and the output projection are tied",
    )
    tied, note, _ = notes_of(changed(tmp_path / "tied", drop=[OUTPUT]))
    assert (tied, note) == ("all", f"{SAYS_NO} is missing, so the target embedding and the output projection are tied")
    tied, note, _ = notes_of(tmp_path / "apart")
    assert (tied, note) == ("none", f"{SHARED} differs from the embedding of the encoder and is ignored")
    drop = [huggingface.ENCODER, huggingface.DECODER]  # checkpoints written by releases before 5 lack these tensors
    tied, _, weights = notes_of(changed(tmp_path / "apart", drop=drop))
    assert tied == "none"
    assert same(weights["source_embedding.table"], weights["target_embedding.table"])


def test_contradictory_legacy_flags_are_reported_in_notes(tmp_path):
    saved(Form("marian"), tmp_path / "model")
    fields = {"normalize_before": True, "static_position_embeddings": True}
    found = import_checkpoint(changed(tmp_path / "model", fields=fields))
    assert found.notes[0] == (
        "normalize_before is True in config.json, but marian models ignore this flag and always use False"
    )
    assert not any("static" in note for note in found.notes)


REFUSED = {
    "no model type": ({"model_type": None}, "model_type in config.json must be one of marian, m2m_100"),
    "UMT5": ({"model_type": "umt5"}, "got umt5, which has separate relative position biases in each layer; a T5 model"),
    "LongT5": ({"model_type": "longt5"}, "got longt5, which uses sparse attention"),
    "Switch Transformers": ({"model_type": "switch_transformers"}, "which uses a mixture of experts; a dense T5 model"),
    "Whisper": ({"model_type": "whisper"}, "got whisper, which reads audio"),
    "experts": ({"model_type": "nllb-moe"}, "got nllb-moe, which uses a mixture of experts"),
    "unsupported norm": ({"model_type": "blenderbot-small"}, "which normalizes the decoder's embeddings before"),
    "unknown": ({"model_type": "gpt2"}, ", fsmt, t5, mt5: got gpt2"),
    "a classifier": (
        {"architectures": ["MarianForSequenceClassification"]},
        "architectures in config.json must be Marian",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "must not contain quantization_config; merge"),
    "unsupported activation": ({"activation_function": "gelu_fast"}, "activation_function must be one of relu"),
    "a billion layers": ({"encoder_layers": 10**9}, "the config has 1,000,000,001 layers, but the file contains only"),
    "contradictory width": (
        {"d_model": 32},
        r"expected shape [31, 32] for model.encoder.embed_tokens.weight, got [31, 16]",
    ),
    "a vocabulary": ({"vocab_size": 32}, "expected shape [32, 16] for model.encoder.embed_tokens.weight, got [31, 16]"),
    "padding ID outside the vocabulary": ({"pad_token_id": 99}, "pad_id must be below the vocabulary size 31: got 99"),
    "text for a number": ({"d_model": "many"}, "d_model must be an integer"),
    "heads that do not divide": ({"encoder_attention_heads": 3}, "num_heads must divide d_model"),
    "multiple EOS tokens": ({"eos_token_id": [0, 1]}, "eos_token_id must be a single ID"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_config_field_raises_value_error_naming_it(directory, what):
    fields, said = REFUSED[what]
    with pytest.raises(ValueError, match="cannot be imported") as error:
        import_checkpoint(changed(directory, fields=fields))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_tensor_errors_use_the_names_of_the_checkpoint(directory):
    norm, more = "model.encoder.layers.0.self_attn_layer_norm.weight", {"model.encoder.adapter.weight": np.ones((2, 2))}
    changed(directory, drop=[norm], **more)
    with pytest.raises(ValueError, match=rf"missing {norm} \[16\]; unexpected model.encoder.adapter.weight \[2, 2\]"):
        import_checkpoint(directory)
    changed(directory, drop=list(more), **{norm: np.ones(16, np.int64)})
    with pytest.raises(ValueError, match=rf"expected float64 or float32 or float16 or bfloat16 for {norm}, got int64"):
        import_checkpoint(directory)


def test_unexpected_position_table_is_rejected(directory):
    exact = ref.sinusoidal_encoding(40, 16, "split", "m").astype(np.float32)
    name = huggingface.POSITIONS[0]
    import_checkpoint(changed(directory, **{name: exact}))
    import_checkpoint(changed(directory, **{name: exact.astype(np.float16)}))
    others = [exact + np.float32(1e-6), ref.sinusoidal_encoding(40, 16, "split", "m_minus_1"), exact[:, ::-1].copy()]
    for other in others:
        with pytest.raises(ValueError, match="does not contain this family's sinusoids: the largest difference is"):
            import_checkpoint(changed(directory, **{name: other}))


def test_directory_with_weights_for_another_framework_is_rejected(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="contains no weights; the directory must contain"):
        import_checkpoint(directory)
    (directory / "tf_model.h5").write_bytes(b"")
    with pytest.raises(ValueError, match=r"got only weights for TensorFlow \(tf_model.h5\)"):
        import_checkpoint(directory)


@pytest.mark.parametrize("format_", ["marian", "fairseq", "torch"])
def test_directory_is_rejected_by_single_file_formats(directory, format_):
    options = ReadOptions(fields=dict.fromkeys(torch_nn.ASKED, "none")) if format_ == "torch" else None
    with pytest.raises(ValueError, match=f"cannot be imported as {format_}: expected "):
        import_checkpoint(directory, format_, options)


def test_adapters_and_unused_options_are_rejected(directory):
    with pytest.raises(ValueError, match="has the format hf, which supports no options; remove --set"):
        import_checkpoint(directory, options=ReadOptions(fields={"num_heads": 8}))
    (directory / "config.json").rename(directory / "adapter_config.json")
    with pytest.raises(ValueError, match=r"contains an adapter \(LoRA, adapter_config.json\), not a model; merge"):
        import_checkpoint(directory)


def test_readme_with_many_empty_lines_is_read_quickly(directory):
    for text in ("---" + "\n" * 3_000_000, "---\n" + "\n--" * 1_000_000):
        (directory / "README.md").write_text(text)
        start = time.process_time()
        assert import_checkpoint(directory).origin.license is None
        assert time.process_time() - start < 20.0  # a quadratic search would take hours


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json", "tokenizer_config.json"])
def test_vocabulary_links_outside_the_directory_are_not_followed(directory, tmp_path, name):
    vocabulary_files.write(directory, vocabulary_files.marian_files(vocabulary_files.train(size=300)))
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    found = import_checkpoint(directory)
    assert found.vocabulary is None
    assert f"{name} must not be a link to a file outside its directory" in found.notes[-1]


def test_unknown_or_unrecognized_format_raises_value_error(directory):
    with pytest.raises(ValueError, match="format must be one of"):
        import_checkpoint(directory, "onnx")
    with pytest.raises(ValueError, match="is not recognized"):
        import_checkpoint(directory / "config.json")
    assert import_checkpoint(directory, "hf", ReadOptions()).config == import_checkpoint(directory).config
    assert differences(import_checkpoint(directory).config, "fairseq")["activation"] == ("relu", "swish")
