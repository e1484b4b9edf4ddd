"""Compare ports with the reference for ``parity check`` and ``parity selftest``, with each port in its own process."""
