"""Compare ports with the reference for ``parity check`` and ``parity selftest``, with one process per port."""
