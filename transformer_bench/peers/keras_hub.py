"""A Transformer based on KerasHub layers on TensorFlow. Each call runs a ``tf.function``, with or without XLA."""

# ruff: noqa: D102  methods are documented in Peer

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from transformer_bench.peers.conventions import Peer
from transformer_spec.search import SearchResult, search_result
from transformer_spec.training_config import TrainingConfig


@dataclass
class KerasHub(Peer):
    """A model based on ``TransformerEncoder`` and ``TransformerDecoder``.

    It decodes with the caches of these layers.
    """

    xla: bool
    modules: ClassVar[tuple[str, ...]] = ("tensorflow", "keras", "keras_hub")

    @property
    def name(self) -> str:  # type: ignore[override]
        return "keras hub XLA" if self.xla else "keras hub"

    def prepare(self) -> dict[str, str]:
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras
        import keras_hub
        import tensorflow as tf

        return {
            "version": f"{keras_hub.__version__}, keras {keras.__version__}, tensorflow {tf.__version__}",
            "device": "cpu",
            "threads": os.environ.get("TF_NUM_INTRAOP_THREADS", "all"),
        }

    def _build(self, config: Any, weights: Mapping[str, ndarray], dtype: str, training: TrainingConfig | None) -> None:
        import keras
        import tensorflow as tf

        model = _translator(config, dtype)
        _put(model, weights)
        loss_of = keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing, reduction="mean_with_sample_weight", dtype=dtype
        )

        @tf.function(jit_compile=self.xla)
        def forward(source, target):
            return model([source, target], training=False)

        @tf.function(jit_compile=self.xla)
        def greedy(source, tokens):
            return _greedy(model, source, tokens)

        @tf.function(jit_compile=self.xla)
        def train_step(source, target, labels):
            with tf.GradientTape() as tape:
                logits = model([source, target], training=True)
                right = tf.one_hot(labels, config.target_vocab_size, dtype=dtype)
                loss = loss_of(right, logits, sample_weight=tf.cast(labels != config.pad_id, dtype))
            gradients = tape.gradient(loss, model.trainable_variables)
            self._optimizer.apply(gradients, model.trainable_variables)
            return loss

        self._model, self._forward, self._greedy, self._train_step = model, forward, greedy, train_step
        if training is not None:
            self._optimizer = keras.optimizers.Adam(0.0, training.beta1, training.beta2, training.epsilon)
            self._optimizer.build(model.trainable_variables)

    def forward(self, source_ids: ndarray, target_ids: ndarray) -> Any:
        return self._forward(*_ids(source_ids, target_ids))  # on a CPU, the call is synchronous

    def _train(self, rate: float, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        self._optimizer.learning_rate = rate
        return float(self._train_step(*_ids(source_ids, target_ids, labels)))

    def greedy(self, source_ids: ndarray, tokens: int) -> SearchResult:
        ids, scores = self._greedy(*_ids(source_ids), tokens)
        return search_result(ids.numpy()[:, None].astype(np.int64), scores.numpy()[:, None], self._config.pad_id)


def _ids(*arrays):
    import tensorflow as tf

    return (tf.constant(array, tf.int32) for array in arrays)


def _translator(config, dtype):
    """Return the model with random weights."""
    import keras
    import keras_hub
    from keras import ops

    positions = sinusoidal_encoding(config.max_length, config.d_model, config.position_layout).astype(dtype)
    sizes = (config.d_ff, config.num_heads)
    options = {
        "dropout": config.dropout.residual,
        "activation": "swish",
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "dtype": dtype,
    }
    states = (None, None, config.d_model)

    class KerasHubTranslator(keras.Model):
        """An encoder and a decoder whose inputs and output share one embedding matrix."""

        def __init__(self):
            super().__init__(dtype=dtype)
            self.config = config
            self.embedding = keras_hub.layers.ReversibleEmbedding(
                config.target_vocab_size, config.d_model, tie_weights=True, dtype=dtype
            )
            self.embedding.build()
            self.dropout = keras.layers.Dropout(config.dropout.embedding, dtype=dtype)
            self.encoder = [
                keras_hub.layers.TransformerEncoder(*sizes, **options) for _ in range(config.num_encoder_layers)
            ]
            self.decoder = [
                keras_hub.layers.TransformerDecoder(*sizes, **options) for _ in range(config.num_decoder_layers)
            ]
            for layer in self.encoder:
                layer.build(states)
            for layer in self.decoder:
                layer.build(states, states)
            for layer in (*self.encoder, *self.decoder):
                _keep_attention_weights(layer)
            self.output_bias = self.add_weight(name="output_bias", shape=(config.target_vocab_size,))
            self.built = True

        def call(self, inputs, training=False):
            source, target = inputs
            length = ops.shape(target)[1]
            memory, is_source = self.encode(source, training)
            is_target = ops.logical_or(target != config.pad_id, ops.arange(length) == 0)  # the first token is BOS
            x = self.embed(target, positions[:length], training)
            for layer in self.decoder:
                x = layer(x, memory, decoder_padding_mask=is_target, encoder_padding_mask=is_source, training=training)
            return self.logits(x)

        def encode(self, source, training=False):
            is_source = source != config.pad_id
            x = self.embed(source, positions[: ops.shape(source)[1]], training)
            for layer in self.encoder:
                x = layer(x, padding_mask=is_source, training=training)
            return x, is_source

        def step(self, said, n, memory, is_source, past, of_memory, memory_index):
            """Return the logits after the token at position n, and both caches of each layer."""
            x = self.embed(said[:, None], ops.take(positions, n, axis=0))
            caches = []
            for layer, self_cache, cross_cache in zip(self.decoder, past, of_memory, strict=True):
                x, *both = layer(
                    x,
                    memory,
                    encoder_padding_mask=is_source,
                    self_attention_cache=self_cache,
                    self_attention_cache_update_index=n,
                    cross_attention_cache=cross_cache,
                    cross_attention_cache_update_index=memory_index,
                )
                caches.append(both)
            return self.logits(x)[:, 0], *map(list, zip(*caches, strict=True))

        def embed(self, ids, positions, training=False):
            x = self.embedding(ids) * ops.cast(config.d_model**0.5, dtype) + positions
            return self.dropout(x, training=training)

        def logits(self, x):
            return self.embedding(x, reverse=True) + self.output_bias

    return KerasHubTranslator()


def _keep_attention_weights(layer):
    """Disable dropout of attention weights. KerasHub's layers use one rate for attention weights and residuals."""
    import keras

    for inner in layer._flatten_layers():
        if isinstance(inner, keras.layers.MultiHeadAttention):
            inner._dropout = 0.0


def _put(model, weights):
    """Copy weights with canonical names into the model, which has a separate axis for heads."""
    model.embedding.embeddings.assign(weights["source_embedding.table"])
    model.output_bias.assign(weights["output_proj.bias"])
    for stack, layers in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i, layer in enumerate(layers):
            of_layer = _by_path(weights, f"{stack}.layers.{i}")
            variables = {variable.path.partition("/")[2]: variable for variable in layer.trainable_variables}
            if variables.keys() != of_layer.keys():
                raise RuntimeError(
                    f"this release of KerasHub has missing or unexpected weights: {variables.keys() ^ of_layer.keys()}"
                )
            for path, variable in variables.items():
                variable.assign(np.reshape(of_layer[path], variable.shape))


def _by_path(weights, layer):
    """Return the weights of one layer, with the paths of KerasHub's variables as keys."""
    found = {}
    for name, array in weights.items():
        path, is_ours, kind = name.removeprefix(f"{layer}.").rpartition(".")
        if not name.startswith(f"{layer}.") or not is_ours:
            continue
        block, _, part = path.partition(".")
        if block.endswith("_norm"):
            path = f"{block.replace('feed_forward', 'feedforward').replace('_norm', '_layer_norm')}"
            kind = {"scale": "gamma", "bias": "beta"}[kind]
        elif block == "feed_forward":
            path = {"inner_proj": "feedforward_intermediate_dense", "output_proj": "feedforward_output_dense"}[part]
        else:
            attention = f"{block}_layer" if layer.startswith("encoder") else block
            path = f"{attention}/{part.removesuffix('_proj').replace('output', 'attention_output')}"
        found[f"{path}/{kind}"] = array
    return found


def _greedy(model, source, tokens):
    """Return the generated token IDs [B, tokens] and their log-probabilities [B]."""
    import tensorflow as tf

    config, batch, depth = model.config, source.shape[0], len(model.decoder)
    memory, is_source = model.encode(source)
    heads = (config.num_heads, config.d_k)

    def say(logits, n, ids, scores, unfinished):
        """Choose the most likely token of each unfinished sentence."""
        log_probabilities = tf.nn.log_softmax(logits)
        is_padding = tf.range(config.target_vocab_size) == config.pad_id
        log_probabilities = tf.where(is_padding, log_probabilities.dtype.min, log_probabilities)
        said = tf.where(unfinished, tf.argmax(log_probabilities, -1, tf.int32), config.pad_id)
        scores = tf.where(unfinished, scores + tf.reduce_max(log_probabilities, -1), scores)
        ids = tf.where(tf.range(tokens) == n, said[:, None], ids)
        return n + 1, said, ids, scores, unfinished & (said != config.eos_id)

    # The first step also fills the caches of the encoder memory.
    past = [tf.zeros((batch, 2, tokens, *heads), memory.dtype)] * depth
    of_memory = [tf.zeros((batch, 2, source.shape[1], *heads), memory.dtype)] * depth
    logits, past, of_memory = model.step(tf.fill([batch], config.bos_id), 0, memory, is_source, past, of_memory, 0)
    ids = tf.fill([batch, tokens], config.pad_id)
    start = say(logits, tf.constant(0), ids, tf.zeros(batch, memory.dtype), tf.fill([batch], True))

    def goes_on(n, said, ids, scores, unfinished, past):
        return (n < tokens) & tf.reduce_any(unfinished)

    def step(n, said, ids, scores, unfinished, past):
        logits, past, _ = model.step(said, n, memory, is_source, past, of_memory, None)
        return *say(logits, n, ids, scores, unfinished), past

    _, _, ids, scores, _, _ = tf.while_loop(goes_on, step, (*start, past))
    return ids, scores
