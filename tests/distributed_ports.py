"""Bugs that users of each framework can introduce into training on multiple devices, injected into the ports.

In PyTorch, each process has its own copy or shard of the model; in TensorFlow, a strategy manages the copies. JAX
partitions the whole program, so there are no such bugs until the per-device computation is written with ``shard_map``.
The JAX entries therefore switch to ``shard_map`` first.
"""

from __future__ import annotations

from functools import partial

from transformer_parity.transformer.bugs.bug import Edit, table
from transformer_parity.transformer.bugs.distributed import BIAS, FIRST_NORM, MASKS, OTHER, injected, run
from transformer_parity.transformer.stages.training_stage import LOSS

in_torch, in_jax, in_tf = (partial(injected, port=port) for port in ("torch", "jax", "tf"))

AVERAGED = "all gradients: averaged over the shards after dividing by the number of tokens (0.5, 0.5)"
MEANS = "each shard divided by its own token count, then averaged: a mean of means"
TWICE = "all gradients: reduced twice (2, 2)"
ALONE = " contributes: not reduced"  # either shard can be reported, because each device has its own gradient
COPIES_COUNT = "its norm is 1.41421 times the expected norm: every tensor is included 2 times"

# --- PyTorch ---

REDUCED = "dist.all_reduce(bucket.buffer(), group=group, async_op=True)"
SUMMED = "return future.then(lambda done: done.value()[0])"
FACTOR = "module.set_gradient_divide_factor(1.0)"
COPIED = "parameter.data.copy_(distribute_tensor(parameter.data, whole, [Replicate()] * whole.ndim).to_local())"
COPIES = "copies = DistributedDataParallel(model,"
HOOKED = "copies.register_comm_hook(group, _sum)\n"
OWN_ROWS = "yield tuple(ids[each] for ids in padded)"
OWN_WIDTH = "ids[each, : int((ids[each] != self.pad_id).any(0).sum().clamp(min=1))]"
OF_SHARD = "total, _ = self._loss(self.shard.module, part, config)"
DIVIDED = "            loss = total / tokens.clamp(min=1)\n"
NORM = "norm = global_norm(gradient)"
OWN_NORM = "global_norm([g.to_local() for g in gradient])"

IN_TORCH = table(
    {
        run("data=2"): {
            "the engine's own mean": in_torch(
                "all gradients: averaged over the shards after dividing by the number of tokens (0.5, 0.5)",
                ("parallel", SUMMED, f"{SUMMED[:-1]} / group.size())"),
            ),
            "mean of means": in_torch(
                f"all gradients: {MEANS} (0.5741, 3.875)",
                ("training", OF_SHARD, OF_SHARD.replace("_", "own", 1)),
                ("training", DIVIDED, DIVIDED.replace("tokens.clamp(min=1)", "own.clamp(min=1) / self.plan.shards")),
            ),
            "reduced twice": in_torch(
                "all gradients: reduced twice (2, 2)", ("parallel", SUMMED, f"{SUMMED[:-1]} * group.size())")
            ),
            "no reduction": in_torch(
                ALONE,
                ("parallel", REDUCED, REDUCED.replace("buffer()", "buffer().clone()")),
                ("parallel", SUMMED, "return future.then(lambda done: bucket.buffer())"),
            ),
            "past the engine": in_torch(ALONE, ("training", OF_SHARD, OF_SHARD.replace("shard.module", "model"))),
            "one tensor left out": in_torch(
                f"the gradient of {BIAS}: only shard ",
                (
                    "parallel",
                    COPIES,
                    "ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model\n"
                    f'        ignore(model, ["{BIAS}"])\n        {COPIES}',
                ),
            ),
            "reduced in float32": in_torch(
                "all gradients: correct except for rounding: reduced in float32",
                ("parallel", REDUCED, REDUCED.replace("buffer()", "buffer().copy_(bucket.buffer().float())")),
            ),
            "same rows on all devices": in_torch(
                "all gradients: all devices train on the rows of shard 0 (2, 0)",
                ("parallel", "[:, self.index, :, 0]", "[:, 0, :, 0]"),
            ),
            "weights differ between devices": in_torch(
                OTHER,
                ("parallel", COPIED, "parameter.data.add_(0.01 * dist.get_rank())"),
                ("parallel", COPIES, f"{COPIES} init_sync=False,"),
            ),
            "buffers differ between devices": in_torch(
                f"all gradients: {OTHER}",
                (
                    "parallel",
                    HOOKED,
                    f"{HOOKED}        for each in model.buffers():\n            each.add_(0.01 * dist.get_rank())\n",
                ),
            ),
        },
        run("fsdp=2"): {
            "averaged only in the layers": in_torch(
                "the gradients of the layers: averaged over the shards after dividing by the number of tokens",
                ("parallel", FACTOR, f"{FACTOR} if module is model else None"),
            )
        },
        run("data=2", case="dropout"): {
            "all shards use the first shard's dropout masks": in_torch(
                MASKS, ("parallel", "(self.index * own.shape[1], len", "(0 * own.shape[1], len")
            ),
            "each process as wide as its own longest sentence": in_torch(
                MASKS, ("parallel", OWN_ROWS, OWN_ROWS.replace("ids[each]", OWN_WIDTH))
            ),
        },
        run("data=2", "", "checkpointing"): {
            "reentrant checkpoints": in_torch(  # find_unused_parameters treats their parameters as unused
                "Expected to mark a variable ready only once",
                ("encoder", "bias=bias, use_reentrant=False", "use_reentrant=True"),
                ("decoder", "bias=bias, use_reentrant=False", "use_reentrant=True"),
                ("parallel", COPIES, f"{COPIES} find_unused_parameters=True,"),
            )
        },
        run("data=2", FIRST_NORM): {
            "norm includes every replica": in_torch(
                "its norm is 1.41421 times the expected norm: every tensor is included 2 times",
                ("training", NORM, f"{NORM} * self.plan.shards**0.5"),
            )
        },
        run("fsdp=2", FIRST_NORM): {
            "norm of the own part": in_torch(
                "times the expected norm: each device uses the norm of its own shard",
                ("training", NORM, f"norm = {OWN_NORM}"),
            )
        },
        run("fsdp=2", f"step 2 {LOSS}"): {
            "clipped by the norm of the own part": in_torch(
                "its norm are correct: later steps differ, as with this bug: clipped by the norm of each shard",
                ("training", "clip_factor(norm", f"clip_factor({OWN_NORM}"),
            )
        },
    }
)

# --- JAX ---

DIFFERENTIATE = "differentiate = jax.value_and_grad(partial(_loss_with_dropout, structure, settings), has_aux=True)"
BY_SHARDS = "differentiate = _on_each(structure, settings)"
SHARDS = """

def _on_each(structure, settings):
    alone = Structure(structure.graph, structure.state, structure.config, None)
    differentiate = jax.value_and_grad(partial(_loss_with_dropout, alone, settings), has_aux=True)
    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def on_each(parameters, part, key):
        (total, tokens), gradient = differentiate(parameters, part, key)
        REDUCED
        return (total, tokens), gradient

    specs = whole, rows, whole
    return jax.shard_map(on_each, mesh=structure.mesh, in_specs=specs, out_specs=whole, check_vma=False)


def _loss_with_dropout("""
SUM_OF_ALL = "total, tokens, gradient = jax.lax.psum((total, tokens, gradient), 'data')"
SUM_OF_LOSS = "total, tokens = jax.lax.psum((total, tokens), 'data')"
JAX_NORM = "norm = global_norm(gradient) / count"


def on_each(*reduced: str, rows: str = "whole, rows, whole") -> list[Edit]:
    """Return edits that compute each device's rows separately and reduce the results with the given lines."""
    text = SHARDS.replace("REDUCED", "\n        ".join(reduced)).replace("whole, rows, whole", rows)
    return [
        ("training", "\n\ndef _loss_with_dropout(", text),
        ("training", f"    {DIFFERENTIATE}\n\n    def add_micro_batch", f"    {BY_SHARDS}\n\n    def add_micro_batch"),
    ]


IN_JAX = table(
    {
        run("data=2", case="shallow"): {
            "no psum": in_jax(f"all gradients: only shard 0{ALONE}", *on_each(SUM_OF_LOSS)),
            "pmean": in_jax(AVERAGED, *on_each(SUM_OF_LOSS, "gradient = jax.lax.pmean(gradient, 'data')")),
            "psum twice": in_jax(TWICE, *on_each(SUM_OF_ALL, "gradient = jax.lax.psum(gradient, 'data')")),
            "mean of means": in_jax(
                f"all gradients: {MEANS} (0.5741, 3.875)",
                *on_each(
                    "own, tokens = jnp.maximum(tokens, 1), jax.lax.psum(tokens, 'data')",
                    "mean = jax.tree.map(lambda x: x / own * tokens, (total, gradient))",
                    "total, gradient = jax.lax.pmean(mean, 'data')",
                ),
            ),
            "table without psum": in_jax(
                "the gradient of source_embedding.table: only shard ",
                *on_each(
                    "own = gradient['source_embedding.table']", SUM_OF_ALL, "gradient['source_embedding.table'] = own"
                ),
            ),
            "clipped before the psum": in_jax(
                "all gradients: each shard clipped by its own norm before the sum",
                *on_each(
                    "own = settings.clip_norm / global_norm(gradient)",
                    "gradient = jax.tree.map(lambda x: x * own, gradient)",
                    SUM_OF_ALL,
                ),
            ),
            "reduced in bfloat16": in_jax(
                "all gradients: correct except for rounding: reduced in bfloat16",
                *on_each(
                    "gradient = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), gradient)", SUM_OF_ALL
                ),
            ),
            "same rows on all devices": in_jax(
                "a step has 54 target tokens instead of 31; "
                "all gradients: all devices train on the rows of shard 0 (1.148, 0)",
                ("parallel", "parts.__getitem__)", "lambda index: parts[: len(parts) // 2])"),
            ),
        },
        run("data=2", "step 1 tokens", "shallow"): {
            "all rows everywhere": in_jax(
                "a step has 62 target tokens instead of 31; the gradient is correct: all devices train on all rows",
                *on_each(SUM_OF_ALL, rows="whole, whole, whole"),
            )
        },
        run("data=2", FIRST_NORM, "shallow"): {
            "norm includes every replica": in_jax(
                COPIES_COUNT, ("training", JAX_NORM, f"{JAX_NORM} * structure.mesh.size**0.5")
            )
        },
        run("fsdp=2", "sharding", "shallow"): {
            "partition specs without fsdp": in_jax(
                "a device must store about 50% of all parameter elements: a device stores 100%",
                ("parallel", 'axes[axis] = "fsdp"', "axes[axis] = None"),
            )
        },
        run("data=2", case="shallow dropout"): {"one key for all shards": in_jax(MASKS, *on_each(SUM_OF_ALL))},
    }
)

# --- TensorFlow ---

ALL_REDUCED = 'total, *gradient = context.all_reduce("SUM", [total, *gradient])'
TOKENS = 'tokens = context.all_reduce("SUM", tokens)'
TOTAL_ALONE = 'total = context.all_reduce("SUM", total)'
SUMMED_MICRO_BATCH = "return summed(self, self._gradient_of_micro_batch(batch, random_bits[0]))"
TF_NORM = "norm = tf.cast(global_norm([*gradient.values()]), total.dtype) / count"

IN_TF = table(
    {
        run("data=2", case="shallow"): {
            "no reduction": in_tf(ALONE, ("parallel", ALL_REDUCED, TOTAL_ALONE)),
            "the strategy's mean": in_tf(AVERAGED, ("parallel", ALL_REDUCED, ALL_REDUCED.replace("SUM", "MEAN"))),
            "mean of means": in_tf(
                f"all gradients: {MEANS} (0.5741, 3.875)",
                (
                    "parallel",
                    TOKENS,
                    f"own = tf.cast(tf.maximum(tokens, 1), total.dtype)\n    {TOKENS}\n"
                    "    scale = tf.cast(tokens, own.dtype) / own\n"
                    "    total, *gradient = tf.nest.map_structure(lambda x: x * scale, [total, *gradient])",
                ),
                ("parallel", ALL_REDUCED, ALL_REDUCED.replace("SUM", "MEAN")),
            ),
            "reduced twice": in_tf(
                TWICE, ("parallel", ALL_REDUCED, f'{ALL_REDUCED}\n    gradient = context.all_reduce("SUM", gradient)')
            ),
            "clipped before the sum": in_tf(
                "all gradients: each shard clipped by its own norm before the sum",
                (
                    "training",
                    SUMMED_MICRO_BATCH,
                    "total, tokens, own = self._gradient_of_micro_batch(batch, random_bits[0])\n"
                    "            clipped, _ = tf.clip_by_global_norm([*own.values()], self.settings.clip_norm)\n"
                    "            return summed(self, (total, tokens, dict(zip(own, clipped, strict=True))))",
                ),
            ),
            "same rows on all devices": in_tf(
                "a step has 54 target tokens instead of 31; "
                "all gradients: all devices train on the rows of shard 0 (1.148, 0)",
                ("compilation", "lambda x: x[shard], parts", "lambda x: x[0], parts"),
            ),
        },
        run("data=2", FIRST_NORM, "shallow"): {
            "norm includes every replica": in_tf(
                COPIES_COUNT, ("training", TF_NORM, f"{TF_NORM} * self.plan.shards**0.5")
            )
        },
        run("data=2", "", "shallow"): {
            "moments outside the scope": in_tf(
                "created in the scope of the trainer's mesh",
                ("training", "if self.mesh is None else self.mesh.scope():", "if self.mesh is None else placed(None):"),
            )
        },
        run("data=2", case="shallow dropout"): {
            "all shards use the first shard's dropout masks": in_tf(
                MASKS, ("compilation", "own_rows(shard, trainer", "own_rows(0, trainer")
            )
        },
    }
)

BUGS = {"torch": IN_TORCH, "jax": IN_JAX, "tf": IN_TF}
APART = {  # bugs that leave each device with its own copy
    "torch": ("no reduction", "past the engine", "one tensor left out", "weights differ between devices"),
    "jax": ("no psum", "table without psum"),
    "tf": ("no reduction",),
}
