"""The public name of what a port of your own subclasses: see ``Port``."""

from transformer_parity.ports.user import Port

__all__ = ["Port"]
