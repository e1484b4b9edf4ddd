"""Applications of the models: training, translation, import and export of checkpoints, and figures."""
