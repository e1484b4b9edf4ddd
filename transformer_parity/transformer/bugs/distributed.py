"""Catalog of known bugs in distributed training.

The bugs are injected into the reference's simulation of multiple devices.

Each entry specifies a run in which the bug must be detected (a plan and a case in ``distributed.cases``), the first
comparison that must fail, and the message about this failure. The message lists the affected tensors and describes the
incorrect reduction.
"""

from __future__ import annotations

from functools import partial

from transformer_parity.transformer.bugs.bug import Bug, Edit, but, table
from transformer_parity.transformer.stages.training_stage import LOSS, WHOLE

LOOP = "for part, rng in divide(self, batch):\n"
SEEN = "            seen = self._tap(part, rng)\n"
SUM = "            total, tokens = total + part_total, tokens + part_tokens\n"
NORM = "norm = global_norm(gradient) / count"
FIRST_NORM = "step 1 norm of the gradient"
UPDATE = "        self.optimizer.update("
EACH_PART = """        whole = clip_factor(norm, settings.clip_norm)
        kept = [g.T if name.endswith("kernel") else g for name, g in gradient.items()]  # as PyTorch divides them
        for part in zip(*(np.array_split(g, self.plan.fsdp) for g in kept), strict=True):
            own = clip_factor(global_norm(dict(enumerate(part))) / count, settings.clip_norm)
            for g in part:
                g *= own / whole
"""

SPREAD = "spread(ids, micro_batches, plan.shards, trainer.model.config.pad_id)"
POSITION = "self.model.source_position"
OWN_WIDTH = "ids[:, : max(1, (ids != trainer.model.config.pad_id).any(0).sum())]"

ALONE = "shard % self.plan.shards == 0"  # True for the first shard of each micro-batch
MEANS = "(batch[2] != self.model.config.pad_id).sum() / max(int(part_tokens), 1)"  # tokens in batch / tokens in shard
BIAS = "encoder.layers.1.feed_forward.inner_proj.bias"
KEPT = '"norm." in name or name.endswith(("table", "output_proj.bias"))'  # parameters replicated over the tensor axis
NOT_REDUCED = "only shard 0 contributes: not reduced (1, 0)"
OTHER = "not a sum of the shards' gradients: rows, weights, buffers or the backward pass differ"
MASKS = "dropout masks are not drawn for the full micro-batch"
INNER = 'self.output_proj(self.dropout(inner, rng, tap, "inner"))'
DX = 'feed_forward.inner_proj.backward(x, dprojected, trace.within("inner_proj").note)'


def injected(said: str, *edits: Edit, port: str = "numpy") -> partial[Bug]:
    """Return a table entry for a bug that consists of the given edits to one backend.

    The default backend is the reference, which simulates multiple devices. ``said`` is the message that the comparison
    must report.
    """
    return but({port: [*edits]}, detail=said)


def in_loop(*lines: str) -> list[Edit]:
    """Return edits that add lines after the backward pass of each shard.

    The lines can use the variable ``shard``, which counts the shards of all micro-batches, starting at 0.
    """
    text = "".join(f"            {line}\n" for line in lines)
    counting = "for shard, (part, rng) in enumerate(divide(self, batch)):\n"
    return [("training", LOOP, counting), ("training", SUM, text + SUM)]


def each(gradient: str, *before: str) -> list[Edit]:
    """Return edits that replace the contribution of each shard to each gradient.

    Args:
        gradient: Expression for the new contribution. It can use the old contribution ``g`` and the parameter ``name``.
        *before: Lines that are executed before the expression.
    """
    return in_loop(*before, f"of_parameters = {{name: {gradient} for name, g in of_parameters.items()}}")


def scaled(factor: str, where: str = "True") -> list[Edit]:
    """Return edits that scale each shard's contribution to the gradient but not its contribution to the loss."""
    return each(f"g * factor if {where} else g", f"factor = {factor}")


def with_loss(factor: str) -> list[Edit]:
    """Return edits that scale each shard's contributions to the gradient and to the loss by the same factor."""
    return each("g * factor", f"factor = {factor}", "part_total = part_total * factor")


def run(plan: str, at: str = WHOLE, case: str = "short") -> tuple[str, str]:
    """Return a key of the table: the first comparison that must fail, and the name of the run in which it must fail."""
    return at, f"distributed/{plan}/{case}"


BUGS = table(
    {
        # With the following bugs, gradients are summed incorrectly or divided by the wrong number.
        run("data=2"): {
            "mean of means": injected(
                "all gradients: each shard divided by its own token count, then averaged: a mean of means "
                "(0.5741, 3.875)",
                *with_loss(f"{MEANS} / self.plan.shards"),
            ),
            "divided by the shard's own token count": injected(
                "all gradients: each shard divided by its own token count, then summed (1.148, 7.75)", *with_loss(MEANS)
            ),
            "averaged over the shards": injected(
                "all gradients: averaged over the shards after dividing by the number of tokens (0.5, 0.5)",
                *with_loss("1 / self.plan.shards"),
            ),
            "scaled by the number of devices": injected(
                "all gradients: scaled by the number of shards, like the loss (2, 2)", *with_loss("self.plan.shards")
            ),
            "reduced twice": injected("all gradients: reduced twice (2, 2)", *scaled("self.plan.shards")),
            "no reduction": injected(f"all gradients: {NOT_REDUCED}", *scaled(ALONE)),
            "tied embedding not reduced": injected(
                f"the gradient of source_embedding.table: {NOT_REDUCED}",
                *scaled(ALONE, 'name == "source_embedding.table"'),
            ),
            "norms not reduced": injected(
                f"the gradients of the norms: {NOT_REDUCED}", *scaled(ALONE, '"norm." in name')
            ),
            "one tensor not reduced": injected(
                f"the gradient of {BIAS}: {NOT_REDUCED}", *scaled(ALONE, f'name == "{BIAS}"')
            ),
            "reduced in float32": injected(
                "all gradients: correct except for rounding: reduced in float32",
                *each("g.astype(np.float32).astype(g.dtype)"),
            ),
            "reduced in bfloat16": injected(
                "all gradients: correct except for rounding: reduced in bfloat16",
                *each("g.astype('bfloat16').astype(g.dtype)"),
            ),
            "clipped before the sum": injected(
                "all gradients: each shard clipped by its own norm before the sum (0.005963, 0.01726)",
                *each("g * own", "own = self.settings.clip_norm / global_norm(of_parameters)"),
            ),
            # With the following bugs, devices process the wrong rows or use the wrong weights.
            "same rows on all devices": injected(
                "a step has 54 target tokens instead of 31; "
                "all gradients: all devices train on the rows of shard 0 (1.148, 0)",
                ("parallel", "ids[number, shard] for ids", "ids[number, 0] for ids"),
            ),
            "weights differ between devices": injected(
                f"all gradients: {OTHER}",
                *in_loop(),
                ("training", SEEN, f"            self.model.source_embedding.table[5] += 0.1 * (-1) ** shard\n{SEEN}"),
            ),
            "buffers differ between devices": injected(
                f"all gradients: {OTHER}",
                *in_loop(),
                (
                    "training",
                    SEEN,
                    f"            moved = type({POSITION}).vectors({POSITION}, 16) + 0.01 * (-1) ** shard\n"
                    f"            {POSITION}.vectors = lambda length, moved=moved: moved[:length]\n{SEEN}",
                ),
            ),
        },
        run("fsdp=2"): {
            "gradient averaged, but not the loss": injected(
                "all gradients: averaged over the shards after dividing by the number of tokens (0.5, 0.5)",
                *scaled("1 / self.plan.shards"),
            ),
            "averaged only in the layers": injected(
                "the gradients of the layers: averaged over the shards after dividing by the number of tokens",
                *scaled("1 / self.plan.shards", '".layers." in name'),
            ),
        },
        run("data=3"): {
            "last rows dropped": injected(
                "a step has 30 target tokens instead of 31; "
                "all gradients: missing the rows of shard 2 (1.033, 1.033, 0)",
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("ids", "ids[: len(ids) // plan.shards * plan.shards]", 1),
                ),
            ),
            "last row repeated": injected(
                "a step has 33 target tokens instead of 31; ",
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("ids", 'np.pad(ids[:-1], ((0, 2), (0, 0)), mode="edge")', 1),
                ),
            ),
        },
        run("data=8"): {
            "division by zero tokens": injected(
                "all gradients: not finite, as after dividing by the token count of a shard without tokens",
                *with_loss("1 if part_tokens else np.nan"),
            )
        },
        run("data=2", case="accumulated"): {
            "only the last micro-batch reduced": injected(
                "all gradients: correct only in the last micro-batch: earlier micro-batches are not reduced "
                "(1, 0; 1, 1)",
                *scaled("shard % self.plan.shards == 0 or shard >= self.plan.shards"),
            ),
        },
        # Wrong dropout masks.
        run("data=2", case="dropout"): {
            "all shards use the first shard's dropout masks": injected(
                MASKS, ("parallel", "rows, shard * own)", "rows, 0)")
            ),
            "each shard draws its own dropout masks": injected(
                MASKS, ("parallel", 'trainer.dropout == "local"', "True")
            ),
            "each shard trimmed to its own longest sequence": injected(
                MASKS,
                (
                    "parallel",
                    "yield [ids[number, shard] for ids in parts]",
                    f"own = [ids[number, shard] for ids in parts]\n        yield [{OWN_WIDTH} for ids in own]",
                ),
            ),
            "batch divided into shards before micro-batches": injected(
                MASKS,
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("micro_batches, plan.shards", "plan.shards, micro_batches") + ".swapaxes(0, 1)",
                ),
            ),
        },
        # The following bugs clip the gradient or update the weights incorrectly.
        run("data=2", FIRST_NORM): {
            "clipped by the norm of one shard's contribution": injected(
                "its norm is 0.829897 times the expected norm: the norm of the contribution of shard 0 only",
                *in_loop("own = global_norm(of_parameters) if shard == 0 else own"),
                (
                    "training",
                    "        return total, tokens, gradient\n",
                    "        self.own = own\n        return total, tokens, gradient\n",
                ),
                ("training", NORM, "norm = self.own / count"),
            ),
            "norm includes every replica": injected(
                "its norm is 1.41421 times the expected norm: every tensor is included 2 times",
                ("training", NORM, f"{NORM} * self.plan.shards**0.5"),
            ),
        },
        run("tensor=2", FIRST_NORM): {
            "norm includes replicated tensors twice": injected(
                "tensors that are replicated on 2 devices are included 2 times",
                (
                    "training",
                    NORM,
                    f"whole = {{name: g for name, g in gradient.items() if {KEPT}}}\n"
                    "        norm = (global_norm(gradient) ** 2 + global_norm(whole) ** 2) ** 0.5 / count",
                ),
            ),
        },
        run("fsdp=2", FIRST_NORM): {
            "norm of one shard": injected(
                "the gradient is correct, but its norm is 0.742859 times the expected norm: the norm of one shard only",
                (
                    "training",
                    NORM,
                    "norm = global_norm({name: g[: len(g) // 2] for name, g in gradient.items()}) / count",
                ),
            )
        },
        run("fsdp=2", f"step 2 {LOSS}"): {
            "clipped by the norm of each shard": injected(
                "the first gradient and its norm are correct: later steps differ, as with this bug: clipped by the "
                "norm of each shard",
                ("training", UPDATE, f"{EACH_PART}{UPDATE}"),
            ),
        },
        run("data=2", f"step 2 {LOSS}"): {
            "learning rate multiplied by the number of devices": injected(
                "the first gradient and its norm are correct: later steps differ",
                ("training", "settings.learning_rate(self.step", "self.plan.shards * settings.learning_rate(self.step"),
            ),
            # This happens if the training loop doesn't pass the epoch to a distributed sampler.
            "every step uses the rows of the first step": injected(
                "later steps differ, as with this bug: every step uses the rows of the first step",
                (
                    "parallel",
                    "    parts = [spread(",
                    '    batch = vars(trainer).setdefault("first_batch", batch)\n    parts = [spread(',
                ),
            ),
        },
        # Wrong tensor parallelism.
        run("tensor=2"): {
            "bias added by each device": injected(
                f"all gradients: {OTHER}", ("feed_forward", INNER, f"{INNER} + self.output_proj.bias")
            ),
            "gradient of the input not reduced": injected(
                OTHER,
                (
                    "backward",
                    f"return {DX}",
                    f"kernel = feed_forward.inner_proj.kernel\n    half = kernel.shape[1] // 2\n    {DX}\n"
                    "    return dprojected[..., :half] @ kernel[:, :half].T",
                ),
            ),
        },
        run("tensor=2", f"step 1 {LOSS}"): {
            "full logits treated as a shard": injected(
                "the gradient is correct, but the loss is off by +0.6931 = log(tensor)",
                ("training", "StepResult(total / count,", "StepResult(total / count + np.log(self.plan.tensor),"),
            ),
        },
        # The following bugs shard parameters or save checkpoints incorrectly.
        run("fsdp=2", "sharding"): {
            "no parameter sharded": injected(
                "a device must store about 50% of all parameter elements: a device stores 100%",
                ("parallel", "if axis is not None:", "if False:"),
            ),
        },
        run("tensor=2", "sharding"): {
            "heads not sharded": injected(
                "tensor=2 must shard encoder.layers.0.self_attention.query_proj.kernel: each device stores the full "
                "parameter",
                ("parallel", "(tensor_axis(name), plan.tensor, place[2])", "(None, 1, 0)"),
            ),
        },
        run("fsdp=2", "step 2 first moment source_embedding.table"): {
            "one shard saved as the full tensor": injected(
                "every step is correct, but the state gathered from the devices is not",
                (
                    "training",
                    "first = {name: array.copy() for",
                    "first = {name: np.resize(array[: len(array) // 2], array.shape) for",
                ),
            ),
        },
        run("data=2", f"step 4 {LOSS}", "resumed"): {
            "moments lost": injected(
                "the state from which the run resumes was not fully restored",
                ("training", "self.optimizer.second_moment[name][...] = state.second_moment[name]", "pass"),
            ),
            "step lost": injected(
                "the state from which the run resumes was not fully restored",
                ("training", "self.step, self.seed = state.step, state.seed", "self.seed = state.seed"),
            ),
        },
    }
)
