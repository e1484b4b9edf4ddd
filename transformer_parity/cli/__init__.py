"""The ``parity`` command: each module parses the options of one command, runs it, and prints the result."""
