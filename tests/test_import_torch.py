"""PyTorch state dicts of user models that contain torch.nn.Transformer, and of the Annotated Transformer."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from annotated_transformer import make_model
from conftest import assert_same_bits, random_weights, tiny_config
from imported_models import assert_only_this_computes_it, ours
from safetensors.torch import load_file
from third_party import paper_positions, torch_sizes
from torch import nn

import reference_numpy as ref
from transformer_parity.apps.checkpoints.formats import annotated, torch_nn
from transformer_parity.apps.checkpoints.options import ReadOptions

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
V, W, D = 19, 23, 12
PE, BIAS = "src_embed.1.pe", "generator.proj.bias"  # tensors of the Annotated Transformer


def randomized(model):
    """Set every parameter of a model to random values that expose bugs."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith(("weight", "a_2")):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
    return model.eval()


def ids():
    rng = np.random.default_rng(3)
    source, target = rng.integers(3, V, (3, 7)), rng.integers(3, V, (3, 5))
    source[1, 4:] = source[2, 6:] = 0
    target[:, 0] = 1
    return source, target


class Seq2Seq(nn.Module):
    """A model as a user would write it."""

    def __init__(self, learned=False, tied=False, **options):
        super().__init__()
        sizes = {"nhead": 3, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 20}
        self.net = nn.Transformer(D, **sizes, batch_first=True, **options)
        self.src_tok = nn.Embedding(V, D)
        self.tgt_tok = nn.Embedding(V if tied else W, D)
        self.head = nn.Linear(D, V if tied else W, bias=not tied)
        if tied:
            self.tgt_tok.weight = self.head.weight = self.src_tok.weight
        self.learned = learned
        if learned:
            self.pos = nn.ModuleList([nn.Embedding(9, D), nn.Embedding(9, D)])
        else:
            self.register_buffer("pe", paper_positions(40, D).float()[None])

    def embed(self, ids, tokens, side):
        if self.learned:
            return tokens(ids) + self.pos[side].weight[: ids.shape[1]]
        return tokens(ids) * math.sqrt(D) + paper_positions(ids.shape[1], D)

    @torch.no_grad()
    def logits(self, source, target):
        source, target = torch.tensor(source), torch.tensor(target)
        states = self.net(
            self.embed(source, self.src_tok, 0),
            self.embed(target, self.tgt_tok, 1),
            tgt_mask=torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), diagonal=1),
            src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.head(states).numpy()


SAID = """
[config]
num_heads = 3
norm_order = "{norm_order}"
activation = "{activation}"
scale_embedding = true
position_encoding = "sinusoidal"
position_offset = 0
position_layout = "interleaved"
position_timescale = "m"
pad_id = 0
bos_id = 1
eos_id = 2

[names]
"source_embedding.table" = "src_tok.weight"
"target_embedding.table" = "tgt_tok.weight"
"output_proj.kernel" = "head.weight"
"output_proj.bias" = "head.bias"
"source_position.table" = "pe"

[file]
prefix = "net."
"""
DEFAULT = {"norm_order": "post", "activation": "relu"}
WHOLE = SAID.format(**DEFAULT)


def save(directory, model, text, key=""):
    state = model.state_dict()
    for part in reversed(key.split(".") if key else []):
        state = {part: state, "epoch": 3}
    torch.save(state, directory / "model.pt")
    (directory / "names.toml").write_text(text + (f'state = "{key}"\n' if key else ""))
    return torch_nn.read(directory / "model.pt", ReadOptions(names=directory / "names.toml"))


@pytest.mark.parametrize(
    ("options", "said", "key"),
    [
        ({}, {}, ""),
        ({"norm_first": True}, {"norm_order": "pre"}, "model_state_dict"),
        ({"activation": "gelu", "norm_first": True}, {"activation": "gelu", "norm_order": "pre"}, "a.b"),
        ({"bias": False}, {}, ""),
    ],
    ids=["post", "pre", "gelu", "no biases"],
)
def test_user_model_with_torch_nn_transformer_is_imported(options, said, key, tmp_path):
    model = randomized(Seq2Seq(**options))
    imported = save(tmp_path, model, SAID.format(**{**DEFAULT, **said}), key)
    assert imported.config.tie_embeddings == "none"
    others = [{"layer_norm_epsilon": 1e-6}, {"scale_embedding": False}, {"position_timescale": "m_minus_1"}]
    others += [{"position_layout": "split"}, {"activation": "swish"}]
    assert_only_this_computes_it(imported, ids(), model.double().logits(*ids()), others)


def test_learned_positions_and_fully_tied_embeddings_are_imported(tmp_path):
    model = randomized(Seq2Seq(learned=True, tied=True))
    lines = WHOLE.replace("scale_embedding = true", "scale_embedding = false").splitlines()
    lines = [line for line in lines if not line.startswith(("position_layout", "position_timescale", '"output_proj.b'))]
    text = "\n".join(lines).replace("sinusoidal", "learned")
    text = text.replace('= "pe"', '= "pos.0.weight"\n"target_position.table" = "pos.1.weight"')
    imported = save(tmp_path, model, text)
    assert (imported.config.tie_embeddings, imported.config.max_length) == ("all", 9)
    assert_only_this_computes_it(imported, ids(), model.double().logits(*ids()))


def without(line):
    return "\n".join(one for one in WHOLE.splitlines() if line not in one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model.pt does not contain num_heads, norm_order, activation, scale_embedding, position_encoding, pos"),
        (
            without("position_layout"),
            r"position_layout; set each value with an option, such as --set position_layout=VALUE, or under \[config\]",
        ),
        (without("src_tok"), r"\[names\] must contain source_embedding.table;"),
        (without("head.weight"), r"unexpected head.weight \[23, 12\]"),
        (without("head.bias"), r"unexpected head.bias \[23\]"),
        (without('= "pe"'), r"unexpected pe \[40, 12\]"),
        (
            WHOLE.replace('"net."', '"nett."'),
            "there is no tensor nett.encoder.layers.0.linear1.weight; the file contains net.encoder.layers.0.linear1",
        ),
        (WHOLE.replace('"src_tok.', '"src_tokens.'), "no tensor src_tokens.weight; the file contains src"),
        (WHOLE.replace('"head.bias"', '"nothing"'), r"missing nothing \[23\]"),
        (WHOLE.replace("num_heads", "heads"), "unknown config field heads; did you mean num_"),
        (WHOLE.replace("[file]", "[flie]"), "names.toml may only contain the tables config, names, file: got"),
        (WHOLE.replace("prefix =", "prefx ="), r"\[file\] in names.toml may only contain the keys state"),
        (WHOLE + "ignored = 3", "'ignored' must be a list of strings"),
        (WHOLE.replace('"pe"', "7"), "names in names.toml must be strings"),
        (WHOLE + "[", "names.toml is not valid TOML"),
        (WHOLE.replace("output_proj.bias", "output.bias"), r"\[names\] may only contain the keys source_embedding.tab"),
        (
            WHOLE.replace("num_heads = 3", "num_heads = 3\nnum_head = 3"),
            "unknown config field num_head; did you mean num_heads",
        ),
        (
            WHOLE.replace('"m"', '"m_minus_1"'),
            "pe does not contain the sinusoids of position_layout interleaved and position_timescale m_m",
        ),
        (WHOLE + 'state = "model"', "model.pt does not contain the key 'model': found"),
    ],
)
def test_unnamed_tensors_and_fields_raise_value_error(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save(tmp_path, Seq2Seq(), text)


def test_non_weight_tensors_can_be_ignored(tmp_path):
    imported = save(tmp_path, Seq2Seq(), without('= "pe"') + '\nignored = ["p*"]')
    assert imported.config.source_vocab_size == V


def test_options_override_fields_in_the_names_file(tmp_path):
    save(tmp_path, Seq2Seq(), WHOLE)
    options = ReadOptions(names=tmp_path / "names.toml", fields={"eos_id": 5})
    assert torch_nn.read(tmp_path / "model.pt", options).config.eos_id == 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_order": "pre"},
        {"activation": "gelu"},
        {"tie_embeddings": "target_output"},
        {"tie_embeddings": "all", "output_bias": False},
        {"position_encoding": "learned", "embedding_norm": True},
    ],
    ids=lambda changes: ", ".join(map(str, changes.values())) or "torch",
)
def test_exported_state_dict_loads_into_torch_and_round_trips(changes, tmp_path):
    config = tiny_config("torch", **changes)
    weights = random_weights(config)
    torch_nn.write(ours(config, weights), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    net = nn.Transformer(**torch_sizes(config), batch_first=True)
    prefix = "transformer."
    net.load_state_dict({name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)})
    names = tomllib.loads((tmp_path / "names.toml").read_text())["names"]
    assert {name for name in state if not name.startswith(prefix)} == set(names.values())
    again = torch_nn.read(tmp_path / "model.safetensors", ReadOptions(names=tmp_path / "names.toml"))
    assert again.config == config
    assert_same_bits(again.weights, weights)


def annotated_file(directory, edit=lambda state: state, **options):
    model = randomized(make_model(V, W, N=2, d_model=D, d_ff=20, h=3))
    torch.save(edit(model.state_dict()), directory / "model.pt")
    return model, lambda: annotated.read(directory / "model.pt", ReadOptions(fields=options))


def test_annotated_transformer_checkpoint_is_imported(tmp_path):
    model, read = annotated_file(tmp_path, num_heads=3)
    imported = read()
    assert annotated.recognizes(tmp_path / "model.pt")
    source, target = ids()
    source, target = np.where(source == 0, 2, source + 0), target  # this model's padding ID is 2
    masks = (torch.tensor(source) != 2)[:, None], torch.ones(1, 5, 5).tril() > 0
    model.double()
    for embed in (model.src_embed, model.tgt_embed):
        assert (embed[1].pe[0, :40] - paper_positions(40, D)).abs().max() < 1e-5
        embed[1].pe = paper_positions(40, D)[None]
    with torch.no_grad():
        states = model(torch.tensor(source), torch.tensor(target), *masks)
        theirs = model.generator.proj(states).numpy()
    others = [{"layer_norm_kind": "standard"}, {"layer_norm_epsilon": 1e-5}, {"position_timescale": "m_minus_1"}]
    assert_only_this_computes_it(imported, (source, target), theirs, others)
    assert imported.config == ref.TransformerConfig.preset(
        "annotated",
        **{"source_vocab_size": V, "target_vocab_size": W, "d_model": D, "num_heads": 3, "d_ff": 20},
        **{"num_encoder_layers": 2, "num_decoder_layers": 2},
    )


def same(state):
    return state


@pytest.mark.parametrize(
    ("heads", "edit", "message"),
    [
        ({}, same, "model.pt does not contain num_heads"),
        ({"num_heads": 5}, same, "num_heads must divide d_model"),
        ({"num_heads": 3}, lambda s: {**s, PE: s[PE].flip(1)}, f"{PE} does not contain the sinusoids"),
        ({"num_heads": 3}, lambda s: {**s, BIAS: torch.ones(2)}, f"for {BIAS}, got"),
        ({"num_heads": 3}, lambda s: {**s, "extra": torch.ones(2)}, r"unexpected extra \[2\]"),
        (
            {"num_heads": 3},
            lambda s: {n: s[n] for n in s if "lut" not in n},
            "no tensor src_embed.0.lut.weight; the file contains ",
        ),
    ],
)
def test_unsupported_annotated_transformer_files_are_rejected(heads, edit, message, tmp_path):
    _, read = annotated_file(tmp_path, edit, **heads)
    with pytest.raises(ValueError, match=message):
        read()


def test_annotated_format_reads_config_from_a_names_file(tmp_path):
    _, _ = annotated_file(tmp_path)
    (tmp_path / "heads.toml").write_text("[config]\nnum_heads = 3\npad_id = 0\n")
    imported = annotated.read(tmp_path / "model.pt", replace(ReadOptions(), names=tmp_path / "heads.toml"))
    assert (imported.config.num_heads, imported.config.pad_id) == (3, 0)
