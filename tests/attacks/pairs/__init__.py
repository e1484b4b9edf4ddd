"""Attacks on the verdict of ``parity pair``, ``assert_parity``, and ``parity compare`` for directories of arrays."""
