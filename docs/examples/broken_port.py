"""A port with a bug, which the site uses as an example of an incorrect model."""

import reference_numpy  # replace with your framework
from transformer_parity.plugin import Port


class MyPort(Port):
    """A port of a model whose positional encoding stores all sine channels before the cosine channels."""

    taps = ("*.output", "**.weights")

    def load(self, config, weights, dtype):
        """Build the model from the weights."""
        config = config.replace(position_layout="split")  # the bug: the paper interleaves sines and cosines
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        """Return the logits."""
        return self.model(source_ids, target_ids, tap=tap)
