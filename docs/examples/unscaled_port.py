"""The port in the README's figure, whose first layer doesn't divide the attention scores by sqrt(d_k)."""

import reference_numpy  # used instead of a framework
from transformer_parity.plugin import Port


class MyPort(Port):
    """A port of the reference model with one bug: the scores in the first layer are not scaled."""

    taps = ("**",)

    def load(self, config, weights, dtype):
        """Build the model from the weights."""
        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)
        self.factor = config.d_k**0.5

    def forward(self, source_ids, target_ids, tap):
        """Return the logits."""

        def undivided(name, x):
            return tap(name, x * self.factor if name == "encoder.layers.0.self_attention.scores" else x)

        return self.model(source_ids, target_ids, tap=undivided)
