"""The stages by name, in the order in which they run.

To add a stage:

1. Add its name to ``cases/case.py``. Add cases for the packages to ``cases/standard.py``, and cases for user ports to
   ``cases/for_ports.py``. A stage without cases never runs.
2. Write a subclass of ``Stage`` in a new file in this directory, and add its tolerances to ``engine/tolerances.toml``.
3. Add the stage to ``STAGES`` and to all texts that list the stages: the help of ``--stage`` in ``cli/check.py``, the
   help of ``--parity-stage`` in ``check/pytest_plugin.py``, and ``docs/result.schema.json``.

If the stage requires a new port method, add the method to ``protocol.py``, ``package.py``, ``user.py``, and the
templates in ``ports``.
"""

from __future__ import annotations

from transformer_parity.transformer.stages.activations import ActivationStage
from transformer_parity.transformer.stages.decode import DecodeStage
from transformer_parity.transformer.stages.gradients import GradientStage
from transformer_parity.transformer.stages.stage import Stage
from transformer_parity.transformer.stages.steps import StepStage

STAGES: dict[str, Stage] = {one.name: one for one in (ActivationStage(), GradientStage(), StepStage(), DecodeStage())}
