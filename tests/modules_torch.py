"""What the tests of PyTorch's idioms share."""

from __future__ import annotations

import torch


def modes(model):
    return [module.training for module in model.modules()]


def compiled(layer, name):
    setattr(layer, name, torch.compile(getattr(layer, name), backend="eager"))
