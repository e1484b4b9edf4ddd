"""Runs of short commands."""

from __future__ import annotations

from functools import cache

from transformer_parity.cli.main import main
from transformer_parity.transformer.ports import source_code
from transformer_parity.transformer.ports.registry import PORTS

FRAMEWORKS = {module for port in PORTS.values() for module in port.needs}


parsed = cache(source_code.SourcePackage)  # once for all tests


def parity(capsys, *arguments):
    """Run a command and return its exit code and what it printed."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as leaving:  # argparse's way out
        code = leaving.code
    return code, *capsys.readouterr()
