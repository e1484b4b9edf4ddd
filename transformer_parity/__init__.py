"""Compare the three framework packages, and ports that users write, with the NumPy reference."""

# This version must be the same as transformer_spec.__version__. It is repeated here because importing transformer_spec
# also imports NumPy, but `parity --version` must work without NumPy.
__version__ = "0.1.0"
__all__ = ["__version__"]
