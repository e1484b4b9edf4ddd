"""A port with a bug, for the site: it stands for a model of yours, and its positions are not the paper's."""

import reference_numpy  # stands for your framework
from transformer_parity.plugin import Port


class MyPort(Port):
    """A port of a model that keeps all sines before the cosines."""

    taps = ("*.output", "**.weights")

    def load(self, config, weights, dtype):
        """Build the model with these weights."""
        config = config.replace(position_layout="split")  # the bug
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        """Return the logits."""
        return self.model(source_ids, target_ids, tap=tap)
