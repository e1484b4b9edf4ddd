"""The entry point of ``parity``: what a signal meets while the command line is imported."""

from __future__ import annotations

INCOMPLETE = 3  # as in main.py, which is not imported yet


def main(arguments: list[str] | None = None) -> int:
    """Import the command line and run it. A signal that comes before that ends the process with 3, quietly."""
    try:
        from transformer_parity.engine.system.interrupts import ctrl_c_waits, sigterm_is_ctrl_c

        with sigterm_is_ctrl_c():
            with ctrl_c_waits():  # an interrupted import may end the process otherwise than we do
                from transformer_parity.cli.main import main as run
            return run(arguments)
    except KeyboardInterrupt:
        return INCOMPLETE
