"""Files, signals, errors, and the machine."""
