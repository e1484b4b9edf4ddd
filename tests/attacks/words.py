"""The expected verdicts. This module imports nothing, because the processes of attacks through pairs import it."""

from __future__ import annotations

FAILS, INCOMPLETE, TOLERATED = "fails", "incomplete", "agrees"
REFUSED = "fails or incomplete"  # both verdicts are correct, because neither is AGREE
