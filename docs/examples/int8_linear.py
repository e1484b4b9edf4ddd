"""Store a JAX model's matrices in int8. docs/how-to/low-precision.md shows this code."""

import jax.numpy as jnp
from flax import nnx


class Int8Linear(nnx.Module):
    """A linear layer that stores an int8 matrix and one scale per output."""

    def __init__(self, linear):
        kernel = linear.kernel[...]
        scale = jnp.maximum(jnp.abs(kernel).max(0), 1e-30) / 127
        self.kernel = nnx.Variable(jnp.round(kernel / scale).astype(jnp.int8))
        self.scale, self.bias = nnx.Variable(scale), linear.bias

    def __call__(self, x):
        """Apply the layer to the last axis of ``x``."""
        y = x @ self.kernel[...].astype(x.dtype) * self.scale[...]
        return y if self.bias is None else y + self.bias[...]


def quantize(model):
    """Replace all linear layers in a model with int8 layers."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(vars(module).items()):
            if isinstance(layer, nnx.Linear):
                setattr(module, name, Int8Linear(layer))
