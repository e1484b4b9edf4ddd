"""The explorer: an interactive HTML page with all taps of one sentence pair, in the reference and in ports."""
