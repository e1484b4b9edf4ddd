"""Bugs in dropout, modes, and seeds, which only the checks in ``test_dropout`` can detect."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_parity.transformer.bugs.bug import ENCODER, Edits, instead
from transformer_parity.transformer.bugs.layers import ATTENDED
from transformer_parity.transformer.bugs.optimizer import in_adam
from transformer_parity.transformer.bugs.training import in_training


@dataclass(frozen=True)
class Misbehaviour:
    """A bug that no comparison of values can detect, because every framework draws different dropout masks."""

    name: str
    check: tuple[str, ...]  # name of a check in test_dropout, followed by its arguments
    complaint: str  # expected error message
    edits: Edits


SITE, MASKS, INFERENCE, SEED = ("check_sites", "post"), ("check_masks",), ("check_inference",), ("check_seed",)
KEPT_ONE = "* 0.0 + 1.0"
SOURCE_DROPOUT = 'self.dropout(tap("source_embedding.output", x)'
UNSCALED = {
    "torch": ("nn.Dropout", "forward(self, x)", "forward(x)", "1.0 - self.p if self.training else 1.0"),
    "jax": ("nnx.Dropout", "__call__(self, x)", "__call__(x)", "1.0 if self.deterministic else 1.0 - self.rate"),
}
SEEDED = "__import__('numpy').random.seed(1)"
UNSCALED_TF = "return super().call(x, training)\n", "return super().call(x, training) * (1.0 - self.rate * training)\n"

MISBEHAVIOUR = [
    Misbehaviour(
        "embedding dropout missing",
        (*SITE, "embedding"),
        f"{ENCODER}.self_attention.query is",
        {
            "torch": [("transformer", f"{SOURCE_DROPOUT})", 'tap("source_embedding.output", x)')],
            "jax": [("transformer", f"{SOURCE_DROPOUT})", 'tap("source_embedding.output", x)')],
            "tf": [("transformer", f"{SOURCE_DROPOUT}, training=training)", 'tap("source_embedding.output", x)')],
        },
    ),
    Misbehaviour(
        "residual dropout missing",
        (*SITE, "residual"),
        f"{ENCODER}.self_attention_norm.output is",
        instead("encoder", ATTENDED, ATTENDED.replace("self.dropout(attended)", "attended")),
    ),
    Misbehaviour(
        "residual dropout behind the norm",
        (*SITE, "residual"),
        f"{ENCODER}.self_attention_norm.output is",
        instead("encoder", ATTENDED, "self.dropout(self.self_attention_norm(x + attended))"),
    ),
    Misbehaviour(
        "feed-forward dropout missing",
        (*SITE, "feed_forward"),
        f"{ENCODER}.feed_forward.output is",
        instead("feed_forward", "self.dropout(inner)", "inner"),
    ),
    Misbehaviour(
        "feed-forward dropout at another rate",
        (*SITE, "feed_forward"),
        f"{ENCODER}.feed_forward.output is",
        instead("feed_forward", "config.dropout.feed_forward", "config.dropout.residual"),
    ),
    Misbehaviour(
        "attention dropout missing",
        (*SITE, "attention"),
        f"{ENCODER}.self_attention.context is",
        instead("attention", "weights = dropout(weights)", "pass"),
    ),
    Misbehaviour(
        "fused attention without dropout",
        (*SITE, "attention"),
        "loss without taps is",
        {"torch": [("fast", "dropout.p if is_plain and dropout is not None and dropout.training else 0.0", "0.0")]},
    ),
    Misbehaviour(
        "dropout not scaled",
        MASKS,
        "source_embedding.output: not scaled",
        instead(
            "layers",
            {port: f"Dropout = {base}\n" for port, (base, *_) in UNSCALED.items()} | {"tf": UNSCALED_TF[0]},
            tf=UNSCALED_TF[1],
            **{
                port: f"class Dropout({base}):\n    def {head}:\n        return super().{call} * ({factor})\n"
                for port, (base, head, call, factor) in UNSCALED.items()
            },
        ),
    ),
    Misbehaviour(
        "one mask for all heads",
        MASKS,
        f"heads of {ENCODER}.self_attention.weights",
        instead("attention", "dropout(weights)", f"weights * dropout(weights[:, :1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all sentences",
        MASKS,
        f"sentences of {ENCODER}.self_attention.weights",
        instead("attention", "dropout(weights)", f"weights * dropout(weights[:1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all positions",
        MASKS,
        f"positions of {ENCODER}.feed_forward.inner",
        instead("feed_forward", "self.dropout(inner)", f"inner * self.dropout(inner[:, :1] {KEPT_ONE})"),
    ),
    Misbehaviour(
        "one mask for all layers",
        MASKS,
        f"{ENCODER}.self_attention.weights and encoder.layers.1.self_attention.weights",
        in_training(
            None,  # not applicable: NumPy draws all masks from one generator
            ("module.rngs = stream", 'module.rngs = nnx.RngStream(key, tag="dropout")'),
            ("tf.unstack(random_bits)", "[random_bits[0]] * len(random_bits)"),
        ),
    ),
    Misbehaviour(
        "gradients with dropout",
        INFERENCE,
        "loss of gradients before a step is",
        in_training(
            ("_loss(model, batch, transformer", "_loss(model.train(), batch, transformer"),
            (
                "return total / jnp.maximum(tokens, 1)",
                "model = structure.build(parameters)\n"
                "        for _, module in nnx.iter_modules(model):\n"
                "            if isinstance(module, nnx.Dropout):\n"
                '                module.rngs = nnx.RngStream(jax.random.key(0), tag="dropout")\n'
                "        model.train()\n"
                "        total, tokens = _loss(model, batch, model.config, lambda name, value: value + zeros[name])\n"
                "        return total / jnp.maximum(tokens, 1)",
            ),
            ("_loss(model, batch, model.config, tap)", "_loss(model, batch, model.config, tap, training=True)"),
        ),
    ),
    Misbehaviour(
        "evaluation with dropout",
        INFERENCE,
        "evaluation before a step is",
        in_training(
            (
                "_loss(self.shard.module, part, config)\n        return",
                "_loss(self.shard.module.train(), part, config)\n        return",
            ),
            (
                "    return _loss(structure.build(parameters), batch, config)",
                "    model = structure.build(parameters)\n"
                "    for _, module in nnx.iter_modules(model):\n"
                "        if isinstance(module, nnx.Dropout):\n"
                '            module.rngs = nnx.RngStream(jax.random.key(0), tag="dropout")\n'
                "    model.train()\n"
                "    return _loss(model, batch, config)",
            ),
            (".replace(label_smoothing=0.0))", ".replace(label_smoothing=0.0), training=True)"),
        ),
    ),
    Misbehaviour(
        "evaluation with label smoothing",
        INFERENCE,
        "evaluation before a step is",
        instead("training", ".replace(label_smoothing=0.0)", ""),
    ),
    Misbehaviour(
        "still in training mode after a step",
        INFERENCE,
        "the model after a step is",
        in_training(
            ("        model.eval()\n            generator", "        generator"),
            (
                "        self.step += 1\n",
                "        self.step += 1\n"
                "        self.model.set_attributes(\n"
                "            nnx.Dropout, deterministic=False, rngs=nnx.RngStream(jax.random.key(0), tag='dropout')\n"
                "        )\n",
            ),
            None,  # not applicable: in Keras, training is an argument of the call
        ),
    ),
    Misbehaviour(
        "seed ignored",
        SEED,
        "the seed is ignored",
        in_training(
            ("model, settings, *random_stream(self.seed, self.step)", "model, settings, 0, self.step"),
            ("random_stream(self.seed, self.step)", "[0, self.step]"),
            None,
        )
        | {"tf": [("parallel", "random_stream(trainer.seed, trainer.step)", "[0, trainer.step]")]},
    ),
    Misbehaviour(
        "the same dropout at every step",
        SEED,
        "the same dropout at every step",
        in_training(
            ("model, settings, *random_stream(self.seed, self.step)", "model, settings, self.seed, 0"),
            ("random_stream(self.seed, self.step)", "[self.seed, 0]"),
            None,
        )
        | {"tf": [("parallel", "random_stream(trainer.seed, trainer.step)", "[trainer.seed, 0]")]},
    ),
    Misbehaviour(
        "dropout that goes on where it was",
        SEED,
        "not reproducible",
        {
            "torch": [
                ("training", "generator.manual_seed(int(np", "(int(np"),
                ("training", "generator.set_state(state)", "pass"),
            ],
            "jax": [("training", "random_stream(self.seed, self.step)", "np.random.randint(1 << 30)")],
            "tf": [("parallel", "random_stream(trainer.seed, trainer.step)", "[np.random.randint(1 << 30)]")],
        },
    ),
    Misbehaviour(
        "the same dropout in every micro-batch",
        ("check_micro_batches",),
        "both micro-batches have the same dropout",
        in_training(
            ("total, _ = self._loss(", "torch.manual_seed(0)\n                total, _ = self._loss("),
            ("jax.random.fold_in(key, number)", "jax.random.fold_in(key, 0)"),
            ("tf.unstack(random_bits)", "tf.unstack(random_bits * 0)"),
        ),
    ),
    Misbehaviour(
        "NumPy's own generator seeded",
        ("check_callers_numbers",),
        "the caller's random numbers are not what they were",
        in_training(
            ("        check_accumulation(settings", "        np.random.seed(1)\n        check_accumulation(settings"),
            (
                "        check_accumulation(micro_batches",
                "        np.random.seed(1)\n        check_accumulation(micro_batches",
            ),
            ("        check_accumulation(micro_batches", f"        {SEEDED}\n        check_accumulation(micro_batches"),
        ),
    ),
    Misbehaviour(
        "torch's own generator left where it is",
        ("check_callers_numbers",),
        "the caller's random numbers are not what they were",
        in_training(("        generator.set_state(state)", "        pass"), None, None),
    ),
    Misbehaviour(
        "weights in bfloat16",
        ("check_mixed_precision",),
        "weight: 100% of the values fit in bfloat16",
        in_adam(
            torch=(
                "        self.step()\n",
                "        self.step()\n"
                '        for p in group["params"]:\n'
                "            p.data = p.data.bfloat16().to(p.dtype)\n",
            ),
            jax=(
                "first_moment[name], second_moment[name] = m, v",
                "first_moment[name], second_moment[name] = m, v\n"
                '            updated[name] = updated[name].astype("bfloat16").astype(theta.dtype)',
            ),
            tf=(
                "(tf.sqrt(v_hat) + settings.epsilon))\n",
                "(tf.sqrt(v_hat) + settings.epsilon))\n"
                "            theta.assign(tf.cast(tf.cast(theta, tf.bfloat16), theta.dtype))\n",
            ),
        ),
    ),
]
