"""A port: the class through which `parity` runs your model and compares it with the reference.

This template passes the check because it wraps a placeholder model. To check your own model:

1. Replace `load` and `forward` first, because they must use the same model. Set `taps` to the names that your `forward`
   reports, or to `()`. Delete the methods that you have not written yet, because they use the placeholder.
2. Check only the forward pass, until it agrees:

       parity check --port my_port:MyPort --stage activations

3. Add `export_weights`, `gradients`, `start_training`, `train_step`, and `generate`, and check everything:

       parity check --port my_port:MyPort
       pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. Shapes: B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy import ndarray
from torch import Tensor

import transformer_torch  # placeholder for your model
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_torch.weights import parameters


class MyPort(Port):
    """My model."""

    # The preset that your model follows (`parity info` lists them), and the config fields in which your model differs,
    # for example {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. The cases use small sizes unless you set them here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # In float64, rounding errors are far smaller than the effect of any bug. If you remove float64, the check can't
    # distinguish a wrong convention from a loss of precision.
    dtypes = ("float64", "float32")
    # Taps (named intermediate values) that `forward` reports. `parity info --names` lists all names, and "**.scores"
    # matches every name that ends in ".scores". If your model reports none, set this to `()`.
    taps = ("**",)
    # Cases that your model doesn't support, each with a reason: {"full/one_token": "needs at least two tokens"}.
    # The report lists them as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, in inference mode, with the given weights."""
        self.config = config
        self.model = transformer_torch.Transformer(config, dtype)
        self.model.eval()  # turn dropout off
        # All methods use this dict from canonical names to parameters. The placeholder's attributes already have the
        # canonical names. For your model, write {"encoder.layers.0.feed_forward.inner_proj.kernel":
        # model.blocks[0].fc1.weight, ...}. List a tied embedding matrix only once. If a projection is fused, use views
        # such as blocks[0].qkv.weight[:d] to load it, and split its gradient in the same way.
        self.parameters = parameters(self.model)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.tensor(_turned(name, weights[name])))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. In a mask, True means that a position may be attended to. Some libraries, such
        # as torch.nn, use the opposite convention. If your model has no `tap` argument, call `tap` yourself for the
        # values that you can read, for example tap("encoder.output", memory).
        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        with torch.inference_mode():
            if tap is no_tap:
                return self.model(source, target).numpy()  # as in normal use
            return self.model(source, target, tap=lambda name, value: torch.tensor(tap(name, value.numpy()))).numpy()
        # If your model has no `tap` argument, use forward hooks. A hook returns the new output of its module:
        #
        #     def hook(module, inputs, output):
        #         return torch.tensor(tap("encoder.layers.0.output", output.numpy()))
        #
        #     handle = self.model.encoder.layers[0].register_forward_hook(hook)
        #     ... call the model, then handle.remove()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, in the model's dtype, as a copy."""
        return {name: _turned(name, parameter.detach().numpy()).copy() for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T] and its gradient with respect to each parameter."""
        seen: dict[str, Tensor] = {}  # if you don't report taps, remove this and the third argument to Gradients
        loss = self._loss(source_ids, target_ids, labels, tap=seen.setdefault)
        found = torch.autograd.grad(loss, [*self.parameters.values(), *seen.values()])
        arrays = {name: gradient.numpy() for name, gradient in zip([*self.parameters, *seen], found, strict=True)}
        of_parameters = {name: _turned(name, arrays[name]) for name in self.parameters}
        return Gradients(loss.item(), of_parameters, {name: arrays[name] for name in seen})

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, tap: Tap = no_tap) -> Tensor:
        """Return the label-smoothed cross-entropy per non-padding token."""
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
        # number of micro-batches. You may ignore it, because the step must match a step on the full batch.
        self.settings, self.step = settings, 0
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), betas=(settings.beta1, settings.beta2), eps=settings.epsilon
        )

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update."""
        self.step += 1  # the schedule starts at step 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.step, self.config.d_model)
        self.optimizer.zero_grad()
        loss = self._loss(source_ids, target_ids, labels)
        loss.backward()
        if (most := self.settings.clip_norm) is not None:
            # clip_grad_norm_ adds 1e-6 to the norm, which is visible in float64, so scale the gradients directly.
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, most / torch.nn.utils.get_total_norm(gradients).clamp(min=most))
        self.optimizer.step()
        return loss.item()

    # `parity check-distributed` compares training on multiple devices. It starts the processes the way torchrun does.
    # Each process then trains on its own rows of every batch and returns the loss, the gradient, and the weights of
    # the full run. To support it, define:
    #
    #     one_process = False  # True if one process controls all devices
    #
    #     def distribute(self, plan):
    #         if not dist.is_initialized():
    #             dist.init_process_group("gloo")
    #         self.model = DistributedDataParallel(self.model)
    #
    #     def parameters_per_device(self):  # only if you use fully_shard, which shards the parameters
    #         return [sum(parameter.to_local().numel() for parameter in self.model.parameters())]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis includes its ``eos_id``, and every later token is padding. Never generate the padding token.
        if beam_size == 1:
            return transformer_torch.greedy_search(self.model, source_ids, max_length).ids
        return transformer_torch.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _turned(name: str, array: ndarray) -> ndarray:
    """Transpose a kernel: canonical weights store [in, out], torch.nn.Linear stores [out, in]."""
    return array.T if name.endswith("kernel") else array
