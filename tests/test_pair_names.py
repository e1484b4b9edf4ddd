"""Names and axes of taps in ``parity pair``: maps that users write, and matches by value."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from transformer_parity.pairs.compare.axes import Axes
from transformer_parity.pairs.compare.names import Counterpart, as_toml, propose, resolve

SHAPES = {  # axis string: (the port's shape, the original's shape)
    "b l h d -> b h l d": ((2, 5, 3, 4), (2, 3, 5, 4)),
    "b l (h d) -> b h l d": ((2, 5, 12), (2, 3, 5, 4)),
    "(b l) d -> b l d": ((10, 7), (2, 5, 7)),
    "b h l d -> b l (h d)": ((2, 3, 5, 4), (2, 5, 12)),
    "n h w c -> n c h w": ((2, 5, 6, 3), (2, 3, 5, 6)),
}


@pytest.mark.parametrize("text", SHAPES)
def test_axes_convert_in_both_directions(text):
    mine, theirs = SHAPES[text]
    axes, value = Axes.parse(text), np.arange(np.prod(mine)).reshape(mine)
    assert str(axes) == text
    moved = axes.to_original(value, theirs)
    assert moved.shape == theirs
    assert not np.array_equal(moved.ravel(), value.ravel()) or text.startswith("(b l)")
    assert np.array_equal(axes.to_port(moved, mine), value)


def test_axes_split_heads_before_they_move_them():
    value = np.arange(2 * 5 * 12).reshape(2, 5, 12)
    moved = Axes.parse("b l (h d) -> b h l d").to_original(value, (2, 3, 5, 4))
    assert np.array_equal(moved, value.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3))


@pytest.mark.parametrize("text", ["a b", "a -> b", "a a -> a a", "(a b -> a b", "a b -> a", "a, b -> b, a"])
def test_invalid_axis_string_is_an_error(text):
    with pytest.raises(ValueError, match="an axis string must list the same axes on both sides"):
        Axes.parse(text)


def test_axes_that_do_not_fit_the_shape_are_an_error():
    with pytest.raises(ValueError, match=r"don't fit|can't be converted"):
        Axes.parse("b l (h d) -> b h l d").to_original(np.zeros((2, 5, 12)), (2, 5, 12))
    with pytest.raises(ValueError, match=r"can't be converted"):
        Axes.parse("b l (h d) -> b h l d").to_original(np.zeros((2, 5, 12)), (2, 5, 5, 4))


def test_patterns_expand_to_every_layer():
    names = {"blocks.{i}.q": ("layers.{i}.query", "b l h -> b h l"), "logits": "lm_head"}
    found = resolve(
        names, ["blocks.0.q", "blocks.11.q", "logits"], ["layers.0.query", "layers.11.query", "lm_head"], []
    )
    assert {name: place.name for name, place in found.declared.items()} == {
        "blocks.0.q": "layers.0.query",
        "blocks.11.q": "layers.11.query",
        "logits": "lm_head",
    }
    assert found.problems == []


def test_entries_without_a_tap_are_problems():
    found = resolve({"a": "x", "b.{i}": "y.{i}"}, ["b.0"], ["x"], [])
    assert found.problems == [
        "names maps 'a', but the original has no such tap",
        "names maps 'b.0' to 'y.0', but the port has no such tap",
    ]


@pytest.mark.parametrize("value", [1, ["a"], ["a", "b", "c"], None])
def test_entry_of_the_wrong_form_is_an_error(value):
    with pytest.raises(ValueError, match="must be a name, or a name and an axis string"):
        resolve({"a": value}, ["a"], ["a"], [])


def test_taps_are_matched_by_value_order_and_axes():
    rng = np.random.default_rng(0)
    query, hidden, late = rng.normal(size=(2, 3, 5, 4)), rng.normal(size=(2, 5, 7)), rng.normal(size=(2, 5, 7))
    original = {"attention.query": query, "hidden": hidden, "late": late, "only here": rng.normal(size=(2, 2))}
    port = {
        "q": query.transpose(0, 2, 1, 3).reshape(2, 5, 12),
        "h": hidden,
        "noise": rng.normal(size=(2, 5, 7)),
        "z": late,
    }
    found = propose(original, port)
    assert {name: place.name for name, place in found.items()} == {"attention.query": "q", "hidden": "h", "late": "z"}
    assert np.array_equal(found["attention.query"].axes.to_original(port["q"], query.shape), query)


def test_port_that_splits_an_axis_is_matched():
    query = np.random.default_rng(0).normal(size=(2, 5, 12))
    (place,) = propose({"query": query}, {"q": query.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3)}).values()
    assert np.array_equal(place.axes.to_original(query.reshape(2, 5, 3, 4).transpose(0, 2, 1, 3), query.shape), query)


def test_unrelated_taps_are_not_matched():
    rng = np.random.default_rng(0)
    assert propose({"a": rng.normal(size=(4, 50))}, {"x": rng.normal(size=(4, 50)), "y": rng.normal(size=(2, 9))}) == {}


def test_written_map_can_be_read_and_uses_patterns():
    names = {f"blocks.{i}.q": [f"layers.{i}.query", "b l -> l b"] for i in range(3)} | {"logits": "lm_head"}
    written = tomllib.loads(as_toml(names))
    assert written == {"blocks.{i}.q": ["layers.{i}.query", "b l -> l b"], "logits": "lm_head"}
    again = resolve(written, list(names), [f"layers.{i}.query" for i in range(3)] + ["lm_head"], [])
    assert again.written() == names


def test_counterpart_without_axes_keeps_the_value():
    found = resolve({}, ["a"], ["a"], ["a"])
    assert found.declared == {"a": Counterpart("a")}
    value = np.ones((2, 3))
    assert found.to_original({"a": value}, {"a": (2, 3)})[0]["a"] is value


def test_axes_of_a_wrong_tensor_are_the_usual_ones():
    rng = np.random.default_rng(0)
    image = np.cumsum(np.cumsum(rng.normal(size=(2, 4, 4, 3)), 1), 2)
    original = {"a": rng.normal(size=(2, 3, 4, 4)), "b": image.transpose(0, 3, 1, 2)}
    image, wrong = image.swapaxes(1, 2), 0.45 * image + 0.55 * image.swapaxes(1, 2)
    assert str(propose({"b": original["b"]}, {"y": wrong})["b"].axes) == "a c d b -> a b c d"
    port = {"x": original["a"].transpose(0, 3, 2, 1), "y": wrong}
    assert {str(place.axes) for place in propose(original, port).values()} == {"a d c b -> a b c d"}
