"""Time an import in a process that has imported almost no modules. This module must import as little as possible."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_parity.engine.processes.messages import Parent


def work(parent: Parent) -> None:
    """Receive module names, import the modules, and send the import time in seconds."""
    names: list[str] = parent.receive()
    start = time.perf_counter()
    for name in names:
        importlib.import_module(name)
    parent.send(time.perf_counter() - start)
