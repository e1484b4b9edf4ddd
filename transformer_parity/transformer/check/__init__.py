"""Compare ports with the reference, each in a separate process, for ``parity check`` and ``parity selftest``."""
