"""Known mistakes of training on several devices in PyTorch, where each process has a copy, or a part, of its own."""

from __future__ import annotations

from functools import partial

from transformer_parity.mistakes.distributed import BIAS, FIRST_NORM, MASKS, OTHER, run
from transformer_parity.mistakes.mistake import Edit, Mistake, but, table

REDUCED = "dist.all_reduce(bucket.buffer(), group=group, async_op=True)"
SUMMED = "return future.then(lambda done: done.value()[0])"
FACTOR = "module.set_gradient_divide_factor(1.0)"
COPIED = "parameter.data.copy_(distribute_tensor(parameter.data, whole, [Replicate()] * whole.ndim).to_local())"
COPIES = "copies = DistributedDataParallel(model,"
OF_SHARE = "total, _ = self._loss(self.share.module, part, config)"
DIVIDED = "            loss = total / tokens.clamp(min=1)\n"
NORM = "norm = global_norm(gradient)"


def planted(said: str, *edits: Edit) -> partial[Mistake]:
    """Return a mistake of a process, and what has to be said of it."""
    return but({"torch": [*edits]}, detail=said)


ALONE = " alone: not reduced"  # of either share: each process has its own

MISTAKES = table(
    {
        run("data=2"): {
            "the engine's own mean": planted(
                "all gradients: averaged over the shares after the division by the number of tokens (0.5, 0.5)",
                ("parallel", SUMMED, f"{SUMMED[:-1]} / group.size())"),
            ),
            "mean of means": planted(
                "all gradients: each share divided by its own tokens, then averaged: a mean of means (0.5741, 3.875)",
                ("training", OF_SHARE, OF_SHARE.replace("_", "own", 1)),
                ("training", DIVIDED, DIVIDED.replace("tokens.clamp(min=1)", "own.clamp(min=1) / self.plan.shares")),
            ),
            "reduced twice": planted(
                "all gradients: reduced twice (2, 2)", ("parallel", SUMMED, f"{SUMMED[:-1]} * group.size())")
            ),
            "no reduction": planted(
                ALONE,
                ("parallel", REDUCED, REDUCED.replace("buffer()", "buffer().clone()")),
                ("parallel", SUMMED, "return future.then(lambda done: bucket.buffer())"),
            ),
            "past the engine": planted(ALONE, ("training", OF_SHARE, OF_SHARE.replace("share.module", "model"))),
            "one tensor left out": planted(
                f"the gradient of {BIAS}: that of share ",
                (
                    "parallel",
                    COPIES,
                    "ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model\n"
                    f'        ignore(model, ["{BIAS}"])\n        {COPIES}',
                ),
            ),
            "reduced in float32": planted(
                "all gradients: right but for rounding, reduced in float32",
                ("parallel", REDUCED, REDUCED.replace("buffer()", "buffer().copy_(bucket.buffer().float())")),
            ),
            "same rows everywhere": planted(
                "all gradients: the rows of share 0 on all devices (2, 0)",
                ("parallel", "[:, self.index, :, 0]", "[:, 0, :, 0]"),
            ),
            "other weights": planted(
                OTHER,
                ("parallel", COPIED, "parameter.data.add_(0.01 * dist.get_rank())"),
                ("parallel", COPIES, f"{COPIES} init_sync=False,"),
            ),
        },
        run("fsdp=2"): {
            "averaged in the layers": planted(
                "the gradients of the layers: averaged over the shares after the division by the number of tokens",
                ("parallel", FACTOR, f"{FACTOR} if module is model else None"),
            ),
        },
        run("data=2", case="dropout"): {
            "masks of the first share": planted(
                MASKS, ("parallel", "(self.index * own.shape[1], len", "(0 * own.shape[1], len")
            ),
        },
        run("data=2", FIRST_NORM): {
            "norm counts copies": planted(
                "its norm 1.41421 times what it should be: every tensor counts 2 times",
                ("training", NORM, f"{NORM} * self.plan.shares**0.5"),
            ),
        },
        run("fsdp=2", FIRST_NORM): {
            "norm of the own part": planted(
                "times what it should be: that of a part alone",
                ("training", NORM, "norm = global_norm([g.to_local() for g in gradient])"),
            ),
        },
    }
)
APART = ("no reduction", "past the engine", "one tensor left out", "other weights")  # copies
