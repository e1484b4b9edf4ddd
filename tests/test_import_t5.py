"""Hugging Face T5 and mT5 checkpoints: imports, exports, translations, and rejected directories.

transformers computes the mean squares of T5's norms in float32. For comparisons in float64, the tests replace this
formula.
"""

from __future__ import annotations

import json

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import pytest
import test_vocabularies
import torch
import vocabulary_files
from imported_models import logits_of, ours
from t5_checkpoints import FORMS, GATED, T5Form, saved
from test_import_hf_refused import changed
from third_party import relative_error
from tiers import first_alone

import reference_numpy as ref
from transformer_parity.apps.checkpoints import proof
from transformer_parity.apps.checkpoints.formats import huggingface_t5
from transformer_parity.apps.checkpoints.importer import (
    differences,
    export_checkpoint,
    import_checkpoint,
    load,
    save,
)
from transformer_parity.apps.checkpoints.name_mapping import same, take
from transformer_parity.apps.containers import tensors
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS

LOGITS, GRADIENTS, DIFFERS = 1e-12, 1e-11, 1e-7
T5, V1_1, MT5, *_ = FORMS


def release():
    """Return the module ``transformers``, which takes seconds to import."""
    import transformers

    return transformers


def theirs_of(model, config):
    """Return the inputs and transformers' logits, and the positions that are not padding."""
    inputs = proof.inputs_of(config)
    return inputs, proof._logits(model, inputs, config), ref.target_padding_mask(inputs["target_ids"], config.pad_id)


def error_of(config, weights, model):
    """Return the error of the reference's logits relative to the logits of transformers, at non-padding positions."""
    inputs, theirs, real = theirs_of(model, config)
    return relative_error(logits_of(config, weights, *inputs.values())[real], theirs[real])


@pytest.mark.extended("backends", "jax", "tf")
@pytest.mark.parametrize("form", first_alone(FORMS, "formats"), ids=str)
def test_logits_match_transformers(tmp_path, form, backend):
    model = saved(form, tmp_path)
    imported = import_checkpoint(tmp_path)
    assert {array.dtype.name for array in imported.weights.values()} == {str(form.dtype).removeprefix("torch.")}
    inputs, theirs, real = theirs_of(model, imported.config)
    port = PORTS[backend.name].load(imported.config, imported.weights, Placement("float64"))
    assert relative_error(port.run("", inputs, taps=False).output[real], theirs[real]) <= LOGITS


AXES = {
    "norm_order": ("post",),
    "layer_norm_epsilon": (1e-6, 1e-5),
    "scale_embedding": (True,),
    "scale_scores": (True,),
    "scale_logits": (False, True),
    "relative_buckets": (8, 14),
    "relative_max_distance": (17, 20, 21),
    "activation": ("relu", "gelu", "gelu_tanh", "swish"),
}


@pytest.mark.parametrize("form", first_alone(FORMS[:4], "formats"), ids=str)
def test_neighboring_convention_gives_different_logits(tmp_path, form):
    model = saved(form, tmp_path)
    imported = import_checkpoint(tmp_path)
    config, weights = imported.config, imported.weights
    for axis, values in AXES.items():
        for value in values:
            if value != getattr(config, axis):
                other = config.replace(**{axis: value})
                shapes = ref.parameter_shapes(other)  # the number of buckets is the number of rows of a table
                resized = {name: np.resize(array, shapes[name]) for name, array in weights.items()}
                assert error_of(other, resized, model) > DIFFERS, (axis, value)
    table = "encoder.relative_bias.table", "decoder.relative_bias.table"
    swapped = {**weights} | {one: weights[other] for one, other in zip(table, reversed(table), strict=True)}
    assert error_of(config, swapped, model) > DIFFERS


@pytest.mark.parametrize("form", first_alone(FORMS[:4], "formats"), ids=str)
def test_gradients_match_transformers(tmp_path, form):
    model = saved(form, tmp_path)
    imported = import_checkpoint(tmp_path)
    config = imported.config
    source, target = proof.inputs_of(config).values()
    dlogits = np.random.default_rng(1).normal(size=(*target.shape, config.target_vocab_size))
    output = model(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source != config.pad_id),
        decoder_input_ids=torch.tensor(target),
        decoder_attention_mask=torch.tensor(ref.target_padding_mask(target, config.pad_id)),
    )
    output.logits.backward(torch.tensor(dlogits))
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    found[huggingface_t5.ENCODER] = found.pop(huggingface_t5.SHARED)
    theirs = take(huggingface_t5.table_of(config), found, config)
    reference = ref.Transformer.from_weights(config, imported.weights, "float64")
    seen = ref.Recorder()
    reference(source, target, tap=seen)
    gradients, _ = ref.transformer_backward(reference, source, target, dlogits, seen)
    assert {name: relative_error(gradients[name], theirs[name]) <= GRADIENTS for name in theirs} == dict.fromkeys(
        ref.parameter_shapes(config), True
    )


@pytest.mark.parametrize("form", first_alone(FORMS, "formats"), ids=str)
def test_exported_checkpoint_loads_in_transformers_and_round_trips(tmp_path, form):
    saved(form, tmp_path / "model")
    imported = import_checkpoint(tmp_path / "model")
    save(tmp_path / "ours.safetensors", imported)
    notes = export_checkpoint(load(tmp_path / "ours.safetensors"), "hf", tmp_path / "back")
    by_5 = ("transformers 4 computes different logits for this model; load it with transformers 5",)
    assert notes == (by_5 if form.name == "scaled but not tied" else ())
    model, said = release().AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, dtype=torch.float64
    )
    assert not any(said.values()), said
    fields = json.loads((tmp_path / "back/config.json").read_text())
    # Release 4 derives both the output matrix and the scale from this flag.
    assert fields["tie_word_embeddings"] == (imported.config.ties_output and imported.config.scale_logits)
    back = import_checkpoint(tmp_path / "back")
    assert (back.config, back.search) == (imported.config, imported.search)
    assert (back.origin.family, back.origin.preset) == (imported.origin.family, imported.origin.preset)
    assert list(back.weights) == list(imported.weights)
    assert all(same(array, back.weights[name]) for name, array in imported.weights.items())
    proof._replace_norms(model)
    assert error_of(back.config, back.weights, model.eval()) <= LOGITS


# Search settings in generation_config.json. With the defaults, transformers generates at most 20 tokens.
SEARCHES = {
    "greedy": {},
    "beam": {"num_beams": 4, "max_length": 24, "length_penalty": 1.2, "no_repeat_ngram_size": 3},
    "early": {"num_beams": 3, "max_new_tokens": 15, "early_stopping": True, "min_length": 4},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.extended("backends", "jax", "tf")
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("form", first_alone([T5, V1_1, MT5, FORMS[10]], "formats"), ids=str)
def test_searches_return_the_tokens_of_transformers(tmp_path, form, search, backend):
    model = saved(form, tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SEARCHES[search]))
    imported = import_checkpoint(tmp_path)
    config = imported.config
    ids = proof.inputs_of(config, 80)["source_ids"][:, :25]
    ids[:40, 15:] = config.pad_id
    found = PORTS[backend.name].load(config, imported.weights, Placement("float64")).search(ids, imported.search)
    options = {"bad_words_ids": [[config.pad_id]], **SEARCHES[search]}  # our searches never generate padding
    with torch.no_grad():
        theirs = model.generate(
            input_ids=torch.tensor(ids), attention_mask=torch.tensor(ids != config.pad_id), **options
        )
    said = [proof._ended(row, config) for row in found.ids.tolist()]
    assert said == [proof._ended(row, config) for row in theirs[:, 1:].tolist()]
    assert len({tuple(row) for row in said}) >= 40
    assert len({len(row) for row in said}) > 3


def test_check_compares_logits_twice_and_translations(tmp_path):
    saved(FORMS[11], tmp_path)  # a model whose decoder has more layers than the encoder
    found = proof.check_against_transformers(tmp_path, import_checkpoint(tmp_path))
    assert [one.verdict for one in found] == [AGREES] * 3
    assert [one.why for one in found] == [
        "logits, using its own float32 norms",
        "logits, using exact norms",
        "4 of 4 translations of at most 20 tokens are identical",
    ]


# Embedding matrices and flags
SHARED, OUTPUT = huggingface_t5.SHARED, huggingface_t5.OUTPUT
BY_4, BY_5 = {"transformers_version": "4.57.6"}, {"transformers_version": "5.23.0"}
NOT_TIED = f"tie_word_embeddings is true, but {OUTPUT} differs from the embedding, so the two are not tied"
MISSING = (
    f"tie_word_embeddings is false, but {OUTPUT} is missing, so the target embedding and the output projection are tied"
)
FLAGS = {  # family, fields, whether there is an output matrix, the resulting scale_logits, and the note
    "T5": ("t5", {**BY_4, "tie_word_embeddings": None}, False, True, None),
    "T5 with output": ("t5", {**BY_4, "tie_word_embeddings": True}, True, True, NOT_TIED),
    "v1.1": ("t5", {**BY_4, "tie_word_embeddings": False}, True, False, None),
    "v1.1 without output": ("t5", {**BY_4, "tie_word_embeddings": False}, False, False, MISSING),
    "v1.1 by 5": ("t5", {**BY_5, "tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False, None),
    "scale": ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": True}, True, True, None),
    "mT5": ("mt5", {**BY_4, "tie_word_embeddings": False}, True, False, None),
    "mT5 by 5": ("mt5", {**BY_5, "tie_word_embeddings": True}, True, False, None),
    "tied mT5 by 4": (
        "mt5",
        {**BY_4, "tie_word_embeddings": True},
        False,
        False,
        "tie_word_embeddings is true, so trans",
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_and_tensors_are_interpreted_as_by_transformers(tmp_path, name):
    family, fields, has_output, scale, note = FLAGS[name]
    saved(T5Form("", family, GATED, is_tied=not has_output), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("tie_word_embeddings", "scale_decoder_outputs")}
    (tmp_path / "config.json").write_text(
        json.dumps(kept | {key: fields[key] for key in fields if fields[key] is not None})
    )
    imported = import_checkpoint(tmp_path)
    assert (imported.config.scale_logits, imported.config.tie_embeddings) == (
        scale,
        "source_target" if has_output else "all",
    )
    assert [said for said in imported.notes if "tie_word" in said and said.startswith(note or " ")] == [
        said for said in imported.notes if "tie_word" in said
    ]
    assert any("tie_word" in said for said in imported.notes) == (note is not None)
    model = release().AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    proof._replace_norms(model)
    assert error_of(imported.config, imported.weights, model) <= LOGITS


def test_checkpoint_without_shared_matrix_uses_the_embedding_of_the_decoder(tmp_path):
    """google/madlad400-3b-mt is published like this."""
    saved(V1_1, tmp_path)
    table = tensors.read(tmp_path / "model.safetensors")[SHARED]
    expected = import_checkpoint(tmp_path)
    found = import_checkpoint(changed(tmp_path, drop=[SHARED], **{huggingface_t5.DECODER: table}))
    assert found.config == expected.config
    assert all(same(array, found.weights[name]) for name, array in expected.weights.items())


def test_separate_embeddings_are_imported_but_not_exported(tmp_path):
    saved(V1_1, tmp_path / "model")
    table = tensors.read(tmp_path / "model/model.safetensors")[SHARED]
    found = import_checkpoint(changed(tmp_path / "model", **{huggingface_t5.DECODER: table + 1}))
    assert found.config.tie_embeddings == "none"
    assert same(found.weights["target_embedding.table"], table + 1)
    with pytest.raises(
        ValueError, match="T5ForConditionalGeneration does not support this model: tie_embeddings must be"
    ):
        export_checkpoint(found, "hf", tmp_path / "out")


def test_prefixes_of_tasks_are_reported_in_a_note(tmp_path):
    saved(T5, tmp_path)
    tasks = {"a": {"prefix": "summarize: ", "num_beams": 4}, "b": {"prefix": "translate English to German: "}, "c": 5}
    found = import_checkpoint(changed(tmp_path, fields={"task_specific_params": tasks}))
    assert found.notes[0] == (
        'config.json lists prefixes for tasks: "summarize: ", "translate English to German: "; `parity translate` does '
        "not add a prefix, so add the prefix of your task to each line"
    )
    assert found.search.beam_size is None


def test_search_of_an_old_directory_is_the_default_of_generate(tmp_path):
    saved(T5, tmp_path)
    expected = import_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    found = import_checkpoint(tmp_path)
    assert (found.search, found.notes) == (expected.search, expected.notes)
    assert (found.search.beam_size, found.search.max_length, found.search.rules.at_limit) == (None, 20, "cut")


# Rejected directories
REFUSED = {
    "an encoder": (
        {"architectures": ["T5EncoderModel"]},
        "T5Model or T5WithLMHeadModel: got ['T5EncoderModel'], which has no decoder",
    ),
    "a classifier": ({"architectures": ["T5ForSequenceClassification"]}, "got ['T5ForSequenceClassification']"),
    "an activation": ({"dense_act_fn": "mish"}, "the activation in dense_act_fn must be one of relu, "),
    "a form": ({"feed_forward_proj": "twice-relu"}, "such as relu or gated-gelu: got 'twice-relu'"),
    "a number": ({"feed_forward_proj": 5}, "such as relu or gated-gelu: got 5"),
    "buckets": (
        {"relative_attention_num_buckets": 3},
        "relative_buckets must be at least 4: got 3 (relative_attention_num_buckets in config.json)",
    ),
    "a distance": (
        {"relative_attention_max_distance": 2},
        "got 2 (relative_attention_max_distance in config.json)",
    ),
    "a scale": ({"scale_decoder_outputs": "no"}, "scale_logits must be"),
    "tensors": ({"num_layers": 2}, "unexpected encoder.block.2.layer.0.SelfAttention.q.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_config_field_raises_value_error_naming_it(tmp_path, what):
    saved(T5, tmp_path)
    fields, said = REFUSED[what]
    with pytest.raises(ValueError, match="cannot be imported") as error:
        import_checkpoint(changed(tmp_path, fields=fields))
    assert said in str(error.value)


def test_checkpoint_without_decoder_is_rejected(tmp_path):
    saved(T5, tmp_path)
    drop = [name for name in tensors.read(tmp_path / "model.safetensors") if name.startswith("decoder.")]
    with pytest.raises(
        ValueError, match="the checkpoint contains no decoder; only models with an encoder and a decoder"
    ):
        import_checkpoint(changed(tmp_path, drop=drop))


def test_bias_in_a_later_layer_is_rejected(tmp_path):
    saved(T5, tmp_path)
    name = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    with pytest.raises(ValueError, match=rf"unexpected {name} \[8, 4\]"):
        import_checkpoint(changed(tmp_path, **{name: np.ones((8, 4), np.float32)}))


# Models that can't be exported
INEXPRESSIBLE = {
    "hf": (
        {"feed_forward_bias": True},
        "T5ForConditionalGeneration does not support this model: feed_forward_bias must",
    ),
    "hf ": ({"d_v": 3}, "d_v must be 4: got 3"),
    "marian": ({}, "Marian does not support this model: .*gated_feed_forward must be False"),
    "ctranslate2": ({}, "CTranslate2 does not support this model: .*scale_scores must be True: got False"),
    "torch": (
        {},
        "torch.nn.Transformer does not support this model: .*position_encoding must be 'sinusoidal' or 'learned'",
    ),
}


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_models_that_a_format_cannot_store_are_rejected(tmp_path, name):
    fields, message = INEXPRESSIBLE[name]
    config = tiny("t5_v1_1", **{"d_k": 4, "d_v": 4, "num_heads": 4, **fields})
    with pytest.raises(ValueError, match=message):
        export_checkpoint(ours(config), name.strip(), tmp_path / "out")


def test_export_reports_dropout_rates_that_differ(tmp_path):
    config = tiny("t5", d_k=8, d_v=8, dropout={"residual": 0.2, "final": 0.1})
    assert export_checkpoint(ours(config), "hf", tmp_path / "out") == (
        "transformers uses one rate for all kinds of dropout, so the residual rate is written",
    )
    assert import_checkpoint(tmp_path / "out").config.dropout.final == 0.2


# Translations of text
LINES = vocabulary_files.LINES[:60:2]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("kind", ["t5", "mt5", "byt5"])
def test_commands_translate_the_text_of_transformers(tmp_path, capfd, kind):
    family, tokenizer, _ = getattr(test_vocabularies, kind)(tmp_path / "model", None)
    padded = -(-len(tokenizer) // 64) * 64  # published models have more rows than tokens
    model = saved(T5Form(kind, family, {**V1_1.fields, "vocab_size": padded}), tmp_path / "model")
    model.float().save_pretrained(tmp_path / "model")
    (tmp_path / "lines").write_text("".join(f"translate English to German: {line}\n" for line in LINES), "utf-8")
    weights = str(tmp_path / "weights")
    assert main(["import", str(tmp_path / "model"), "--out", weights, "--backends", "numpy"]) == 0
    assert main(["export", weights, "--format", "hf", "--out", str(tmp_path / "back")]) == 0
    capfd.readouterr()
    assert (
        main(["translate", "--weights", weights, "--backend", "numpy", "--dtype", "float64", str(tmp_path / "lines")])
        == 0
    )
    said = capfd.readouterr().out.split("\n")[:-1]
    text = (tmp_path / "lines").read_text("utf-8").splitlines()
    for directory in (tmp_path / "model", tmp_path / "back"):
        tokenizer = release().AutoTokenizer.from_pretrained(directory)
        model = release().AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float64)
        found = model.generate(**tokenizer(text, padding=True, return_tensors="pt"), bad_words_ids=[[0]])
        theirs = tokenizer.batch_decode(found, skip_special_tokens=True)
        assert said == [" ".join(line.splitlines()).lstrip(" ") for line in theirs]
    assert len(set(said)) > 10


def test_changed_buckets_are_listed_as_differences_from_the_preset():
    found = differences(tiny("t5"), "t5")
    assert found == {"relative_buckets": (32, 8), "relative_max_distance": (128, 12)}
