"""The comparison of the four packages, and of ports that a user brings, with the reference."""

# The same as transformer_spec.__version__, which would take NumPy to read: `parity --version` starts without it.
__version__ = "0.1.0"
__all__ = ["__version__"]
