"""Use the models: train, translate, import and export checkpoints, draw attention."""
