"""A Transformer based on Flax NNX layers and Optax. Compiled functions receive the model's state as an argument."""

# ruff: noqa: D102  methods are documented in Peer

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_bench.peers.conventions import Peer
from transformer_spec.search import SearchResult, search_result
from transformer_spec.training_config import TrainingConfig


@dataclass
class FlaxNNX(Peer):
    """A model based on ``nnx.MultiHeadAttention``. It decodes with this layer's cache."""

    name: str = "flax nnx"
    modules: ClassVar[tuple[str, ...]] = ("jax", "flax", "optax")

    def prepare(self) -> dict[str, str]:
        import flax
        import jax

        return {
            "version": f"{flax.__version__}, jax {jax.__version__}",
            "device": "cpu",
            "threads": os.environ.get("PJRT_NPROC", str(os.cpu_count())),
        }

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        import jax
        import optax
        from flax import nnx

        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        model = _translator(config, dtype)
        _put(model, weights)
        graph_in_training, self._state = nnx.split(model)
        model.eval()
        graph = nnx.graphdef(model)

        @jax.jit
        def forward(state, source, target):
            return nnx.merge(graph, state)(source, target)

        @partial(jax.jit, static_argnums=2)
        def greedy(state, source, tokens):
            return _greedy(nnx.merge(graph, state), source, tokens)

        def loss_of(model, source, target, labels):
            logits = model(source, target)
            right = jax.nn.one_hot(labels, config.target_vocab_size, dtype=logits.dtype)
            losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(right, config.label_smoothing))  # [B, T]
            return losses.mean(where=labels != config.pad_id)

        settings = training or TrainingConfig()

        def adam(learning_rate):
            return optax.adam(learning_rate, b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon)

        @partial(jax.jit, donate_argnums=(0, 1))
        def train_step(state, moments, learning_rate, *batch):
            model = nnx.merge(graph_in_training, state)
            loss, gradient = nnx.value_and_grad(loss_of)(model, *batch)
            parameters = nnx.state(model, nnx.Param)
            updates, moments = adam(learning_rate).update(gradient, moments, parameters)
            nnx.update(model, optax.apply_updates(parameters, updates))
            return nnx.state(model), moments, loss

        self._forward, self._greedy, self._train_step = forward, greedy, train_step
        if training is not None:
            self._moments = adam(0.0).init(nnx.state(model, nnx.Param))

    def forward(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        return self._forward(self._state, *_ids(source_ids, target_ids)).block_until_ready()

    def _train(self, rate: float, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        self._state, self._moments, loss = self._train_step(
            self._state, self._moments, rate, *_ids(source_ids, target_ids, labels)
        )
        return float(loss)

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        # Self-attention uses the layer's cache. The compiler hoists the keys and values of the source out of the loop.
        ids, scores = self._greedy(self._state, *_ids(source_ids), tokens)
        return search_result(np.array(ids, np.int64)[:, None], np.array(scores)[:, None], self._config.pad_id)


def _ids(*arrays):
    return (array.astype(np.int32) for array in arrays)


def _translator(config, dtype):
    """Return the model with random weights."""
    import jax.numpy as jnp
    from flax import nnx

    positions = sinusoidal_encoding(config.max_length, config.d_model, config.position_layout).astype(dtype)
    dtypes = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}

    def norm(rngs):
        return nnx.LayerNorm(config.d_model, epsilon=config.layer_norm_epsilon, **dtypes, rngs=rngs)

    def attention(rngs):
        return nnx.MultiHeadAttention(config.num_heads, config.d_model, decode=False, **dtypes, rngs=rngs)

    class FeedForward(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Linear(config.d_model, config.d_ff, **dtypes, rngs=rngs)
            self.output = nnx.Linear(config.d_ff, config.d_model, **dtypes, rngs=rngs)

        def __call__(self, x):
            return self.output(nnx.swish(self.inner(x)))

    class FlaxEncoderLayer(nnx.Module):
        def __init__(self, rngs):
            self.self_attention, self.self_attention_norm = attention(rngs), norm(rngs)
            self.feed_forward, self.feed_forward_norm = FeedForward(rngs), norm(rngs)
            self.dropout = nnx.Dropout(config.dropout.residual, rngs=rngs)

        def __call__(self, x, mask):
            x = self.self_attention_norm(x + self.dropout(self.self_attention(x, mask=mask)))
            return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    class FlaxDecoderLayer(nnx.Module):
        def __init__(self, rngs):
            self.self_attention, self.self_attention_norm = attention(rngs), norm(rngs)
            self.cross_attention, self.cross_attention_norm = attention(rngs), norm(rngs)
            self.feed_forward, self.feed_forward_norm = FeedForward(rngs), norm(rngs)
            self.dropout = nnx.Dropout(config.dropout.residual, rngs=rngs)

        def __call__(self, x, memory, self_mask, cross_mask, decode=False):
            attended = self.self_attention(x, mask=self_mask, decode=decode)
            x = self.self_attention_norm(x + self.dropout(attended))
            attended = self.cross_attention(x, memory, mask=cross_mask)
            x = self.cross_attention_norm(x + self.dropout(attended))
            return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))

    class FlaxTranslator(nnx.Module):
        """An encoder and a decoder whose inputs and output share one embedding matrix."""

        def __init__(self, rngs):
            self.config = config
            self.embedding = nnx.Embed(config.target_vocab_size, config.d_model, **dtypes, rngs=rngs)
            self.encoder = nnx.List([FlaxEncoderLayer(rngs) for _ in range(config.num_encoder_layers)])
            self.decoder = nnx.List([FlaxDecoderLayer(rngs) for _ in range(config.num_decoder_layers)])
            self.output_bias = nnx.Param(jnp.zeros(config.target_vocab_size, dtype))
            self.dropout = nnx.Dropout(config.dropout.embedding, rngs=rngs)

        def __call__(self, source, target):
            length = target.shape[1]
            is_token = (target != config.pad_id) | (jnp.arange(length) == 0)  # the first token is BOS
            self_mask = nnx.combine_masks(
                nnx.make_causal_mask(target, dtype=bool), is_token[:, None, None, :], dtype=bool
            )
            memory, cross_mask = self.encode(source)
            x = self.embed(target, jnp.asarray(positions[:length]))
            for layer in self.decoder:
                x = layer(x, memory, self_mask, cross_mask)
            return self.logits(x)

        def encode(self, source):
            mask = (source != config.pad_id)[:, None, None, :]
            x = self.embed(source, jnp.asarray(positions[: source.shape[1]]))
            for layer in self.encoder:
                x = layer(x, mask)
            return x, mask

        def init_cache(self, batch, tokens):
            for layer in self.decoder:
                layer.self_attention.init_cache((batch, tokens, config.d_model), jnp.dtype(dtype))

        def step(self, said, n, memory, cross_mask):
            """Return the logits after the token at position n."""
            x = self.embed(said[:, None], jnp.asarray(positions)[n])
            for layer in self.decoder:
                x = layer(x, memory, None, cross_mask, decode=True)
            return self.logits(x)[:, 0]

        def embed(self, ids, positions):
            return self.dropout(self.embedding(ids) * config.d_model**0.5 + positions)

        def logits(self, x):
            return self.embedding.attend(x) + self.output_bias[...]

    return FlaxTranslator(nnx.Rngs(0))


def _put(model, weights):
    """Copy weights with canonical names into the model, which has a separate axis for heads."""
    import jax.numpy as jnp

    def put(variable, array):
        variable[...] = jnp.array(array, variable.dtype).reshape(variable.shape)

    put(model.embedding.embedding, weights["source_embedding.table"])
    put(model.output_bias, weights["output_proj.bias"])
    names = {"query": "query", "key": "key", "value": "value", "out": "output"}
    for stack, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i, layer in enumerate(layers):
            path = f"{stack}.layers.{i}"
            for sublayer in ("self_attention", "cross_attention", "feed_forward"):
                if not hasattr(layer, sublayer):
                    continue
                norm, block = getattr(layer, f"{sublayer}_norm"), getattr(layer, sublayer)
                put(norm.scale, weights[f"{path}.{sublayer}_norm.scale"])
                put(norm.bias, weights[f"{path}.{sublayer}_norm.bias"])
                parts = {"inner": "inner", "output": "output"} if sublayer == "feed_forward" else names
                for theirs, ours in parts.items():
                    for kind in ("kernel", "bias"):
                        put(getattr(getattr(block, theirs), kind), weights[f"{path}.{sublayer}.{ours}_proj.{kind}"])


def _greedy(model, source, tokens):
    """Return the generated token IDs [B, tokens] and their log-probabilities [B]."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    config, batch = model.config, len(source)
    memory, cross_mask = model.encode(source)
    model.init_cache(batch, tokens)
    graph, cache, rest = nnx.split(model, nnx.Cache, ...)  # type: ignore[misc]  # split accepts an ellipsis

    def goes_on(carry):
        n, _, _, _, unfinished, _ = carry
        return (n < tokens) & unfinished.any()

    def step(carry):
        n, said, ids, scores, unfinished, cache = carry
        model = nnx.merge(graph, cache, rest)
        log_probabilities = jax.nn.log_softmax(model.step(said, n, memory, cross_mask))
        log_probabilities = log_probabilities.at[:, config.pad_id].set(-jnp.inf)
        said = jnp.where(unfinished, log_probabilities.argmax(-1), config.pad_id).astype(jnp.int32)
        scores = jnp.where(unfinished, scores + log_probabilities.max(-1), scores)
        ids = ids.at[:, n].set(said)
        return n + 1, said, ids, scores, unfinished & (said != config.eos_id), nnx.state(model, nnx.Cache)

    start = (
        jnp.array(0, jnp.int32),
        jnp.full(batch, config.bos_id, jnp.int32),
        jnp.full((batch, tokens), config.pad_id, jnp.int32),
        jnp.zeros(batch, memory.dtype),
        jnp.full(batch, True),
        cache,
    )
    _, _, ids, scores, _, _ = jax.lax.while_loop(goes_on, step, start)
    return ids, scores
