"""fairseq checkpoints, written with the names and tensors of the fairseq models that transformers contains."""

from __future__ import annotations

import argparse
import math
import re

import numpy as np
import pytest
import torch
from conftest import assert_same_bits
from imported_models import assert_only_this_computes_it
from tiers import first_alone

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats import fairseq
from transformer_parity.apps.checkpoints.importer import import_checkpoint
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_spec.search import Search

V, D, POSITIONS = 19, 12, 24
SIZES = {
    **{"d_model": D, "encoder_layers": 2, "decoder_layers": 1, "max_position_embeddings": POSITIONS},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 16},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
ARGS = {
    **{"arch": "transformer_iwslt_de_en", "encoder_embed_dim": D, "decoder_embed_dim": D},
    **{"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 2},
    **{"encoder_ffn_embed_dim": 20, "decoder_ffn_embed_dim": 16, "activation_fn": "relu", "no_scale_embedding": False},
    **{"encoder_normalize_before": False, "decoder_normalize_before": False, "adaptive_softmax_cutoff": None},
    **{"encoder_learned_pos": False, "decoder_learned_pos": False, "layernorm_embedding": False, "dropout": 0.1},
    **{"share_all_embeddings": False, "share_decoder_input_output_embed": False, "encoder_layerdrop": 0.0},
}
PRE = {"encoder_normalize_before": True, "decoder_normalize_before": True, "share_all_embeddings": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True}


def fsmt():
    import transformers

    return transformers.FSMTForConditionalGeneration(
        transformers.FSMTConfig(langs=["en", "de"], src_vocab_size=V, tgt_vocab_size=V + 4, **SIZES)
    )


def m2m_100():
    import transformers

    return transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(vocab_size=V, scale_embedding=True, **SIZES)
    )


def mbart():
    import transformers

    config = transformers.MBartConfig(vocab_size=V, scale_embedding=True, activation_function="gelu", **SIZES)
    return transformers.MBartForConditionalGeneration(config)


MODELS = {
    fsmt: ARGS,
    m2m_100: {**ARGS, **PRE, "arch": "transformer_wmt_en_de_big_t2t"},
    mbart: {**ARGS, **PRE, **LEARNED, "activation_fn": "gelu", "arch": "mbart_large"},
}


def randomized(make):
    """Return a model with random parameters, and a fairseq state dict with the same values."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm_embedding.weight" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed_positions" not in name or make is mbart:
                parameter.normal_(0, 0.3)
    state = {
        name.removeprefix("model."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if "shared" not in name and "final_logits_bias" not in name
    }
    if "lm_head.weight" in state:
        state["decoder.output_projection.weight"] = state.pop("lm_head.weight")
    if make is not mbart:
        state = {name: tensor for name, tensor in state.items() if "embed_positions" not in name}
        state |= {f"{stack}.embed_positions._float_tensor": torch.zeros(1) for stack in ("encoder", "decoder")}
    return model, {**state, "encoder.version": torch.tensor([3.0]), "decoder.version": torch.tensor([3.0])}


@torch.no_grad()
def logits(model, source, target):
    """Run a model in float64, including its positional encoding."""
    import transformers

    exact = ref.sinusoidal_encoding(POSITIONS + 2, D, "split", "m_minus_1")
    exact[1] = 0.0
    model.double()
    stacks = [model.model.encoder, model.model.decoder]
    for stack in stacks if not isinstance(model, transformers.MBartForConditionalGeneration) else ():
        name = "weight" if isinstance(model, transformers.FSMTForConditionalGeneration) else "weights"
        table = getattr(stack.embed_positions, name)
        assert (table[: len(exact)].double() - torch.tensor(exact)[: len(table)]).abs().max() < 1e-5
        setattr(
            stack.embed_positions,
            name,
            torch.nn.Parameter(torch.tensor(exact)) if name == "weight" else torch.tensor(exact),
        )
    source, target = torch.tensor(source), torch.tensor(target)
    if not isinstance(model, transformers.FSMTForConditionalGeneration):
        return model(input_ids=source, attention_mask=source != 1, decoder_input_ids=target).logits.numpy()
    memory = stacks[0](source, attention_mask=source != 1).last_hidden_state
    future = torch.triu(torch.full((target.shape[1], target.shape[1]), -math.inf, dtype=torch.float64), diagonal=1)
    return stacks[1](target, memory, source != 1, target == 1, future).last_hidden_state.numpy()


DOUBLED: list = []
for _ in range(60):
    DOUBLED = [DOUBLED, DOUBLED]  # a few bytes in a pickle, but practically endless as text


def save(path, state, options, form="args", legacy=False):
    holder = {
        "args": {"args": argparse.Namespace(**options)},
        "cfg": {
            "args": None,
            "cfg": {"model": {**options, "_name": options["arch"]}, "task": {"_name": "translation"}},
        },
        "cfg with a namespace": {"cfg": {"model": argparse.Namespace(**options)}},
    }[form]
    rest = {"optimizer_history": [{"lr": 0.1}], "extra_state": {"epoch": 3}, "last_optimizer_state": None}
    torch.save({**holder, "model": state, **rest}, path, _use_new_zipfile_serialization=not legacy)
    return path


def read(path):
    return fairseq.read(path, ReadOptions())


def ids():
    rng = np.random.default_rng(3)
    source, target = rng.integers(4, V, (3, 7)), rng.integers(4, V, (3, 5))
    source[1, 4:] = source[2, 6:] = 1
    target[:, 0] = 2
    return source, target


@pytest.mark.parametrize("make", MODELS)
def test_logits_match_the_transformers_ports_of_fairseq(make, tmp_path):
    model, state = randomized(make)
    path = save(tmp_path / "model.pt", state, MODELS[make])
    imported = read(path)
    assert fairseq.recognizes(path)
    assert imported.notes == ()
    assert imported.config.tie_embeddings == ("none" if make is fsmt else "all")
    assert imported.search == Search.preset("fairseq", beam_size=5)
    assert (imported.origin.format, imported.origin.family) == ("fairseq", MODELS[make]["arch"])
    others = [{"layer_norm_epsilon": 1e-6}, {"scale_embedding": False}]
    sinusoids = [{"position_offset": 1}, {"position_timescale": "m"}]
    others += [{"embedding_norm": False}, {"activation": "gelu_tanh"}] if make is mbart else sinusoids
    assert_only_this_computes_it(imported, ids(), logits(model, *ids()), others)


def old_names(state):
    """Return the state dict in the format that fairseq wrote in 2018."""
    old = {}
    numbers = {"self_attn_layer_norm": "0", "encoder_attn_layer_norm": "1"}
    for name, tensor in state.items():
        stack, _, rest = name.partition(".")
        if found := re.fullmatch(r"(.*_attn\.)q_proj\.(weight|bias)", name):
            parts = [state[f"{found[1]}{one}_proj.{found[2]}"] for one in "qkv"]
            old[f"{found[1]}in_proj_{found[2]}"] = torch.cat(parts)
        elif "layer_norm." in rest and ".layers." in name:
            path, norm, kind = name.rsplit(".", 2)
            number = numbers.get(norm, "1" if stack == "encoder" else "2")
            old[f"{path}.layer_norms.{number}.{kind}"] = tensor
        elif not re.fullmatch(r".*\.[kv]_proj\.(weight|bias)", name):
            old["decoder.embed_out" if name == "decoder.output_projection.weight" else name] = tensor
    old["encoder.embed_positions.weights"] = torch.zeros(3)
    return old


@pytest.mark.parametrize("form", first_alone(["args", "cfg", "cfg with a namespace"], "formats"))
@pytest.mark.parametrize("legacy", [False, True])
def test_old_and_new_file_formats_give_the_same_model(form, legacy, tmp_path):
    _, state = randomized(fsmt)
    new = read(save(tmp_path / "new.pt", state, ARGS))
    old = read(save(tmp_path / "old.pt", old_names(state), ARGS, form, legacy))
    assert old.config == new.config
    assert_same_bits(old.weights, new.weights)


def test_nested_options_equal_flat_options(tmp_path):
    _, state = randomized(fsmt)
    flat = {name: value for name, value in ARGS.items() if not name.startswith(("encoder_", "decoder_"))}
    nested = {
        stack: {name.removeprefix(f"{stack}_"): value for name, value in ARGS.items() if name.startswith(f"{stack}_")}
        for stack in ("encoder", "decoder")
    }
    imported = read(save(tmp_path / "model.pt", state, {**flat, **nested}, "cfg"))
    assert imported.config == read(save(tmp_path / "model.pt", state, ARGS)).config


def test_embedding_ties_follow_the_tensors_and_contradictions_are_noted(tmp_path):
    _, state = randomized(fsmt)
    state["decoder.output_projection.weight"] = state["decoder.embed_tokens.weight"]
    imported = read(save(tmp_path / "model.pt", state, {**ARGS, "share_all_embeddings": True}))
    assert imported.config.tie_embeddings == "target_output"
    assert imported.notes == (
        "tied embeddings are 'all' in the options, but the tensors imply 'target_output', which is used",
    )
    del state["decoder.output_projection.weight"]
    imported = read(save(tmp_path / "model.pt", state, {**ARGS, "share_decoder_input_output_embed": True}))
    assert imported.config.tie_embeddings == "target_output"
    assert imported.notes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive_softmax_cutoff": [100, 200]}, r"--adaptive-softmax-cutoff is '\[100, 200\]': adaptive softmax"),
        ({"adaptive_softmax_cutoff": DOUBLED}, r"--adaptive-softmax-cutoff is '\[\[\[.{,999}': adaptive softmax"),
        ({"activation_fn": DOUBLED}, r"--activation-fn must be one of relu, .*: got '\[\["),
        ({"cross_self_attention": True}, "--cross-self-attention is True"),
        ({"no_token_positional_embeddings": True}, "a model without positions"),
        ({"activation_fn": "tanh"}, "--activation-fn must be one of relu, .*: got 'tanh'"),
        ({"decoder_normalize_before": True}, "--encoder-normalize-before and --decoder-normalize-before must be equal"),
        ({"encoder_learned_pos": True}, "must be equal: got True and False"),
    ],
)
def test_unsupported_models_are_rejected_by_name(options, message, tmp_path):
    _, state = randomized(fsmt)
    with pytest.raises(ValueError, match=message):
        read(save(tmp_path / "model.pt", state, {**ARGS, **options}))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: s.pop("encoder.embed_tokens.weight"),
            "no tensor encoder.embed_tokens.weight; the file contains decoder",
        ),
        (lambda s: s.pop("decoder.layers.0.fc2.bias"), r"missing decoder.layers.0.fc2.bias \[12\]"),
        (lambda s: s.update({"encoder.layers.0.c_attn": torch.ones(3)}), "unexpected encoder.layers.0.c_attn"),
        (
            lambda s: s.update({"encoder.layer_norm.weight": torch.ones(12)}),
            "only one of encoder.layer_norm and decoder.layer_norm",
        ),
        (
            lambda s: s.update({"x.in_proj_weight": torch.ones(4, 2)}),
            "must have a number of rows that is divisible by 3",
        ),
    ],
)
def test_invalid_tensors_are_rejected_with_names_from_the_file(edit, message, tmp_path):
    _, state = randomized(fsmt)
    edit(state)
    with pytest.raises(ValueError, match=message):
        read(save(tmp_path / "model.pt", state, ARGS))


def test_invalid_fairseq_checkpoint_is_rejected(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2)}, path)
    assert not fairseq.recognizes(path)
    with pytest.raises(ValueError, match="must contain the weights under the key 'model'"):
        read(path)
    torch.save({"model": {"a": torch.ones(2)}}, path)
    with pytest.raises(ValueError, match=r"if the options were removed, load the file, set content\['args'\]"):
        read(path)


def test_fairseq_ids_follow_the_lines_of_the_dictionaries(tmp_path):
    _, state = randomized(fsmt)
    path = save(tmp_path / "model.pt", state, {**ARGS, "source_lang": "en", "target_lang": "de"})
    for name, size in (("dict.en.txt", V), ("dict.de.txt", V + 4)):
        (tmp_path / name).write_text("".join(f"w{i} 1\n" for i in range(size - 4)))
    vocab = (tmp_path / "dict.en.txt", tmp_path / "dict.de.txt")
    imported = fairseq.read(path, ReadOptions(vocab=vocab))
    assert imported.vocabulary.ids("w0 none w2") == [4, 3, 6, 2]
    assert imported.vocabulary.text([4, 5, 2]) == "w0 w1"
    assert set(imported.origin.files) == {"model.pt", "dict.en.txt", "dict.de.txt"}
    with pytest.raises(ValueError, match="23"):
        fairseq.read(path, ReadOptions(vocab=vocab[1:]))
    with pytest.raises(
        ValueError, match=r"one or two dict.txt files and, optionally, a file with BPE codes or a .model file: got a, b"
    ):
        fairseq.read(path, ReadOptions(vocab=(tmp_path / "a", tmp_path / "b")))
    vocab[1].write_text("w1 1\nw2\n")
    with pytest.raises(ValueError, match=r"line 2 of dict\.de\.txt must be `symbol count`: got 'w2'"):
        fairseq.read(path, ReadOptions(vocab=vocab))
    assert import_checkpoint(path).notes[-1].endswith("--vocab dict.en.txt dict.de.txt bpe.codes")
