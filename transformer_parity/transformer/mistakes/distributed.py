"""Known mistakes of training on several devices, as data, planted in the reference's simulation.

Each has the run that shows it (plan and case of ``distributed.cases``), the first comparison that fails, and what is
said of it: which tensors, and which reduction.
"""

from __future__ import annotations

from functools import partial

from transformer_parity.transformer.mistakes.mistake import Edit, Mistake, but, table
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

SPREAD = "spread(ids, slices, plan.shares, trainer.model.config.pad_id)"
POSITION = "self.model.source_position"
OWN_WIDTH = "ids[:, : max(1, (ids != trainer.model.config.pad_id).any(0).sum())]"

ALONE = "share % self.plan.shares == 0"  # that of the first share alone
MEANS = "(batch[2] != self.model.config.pad_id).sum() / max(int(part_tokens), 1)"  # of the tokens of each share
BIAS = "encoder.layers.1.feed_forward.inner_proj.bias"
KEPT = '"norm." in name or name.endswith(("table", "output_proj.bias"))'  # what tensor leaves whole
NOT_REDUCED = "that of share 0 alone: not reduced (1, 0)"
OTHER = "no sum of what the shares contribute: other rows, weights or buffers, or another backward pass"
MASKS = "masks of dropout that are not drawn for the whole slice"
INNER = 'self.output_proj(self.dropout(inner, rng, tap, "inner"))'
DX = 'feed_forward.inner_proj.backward(x, dprojected, trace.within("inner_proj").note)'


def planted(said: str, *edits: Edit, port: str = "numpy") -> partial[Mistake]:
    """Return a mistake of the simulation, or of a port, and what has to be said of it."""
    return but({port: [*edits]}, detail=said)


def in_loop(*lines: str) -> list[Edit]:
    """Return edits that run lines after the backward pass of each share; ``share`` counts through all slices."""
    text = "".join(f"            {line}\n" for line in lines)
    counting = "for share, (part, rng) in enumerate(divide(self, batch)):\n"
    return [("training", LOOP, counting), ("training", SUM, text + SUM)]


def each(gradient: str, *before: str) -> list[Edit]:
    """Return edits that replace ``g``, what a share contributes to the gradient of ``name``."""
    return in_loop(*before, f"of_parameters = {{name: {gradient} for name, g in of_parameters.items()}}")


def scaled(factor: str, where: str = "True") -> list[Edit]:
    """Return edits that scale what a share contributes, and leave the loss as it is."""
    return each(f"g * factor if {where} else g", f"factor = {factor}")


def with_loss(factor: str) -> list[Edit]:
    """Return edits that scale what a share contributes, and its loss."""
    return each("g * factor", f"factor = {factor}", "part_total = part_total * factor")


def run(plan: str, at: str = WHOLE, case: str = "short") -> tuple[str, str]:
    """Return the comparison that fails, and the run in which it does."""
    return at, f"distributed/{plan}/{case}"


MISTAKES = table(
    {
        # What is summed, and what it is divided by.
        run("data=2"): {
            "mean of means": planted(
                "all gradients: each share divided by its own tokens, then averaged: a mean of means (0.5741, 3.875)",
                *with_loss(f"{MEANS} / self.plan.shares"),
            ),
            "own tokens": planted(
                "all gradients: each share divided by its own tokens, then summed (1.148, 7.75)", *with_loss(MEANS)
            ),
            "averaged": planted(
                "all gradients: averaged over the shares after the division by the number of tokens (0.5, 0.5)",
                *with_loss("1 / self.plan.shares"),
            ),
            "scaled by the devices": planted(
                "all gradients: scaled by the number of shares, as is the loss (2, 2)", *with_loss("self.plan.shares")
            ),
            "reduced twice": planted("all gradients: reduced twice (2, 2)", *scaled("self.plan.shares")),
            "no reduction": planted(f"all gradients: {NOT_REDUCED}", *scaled(ALONE)),
            "tied table not reduced": planted(
                f"the gradient of source_embedding.table: {NOT_REDUCED}",
                *scaled(ALONE, 'name == "source_embedding.table"'),
            ),
            "norms not reduced": planted(
                f"the gradients of the norms: {NOT_REDUCED}", *scaled(ALONE, '"norm." in name')
            ),
            "one tensor not reduced": planted(
                f"the gradient of {BIAS}: {NOT_REDUCED}", *scaled(ALONE, f'name == "{BIAS}"')
            ),
            "reduced in float32": planted(
                "all gradients: right but for rounding, reduced in float32",
                *each("g.astype(np.float32).astype(g.dtype)"),
            ),
            "reduced in bfloat16": planted(
                "all gradients: right but for rounding, reduced in bfloat16",
                *each("g.astype('bfloat16').astype(g.dtype)"),
            ),
            "clipped before the sum": planted(
                "all gradients: each share clipped by its own norm before the sum (0.005963, 0.01726)",
                *each("g * own", "own = self.settings.clip_norm / global_norm(of_parameters)"),
            ),
            # Which rows and which weights a share has.
            "same rows everywhere": planted(
                "a step counts 54 target tokens, not 31; all gradients: the rows of share 0 on all devices (1.148, 0)",
                ("parallel", "ids[number, share] for ids", "ids[number, 0] for ids"),
            ),
            "other weights": planted(
                f"all gradients: {OTHER}",
                *in_loop(),
                ("training", SEEN, f"            self.model.source_embedding.table[5] += 0.1 * (-1) ** share\n{SEEN}"),
            ),
            "buffers apart": planted(
                f"all gradients: {OTHER}",
                *in_loop(),
                (
                    "training",
                    SEEN,
                    f"            moved = type({POSITION}).vectors({POSITION}, 16) + 0.01 * (-1) ** share\n"
                    f"            {POSITION}.vectors = lambda length, moved=moved: moved[:length]\n{SEEN}",
                ),
            ),
        },
        run("fsdp=2"): {
            "averaged, but the loss": planted(
                "all gradients: averaged over the shares after the division by the number of tokens (0.5, 0.5)",
                *scaled("1 / self.plan.shares"),
            ),
            "averaged in the layers": planted(
                "the gradients of the layers: averaged over the shares after the division by the number of tokens",
                *scaled("1 / self.plan.shares", '".layers." in name'),
            ),
        },
        run("data=3"): {
            "last rows dropped": planted(
                "a step counts 30 target tokens, not 31; all gradients: without the rows of share 2 (1.033, 1.033, 0)",
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("ids", "ids[: len(ids) // plan.shares * plan.shares]", 1),
                ),
            ),
            "last row repeated": planted(
                "a step counts 33 target tokens, not 31; ",
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("ids", 'np.pad(ids[:-1], ((0, 2), (0, 0)), mode="edge")', 1),
                ),
            ),
        },
        run("data=8"): {
            "divided by no tokens": planted(
                "all gradients: not finite, as after a division by the tokens of a share that has none",
                *with_loss("1 if part_tokens else np.nan"),
            )
        },
        run("data=2", case="accumulated"): {
            "last slice alone reduced": planted(
                "all gradients: right in the last slice only: the slices before are not reduced (1, 0; 1, 1)",
                *scaled("share % self.plan.shares == 0 or share >= self.plan.shares"),
            ),
        },
        # What is dropped.
        run("data=2", case="dropout"): {
            "masks of the first share": planted(MASKS, ("parallel", "rows, share * own)", "rows, 0)")),
            "masks of each share's own": planted(MASKS, ("parallel", 'trainer.dropout == "local"', "True")),
            "each share as wide as its own longest sentence": planted(
                MASKS,
                (
                    "parallel",
                    "yield [ids[number, share] for ids in parts]",
                    f"own = [ids[number, share] for ids in parts]\n        yield [{OWN_WIDTH} for ids in own]",
                ),
            ),
            "shares before slices": planted(
                MASKS,
                (
                    "parallel",
                    SPREAD,
                    SPREAD.replace("slices, plan.shares", "plan.shares, slices") + ".swapaxes(0, 1)",
                ),
            ),
        },
        # What is clipped, and what is updated.
        run("data=2", FIRST_NORM): {
            "clipped by a share's norm": planted(
                "its norm 0.829897 times what it should be: that of share 0 alone",
                *in_loop("own = global_norm(of_parameters) if share == 0 else own"),
                (
                    "training",
                    "        return total, tokens, gradient\n",
                    "        self.own = own\n        return total, tokens, gradient\n",
                ),
                ("training", NORM, "norm = self.own / count"),
            ),
            "norm counts copies": planted(
                "its norm 1.41421 times what it should be: every tensor counts 2 times",
                ("training", NORM, f"{NORM} * self.plan.shares**0.5"),
            ),
        },
        run("tensor=2", FIRST_NORM): {
            "norm counts whole tensors twice": planted(
                "what each of 2 devices has whole counts 2 times",
                (
                    "training",
                    NORM,
                    f"whole = {{name: g for name, g in gradient.items() if {KEPT}}}\n"
                    "        norm = (global_norm(gradient) ** 2 + global_norm(whole) ** 2) ** 0.5 / count",
                ),
            ),
        },
        run("fsdp=2", FIRST_NORM): {
            "norm of one part": planted(
                "the gradient is right, its norm 0.742859 times what it should be: that of a part alone",
                (
                    "training",
                    NORM,
                    "norm = global_norm({name: g[: len(g) // 2] for name, g in gradient.items()}) / count",
                ),
            )
        },
        run("fsdp=2", f"step 2 {LOSS}"): {
            "clipped by the norm of each part": planted(
                "the first gradient and its norm are right: what follows differs, as by this mistake: clipped by the "
                "norm of each part",
                ("training", UPDATE, f"{EACH_PART}{UPDATE}"),
            ),
        },
        run("data=2", f"step 2 {LOSS}"): {
            "learning rate times devices": planted(
                "the first gradient and its norm are right: what follows differs",
                ("training", "settings.learning_rate(self.step", "self.plan.shares * settings.learning_rate(self.step"),
            ),
            # As of a sampler that is not told the epoch.
            "the rows of the first step again": planted(
                "what follows differs, as by this mistake: the rows of the first step again",
                (
                    "parallel",
                    "    parts = [spread(",
                    '    batch = vars(trainer).setdefault("first_batch", batch)\n    parts = [spread(',
                ),
            ),
        },
        # Parts of heads and of units.
        run("tensor=2"): {
            "bias added by each device": planted(
                f"all gradients: {OTHER}", ("feed_forward", INNER, f"{INNER} + self.output_proj.bias")
            ),
            "gradient of the input not reduced": planted(
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
            "whole logits taken for a part": planted(
                "the gradient is right, the loss +0.6931 = log(tensor) off",
                ("training", "StepResult(total / count,", "StepResult(total / count + np.log(self.plan.tensor),"),
            ),
        },
        # What the devices hold, and what is saved of it.
        run("fsdp=2", "what is divided"): {
            "nothing divided": planted(
                "a device must hold about 50% of all numbers: one holds 100%",
                ("parallel", "if axis is not None:", "if False:"),
            ),
        },
        run("tensor=2", "what is divided"): {
            "heads not divided": planted(
                "tensor=2 must divide encoder.layers.0.self_attention.query_proj.kernel: each device has all of it",
                ("parallel", "(tensor_axis(name), plan.tensor, place[2])", "(None, 1, 0)"),
            ),
        },
        run("fsdp=2", "step 2 first moment source_embedding.table"): {
            "a part saved as the whole": planted(
                "every step is right: what is gathered from the devices is not what they have",
                (
                    "training",
                    "first = {name: array.copy() for",
                    "first = {name: np.resize(array[: len(array) // 2], array.shape) for",
                ),
            ),
        },
        run("data=2", f"step 4 {LOSS}", "resumed"): {
            "moments lost": planted(
                "the state that the run goes on from was not taken over whole",
                ("training", "self.optimizer.second_moment[name][...] = state.second_moment[name]", "pass"),
            ),
            "step lost": planted(
                "the state that the run goes on from was not taken over whole",
                ("training", "self.step, self.seed = state.step, state.seed", "self.seed = state.seed"),
            ),
        },
    }
)
