"""A config is either valid or rejected with a message that states the field, its value, and the requirement."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path

import pytest
from conftest import tiny_config

from reference_numpy import PRESETS, DropoutRates, TransformerConfig
from transformer_spec.config import CHOICES, DECODER_SIZES, DEPTHS, SIZES, SWITCHES
from transformer_spec.presets import IMPLEMENTATIONS

RATES = [field.name for field in dataclasses.fields(DropoutRates)]
IDS = ("pad_id", "bos_id", "eos_id")


@pytest.mark.parametrize("kind", [TransformerConfig, DropoutRates])
def test_help_describes_every_field(kind):
    attributes = inspect.getdoc(kind).partition("Attributes:")[2].partition("Raises:")[0]
    described = re.findall(r"^ {4}(\w+): [A-Z]", attributes, re.MULTILINE)
    assert sorted(described) == sorted(field.name for field in dataclasses.fields(kind))


def bad_fields():
    """Yield fields, each with a bad value, and the type and message of the expected exception."""
    for name in (*SIZES, *DEPTHS):
        for value in (0, -3):
            yield {name: value}, ValueError, f"{name} must be at least 1: got {value}"
        for value in (2.0, True, "8", math.nan, [8]):
            yield {name: value}, TypeError, f"{name} must be an integer: got {value!r}"
    for name in (f"decoder_{name}" for name in DECODER_SIZES):
        yield {name: 0}, ValueError, f"{name} must be at least 1: got 0"
        yield {name: 2.0}, TypeError, f"{name} must be an integer: got 2.0"
    yield (
        {"decoder_num_heads": 5, "decoder_d_k": 4},
        ValueError,
        "decoder_num_heads must divide d_model unless decoder_d_k and decoder_d_v are given: got 5 and 24",
    )
    for name in (*IDS, "position_offset"):
        yield {name: -1}, ValueError, f"{name} must be at least 0: got -1"
        for value in (1.0, False, None):
            yield {name: value}, TypeError, f"{name} must be an integer: got {value!r}"
    for name in IDS:
        yield {name: 37}, ValueError, f"{name} must be below the vocabulary size 37: got 37"
    for name in SWITCHES:
        for value in (1, None, "yes"):
            yield {name: value}, TypeError, f"{name} must be True or False: got {value!r}"
    for name, choices in CHOICES.items():
        for value in ("middle", None, 3, [choices[0]]):
            yield {name: value}, ValueError, f"{name} must be one of {', '.join(choices)}: got {value!r}"
    for value in (0.0, -1e-6, 1.001, 1e30, math.inf, math.nan):
        yield {"layer_norm_epsilon": value}, ValueError, f"layer_norm_epsilon must be in (0, 1]: got {value}"
    for value in (1.0, 0.991, -0.1, math.nan, math.inf):
        yield {"label_smoothing": value}, ValueError, f"label_smoothing must be in [0, 0.99]: got {value}"
    yield {"position_offset": 10**18}, ValueError, f"position_offset must be at most 1,000,000: got {10**18:,}"
    for value in (1.0, -0.1, math.nan, math.inf):
        for site in RATES:
            yield {"dropout": {site: value}}, ValueError, f"dropout.{site} must be in [0, 1): got {value}"
    for value in ("0.1", None, True):
        for name in ("layer_norm_epsilon", "label_smoothing"):
            yield {name: value}, TypeError, f"{name} must be a number: got {value!r}"
        for site in RATES:
            yield {"dropout": {site: value}}, TypeError, f"dropout.{site} must be a number: got {value!r}"
    yield (
        {"skip_first_self_attention": True, "num_decoder_layers": 1},
        ValueError,
        "skip_first_self_attention requires num_decoder_layers to be at least 2: with one layer, no target position "
        "could attend to earlier positions",
    )
    yield {"dropout": 0.1}, TypeError, "dropout must be a DropoutRates or a dict: got float"
    yield {"d_model": 22}, ValueError, "num_heads must divide d_model unless d_k and d_v are given: got 3 and 22"
    yield {"d_model": 21}, ValueError, "sinusoidal positional encodings require an even d_model: got 21"
    yield (
        {"d_model": 2, "num_heads": 1, "position_timescale": "m_minus_1"},
        ValueError,
        "position_timescale='m_minus_1' requires d_model to be at least 4: got 2",
    )
    yield (
        {"position_encoding": "learned", "position_offset": 29},
        ValueError,
        "position_offset must be below max_length 29: got 29",
    )
    yield (
        {"tie_embeddings": "all", "target_vocab_size": 41},
        ValueError,
        "tie_embeddings='all' requires equal vocabulary sizes: got source_vocab_size 37 and target_vocab_size 41",
    )
    yield (
        {"tie_embeddings": "source_target", "target_vocab_size": 41},
        ValueError,
        "tie_embeddings='source_target' requires equal vocabulary sizes: got source_vocab_size 37 and "
        "target_vocab_size 41",
    )
    yield {"relative_buckets": 3}, ValueError, "relative_buckets must be at least 4: got 3"
    yield {"relative_max_distance": 16}, ValueError, "relative_max_distance must be at least 17: got 16"


@pytest.mark.parametrize(("fields", "kind", "message"), list(bad_fields()), ids=str)
def test_invalid_field_raises_the_expected_error(fields, kind, message):
    with pytest.raises(kind) as error:
        tiny_config(**fields)
    assert str(error.value) == message


def test_every_field_has_an_invalid_value_in_the_tests():
    """This test fails if a new field isn't validated or isn't listed above."""
    checked = {name for fields, _, _ in bad_fields() for name in fields}
    assert checked == {field.name for field in dataclasses.fields(TransformerConfig)}


def test_single_channel_has_no_unbiased_deviation():
    """The Annotated Transformer divides by d_model - 1, which would be zero."""
    with pytest.raises(ValueError, match="d_model"):
        tiny_config("annotated", d_model=1, num_heads=1, position_encoding="learned")


def test_unknown_preset_raises_an_error():
    with pytest.raises(ValueError, match=r"^preset must be one of paper_base, paper_h1, .*: got 'paper'$"):
        TransformerConfig.preset("paper", source_vocab_size=37, target_vocab_size=37)


def test_unknown_and_missing_fields_are_named_in_the_error():
    with pytest.raises(TypeError, match="layers"):
        TransformerConfig.preset("paper_base", source_vocab_size=37, target_vocab_size=37, layers=6)
    with pytest.raises(TypeError, match="target_vocab_size"):
        TransformerConfig.preset("paper_base", source_vocab_size=37)
    fields = tiny_config().to_dict()
    with pytest.raises(ValueError, match=r"^missing config fields: d_ff, dropout$"):
        TransformerConfig.from_dict({name: fields[name] for name in fields if name not in ("d_ff", "dropout")})
    with pytest.raises(ValueError, match=r"^unknown config fields: depth$"):
        TransformerConfig.from_dict({**fields, "depth": 6})
    with pytest.raises(TypeError, match=r"^a config must be a mapping of field names to values: got list$"):
        TransformerConfig.from_dict(list(fields))


def test_config_is_immutable():
    config = tiny_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 48
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dropout.residual = 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_config_round_trips_through_json(preset):
    config = tiny_config(preset)
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.replace() == config
    assert config.replace(d_ff=7).d_ff == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (3, 8, 8, 40)),
        ({"decoder_num_heads": 2}, (2, 12, 12, 40)),
        ({"decoder_num_heads": 2, "decoder_d_k": 5, "decoder_d_ff": 7}, (2, 5, 12, 7)),
        ({"decoder_num_heads": 5, "decoder_d_k": 5, "decoder_d_v": 6}, (5, 5, 6, 40)),
        ({"decoder_d_v": 9}, (3, 8, 9, 40)),
        ({"d_k": 4}, (3, 4, 8, 40)),
    ],
    ids=str,
)
def test_decoder_sizes_default_to_the_encoder_sizes(given, expected):
    config = tiny_config(**given)
    assert tuple(getattr(config.in_decoder, name) for name in DECODER_SIZES) == expected
    assert config.in_decoder.in_decoder == config.in_decoder
    assert (config.num_heads, config.d_ff) == (3, 40)


def test_t5_table_shows_the_values_of_the_presets():
    page = (Path(__file__).parent.parent / "docs" / "reference" / "config.md").read_text("utf-8")
    section = page.partition("## Fields that define T5\n")[2].partition("\n## ")[0].replace("`", "")
    rows = re.findall(r"^\| (?!convention|--).+? \| (.+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert rows
    listed = {name for fields, *_ in rows for name in fields.split(", ")}
    for preset, column in (("t5", 1), ("t5_v1_1", 2), ("mt5", 2), ("byt5", 2)):
        config = TransformerConfig.preset(preset, source_vocab_size=9, target_vocab_size=9)
        values = {**vars(config), **{f"dropout.{site}": rate for site, rate in vars(config.dropout).items()}}
        for row in rows:
            names, shown = row[0].split(", "), row[column].split(", ")
            assert [str(values[name]) for name in names] == (shown * len(names) if len(shown) == 1 else shown), row
        assert IMPLEMENTATIONS[preset].keys() - {"dropout", "label_smoothing", *SIZES, *DEPTHS} <= listed
