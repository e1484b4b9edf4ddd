"""Training runs with any backend: data, checkpoints, logs, evaluation, and curves."""
