"""Compare ports with the reference, one process each: what ``parity check`` and ``parity selftest`` run."""
