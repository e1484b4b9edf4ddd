"""What the tests of PyTorch's idioms share."""

from __future__ import annotations

import torch


def modes(model):
    return [module.training for module in model.modules()]


def compiled(layer, name):
    setattr(layer, name, torch.compile(getattr(layer, name), backend="eager"))


class LoRA(torch.nn.Module):
    """A low-rank adapter as peft lays it out: its weight is the base layer's."""

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
        """Return the base layer, with the adapter added to its weight."""
        with torch.no_grad():
            self.base_layer.weight += self.lora_B @ self.lora_A
        return self.base_layer


def with_adapters(model):
    """Freeze a model, and give each self-attention of the encoder two adapters."""
    model.requires_grad_(False)
    for attention in (layer.self_attention for layer in model.encoder.layers):
        attention.query_proj, attention.value_proj = LoRA(attention.query_proj), LoRA(attention.value_proj)
