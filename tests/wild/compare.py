"""Compare pairs of a module: ``python -m tests.wild.compare tests.wild.mlx_pairs Llama ...`` writes one line each."""

import importlib
import json
import sys
import traceback

import numpy as np

from transformer_parity.pair import Implementation


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


def compare(original, port, same=lambda name: name, seeds=(0,)):
    source = original()
    weights = varied(source.init_weights(0))
    result = {"port64": 0.0, "port32": 0.0, "base32": 0.0}
    for seed in seeds:
        inputs = source.inputs(seed)
        truth, seen = run(original, weights, inputs, "float64")
        single, _ = run(original, weights, inputs, "float32")
        result["base32"] = max(result["base32"], *(error(single[k], truth[k]) for k in truth))
        for dtype in ("float64", "float32"):
            key = "port" + dtype[-2:]
            if dtype not in port.dtypes:
                result[key] = None
                continue
            try:
                outputs, taps = run(port, weights, inputs, dtype)
            except Exception as exception:
                result[key] = f"{type(exception).__name__}: {str(exception)[:300]}"
                result["trace"] = traceback.format_exc()[-1500:]
                continue
            assert outputs.keys() == truth.keys()
            errors = [error(outputs[k], truth[k]) for k in truth]
            if isinstance(result[key], float) and all(isinstance(each, float) for each in errors):
                result[key] = max(result[key], *errors)
            elif isinstance(result[key], float):
                result[key] = next(each for each in errors if isinstance(each, str))
            if dtype == "float32":
                pairs = [(k, seen[same(k)], v) for k, v in taps.items() if same(k) in seen]
                result["first"] = [(k, error(v, t)) for k, t, v in pairs if v.dtype.kind == "f"][:60]
    limit = 4 * result["base32"] + 5e-7
    values = [v for v in (result["port64"], result["port32"]) if v is not None]
    result["good"] = all(isinstance(v, float) and v <= limit for v in values)
    result["ratio"] = max((v / (result["base32"] + 1e-30) for v in values if isinstance(v, float)), default=None)
    return result


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


def run_pair(module, name, shown):
    original, port = module.TABLE[name]
    assert getattr(module, port.__name__) is port
    assert issubclass(port, Implementation)
    try:
        result = compare(original, port, getattr(module, "same_name", lambda each: each))
    except (Exception, SystemExit) as exception:
        result = {"failed": f"{type(exception).__name__}: {str(exception)[:600]}"}
        result["trace"] = traceback.format_exc()[-1500:]
    if "-t" not in shown:
        result.pop("trace", None)
    if "-v" not in shown:
        result.pop("first", None)
    print(json.dumps({"name": name, **result}), flush=True)


def main():
    module = importlib.import_module(sys.argv[1])
    for name in [name for name in sys.argv[2:] if not name.startswith("-")] or list(module.TABLE):
        run_pair(module, name, sys.argv)


if __name__ == "__main__":
    main()
