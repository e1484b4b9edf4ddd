"""Compare implementations of the Transformer: cases, ports, comparison, diagnosis, and the bug catalog."""
