"""The optimizer (Vaswani et al., 2017, section 5.3): gradient clipping by global norm, and Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from transformer_spec.training_config import TrainingConfig
from transformer_torch.weights import gathered


def global_norm(gradient: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of a gradient, treating all tensors and their shards as one vector."""
    norms = [gathered(torch.nn.utils.get_total_norm(tensors)) for tensors in by_mesh(gradient)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | float:
    """Return the factor that scales a gradient to a norm of at most ``clip_norm`` (Pascanu et al., 2013).

    Args:
        norm: Norm of the gradient.
        clip_norm: Maximum norm. If None, gradients aren't clipped.
    """
    # torch.nn.utils.clip_grad_norm_ would add 1e-6 to the norm.
    return 1.0 if clip_norm is None else clip_norm / norm.clamp(min=clip_norm)


class Adam(torch.optim.Adam):
    """Adam, Algorithm 1 of Kingma and Ba (2015).

    The moments are corrected for bias. Epsilon is added to the square root of the corrected second moment.

    Args:
        parameters: Parameters to update. Frozen parameters have no moments.
        settings: Training settings, which define the betas and epsilon.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: TrainingConfig) -> None:
        groups = [{"params": tensors} for tensors in by_mesh(parameters)]
        super().__init__(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon, fused=True)

    def moments(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """Return the optimizer state of a parameter. Create zero moments if the state is missing.

        Args:
            parameter: Parameter of the optimizer.
            steps: Number of steps taken so far, used if the state is new.
        """
        if parameter not in self.state:  # otherwise, the base class would create the moments in its first step
            self.state[parameter] = {
                "step": torch.full((), float(steps), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]

    def update(self, learning_rate: float, steps: int) -> None:
        """Take a step using the gradient in ``parameter.grad``: update parameters and moments in place.

        Args:
            learning_rate: Learning rate for this step, the same for all parameter groups.
            steps: Number of steps taken before this one.
        """
        for group in self.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.moments(parameter, steps)
        self.step()
        torch.clear_autocast_cache()  # otherwise, a surrounding autocast context would keep casts of the old weights
        frozen = [state["step"] for parameter, state in self.state.items() if parameter.grad is None]
        if frozen:  # count steps for frozen parameters too, because they may be trained later
            torch._foreach_add_(frozen, 1)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their device mesh, because a fused kernel accepts tensors of only one mesh.

    Tensors without a mesh form a separate group.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*groups.values()]
