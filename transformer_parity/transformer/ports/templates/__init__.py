"""Templates for ``parity init-port``: one port per framework, with the repository's package as a placeholder model."""
