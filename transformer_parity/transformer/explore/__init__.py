"""Create the explorer, an interactive HTML page that shows all taps of one sentence pair in the reference and ports."""
