"""The JSON result of a command. Its top-level keys, verdicts, and exit codes are the same for all commands.

``docs/result.schema.json`` describes the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from transformer_parity import __version__
from transformer_parity.engine.report.result import plain
from transformer_parity.engine.system.machine import describe_machine
from transformer_parity.engine.verdict import EXIT_CODES, LAST_WORDS

FORMAT = 1
WORDS = {code: LAST_WORDS[verdict] for verdict, code in EXIT_CODES.items()}  # maps exit codes to words such as AGREE


def envelope(
    command: str,
    result: Mapping[str, Any],
    *,
    exit_code: int = 0,
    compares: bool = True,
    environment: Mapping[str, Mapping[str, Any]] | None = None,
    seconds: float,
    introduced: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the result of a command as built-in Python types that can be written as JSON.

    Args:
        command: The name of the command, without ``parity``.
        result: The part of the result that is specific to this command.
        exit_code: The exit code of the command.
        compares: Whether the command compares implementations. If False, the result has no verdict.
        environment: Versions, devices, and settings, keyed by backend.
        seconds: The duration of the command in seconds.
        introduced: The names of the tensors at which differences start; None if the command doesn't locate any.
    """
    return plain(
        {
            "format": FORMAT,
            "command": command,
            "version": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "verdict": WORDS[exit_code] if compares else None,
            "exit_code": exit_code,
            **({} if introduced is None else {"introduced": introduced}),
            "machine": describe_machine(),
            "environment": environment or {},
            "seconds": seconds,
            "result": result,
        }
    )
