"""Validation against docs/result.schema.json, which describes the JSON results of all commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "result.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def violations(document: Any) -> list[tuple[str, str]]:
    """Return the violations in a document, each with its location and the keyword of the schema."""
    return [(error.json_path, error.validator) for error in VALIDATOR.iter_errors(document)]


def read_document(path: Path, command: str) -> dict[str, Any]:
    """Validate the JSON result of a command against the schema and return it."""
    document = json.loads(path.read_text("utf-8"))
    assert violations(document) == []
    assert document["command"] == command
    return document
