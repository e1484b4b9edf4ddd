"""Applications of the models: training, translation, checkpoint import and export, and figures."""
