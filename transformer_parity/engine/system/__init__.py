"""Child processes, files, signals, and the machine."""
