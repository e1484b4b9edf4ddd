"""Third-party ports and ports with injected bugs, which the diagnosis must tell apart without any hints.

Each port declares only its parameters: sizes, IDs, biases, and which embeddings are tied. It doesn't declare its
conventions.
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
    """An unmodified torch.nn.Transformer with the paper's embeddings."""

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
                    tgt_mask=future,  # True = must not attend
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
    """torch.nn.Transformer with pre-norm layers."""

    options = {"norm_first": True}


class TorchGelu(TorchTransformer):
    """torch.nn.Transformer with pre-norm layers and a different activation function."""

    options = {"norm_first": True, "activation": "gelu"}


class KerasHub(Port):
    """Unmodified keras_hub layers."""

    dtypes = ("float64",)
    overrides = {
        "d_model": 32,  # Keras rounds 1 / sqrt(d_k) to float32, which is exact for powers of four such as d_k = 16
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
    """keras_hub's layers with pre-norm and without a final norm after each stack."""

    options = {"normalize_first": True}


class KerasHubOddHeads(KerasHub):
    """keras_hub's layers with the sizes of the standard cases, for which Keras rounds 1 / sqrt(d_k)."""

    overrides = {name: value for name, value in KerasHub.overrides.items() if name not in ("d_model", "num_heads")}


class Marian(Port):
    """Hugging Face's MarianMTModel, with its float32 positional encodings recomputed in float64."""

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
    """Hugging Face's MarianMTModel with its own float32 positional encodings."""

    def load(self, config, weights, dtype):
        from transformer_bench.peers.marian import marian_model

        self.model, self.config = marian_model(config, weights).double(), config


class Packaged(Port):
    """One of our four packages, or a copy of it with an injected bug."""

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
    """The NumPy reference as a port."""

    backend, package = "numpy", "reference_numpy"


class Jax(Packaged):
    """Our JAX package as a port."""

    backend, package = "jax", "transformer_jax"


class Tf(Packaged):
    """Our TensorFlow package as a port."""

    backend, package = "tf", "transformer_tf"


class Buggy(Packaged):
    """Our PyTorch package with an injected bug. A test sets ``package`` to the modified copy."""


class BuggyUnseen(Buggy):
    """Our PyTorch package with an injected bug, as a port that reports only the logits."""

    taps = ()

    def forward(self, source_ids, target_ids, tap):
        return super().forward(source_ids, target_ids, lambda name, value: value)  # this also disables the fused kernel
