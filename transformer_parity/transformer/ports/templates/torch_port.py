"""A port: a class through which `parity` runs your model and compares the results with the NumPy reference.

This template already agrees with the reference, because its placeholder is a correct model. To check your own model:

1. Replace the placeholder in both `load` and `forward`, which must use the same model. Set `taps` to the names of the
   intermediate values that your `forward` reports, or to `()` if it reports none. Delete all other methods for now,
   because they still use the placeholder.
2. Check only the forward pass, and fix your port until it agrees with the reference:

       parity check --port my_port:MyPort --stage activations

3. Add `export_weights`, `gradients`, `start_training`, `train_step`, and `generate`. Then check all methods, using
   either `parity` or pytest:

       parity check --port my_port:MyPort
       pytest --parity-port=my_port:MyPort

All methods take and return NumPy arrays. In shapes, B is the batch size, S is the source length, T is the target
length, and V is the size of the target vocabulary.
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

    # The preset that your model follows (`parity info` lists all presets), and the config fields in which your model
    # differs from the preset, for example {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. `parity` checks a small
    # model unless you also set the sizes of your model here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # The dtypes that your model supports. In float64, rounding errors are far smaller than the effect of any bug. If
    # you remove float64, the check can't distinguish bugs from rounding errors.
    dtypes = ("float64", "float32")
    # Patterns for the names of the taps (named intermediate values) that `forward` reports. `parity info --names` lists
    # all names. "**" matches every name, and "**.scores" matches every name that ends in ".scores". If `forward`
    # doesn't report any taps, set this to `()`.
    taps = ("**",)
    # The test cases that your model doesn't support, and the reason for each of them, for example
    # {"full/one_token": "needs at least two tokens"}. The report lists these cases as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, load the given weights, and put the model in inference mode."""
        self.config = config
        self.model = transformer_torch.Transformer(config, dtype)
        self.model.eval()  # turn dropout off
        # A dict from canonical names to the model's parameters. All methods use this dict. To list the names, run
        # `parity info --names`. The placeholder's parameters already have the canonical names. For your model, write
        # {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. List a tied embedding
        # matrix only once. If one parameter stores multiple projections, load each projection into a view, such as
        # blocks[0].qkv.weight[:d], and split the parameter's gradient in the same way.
        self.parameters = parameters(self.model)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.tensor(_turned(name, weights[name])))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], both padded with ``pad_id``."""
        # If your model takes masks as arguments, compute the masks from the IDs. In the placeholder's masks, True means
        # that a position may be attended to. Some libraries, such as torch.nn, use the opposite convention.
        # If your model doesn't take a `tap` argument, call `tap` here for all intermediate values that you can access,
        # for example tap("encoder.output", memory).
        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        with torch.inference_mode():
            if tap is no_tap:
                return self.model(source, target).numpy()  # run the model as in normal use
            return self.model(source, target, tap=lambda name, value: torch.tensor(tap(name, value.numpy()))).numpy()
        # If your model doesn't take a `tap` argument, you can also call `tap` in forward hooks. The return value of a
        # hook replaces the output of its module:
        #
        #     def hook(module, inputs, output):
        #         return torch.tensor(tap("encoder.layers.0.output", output.numpy()))
        #
        #     handle = self.model.encoder.layers[0].register_forward_hook(hook)
        #     ... call the model, then handle.remove()

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return a dict from canonical names to copies of all parameters, in the model's dtype."""
        return {name: _turned(name, parameter.detach().numpy()).copy() for name, parameter in self.parameters.items()}

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the loss for labels [B, T], and the gradient of the loss with respect to each parameter."""
        seen: dict[str, Tensor] = {}  # if you don't report taps, remove `seen` everywhere
        loss = self._loss(source_ids, target_ids, labels, tap=seen.setdefault)
        found = torch.autograd.grad(loss, [*self.parameters.values(), *seen.values()])
        arrays = {name: gradient.numpy() for name, gradient in zip([*self.parameters, *seen], found, strict=True)}
        of_parameters = {name: _turned(name, arrays[name]) for name in self.parameters}
        return Gradients(loss.item(), of_parameters, {name: arrays[name] for name in seen})

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, tap: Tap = no_tap) -> Tensor:
        """Return the label-smoothed cross-entropy, averaged over the non-padding labels."""
        logits = self.model(torch.tensor(source_ids), torch.tensor(target_ids), tap=tap)
        return F.cross_entropy(
            logits.flatten(0, 1),
            torch.tensor(labels).flatten(),
            ignore_index=self.config.pad_id,
            label_smoothing=self.config.label_smoothing,
        )

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer."""
        # settings.clip_norm is the maximum norm of the gradient of all parameters; None disables clipping.
        # settings.accumulation_steps is the number of micro-batches. You may ignore accumulation_steps and process the
        # batch all at once, because the results must be the same.
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
            # Don't use clip_grad_norm_. It adds 1e-6 to the norm, which causes a visible error in float64.
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, most / torch.nn.utils.get_total_norm(gradients).clamp(min=most))
        self.optimizer.step()
        return loss.item()

    # `parity check-distributed` trains your model on multiple devices and compares the results with the reference's
    # results. It starts processes with the same environment variables as torchrun. Every process receives the full
    # batch, trains on its shard of the rows, and returns the results of the full batch: the loss, the gradient, and the
    # unsharded weights. To support this check, define:
    #
    #     one_process = False  # True if one process controls all devices
    #
    #     def distribute(self, plan):
    #         if not dist.is_initialized():
    #             dist.init_process_group("gloo")
    #         self.model = DistributedDataParallel(self.model)
    #
    #     def parameters_per_device(self):  # required only if you shard the parameters, for example with fully_shard
    #         return [sum(parameter.to_local().numel() for parameter in self.model.parameters())]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, padded and without the BOS token."""
        # A hypothesis ends with ``eos_id`` or after ``max_length`` tokens. Pad shorter hypotheses with ``pad_id``. The
        # search itself must never choose the padding token.
        if beam_size == 1:
            return transformer_torch.greedy_search(self.model, source_ids, max_length).ids
        return transformer_torch.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _turned(name: str, array: ndarray) -> ndarray:
    """Transpose kernels, because canonical kernels are [in, out], and the weights of torch.nn.Linear are [out, in]."""
    return array.T if name.endswith("kernel") else array
