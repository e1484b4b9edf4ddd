"""Ports written by others, and by us with a mistake: what the diagnosis has to tell apart with no hint.

A port declares what is a matter of parameters: sizes, ids, biases, tables. Its conventions it leaves at the paper's.
"""

from __future__ import annotations

import math
from dataclasses import replace

from reference_numpy import target_padding_mask
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import Port
from transformer_spec.taps import no_tap


class TorchTransformer(Port):
    """torch.nn.Transformer as it comes, under the paper's embeddings."""

    dtypes = ("float64",)
    overrides = {"attention_bias": True}
    options: dict[str, object] = {}

    def load(self, config, weights, dtype):
        import torch
        from third_party import tensor, torch_stacks

        sizes = (config.d_model, config.num_heads, config.num_encoder_layers, config.num_decoder_layers, config.d_ff)
        self.model = torch.nn.Transformer(*sizes, batch_first=True, dtype=torch.float64, **self.options).eval()
        missing, unexpected = self.model.load_state_dict(torch_stacks(weights), strict=False)
        final = {f"{stack}.norm.{kind}" for stack in ("encoder", "decoder") for kind in ("weight", "bias")}
        if set(missing) != final or unexpected:
            raise ValueError(f"missing {missing}, unexpected {unexpected}")
        self.table, self.config = tensor(weights["source_embedding.table"]), config

    def forward(self, source_ids, target_ids, tap):
        import torch

        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        padding, future = source == self.config.pad_id, torch.ones(2 * target.shape[1:], dtype=torch.bool).triu(1)
        with torch.no_grad():
            return (
                self.model(
                    self.embed(source),
                    self.embed(target),
                    tgt_mask=future,  # True = may not attend
                    src_key_padding_mask=padding,
                    memory_key_padding_mask=padding,
                    tgt_key_padding_mask=target == self.config.pad_id,
                )
                @ self.table.T
            ).numpy()

    def embed(self, ids):
        from third_party import paper_positions

        d_model = self.config.d_model
        return self.table[ids] * math.sqrt(d_model) + paper_positions(ids.shape[1], d_model)


class TorchPreNorm(TorchTransformer):
    """The same, with the norms in front."""

    options = {"norm_first": True}


class TorchGelu(TorchTransformer):
    """The same, with the norms in front and another activation."""

    options = {"norm_first": True, "activation": "gelu"}


class KerasHub(Port):
    """keras_hub's layers as they come."""

    dtypes = ("float64",)
    overrides = {
        "d_model": 32,  # Keras rounds 1 / sqrt(d_k) to float32: of powers of four, here 16, nothing is lost
        "num_heads": 2,
        "attention_bias": True,
        "output_bias": True,
        "position_encoding": "learned",
        "tie_embeddings": "none",
    }
    options: dict[str, object] = {}

    def load(self, config, weights, dtype):
        self.config, self.weights = config, weights

    def forward(self, source_ids, target_ids, tap):
        from third_party import keras_hub_logits

        return keras_hub_logits(self.config, self.weights, source_ids, target_ids, **self.options)


class KerasHubPreNorm(KerasHub):
    """The same, with the norms in front, and none behind the stacks."""

    options = {"normalize_first": True}


class KerasHubOddHeads(KerasHub):
    """The same at the sizes of the standard cases, where Keras rounds 1 / sqrt(d_k)."""

    overrides = {name: value for name, value in KerasHub.overrides.items() if name not in ("d_model", "num_heads")}


class Marian(Port):
    """Hugging Face's MarianMTModel; its table of positions, which is of float32, made anew in float64."""

    dtypes = ("float64",)
    overrides = {"attention_bias": True, "output_bias": True, "pad_id": 1, "bos_id": 1, "eos_id": 0}

    def load(self, config, weights, dtype):
        from third_party import marian_model

        self.model, self.config = marian_model(config, weights), config

    def forward(self, source_ids, target_ids, tap):
        import torch

        pad_id = self.config.pad_id
        with torch.no_grad():
            return self.model(
                input_ids=torch.tensor(source_ids),
                attention_mask=torch.tensor(source_ids != pad_id),
                decoder_input_ids=torch.tensor(target_ids),
                decoder_attention_mask=torch.tensor(target_padding_mask(target_ids, pad_id)),
            ).logits.numpy()


class MarianAsItComes(Marian):
    """The same with its own table of positions."""

    def load(self, config, weights, dtype):
        from transformer_bench.peers.marian import marian_model

        self.model, self.config = marian_model(config, weights).double(), config


class Packaged(Port):
    """One of our four packages, or a copy of it with a mistake in it."""

    taps = ("**",)
    backend, package = "torch", "transformer_torch"

    def load(self, config, weights, dtype):
        port = replace(PORTS[self.backend], package=self.package)
        self.loaded = port.load(config, weights, Placement(dtype))

    def forward(self, source_ids, target_ids, tap):
        to_array, to_numpy = self.loaded.to_array, self.loaded.to_numpy

        def show(name, value):
            return to_array(tap(name, to_numpy(value)))

        logits = self.loaded.model(to_array(source_ids), to_array(target_ids), tap=no_tap if tap is no_tap else show)
        return to_numpy(logits)


class Numpy(Packaged):
    """The reference itself."""

    backend, package = "numpy", "reference_numpy"


class Jax(Packaged):
    """Ours in JAX."""

    backend, package = "jax", "transformer_jax"


class Tf(Packaged):
    """Ours in TensorFlow."""

    backend, package = "tf", "transformer_tf"


class Mistaken(Packaged):
    """Ours in PyTorch, with what has been planted: a test sets the package."""


class MistakenUnseen(Mistaken):
    """The same, and only the logits are shown."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, lambda name, value: value)  # and no fused kernel
