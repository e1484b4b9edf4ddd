"""Hugging Face's folders: what is imported computes what transformers computes, and what is exported is loaded there.

Offline, with random weights. The folders are written by transformers and read in a process that cannot import it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import pytest
import test_vocabularies
import torch
import vocabulary_files
from imports import ROOT
from third_party import relative_error
from tiers import first_alone

import reference_numpy as ref
from transformer_parity.apps.checkpoints import proof
from transformer_parity.apps.checkpoints.formats import huggingface, huggingface_families, torch_nn
from transformer_parity.apps.checkpoints.formats.huggingface_search import read_search, write_search
from transformer_parity.apps.checkpoints.importer import differences, export_checkpoint, import_checkpoint, load, save
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.checkpoints.table import same
from transformer_parity.apps.containers import tensors
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.cli.main import main
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.search import Search

EXACT, AS_IT_COMES = 1e-12, 1e-7
DIFFERS = 1e-7
SIZES = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": 40},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24},
}


@dataclass(frozen=True)
class Form:
    """A family, what its config says, and how it is saved."""

    family: str
    fields: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard: str = "5GB"
    pickled: bool = False

    def __str__(self) -> str:
        kinds = {"bin": self.pickled, "shards": self.shard != "5GB", "float16": self.dtype != torch.float32}
        return "-".join([self.family, *(f"{value}" for value in self.fields.values()), *filter(kinds.get, kinds)])


SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}
FAMILIES = ("marian", *(name for name in huggingface_families.FAMILIES if name != "marian"))
FORMS = [
    Form("marian"),
    Form("fsmt", {"src_vocab_size": 37}),
    *(Form(family) for family in FAMILIES if family not in ("marian", "fsmt")),
    Form("fsmt", {"tie_word_embeddings": True}),
    *(Form(family, {"tie_word_embeddings": False}) for family in FAMILIES if family != "fsmt"),
    Form("marian", SEPARATE),
    Form("marian", {**SEPARATE, "tie_word_embeddings": False}),
    Form("marian", dtype=torch.float16),
    Form("marian", pickled=True),
    Form("marian", SEPARATE, shard="4KB"),
    Form("m2m_100", {"tie_word_embeddings": False}, pickled=True, shard="4KB"),
    Form("pegasus", dtype=torch.float16, pickled=True),
    Form("fsmt", dtype=torch.bfloat16),
]


def made(form: Form) -> torch.nn.Module:
    """Return a model of transformers' with random parameters and buffers, but for static tables of positions."""
    import transformers

    family = huggingface_families.FAMILIES[form.family]
    sizes = {"src_vocab_size": 31, "tgt_vocab_size": 31} if form.family == "fsmt" else {"vocab_size": 31}
    special = {"pad_token_id": 30, "decoder_start_token_id": 30} if form.family == "marian" else {}
    scaled = {} if form.family == "fsmt" else {"scale_embedding": True, "activation_function": "swish"}
    fields = {**SIZES, **sizes, **special, **scaled, **form.fields}
    config = getattr(transformers, f"{family.title}Config")(**fields)
    torch.manual_seed(3)
    model = getattr(transformers, family.classes[0])(config).eval()
    static = form.family in ("marian", "pegasus", "fsmt")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not (static and "embed_positions" in name) and not name.endswith("embed_positions.weights"):
                tensor.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.4)
    return model.to(form.dtype)


def saved(form: Form, folder: Path) -> torch.nn.Module:
    """Save such a model as a user would, and return it in float64."""
    model = made(form)
    model.save_pretrained(folder, max_shard_size=form.shard)
    if form.pickled:  # as releases before 5 wrote it: every name of a tied table is there
        pickle(folder, model)
    return model.double()


def pickle(folder: Path, model: torch.nn.Module) -> None:
    """Write the weights as torch's files, in one or in as many as there are shards."""
    files, state = sorted(folder.glob("*.safetensors")), model.state_dict()
    names = list(state)
    places = {name: f"pytorch_model-{at * len(files) // len(names)}.bin" for at, name in enumerate(names)}
    places = places if len(files) > 1 else dict.fromkeys(names, "pytorch_model.bin")
    for place in set(places.values()):
        torch.save({name: state[name] for name in names if places[name] == place}, folder / place)
    if len(files) > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for path in [*files, *folder.glob("*.safetensors.index.json")]:
        path.unlink()


CHILD = """
import sys
for name in ("torch", "transformers", "jax", "tensorflow", "keras"):
    sys.modules[name] = None  # an import of it is an ImportError
from transformer_parity.apps.checkpoints.importer import import_checkpoint, save
for folder in sys.argv[1:]:
    save(f"{folder}.safetensors", import_checkpoint(folder))
"""


def imported_elsewhere(*folders: Path) -> None:
    """Import folders in a process that has neither torch nor transformers, into files beside them."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, *map(str, folders)]
    child = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def theirs_of(model, config):
    """Return the logits of transformers with its own table of positions, and with the exact one."""
    inputs = proof.inputs_of(config)
    as_it_comes = proof._logits(model, inputs, config)
    if config.position_encoding == "sinusoidal":
        proof._replace_positions(model, config)
    return as_it_comes, proof._logits(model, inputs, config)


def error_of(config, weights, theirs, backend="numpy"):
    """Return how far the logits of a backend are from others, at the positions that are not padded."""
    inputs = proof.inputs_of(config)
    ours = PORTS[backend].load(config, weights, Placement("float64")).run("", inputs, taps=False).output
    real = ref.target_padding_mask(inputs["target_ids"], config.pad_id)
    return relative_error(ours[real], theirs[real])


@pytest.mark.extended("backends", "jax", "tf")
@pytest.mark.parametrize("form", [FORMS[0], *first_alone(FORMS[1:], "formats")], ids=str)
def test_logits_are_those_of_transformers(tmp_path, form, backend):
    model = saved(form, tmp_path / "model")
    if form is FORMS[0] and backend.name == "numpy":
        imported_elsewhere(tmp_path / "model")
        config, weights = ref.load_weights(tmp_path / "model.safetensors")
    else:
        imported = import_checkpoint(tmp_path / "model")
        config, weights = imported.config, imported.weights
    if form.dtype != torch.float32:
        assert {array.dtype.name for array in weights.values()} == {str(form.dtype).removeprefix("torch.")}
    as_it_comes, exact = theirs_of(model, config)
    assert error_of(config, weights, exact, backend.name) <= EXACT
    if form.dtype == torch.float32:  # whose tables are not rounded further
        assert error_of(config, weights, as_it_comes, backend.name) <= AS_IT_COMES


AXES = {
    "norm_order": ("post", "pre"),
    "layer_norm_epsilon": (1e-6, 1e-5),
    "layer_norm_kind": ("standard", "annotated"),
    "position_layout": ("interleaved", "split"),
    "position_timescale": ("m", "m_minus_1"),
    "position_offset": (0, 1, 2),
    "scale_embedding": (True, False),
    "activation": ("relu", "gelu", "gelu_tanh", "swish"),
}


@pytest.mark.parametrize("form", first_alone(FORMS[:8], "formats"), ids=str)
def test_a_neighbouring_convention_is_another_model(tmp_path, form):
    model = saved(form, tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model")
    config, (_, exact) = imported.config, theirs_of(model, imported.config)

    def error(config, weights=imported.weights):
        return error_of(config, weights, exact)

    assert error(config) <= EXACT
    for axis, values in AXES.items():
        if axis in ("position_layout", "position_timescale") and config.position_encoding == "learned":
            continue
        for value in values:
            if value != getattr(config, axis):
                assert error(config.replace(**{axis: value})) > DIFFERS, (axis, value)
    if config.tie_embeddings == "none":
        table = imported.weights["target_embedding.table"]
        assert error(config, {**imported.weights, "output_proj.kernel": table.T}) > DIFFERS
    weights, swap = imported.weights.items(), {"query_proj": "key_proj", "key_proj": "query_proj"}
    swapped = {re.sub("query_proj|key_proj", lambda found: swap[found[0]], name): array for name, array in weights}
    assert error(config, swapped) > DIFFERS


@pytest.mark.parametrize("form", first_alone(FORMS, "formats"), ids=str)
def test_what_is_exported_is_loaded_and_comes_back(tmp_path, form):
    import transformers

    saved(form, tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model")
    save(tmp_path / "ours.safetensors", imported)
    assert export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "back") == ()
    model, said = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, dtype=torch.float64
    )
    assert not any(said.values()), said
    back = import_checkpoint(tmp_path / "back")
    assert back.config == imported.config
    assert back.search == imported.search
    assert list(back.weights) == list(imported.weights)
    assert all(same(array, back.weights[name]) for name, array in imported.weights.items())
    assert error_of(back.config, back.weights, theirs_of(model, back.config)[1]) <= EXACT


BEAMS = {"num_beams": 4, "max_length": 24, "renormalize_logits": True, "no_repeat_ngram_size": 3, "length_penalty": 1.2}


# As OPUS-MT is published: the table of positions is in the file, in float16 too.
HALF = Form("marian", dtype=torch.float16, pickled=True)


@pytest.mark.parametrize("form", [HALF, *first_alone(FORMS[:8], "formats")], ids=str)
def test_translations_are_those_of_transformers(tmp_path, form):
    saved(form, tmp_path / "model")
    generation = tmp_path / "model/generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | BEAMS))
    found = proof.check_against_transformers(tmp_path / "model", import_checkpoint(tmp_path / "model"))
    assert [one.why for one in found if not one.agrees] == []
    assert found[-1].why == "4 of 4 translations of at most 20 tokens are the same"


def test_a_vocabulary_travels_with_its_weights(tmp_path):
    import transformers

    _, tokenizer, _ = test_vocabularies.marian(tmp_path / "model", vocabulary_files.train())
    size, pad_id = len(tokenizer), tokenizer.pad_token_id
    special = {"vocab_size": size, "pad_token_id": pad_id, "decoder_start_token_id": pad_id}
    saved(Form("marian", special), tmp_path / "model")
    found = import_checkpoint(tmp_path / "model")
    assert set(found.origin.files) >= {"config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json"}
    save(tmp_path / "ours.safetensors", found)
    read = read_trained(tmp_path / "ours.safetensors")
    assert read.search == found.search
    for line in vocabulary_files.LINES[:20:2]:
        assert read.vocabulary.ids(line) == tokenizer(line).input_ids
    export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "back")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back(vocabulary_files.LINES[0]).input_ids == tokenizer(vocabulary_files.LINES[0]).input_ids


def changed(folder: Path, drop=(), fields=None, **arrays) -> Path:
    """Change tensors and config.json of a folder."""
    found = tensors.read(folder / "model.safetensors")
    found = {name: array for name, array in found.items() if name not in drop} | arrays
    tensors.write(folder / "model.safetensors", found)
    config = json.loads((folder / "config.json").read_text()) | (fields or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OUTPUT, SHARED = "lm_head.weight", "model.shared.weight"
SAYS_NO = f"tie_word_embeddings is false, and {OUTPUT}"


def test_contradictions_are_decided_by_the_tensors_and_said(tmp_path):
    """The wrong tables have been loaded by transformers itself, five times."""
    saved(Form("m2m_100"), tmp_path / "tied")
    saved(Form("m2m_100", {"tie_word_embeddings": False}), tmp_path / "apart")
    table = tensors.read(tmp_path / "tied/model.safetensors")[SHARED]

    def notes_of(folder):
        found = import_checkpoint(folder)
        return found.config.tie_embeddings, found.notes[0], found.weights

    tied, note, weights = notes_of(changed(tmp_path / "tied", **{OUTPUT: table + 1}))
    assert (tied, note.split(",")[0]) == ("none", "tie_word_embeddings is true")
    assert same(weights["output_proj.kernel"].T, table + 1)
    tied, note, _ = notes_of(changed(tmp_path / "tied", fields={"tie_word_embeddings": False}, **{OUTPUT: table}))
    assert (tied, note) == (
        "all",
        f"{SAYS_NO} is the target embedding: they are tied here",
    )
    tied, note, _ = notes_of(changed(tmp_path / "tied", drop=[OUTPUT]))
    assert (tied, note) == ("all", f"{SAYS_NO} is missing: they are tied here")
    tied, note, _ = notes_of(tmp_path / "apart")
    assert (tied, note) == ("none", f"{SHARED} is not the embedding of the encoder, and is not used")
    drop = [huggingface.ENCODER, huggingface.DECODER]  # as releases before 5 wrote them
    tied, _, weights = notes_of(changed(tmp_path / "apart", drop=drop))
    assert tied == "none"
    assert same(weights["source_embedding.table"], weights["target_embedding.table"])


def test_flags_of_old_releases_are_named_where_they_contradict_the_class(tmp_path):
    saved(Form("marian"), tmp_path / "model")
    fields = {"normalize_before": True, "static_position_embeddings": True}
    found = import_checkpoint(changed(tmp_path / "model", fields=fields))
    assert found.notes[0] == (
        "normalize_before is True in config.json: a marian model is computed with False, whatever stands there"
    )
    assert not any("static" in note for note in found.notes)


def test_a_folder_without_its_output_layer_and_without_a_bias(tmp_path):
    """As facebook/bart-base is published."""
    model = saved(Form("bart"), tmp_path / "whole")
    model.model.float().save_pretrained(tmp_path / "bare")
    whole, bare = import_checkpoint(tmp_path / "whole"), import_checkpoint(tmp_path / "bare")
    assert bare.config == whole.config
    assert "there is no final_logits_bias: it is zero, as transformers has it" in bare.notes
    for name, array in whole.weights.items():
        assert same(array, bare.weights[name]) or name == "output_proj.bias"
    assert not bare.weights["output_proj.bias"].any()


REFUSED = {
    "no type": ({"model_type": None}, "config.json must name its model_type, one of marian, m2m_100"),
    "T5": ({"model_type": "t5"}, "a t5 model has relative positions"),
    "Whisper": ({"model_type": "whisper"}, "a whisper model reads sound"),
    "experts": ({"model_type": "nllb-moe"}, "has experts in the place of feed-forward blocks"),
    "another norm": (
        {"model_type": "blenderbot-small"},
        "has the norm of its decoder's embeddings before",
    ),
    "unknown": ({"model_type": "gpt2"}, "a gpt2 model is none of the families"),
    "a classifier": (
        {"architectures": ["MarianForSequenceClassification"]},
        "architectures must name a model",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "has a quantization_config: merge or dequantize"),
    "an activation": ({"activation_function": "gelu_fast"}, "activation_function must be one of relu"),
    "a billion layers": ({"encoder_layers": 10**9}, "too few for the config's 1,000,000,001 layers"),
    "another width": ({"d_model": 32}, r"model.encoder.embed_tokens.weight must have shape [31, 32]: got [31, 16]"),
    "a vocabulary": ({"vocab_size": 32}, "must have shape [32, 16]: got [31, 16]"),
    "padding outside": ({"pad_token_id": 99}, "pad_id must be below the vocabulary size 31: got 99"),
    "text for a number": ({"d_model": "many"}, "d_model must be an integer"),
    "heads that do not divide": ({"encoder_attention_heads": 3}, "num_heads must divide d_model"),
    "several ends": ({"eos_token_id": [0, 1]}, "eos_token_id must be one id"),
}


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("marian") / "model"
    saved(Form("marian"), folder)
    return folder


@pytest.fixture
def folder(marian, tmp_path) -> Path:
    """A copy of one model to change."""
    (tmp_path / "model").mkdir()
    for path in marian.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "model"


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(folder, what):
    fields, said = REFUSED[what]
    with pytest.raises(ValueError, match="cannot be imported") as error:
        import_checkpoint(changed(folder, fields=fields))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit_are_named_as_their_file_names_them(folder):
    norm, more = "model.encoder.layers.0.self_attn_layer_norm.weight", {"model.encoder.adapter.weight": np.ones((2, 2))}
    changed(folder, drop=[norm], **more)
    with pytest.raises(ValueError, match=rf"missing {norm} \[16\]; unexpected model.encoder.adapter.weight \[2, 2\]"):
        import_checkpoint(folder)
    changed(folder, drop=list(more), **{norm: np.ones(16, np.int64)})
    with pytest.raises(ValueError, match=rf"{norm} must be one of float64, float32, float16, bfloat16: got int64"):
        import_checkpoint(folder)


def test_a_table_of_positions_that_is_another_is_refused(folder):
    exact = ref.sinusoidal_encoding(40, 16, "split", "m").astype(np.float32)
    name = huggingface.POSITIONS[0]
    import_checkpoint(changed(folder, **{name: exact}))
    import_checkpoint(changed(folder, **{name: exact.astype(np.float16)}))
    others = [exact + np.float32(1e-6), ref.sinusoidal_encoding(40, 16, "split", "m_minus_1"), exact[:, ::-1].copy()]
    for other in others:
        with pytest.raises(ValueError, match="is not the table of sinusoids that this family has: it differs by"):
            import_checkpoint(changed(folder, **{name: other}))


def test_a_folder_with_the_weights_of_other_frameworks_says_so(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        import_checkpoint(folder)
    (folder / "tf_model.h5").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has weights of TensorFlow \(tf_model.h5\) only"):
        import_checkpoint(folder)


def test_the_licence_and_what_was_read_are_remembered(folder, tmp_path):
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: cc-by-4.0\n---\nlicense: not this\n")
    found = import_checkpoint(folder)
    save(tmp_path / "ours.safetensors", found)
    origin = load(tmp_path / "ours.safetensors").origin
    assert origin == found.origin
    assert (origin.format, origin.family, origin.preset, origin.licence) == ("hf", "marian", "marian", "cc-by-4.0")
    assert set(origin.files) >= {"config.json", "generation_config.json", "model.safetensors"}


@pytest.mark.parametrize("format_", ["marian", "fairseq", "torch"])
def test_a_folder_is_no_file_of_another_format(folder, format_):
    options = ReadOptions(fields=dict.fromkeys(torch_nn.ASKED, "none")) if format_ == "torch" else None
    with pytest.raises(ValueError, match=f"cannot be imported as {format_}: it must be "):
        import_checkpoint(folder, format_, options)


def test_an_adapter_is_refused_and_so_is_what_would_not_be_used(folder):
    with pytest.raises(ValueError, match="is read as hf, which takes none of these options: leave out --set"):
        import_checkpoint(folder, options=ReadOptions(fields={"num_heads": 8}))
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match=r"an adapter \(LoRA\) changes another model: merge it into that model"):
        import_checkpoint(folder)


def test_a_readme_of_empty_lines_takes_no_time(folder):
    for text in ("---" + "\n" * 3_000_000, "---\n" + "\n--" * 1_000_000):
        (folder / "README.md").write_text(text)
        start = time.process_time()
        assert import_checkpoint(folder).origin.licence is None
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json", "tokenizer_config.json"])
def test_no_file_of_a_vocabulary_is_read_from_elsewhere(folder, tmp_path, name):
    vocabulary_files.write(folder, vocabulary_files.marian_files(vocabulary_files.train(size=300)))
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    found = import_checkpoint(folder)
    assert found.vocabulary is None
    assert f"{name} is a link that leads out of its folder" in found.notes[-1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 10**9}, "beam_size of a search in a file must be at most 1,000: got 1,000,000,000"),
        ({"max_new_tokens": 10**9}, "max_length of a search in a file must be at most 65,536: got 1,000,000,000"),
        ({"no_repeat_ngram_size": 10**9}, "no_repeat_ngram_size of a search in a file must be at most 1,000: got 1,"),
        ({"forced_bos_token_id": 31}, r"forced_ids must lie in \[0, 31\): got 31"),
        ({"decoder_start_token_id": 31}, r"start_id must lie in \[0, 31\): got 31"),
        ({"bad_words_ids": [[31]]}, r"banned_ids must lie in \[0, 31\): got 31"),
        ({"bad_words_ids": 5}, "bad_words_ids must be a list: got 5"),
        ({"max_length": [5]}, r"max_length must be an integer: got \[5\]"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(folder, fields, message):
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        import_checkpoint(folder)


CONFIG = ref.TransformerConfig.preset("marian", source_vocab_size=31, target_vocab_size=31)
SETTINGS = {  # settings of generate, and what they are here; the rest is as for Hugging Face
    "OPUS-MT": (
        {
            "num_beams": 4,
            "max_length": 512,
            "bad_words_ids": [[1]],
            "forced_eos_token_id": 0,
            "renormalize_logits": True,
        },
        {"beam_size": 4, "max_length": 511},
        {"at_limit": "forced", "renormalize": True},
    ),
    "NLLB": (
        {"num_beams": 5, "max_length": 200, "early_stopping": True, "forced_bos_token_id": 7},
        {"beam_size": 5, "max_length": 199},
        {"stop": "first", "forced_ids": (7,)},
    ),
    "new tokens": ({"max_new_tokens": 30, "min_new_tokens": 3}, {"max_length": 30, "min_length": 4}, {}),
    "never": (
        {"num_beams": 2, "early_stopping": "never", "max_length": 9},
        {"beam_size": 2, "max_length": 8},
        {"stop": "attainable"},
    ),
    "summaries": (
        {"num_beams": 4, "length_penalty": 2.0, "min_length": 5, "no_repeat_ngram_size": 3, "max_length": 62},
        {"beam_size": 4, "length_penalty": 2.0, "min_length": 5, "max_length": 61},
        {"no_repeat_ngram_size": 3},
    ),
    "a start and a ban": (
        {"decoder_start_token_id": 5, "bad_words_ids": [[1], [9]], "max_length": 20},
        {"start_id": 5, "max_length": 19},
        {"banned_ids": (9,)},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_generate_are_a_search(name):
    fields, options, rules = SETTINGS[name]
    found, notes = read_search(fields, CONFIG)
    assert notes == []
    assert found == Search.preset("hf", **options, rules=ref.SearchRules.preset("hf", **rules))
    written, notes = write_search(found, CONFIG)
    assert notes == []
    assert read_search(written, CONFIG) == (found, [])


def test_settings_without_a_place_are_named():
    _, notes = read_search({"do_sample": True, "repetition_penalty": 1.2, "bad_words_ids": [[3, 4]]}, CONFIG)
    assert [note.split(" ")[0] for note in notes] == ["bad_words_ids", "do_sample", "repetition_penalty", "no"]
    _, notes = write_search(Search(4), CONFIG)
    assert notes == ["the search is not one of Hugging Face's: generate finds other translations with a beam"]


SMALL = {
    **{"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 16, "num_heads": 4, "d_ff": 8, "max_length": 20},
    **{"num_encoder_layers": 1, "num_decoder_layers": 1},
}
EXPORTED = {
    "no final norm": ({"name": "m2m_100", "final_norm": False}, "final_norm must be True: got False"),
    "pre-norm": ({"name": "marian", "norm_order": "pre"}, "norm_order must be 'post': got 'pre'"),
    "the paper's": ({"name": "paper_base"}, "cannot hold this model"),
    "wide heads": ({"name": "bart", "d_k": 16}, "d_k must be 4: got 16"),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_what_no_family_computes_is_not_written(tmp_path, name):
    changes, said = EXPORTED[name]
    config = ref.TransformerConfig.preset(**{**SMALL, **changes})
    ref.save_weights(tmp_path / "ours.safetensors", config, ref.init_weights(config, seed=0))
    with pytest.raises(ValueError, match="cannot hold this model") as error:
        export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "out")
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_command_imports_proves_and_checks(folder, tmp_path, capsys):
    out = ["--out", str(tmp_path / "a.safetensors"), "--json", str(tmp_path / "a.json")]
    assert main(["import", str(folder), *out, "--backends", "numpy,torch", "--check"]) == 0
    said = capsys.readouterr().out
    for part in ("marian", "target and output have one table", "4 of 4 translations", "AGREE  numpy, torch, trans"):
        assert part in said
    found = json.loads((tmp_path / "a.json").read_text())["result"]
    assert [one["name"].split()[0] for one in found["proof"]] == [*["numpy"] * 2, *["torch"] * 2, *["transformers"] * 3]
    assert all(one["error"] <= one["allowed"] for one in found["proof"])
    assert main(["export", str(tmp_path / "a.safetensors"), "--format", "hf", "--out", str(tmp_path / "back")]) == 0
    assert "config.json" in capsys.readouterr().out
    assert main(["import", str(tmp_path / "back")]) == 0
    assert "Nothing was written: add --out FILE." in capsys.readouterr().out


def test_a_wrong_import_is_found_out(folder, tmp_path, capsys, monkeypatch):
    import transformers

    monkeypatch.setitem(ref.PRESETS["marian"], "layer_norm_epsilon", 1e-6)  # Marian's own, and not transformers'
    out = ["--out", str(tmp_path / "a.safetensors"), "--backends", "numpy"]
    assert main(["import", str(folder), *out, "--check"]) == 1
    assert capsys.readouterr().out.endswith(f"DIVERGE  transformers {transformers.__version__}\n")


def test_a_check_without_transformers_is_not_one(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    assert main(["import", str(folder), "--check"]) == 3
    assert "NOT CHECKED: not installed: torch, transformers" in " ".join(capsys.readouterr().out.split())


def test_options_are_asked_for_where_they_are_needed(folder):
    with pytest.raises(ValueError, match="format must be one of"):
        import_checkpoint(folder, "onnx")
    with pytest.raises(ValueError, match="is not recognised"):
        import_checkpoint(folder / "config.json")
    assert import_checkpoint(folder, "hf", ReadOptions()).config == import_checkpoint(folder).config
    assert differences(import_checkpoint(folder).config, "fairseq")["activation"] == ("relu", "swish")
