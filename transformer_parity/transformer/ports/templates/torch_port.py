"""A port of my model for `parity`. It wraps transformer_torch, so it agrees with the reference.

Replace transformer_torch with your own model, one method at a time, and rerun the check after each change:

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S the source length, T the target length,
and V the size of the target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy import ndarray
from torch import Tensor

import transformer_torch  # replace with your own model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_torch.weights import parameters


class MyPort(Port):
    """My model."""

    # `preset` names the published conventions that your model follows; `parity info` lists them. `overrides` lists the
    # fields in which your model differs, such as {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. It can also set
    # sizes, which are small by default.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # Keep float64 if you can. Its rounding errors are much smaller than any bug; without float64, a wrong convention
    # looks like a loss of precision.
    dtypes = ("float64", "float32")
    # The taps (named intermediate values) that `forward` reports. `parity info --names` lists all names. The pattern
    # "**.scores" matches every name that ends with ".scores". Remove the names that your model can't report.
    taps = ("**",)
    # Cases that your model doesn't support, with the reason: {"full/one_token": "the model needs two tokens"}. The
    # report lists them as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model with the given weights, in inference mode."""
        self.config = config
        self.model = transformer_torch.Transformer(config, dtype)
        self.model.eval()  # disables dropout
        # All methods use this mapping from canonical names to parameters. For your model, it may look like this:
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied matrix has only
        # one name. For a fused projection, map each name to a view such as blocks[0].qkv.weight[:d]. You can copy
        # weights into a view. Split the gradient of the fused weight in the same way.
        self.parameters = parameters(self.model)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.tensor(_turned(name, weights[name])))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # Derive the masks from the IDs. In this repository, True means that a position may be attended to. In
        # torch.nn.Transformer and some other libraries, True means the opposite. If your model has no taps, report
        # the values that you have: memory = tap("encoder.output", memory).
        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        with torch.inference_mode():
            if tap is no_tap:
                return self.model(source, target).numpy()  # without taps, run the model as users do
            return self.model(source, target, tap=lambda name, value: torch.tensor(tap(name, value.numpy()))).numpy()
        # If your model has no tap argument, use forward hooks. The return value of a hook replaces the module's output:
        #
        #     def hook(module, inputs, output):
        #         return torch.tensor(tap("encoder.layers.0.output", output.numpy()))
        #
        #     handle = self.model.encoder.layers[0].register_forward_hook(hook)
        #     ... call the model, then handle.remove()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a copy of every parameter in the model's dtype, by canonical name."""
        return {name: _turned(name, parameter.detach().numpy()).copy() for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        seen: dict[str, Tensor] = {}  # values at the taps; remove it if your model has no taps
        loss = self._loss(source_ids, target_ids, labels, tap=seen.setdefault)
        found = torch.autograd.grad(loss, [*self.parameters.values(), *seen.values()])
        arrays = {name: gradient.numpy() for name, gradient in zip([*self.parameters, *seen], found, strict=True)}
        of_parameters = {name: _turned(name, arrays[name]) for name in self.parameters}
        return Gradients(loss.item(), of_parameters, {name: arrays[name] for name in seen})

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, tap: Tap = no_tap) -> Tensor:
        """Return the label-smoothed cross-entropy, averaged over target tokens without padding."""
        logits = self.model(torch.tensor(source_ids), torch.tensor(target_ids), tap=tap)
        return F.cross_entropy(
            logits.flatten(0, 1),
            torch.tensor(labels).flatten(),
            ignore_index=self.config.pad_id,
            label_smoothing=self.config.label_smoothing,
        )

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the full gradient, or None. settings.accumulation_steps is the
        # number of micro-batches. You may ignore it, because the update must be the one for the full batch.
        self.settings, self.step = settings, 0
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), betas=(settings.beta1, settings.beta2), eps=settings.epsilon
        )

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step without dropout, and return the loss before the update."""
        self.step += 1  # the first step of the schedule is step 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.step, self.config.d_model)
        self.optimizer.zero_grad()
        loss = self._loss(source_ids, target_ids, labels)
        loss.backward()
        if (most := self.settings.clip_norm) is not None:  # clip_grad_norm_ adds 1e-6 to the norm: too inexact
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, most / torch.nn.utils.get_total_norm(gradients).clamp(min=most))
        self.optimizer.step()
        return loss.item()

    # `parity check-distributed` compares training on multiple devices. It starts the processes as torchrun does. Each
    # process must read only its own rows of every batch, and must return the loss, gradients, and weights of the full
    # batch. To support the command, add these members:
    #
    #     one_process = False  # whether one process controls all devices
    #
    #     def distribute(self, plan):
    #         if not dist.is_initialized():
    #             dist.init_process_group("gloo")
    #         self.model = DistributedDataParallel(self.model)
    #
    #     def parameters_per_device(self):  # only for fully_shard, which shards parameters
    #         return [sum(parameter.to_local().numel() for parameter in self.model.parameters())]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without BOS, padded with ``pad_id``."""
        # A hypothesis includes its ``eos_id``. Only padding follows it. The search never chooses the padding token.
        if beam_size == 1:
            return transformer_torch.greedy_search(self.model, source_ids, max_length).ids
        return transformer_torch.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _turned(name: str, array: ndarray) -> ndarray:
    """Transpose kernels, which are [in, out] in the reference and [out, in] in torch.nn.Linear."""
    return array.T if name.endswith("kernel") else array
