"""A trainer that uses DistributedDataParallel, and a port for comparing two processes with one process.

parity check-distributed --port ddp_port:MyPort
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import transformer_torch  # replace with your model
from transformer_parity.plugin import Gradients, Port
from transformer_torch.weights import copy_out, parameters

# --- The trainer, as in a script for torchrun, without any code for the comparison ---


class MyTrainer:
    """A trainer that minimizes the mean loss over the target tokens of all processes."""

    def __init__(self, model, config, settings):
        self.model = DistributedDataParallel(model)
        self.config, self.settings, self.step = config, settings, 0
        betas = settings.beta1, settings.beta2
        self.optimizer = torch.optim.Adam(model.parameters(), betas=betas, eps=settings.epsilon)

    def backward(self, source, target, labels):
        """Store the gradient of the loss in the parameters, and return the loss."""
        tokens = (labels != self.config.pad_id).sum()
        dist.all_reduce(tokens)
        total = F.cross_entropy(
            self.model(source, target).flatten(0, 1),
            labels.flatten(),
            ignore_index=self.config.pad_id,
            label_smoothing=self.config.label_smoothing,
            reduction="sum",
        )
        self.optimizer.zero_grad()
        (total / tokens * dist.get_world_size()).backward()  # DistributedDataParallel averages the gradients.
        loss = total.detach() / tokens
        dist.all_reduce(loss)
        return loss

    def train_step(self, source, target, labels):
        """Take one training step, and return the loss."""
        loss = self.backward(source, target, labels)
        self.step += 1
        gradient = [parameter.grad for parameter in self.model.parameters()]
        largest = self.settings.clip_norm
        torch._foreach_mul_(gradient, largest / torch.nn.utils.get_total_norm(gradient).clamp(min=largest))
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate(self.step, self.config.d_model)
        self.optimizer.step()
        return loss


# --- The port ---


class MyPort(Port):
    """A port of the model and the trainer. It returns the loss and the gradient for all processes' rows."""

    def load(self, config, weights, dtype):
        """Build the model in each process."""
        self.config, self.model = config, transformer_torch.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        """Return the logits."""
        return self.model(torch.tensor(source_ids), torch.tensor(target_ids)).detach().numpy()

    def export_weights(self):
        """Return the full array of every parameter."""
        return {name: copy_out(name, parameter) for name, parameter in parameters(self.model).items()}

    def distribute(self, plan):
        """Create the process group, as the training script does under torchrun."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def start_training(self, settings):
        """Create the trainer."""
        self.trainer = MyTrainer(self.model, self.config, settings)

    def gradients(self, *batch):
        """Return the loss and the gradient of the full batch."""
        loss = self.trainer.backward(*self._own_rows(batch))
        return Gradients(loss.item(), {name: copy_out(name, p.grad) for name, p in parameters(self.model).items()})

    def train_step(self, *batch):
        """Take one training step, and return the loss of the full batch."""
        return self.trainer.train_step(*self._own_rows(batch)).item()

    def _own_rows(self, batch):
        return [torch.tensor(ids[dist.get_rank() :: dist.get_world_size()]) for ids in batch]
