"""Training runs of any package: data, checkpoints, logs, evaluation and curves."""
