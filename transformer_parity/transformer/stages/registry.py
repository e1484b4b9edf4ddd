"""The stages by name, in the order in which they are run."""

from __future__ import annotations

from transformer_parity.transformer.stages.activations import Activations
from transformer_parity.transformer.stages.decode import Decode
from transformer_parity.transformer.stages.gradients import Gradients
from transformer_parity.transformer.stages.stage import Stage
from transformer_parity.transformer.stages.steps import Steps

STAGES: dict[str, Stage] = {one.name: one for one in (Activations(), Gradients(), Steps(), Decode())}
