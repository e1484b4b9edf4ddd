"""The stages of a comparison. Each of them runs a model on a batch, and returns tensors that are compared by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy import ndarray

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.compare.names import Names
from transformer_parity.pairs.contract.arrays import OUTPUT
from transformer_parity.pairs.contract.implementation import Arrays
from transformer_parity.pairs.run.messages import Ran
from transformer_parity.pairs.run.side import RunError, Side, SideModel

FORWARD, GRADIENTS, DECODE, CACHED = "forward", "gradients", "decode", "cached decode"
NEEDS = {FORWARD: "forward", GRADIENTS: "gradients", DECODE: "next_logits", CACHED: "next_logits_cached"}
STEPS = 6  # number of tokens that a decoding stage generates


def plain_name(name: str) -> str:
    """Return the name of a tensor without the prefix of outputs."""
    return name.removeprefix(OUTPUT)


@dataclass
class Runs:
    """Runs models of both implementations. Results are returned under the original's names, with its axes.

    Attributes:
        batches: The inputs, one batch per seed.
        names: The correspondence of the taps.
        port: The port, whose tensors are renamed.
        prefixes: The tokens that the original generates from each batch.
        shapes: The shapes of the original's tensors.
        port_shapes: The shapes of the port's tensors, under the port's names.
        modified: The inputs that an implementation modified, as descriptions.
    """

    batches: Sequence[Arrays]
    names: Names
    port: Side
    prefixes: dict[int, ndarray] = field(default_factory=dict)
    shapes: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    port_shapes: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    modified: dict[str, None] = field(default_factory=dict)

    def forward(self, model: SideModel, batch: int, given: Arrays | None = None) -> Tensors:
        """Return all taps of a forward pass that have a counterpart, and the outputs.

        Args:
            model: A model of one of the implementations.
            batch: The number of the batch.
            given: The tensors that replace the values of taps.
        """
        is_port = model.side is self.port
        if given and is_port:
            given = self.names.to_port(given, self.port_shapes[batch])
        ran = model.forward(self.batches[batch], given)
        self._note(model, ran, "forward")
        if not is_port:
            taps = {name: value for name, value in ran.taps.items() if name in self.names.all}
        else:
            self.port_shapes[batch] = {name: value.shape for name, value in ran.taps.items()}
            taps, unfit = self.names.to_original(ran.taps, self.shapes[batch])
            for name, why in unfit.items():
                if name in self.names.declared and (text := f"names: {name!r}: {why}") not in self.names.problems:
                    self.names.problems.append(text)
        found = {**taps, **{OUTPUT + name: value for name, value in ran.outputs.items()}}
        if not is_port:
            self.shapes[batch] = {name: value.shape for name, value in found.items()}
        return found

    def gradients(self, model: SideModel, batch: int) -> Tensors:
        """Return the gradients of the loss."""
        ran = model.gradients(self.batches[batch])
        self._note(model, ran, "gradients")
        return ran.outputs

    def decode(self, model: SideModel, batch: int, cached: bool = False) -> Tensors:
        """Return the logits of every decoding step, for the tokens that the original generates.

        Raises:
            RunError: If the logits don't have the shape [B, V].
        """
        prefix = self.prefixes.get(batch)
        found: Tensors = {}
        tokens = np.zeros((0, 0), np.int64) if prefix is None else prefix[:, :0]
        if prefix is None:
            rows = {array.shape[0] for array in self.batches[batch].values() if array.ndim}
            tokens = np.zeros((max(rows, default=1), 0), np.int64)
        for step in range(STEPS):
            logits = model.next_logits(self.batches[batch], tokens, cached)
            if logits.ndim != 2 or len(logits) != len(tokens) or not logits.size:
                raise RunError(
                    f"the logits of a decoding step must have the shape [{len(tokens)}, V]: got {list(logits.shape)}"
                )
            found[f"{'next_logits_cached' if cached else 'next_logits'}[{step}]"] = logits
            chosen = logits.argmax(1)[:, None] if prefix is None else prefix[:, step : step + 1]
            tokens = np.concatenate([tokens, chosen], 1)
        if prefix is None:
            self.prefixes[batch] = tokens
        return found

    def run(self, stage: str, model: SideModel, batch: int, inputs: Arrays | None = None) -> Tensors:
        """Return the tensors of a stage, for different inputs of the same shapes if they are given."""
        if inputs is not None:
            batches = [*self.batches[:batch], inputs, *self.batches[batch + 1 :]]
            return replace(self, batches=batches).run(stage, model, batch)
        if stage == FORWARD:
            return self.forward(model, batch)
        if stage == GRADIENTS:
            return self.gradients(model, batch)
        return self.decode(model, batch, stage == CACHED)

    def _note(self, model: SideModel, ran: Ran, method: str) -> None:
        for name in ran.modified:
            self.modified[f"{model.side.name}.{method}() modifies its input {name!r}"] = None
