"""A port with a bug, used on the site as a substitute for your own model."""

import reference_numpy  # replace with your framework
from transformer_parity.plugin import Port


class MyPort(Port):
    """A model that stores all sines of the positional encoding before the cosines."""

    taps = ("*.output", "**.weights")

    def load(self, config, weights, dtype):
        """Build the model with these weights."""
        config = config.replace(position_layout="split")  # the bug: the paper interleaves sines and cosines
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        """Return the logits."""
        return self.model(source_ids, target_ids, tap=tap)
