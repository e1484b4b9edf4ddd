"""My port, as `parity` sees it. It agrees as it stands: replace the stand-in by your own model, method by method.

    parity check --port my_port:MyPort
    pytest --parity-port=my_port:MyPort

NumPy arrays go in and come out. B batch, S source length, T target length, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from numpy import ndarray
from torch import Tensor

import transformer_torch  # the stand-in
from reference_numpy import TransformerConfig
from transformer_parity.plugin import Gradients, Port, Tap, TrainingConfig, no_tap
from transformer_torch.weights import parameters


class MyPort(Port):
    """My model."""

    # The published conventions that your model follows (`parity info` lists them), and where it differs: for instance
    # {"norm_order": "pre", "layer_norm_epsilon": 1e-5}. Sizes are small ones, unless you give others here.
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    # In float64, rounding is far below any mistake: without it, a wrong convention looks like a loss of precision.
    dtypes = ("float64", "float32")
    # Names as in `parity info --names`; "**.scores" is every name that ends so. Leave out what you cannot show.
    taps = ("**",)
    # Cases that your model is not made for, and why: {"full/one_token": "it needs two tokens"}. They count as skipped.
    left_out: Mapping[str, str] = {}

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, in inference mode, with the given weights."""
        self.config = config
        self.model = transformer_torch.Transformer(config, dtype)
        self.model.eval()  # or dropout goes on
        # One table serves all methods: canonical name -> parameter. The stand-in's attributes have the canonical names;
        # yours may read {"encoder.layers.0.feed_forward.inner_proj.kernel": model.blocks[0].fc1.weight, ...}. A tied
        # table stands in it once. Of a fused projection, name the rows: views such as blocks[0].qkv.weight[:d] can be
        # copied into, and its gradient is cut into the same pieces.
        self.parameters = parameters(self.model)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.tensor(_turned(name, weights[name])))

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source ids [B, S] and target ids [B, T], both padded with ``pad_id``."""
        # Derive the masks from the ids. Here True means that a position may be attended to; torch.nn and others mean
        # the opposite. With other names or none in your model, show what you have: tap("encoder.output", memory).
        source, target = torch.tensor(source_ids), torch.tensor(target_ids)
        with torch.inference_mode():
            if tap is no_tap:
                return self.model(source, target).numpy()  # as users run it
            return self.model(source, target, tap=lambda name, value: torch.tensor(tap(name, value.numpy()))).numpy()
        # A model without a tap argument is tapped by forward hooks; what a hook returns replaces the module's output:
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
        """Return the loss and its gradient at each parameter, of labels [B, T]."""
        seen: dict[str, Tensor] = {}  # without taps, leave it and the third argument out
        loss = self._loss(source_ids, target_ids, labels, tap=seen.setdefault)
        found = torch.autograd.grad(loss, [*self.parameters.values(), *seen.values()])
        arrays = {name: gradient.numpy() for name, gradient in zip([*self.parameters, *seen], found, strict=True)}
        of_parameters = {name: _turned(name, arrays[name]) for name in self.parameters}
        return Gradients(loss.item(), of_parameters, {name: arrays[name] for name in seen})

    def _loss(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray, tap: Tap = no_tap) -> Tensor:
        """Return the label-smoothed cross-entropy per token that is no padding."""
        logits = self.model(torch.tensor(source_ids), torch.tensor(target_ids), tap=tap)
        return F.cross_entropy(
            logits.flatten(0, 1),
            torch.tensor(labels).flatten(),
            ignore_index=self.config.pad_id,
            label_smoothing=self.config.label_smoothing,
        )

    def start_training(self, settings: TrainingConfig) -> None:
        """Make an Adam optimizer."""
        # settings.clip_norm is the largest norm of the whole gradient, or None. settings.accumulation_steps is in how
        # many slices a batch may be computed; the step is that of the whole batch.
        self.settings, self.step = settings, 0
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), betas=(settings.beta1, settings.beta2), eps=settings.epsilon
        )

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step, still without dropout, and return the loss before it."""
        self.step += 1  # the schedule counts from 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate(self.step, self.config.d_model)
        self.optimizer.zero_grad()
        loss = self._loss(source_ids, target_ids, labels)
        loss.backward()
        if (most := self.settings.clip_norm) is not None:  # clip_grad_norm_ adds 1e-6, which shows in float64
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(gradients, most / torch.nn.utils.get_total_norm(gradients).clamp(min=most))
        self.optimizer.step()
        return loss.item()

    # `parity check-distributed` compares training on several devices, in processes that it starts like torchrun.
    # Then each process reads only its rows of every batch, and returns loss, gradient and weights of all. It needs:
    #
    #     one_process = False  # whether one process has all devices
    #
    #     def distribute(self, plan):
    #         if not dist.is_initialized():
    #             dist.init_process_group("gloo")
    #         self.model = DistributedDataParallel(self.model)
    #
    #     def parameters_per_device(self):  # for fully_shard, which divides parameters
    #         return [sum(parameter.to_local().numel() for parameter in self.model.parameters())]

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], without the start symbol, padded."""
        # After ``eos_id``, which belongs to the hypothesis, come pads only. The padding symbol is never chosen.
        if beam_size == 1:
            return transformer_torch.greedy_search(self.model, source_ids, max_length).ids
        return transformer_torch.beam_search(self.model, source_ids, beam_size, length_penalty, max_length).ids


def _turned(name: str, array: ndarray) -> ndarray:
    """Return an array the other way round if it is a kernel: [in, out] here, [out, in] in torch.nn.Linear."""
    return array.T if name.endswith("kernel") else array
