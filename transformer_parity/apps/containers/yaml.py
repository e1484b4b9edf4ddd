"""A reader and a writer for small YAML files. The reader rejects aliases and Python tags. Requires PyYAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

# Maximum size in bytes. Settings files are a few kilobytes long. PyYAML parses only about 100 KB per second.
LARGEST = 2**18

NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
LONGEST_NUMBER = 100  # maximum length of a number in characters


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects aliases, because nested aliases let a short text expand to exponential size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(f"the alias *{self.peek_event().anchor} is not supported")
        return super().compose_node(parent, index)

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        # PyYAML parses base-60 numbers such as 1:2:3 in quadratic time.
        if node.tag in NUMBERS and len(value) > LONGEST_NUMBER:
            raise ValueError(f"expected numbers of at most {LONGEST_NUMBER} characters, got {len(value):,}")
        return value


def read(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a YAML text, and return its content, which must be a mapping.

    Args:
        text: Text to parse.
        what: Name of the text, for error messages.

    Raises:
        ValueError: If the text is too long, is not valid YAML, contains tags or aliases, or is not a mapping.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{what} must have at most {LARGEST:,} bytes: got {len(text):,}")
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid YAML: {str(error) or type(error).__name__}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{what} must be a mapping: got {type(content).__name__}")
    return content


def write(content: Mapping[str, Any]) -> str:
    """Convert a mapping of JSON-compatible values to YAML, preserving the order of the keys."""
    return yaml.safe_dump(dict(content), sort_keys=False)
