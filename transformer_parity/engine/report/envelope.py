"""The result of a command for programs: the same keys, verdicts and exit codes in every command.

``docs/result.schema.json`` describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from transformer_parity import __version__
from transformer_parity.engine.report.result import plain
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.verdict import EXIT_CODES, LAST_WORDS

FORMAT = 1
WORDS = {code: LAST_WORDS[verdict] for verdict, code in EXIT_CODES.items()}  # AGREE and so on, by exit code


def envelope(
    command: str,
    result: Mapping[str, Any],
    *,
    exit_code: int = 0,
    compares: bool = True,
    environment: Mapping[str, Mapping[str, Any]] | None = None,
    seconds: float,
) -> dict[str, Any]:
    """Return the result of a command as plain values that JSON can hold.

    Args:
        command: The command, without ``parity``.
        result: The content that only this command has.
        exit_code: The exit code of the command.
        compares: Whether the command compares anything; the others have no verdict.
        environment: Versions, devices and switches, by backend.
        seconds: How long the command took.
    """
    return plain(
        {
            "format": FORMAT,
            "command": command,
            "version": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "verdict": WORDS[exit_code] if compares else None,
            "exit_code": exit_code,
            "machine": describe_machine(),
            "environment": environment or {},
            "seconds": seconds,
            "result": result,
        }
    )
