"""Cases, ports, comparisons, a diagnosis, and a bug catalog for implementations of the Transformer."""
