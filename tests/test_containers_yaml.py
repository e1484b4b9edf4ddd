"""A YAML text is read as plain data, and what would build objects or grow is refused."""

from __future__ import annotations

import time

import pytest

from transformer_parity.apps.containers import yaml


def test_a_mapping_comes_back():
    content = {
        "type": "transformer",
        "dim-vocabs": [7, 9],
        "ulr": False,
        "transformer-preprocess": "",
        "text": "a: #b\n",
    }
    assert yaml.read(yaml.write(content), "it") == content
    assert yaml.read(yaml.write(content).encode(), "it") == content
    assert list(yaml.read(yaml.write(content), "it")) == list(content)


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.system [touch ran]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        (BOMB, r"it has an alias, \*a"),
        ("a: &a {b: *a}", r"it has an alias, \*a"),
        ("[" * 3_000, "is not usable YAML"),
        ("a: " + "x" * 2**18, "must have at most 262,144 bytes"),
        ("a: 1" + ":9" * 100_000, "it has a number of 200,001 characters"),
        ("a: [1", "is not usable YAML"),
        ("a: \x00", "is not usable YAML"),
        (b"a: \xff\xfe\xfa", "is not usable YAML"),
        ("[1, 2]", "must be a mapping: got list"),
        ("", "must be a mapping: got NoneType"),
        ("{[1]: 2}", "is not usable YAML"),
    ],
)
def test_attacks_are_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    with pytest.raises(ValueError, match=message) as refused:
        yaml.read(text, "special:model.yml")
    assert str(refused.value).startswith("special:model.yml ")
    assert time.process_time() - start < 1.0
    assert list(tmp_path.iterdir()) == []
