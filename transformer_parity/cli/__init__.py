"""The command ``parity``: each module parses options, calls, and prints."""
