"""The Ports: models of mlx-lm."""

import re

import numpy as np

from tests.wild.originals import TransformersModel, capture, hub_config
from transformer_parity.pair import Implementation


class MlxModel(Implementation):
    """A model of mlx-lm that is loaded as ``mlx_lm.utils.load_model`` does it."""

    original = TransformersModel
    module = ""
    v5_config = False
    hub = {}
    # Weights of the checkpoint that the library has no place for.
    unused = "\\Z\\A"

    def config(self):
        """Return the entries of config.json that transformers 5 writes, and the entries that version 4 wrote."""
        source = self.original().config()
        return source.to_dict() if self.v5_config else hub_config(source) | self.hub

    def load(self, weights, dtype):
        import importlib

        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        library = importlib.import_module(f"mlx_lm.models.{self.module}")
        self.model = library.Model(library.ModelArgs.from_dict(self.config()))
        arrays = {name: mx.array(value, dtype=getattr(mx, str(value.dtype))) for name, value in weights.items()}
        arrays = {name: value for name, value in arrays.items() if not re.search(self.unused, name)}
        if hasattr(self.model, "sanitize"):
            arrays = self.model.sanitize(arrays)
        self.model.load_weights(list(arrays.items()), strict=True)
        self.model.eval()

    def forward(self, inputs, tap):
        import mlx.core as mx

        with capture.mlx(self.model, tap):
            logits = self.model(mx.array(np.array(inputs["input_ids"], dtype=np.int32)))
            mx.eval(logits)
        return {"logits": np.array(logits)}


def pair(
    module_globals,
    name,
    kind,
    module=None,
    *,
    v5_config=False,
    base=None,
    hub=None,
    unused=MlxModel.unused,
    **changes,
):
    """Define the classes ``<name>Original`` and ``<name>Port`` of a module, and add them to its ``TABLE``."""
    place = {"__module__": module_globals["__name__"]}
    attributes = {"kind": kind, "changes": changes, **(base or {})}
    original = type(f"{name}Original", (TransformersModel,), place | attributes)
    port = type(
        f"{name}Port",
        (MlxModel,),
        place
        | {
            "original": original,
            "module": module or kind,
            "dtypes": ("float32",),  # many operations of MLX have the precision of float32 in float64
            "v5_config": v5_config,
            "hub": hub or {},
            "unused": unused,
        },
    )
    module_globals.update({f"{name}Original": original, f"{name}Port": port})
    module_globals["TABLE"][name] = (original, port)
