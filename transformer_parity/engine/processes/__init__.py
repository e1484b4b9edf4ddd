"""Child processes: start them, exchange messages with them, and leave nothing behind."""
