"""Ports that are correct at first but wrong after a different call, for long outputs, or for small gradients."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from transformer_parity.transformer.ports.templates.torch_port import MyPort


class MaskByShape(MyPort):
    """A port that caches the source's padding mask by the shape of the IDs."""

    masks: ClassVar[dict] = {}

    def load(self, config, weights, dtype):
        super().load(config, weights, dtype)
        self.masks = {}

    def forward(self, source_ids, target_ids, tap):
        mask = self.masks.setdefault(source_ids.shape, source_ids != self.config.pad_id)
        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        with torch.inference_mode():
            return self.model(
                source, target, source_mask=torch.tensor(mask), tap=lambda n, v: torch.tensor(tap(n, v.numpy()))
            ).numpy()


class ForwardOfOldWeights(MyPort):
    """A port whose forward and generate methods use a copy of the weights from before training."""

    def start_training(self, settings):
        import copy

        super().start_training(settings)
        self.copy = copy.deepcopy(self.model)

    def forward(self, source_ids, target_ids, tap):
        model, self.model = self.model, getattr(self, "copy", self.model)
        try:
            return super().forward(source_ids, target_ids, tap)
        finally:
            self.model = model


class ClipsBelowTheNorm(MyPort):
    """A port that scales gradients to the clip norm even if their norm is smaller."""

    def train_step(self, source_ids, target_ids, labels):
        settings = self.settings
        if settings.clip_norm is None:
            return super().train_step(source_ids, target_ids, labels)
        found = self.gradients(source_ids, target_ids, labels).parameters
        norm = math.sqrt(sum(float(np.sum(g * g)) for g in found.values()))
        from dataclasses import replace

        self.settings = replace(settings, clip_norm=None)
        hooks = [p.register_hook(lambda g: g * settings.clip_norm / norm) for p in self.parameters.values()]
        try:
            return super().train_step(source_ids, target_ids, labels)
        finally:
            self.settings = settings
            for hook in hooks:
                hook.remove()


class TwentyTokens(MyPort):
    """A port that never generates more than twenty tokens."""

    def generate(self, source_ids, max_length, beam_size, length_penalty):
        return super().generate(source_ids, min(max_length, 20), beam_size, length_penalty)
