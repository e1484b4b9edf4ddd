"""The stages by name, in the order in which they are run. A new stage is a file beside this one and an entry here."""

from __future__ import annotations

from transformer_parity.transformer.stages.activations import ActivationStage
from transformer_parity.transformer.stages.decode import DecodeStage
from transformer_parity.transformer.stages.gradients import GradientStage
from transformer_parity.transformer.stages.stage import Stage
from transformer_parity.transformer.stages.steps import StepStage

STAGES: dict[str, Stage] = {one.name: one for one in (ActivationStage(), GradientStage(), StepStage(), DecodeStage())}
