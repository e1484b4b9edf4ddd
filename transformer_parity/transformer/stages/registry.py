"""The stages by name, in the order in which they run.

To add a stage:

1. Name it in ``cases/case.py``, and add cases for the packages to ``cases/standard.py`` and for ports of users to
   ``cases/for_ports.py``. A stage without cases never runs.
2. Write its file next to this one: a subclass of ``Stage`` in ``stage.py``, with the numbers of its tolerances in
   ``engine/tolerances.toml``.
3. Add it to ``STAGES``, and to the texts that list the stages: the help of ``--stage`` in ``cli/check.py``, of
   ``--parity-stage`` in ``check/pytest_plugin.py``, and ``docs/result.schema.json``.

If it requires a new method of ports, add the method to ``protocol.py``, ``package.py``, ``user.py`` and templates in
``ports``.
"""

from __future__ import annotations

from transformer_parity.transformer.stages.activations import ActivationStage
from transformer_parity.transformer.stages.decode import DecodeStage
from transformer_parity.transformer.stages.gradients import GradientStage
from transformer_parity.transformer.stages.stage import Stage
from transformer_parity.transformer.stages.steps import StepStage

STAGES: dict[str, Stage] = {one.name: one for one in (ActivationStage(), GradientStage(), StepStage(), DecodeStage())}
