"""The optimizer (Vaswani et al., 2017, section 5.3): clipping by the norm of the whole gradient, and Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from transformer_spec.training_config import TrainingConfig
from transformer_torch.weights import gathered


def global_norm(gradient: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of a gradient, all tensors taken together; a part that a mesh divides counts once."""
    norms = [gathered(torch.nn.utils.get_total_norm(tensors)) for tensors in by_mesh(gradient)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | float:
    """Return what scales a gradient of some norm to one of at most ``clip_norm`` (Pascanu et al., 2013)."""
    # clip_grad_norm_ would add 1e-6 to the norm.
    return 1.0 if clip_norm is None else clip_norm / norm.clamp(min=clip_norm)


class Adam(torch.optim.Adam):
    """Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for their bias, and epsilon is added to the root of the corrected one.

    Args:
        parameters: What is updated. Frozen parameters have no moments.
        settings: Both betas and epsilon.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: TrainingConfig) -> None:
        groups = [{"params": tensors} for tensors in by_mesh(parameters)]
        super().__init__(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True)

    def moments(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Return the state of a parameter. If it has none yet, both moments are zero after so many steps."""
        if parameter not in self.state:  # as the optimizer itself would on its first step
            self.state[parameter] = {
                "step": torch.full((), float(steps), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]

    def update(self, learning_rate: float, steps: int) -> None:
        """Take a step along the gradient that the parameters hold: change parameters and moments in place.

        All groups of parameters have the one learning rate. ``steps`` is the number of steps taken before.
        """
        for group in self.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.moments(parameter, steps)
        self.step()
        frozen = [state["step"] for parameter, state in self.state.items() if parameter.grad is None]
        if frozen:  # a parameter that is trained again later has counted all steps
            torch._foreach_add_(frozen, 1)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh that divides them, if any: a fused kernel takes one group at a time."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*groups.values()]
