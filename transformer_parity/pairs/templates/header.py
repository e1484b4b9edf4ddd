"""A pair of implementations of one model. `parity pair my_pair.py` compares the class Port with the class Original.

This template contains a toy model, and both classes agree. Replace the toy model with your model:

1. Let `Original` run the implementation that you trust. Its weights can be random, or come from a checkpoint.
2. Let `Port` run your port. It receives the weights of the original under the original's names and in the original's
   layout, so `load` renames and transposes them where your port differs.
3. Run `parity pair my_pair.py`. If the results differ, the report shows the first wrong tensor.

All of this is optional:

- Taps: `x = tap("name", x)` shows an intermediate value. The more taps both classes have, the more precisely the report
  locates a difference. The module `capture` calls `tap` for every layer, without changes to your model.
- `dtypes = ("float32",)` in a class that can't run in float64. Use float64 if you can, because its rounding errors are
  far smaller than the effect of any bug.
- `names`, at the end of this file: which taps correspond if their names differ.
- The methods `gradients`, `next_logits`, and `next_logits_cached`, which add comparisons. `Implementation` describes
  them.
"""

from __future__ import annotations

import numpy as np

from transformer_parity.pair import Implementation

TOKENS, WIDTH, HIDDEN, BLOCKS, EPSILON = 31, 8, 20, 2, 1e-5  # the sizes of the toy model


class Original(Implementation):
    """The implementation that you trust."""

    def init_weights(self, seed):
        """Return the weights by name: random weights, or the weights of a checkpoint as NumPy arrays."""
        shapes = {"embed.embedding": (TOKENS, WIDTH), "norm.scale": (WIDTH,), "norm.bias": (WIDTH,)}
        shapes |= {"head.kernel": (WIDTH, TOKENS), "head.bias": (TOKENS,)}
        for i in range(BLOCKS):
            for name in ("norm1", "norm2"):
                shapes |= {f"blocks.{i}.{name}.scale": (WIDTH,), f"blocks.{i}.{name}.bias": (WIDTH,)}
            sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
            for name, shape in sizes.items():
                shapes |= {f"blocks.{i}.{name}.kernel": shape, f"blocks.{i}.{name}.bias": shape[1:]}
        rng = np.random.default_rng(seed)
        return {name: rng.normal(scale=0.5, size=shape) for name, shape in shapes.items()}

    def inputs(self, seed):
        """Return one batch of inputs by name, with sequences of different lengths and padding."""
        mask = np.arange(7) < np.array([[7], [4], [2]])
        return {"ids": np.random.default_rng(seed).integers(1, TOKENS, mask.shape) * mask, "mask": mask}


class Port(Implementation):
    """Your port."""


# Which taps correspond if their names or axes differ, for example:
#     {"blocks.{i}.attention": "layers.{i}.attn", "blocks.{i}.mlp": ["layers.{i}.ffn", "(b l) d -> b l d"]}
names: dict = {}
