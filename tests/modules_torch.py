"""LoRA adapters used by the tests of PyTorch idioms."""

from __future__ import annotations

import torch


def modes(model):
    return [module.training for module in model.modules()]


def compiled(layer, name):
    setattr(layer, name, torch.compile(getattr(layer, name), backend="eager"))


class LoRA(torch.nn.Module):
    """A low-rank adapter structured like peft's: its ``weight`` is the base layer's weight."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        shapes = (rank, base.in_features), (base.out_features, rank)
        drawn = (torch.randn(shape, generator=generator, dtype=base.weight.dtype) * 0.3 for shape in shapes)
        self.lora_A, self.lora_B = map(torch.nn.Parameter, drawn)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x):
        return self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T

    def merged(self):
        """Merge the adapter into the base layer's weight and return the base layer."""
        with torch.no_grad():
            self.base_layer.weight += self.lora_B @ self.lora_A
        return self.base_layer


def with_adapters(model):
    """Freeze a model and add two adapters to each self-attention block in the encoder."""
    model.requires_grad_(False)
    for attention in (layer.self_attention for layer in model.encoder.layers):
        attention.query_proj, attention.value_proj = LoRA(attention.query_proj), LoRA(attention.value_proj)
