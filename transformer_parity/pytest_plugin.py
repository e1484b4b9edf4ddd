"""Temporary: the entry point of an installation made before the plug-in moved."""

from transformer_parity.check.pytest_plugin import *  # noqa: F403
