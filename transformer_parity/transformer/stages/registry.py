"""The stages by name, in the order in which they run.

To add a stage:

1. Name it in ``cases/case.py`` and give it cases: ``cases/standard.py`` for the packages, ``cases/for_ports.py`` for ports
   of users. A stage without cases never runs.
2. Write its file next to this one: a subclass of ``Stage`` in ``stage.py``, with the numbers of its tolerances in
   ``engine/tolerances.toml``.
3. Add it to ``STAGES``, and to the texts that list the stages: the help of ``--stage`` and ``docs/result.schema.json``.

If it requires a new method of a port, add this method to ``ports/protocol.py``, ``ports/package.py``, ``ports/user.py``,
and the templates.
"""

from __future__ import annotations

from transformer_parity.transformer.stages.activations import ActivationStage
from transformer_parity.transformer.stages.decode import DecodeStage
from transformer_parity.transformer.stages.gradients import GradientStage
from transformer_parity.transformer.stages.stage import Stage
from transformer_parity.transformer.stages.steps import StepStage

STAGES: dict[str, Stage] = {one.name: one for one in (ActivationStage(), GradientStage(), StepStage(), DecodeStage())}
