"""Functions with which ``reproductions.md`` shows the error of a port with and without the cause of a difference."""

import numpy as np


def cast(arrays, dtype):
    return {k: v.astype(np.float32).astype(dtype) if v.dtype.kind == "f" else v for k, v in arrays.items()}


def varied(arrays):
    """Replace the constant weights with random ones, as the checker does."""
    rng = np.random.default_rng(1)
    result = {}
    for name, value in arrays.items():
        if value.dtype.kind == "f" and value.size and (value == value.flat[0]).all():
            noise = 0.1 * rng.normal(size=value.shape) + value.flat[0] * (1 + 0.1 * rng.uniform(-1, 1, value.shape))
            value = noise.astype(value.dtype)
        result[name] = value
    return result


def array(value):
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def run(cls, weights, inputs, dtype):
    model, seen = cls(), {}
    model.load(cast(weights, dtype), dtype)

    def tap(name, value):
        seen[name] = array(value)
        return value

    outputs = model.forward(inputs, tap)
    for name, value in outputs.items():
        assert value.dtype == dtype, (cls.__name__, name, value.dtype)
        assert np.isfinite(value).all(), (cls.__name__, name)
    return outputs, seen


def error(value, truth):
    if value.shape != truth.shape:
        return f"shapes {value.shape} and {truth.shape}"
    return float(np.linalg.norm((value - truth).ravel()) / np.linalg.norm(truth.ravel()))


def port_error(pair):
    """Return the error of the Port in float32; ``reproductions.md`` uses it."""
    original, port = pair
    weights, inputs = varied(original().init_weights(0)), original().inputs(0)
    truth, _ = run(original, weights, inputs, "float64")
    outputs, _ = run(port, weights, inputs, "float32")
    return f"{max(error(outputs[name], truth[name]) for name in truth):.1e}"


def changed(pair, hub=None, after=None, **changes):
    """Return a pair with other entries of the configuration, and with a change of the Port after loading."""
    original, port = pair
    settings = {"changes": {**original.changes, **changes}}
    original = type(original.__name__, (original,), settings)

    def load(self, weights, dtype):
        port.load(self, weights, dtype)
        if after:
            after(self.model)

    return original, type(port.__name__, (port,), {"original": original, "hub": port.hub | (hub or {}), "load": load})
