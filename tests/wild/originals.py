"""The Originals: models of transformers with random weights, under the names of its checkpoints."""

import os
import re
import tempfile
from copy import deepcopy

import numpy as np

from transformer_parity.pair import Implementation, capture

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

VOCABULARY = 101
# The experts' other implementation has no float64.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "rope_theta": 700.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def configuration(kind, changes, tiny=TINY):
    """A tiny configuration of transformers of this model type. ``None`` removes an entry of ``TINY``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    merged = deepcopy({**tiny, **changes})
    return CONFIG_MAPPING[kind](**{name: value for name, value in merged.items() if value is not None})


def hub_config(source):
    """Return the entries of config.json that transformers 5 writes, and the entries that version 4 wrote."""
    config = source.to_dict()
    for alias, name in source.attribute_map.items():
        if name in config:
            config.setdefault(alias, config[name])
    ropes = config.get("rope_parameters") or {}
    rope = ropes.get("full_attention", ropes)
    config.setdefault("rope_theta", rope.get("rope_theta"))
    plain = rope.get("rope_type", "default") == "default"
    scaling = {"type": rope.get("rope_type"), **{k: v for k, v in rope.items() if k != "rope_theta"}}
    config.setdefault("rope_scaling", None if plain else scaling)
    if "partial_rotary_factor" in rope:
        config.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    return config


def without_padding(outputs, inputs):
    """Set the rows of padding to zero."""
    mask = inputs["attention_mask"][..., None]
    return {name: value * mask.astype(value.dtype) for name, value in outputs.items()}


class TransformersModel(Implementation):
    """A model of transformers. Subclasses set the model type, the changes to ``TINY``, and the automatic class."""

    kind = ""
    changes = {}
    automatic = "AutoModelForCausalLM"
    masked = False
    # Maps names that transformers writes to names that the port's library expects in checkpoints.
    rename = ()
    # Whether to return zeros in the rows of padding, whose values have no meaning.
    valid_rows = False
    segments = False
    decoder = False
    image_size = 0
    tiny = TINY

    def model_class(self, config):
        import transformers

        return getattr(transformers, self.automatic)._model_mapping[type(config)]

    def config(self):
        config = configuration(self.kind, self.changes, self.tiny)
        config.architectures = [self.model_class(config).__name__]
        return config

    def init_weights(self, seed):
        import torch
        from safetensors.numpy import load_file

        torch.manual_seed(seed)
        config = self.config()
        model = self.model_class(config)._from_config(config, **EAGER).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            arrays = load_file(os.path.join(folder, "model.safetensors"))
        for old, new in self.rename:
            arrays = {re.sub(old, new, name): value for name, value in arrays.items()}
        return arrays

    def inputs(self, seed):
        rng = np.random.default_rng(seed)
        if self.image_size:
            return {"pixel_values": rng.normal(size=(2, 3, self.image_size, self.image_size)).astype(np.float32)}
        ids = rng.integers(3, VOCABULARY, (2, 11))
        if not self.masked:
            return {"input_ids": ids}
        mask = np.ones_like(ids)
        mask[1, 9:] = 0
        result = {"input_ids": np.where(mask == 1, ids, self.config().pad_token_id), "attention_mask": mask}
        if self.segments:
            result["token_type_ids"] = rng.integers(0, 2, ids.shape)
        if self.decoder:
            result["decoder_input_ids"] = rng.integers(3, VOCABULARY, (2, 9))
            result["decoder_attention_mask"] = (np.arange(9) < np.array([[9], [5]])).astype(np.int64)
        return result

    def load(self, weights, dtype):
        import torch

        self.dtype = dtype
        config = self.config()
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        with tempfile.TemporaryDirectory() as folder:
            from safetensors.torch import save_file

            save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
            config.save_pretrained(folder)
            self.model, report = self.model_class(config).from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                **EAGER,
                output_loading_info=True,
            )
        problems = {name: keys for name, keys in report.items() if keys}
        assert not problems, problems
        self.model.eval()

    def forward(self, inputs, tap):
        import torch

        tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
        if self.image_size:
            tensors = {name: value.to(getattr(torch, self.dtype)) for name, value in tensors.items()}
        with torch.no_grad(), capture.torch(self.model, tap):
            outputs = self.model(**tensors, **self.options())
        if "logits" in outputs:
            result = {"logits": outputs.logits}
        else:
            result = {"hidden": outputs.last_hidden_state}
            if self.decoder:
                result["encoder"] = outputs.encoder_last_hidden_state
        # Some models cast their logits to float32.
        result = {name: value.numpy().astype(self.dtype) for name, value in result.items()}
        return without_padding(result, inputs) if self.valid_rows else result

    def options(self):
        return {} if self.image_size else {"use_cache": False}
