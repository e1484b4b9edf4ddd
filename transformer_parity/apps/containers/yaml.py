"""YAML as plain data: no tags of Python, no aliases, and small. Needs PyYAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

LARGEST = 2**18  # bytes: the settings of a model take thousands; PyYAML reads a hundred thousand a second

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
LONGEST_NUMBER = 100  # characters


class _Loader(yaml.SafeLoader):
    """The safe loader, without aliases: with them, a short text can stand for one that is exponentially long."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{self.peek_event().anchor}")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if node.tag in NUMBERS and len(value) > LONGEST_NUMBER:  # 1:2:3 is one too, and takes quadratic time
            raise ValueError(f"it has a number of {len(value):,} characters")
        return value


def read(text: str | bytes, what: str) -> dict[str, Any]:
    """Read the one mapping that a YAML text holds; ``what`` names the text in messages.

    Raises:
        ValueError: The text is too long, is no YAML, has tags or aliases, or holds something other than a mapping.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{what} must have at most {LARGEST:,} bytes: got {len(text):,}")
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not usable YAML: {str(error) or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a mapping: got {type(content).__name__}")
    return content


def write(content: Mapping[str, Any]) -> str:
    """Return a mapping of plain values as YAML, in its order."""
    return yaml.safe_dump(dict(content), sort_keys=False)
