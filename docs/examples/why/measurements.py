"""Measurements for two claims of section 3.2.1 that the paper states and does not show.

Why the scores are divided by sqrt(d_k): what the division does to the softmax, and to the gradient behind it.
Why dot-product attention is faster than additive attention, although both take the same number of multiply-adds.
"""

from __future__ import annotations

import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from reference_numpy.attention import scaled_dot_product_attention
from reference_numpy.backward import multi_head_attention_backward
from reference_numpy.backward_trace import Trace
from reference_numpy.fast import attend, softmax
from transformer_spec.shapes import Bool, Float

SEED = 2017
POSITIONS = 64  # queries and keys of one sequence
SEQUENCES = 16  # times POSITIONS: the queries behind every quantile
D_MODEL = 512  # the paper's base model
LAYERS = 8  # random layers behind every quantile
CARRIED = 0.9  # of the squared gradient
SECONDS, LEAST_ROUNDS = 0.8, 7  # of timing, for each size
# Of this thread, so that other programs do not count; on Windows that clock goes in steps of 16 ms.
CLOCK = time.perf_counter if sys.platform == "win32" else time.thread_time


def additive_attention(
    query: Float[ndarray, "B L d_model"],
    key: Float[ndarray, "B M d_model"],
    value: Float[ndarray, "B M d_v"],
    query_kernel: Float[ndarray, "d_model d_k"],
    key_kernel: Float[ndarray, "d_model d_k"],
    score_vector: Float[ndarray, " d_k"],
    mask: Bool[ndarray, "#B #L #M"] | None = None,
) -> Float[ndarray, "B L d_v"]:
    """Average the values, weighted by a one-hidden-layer network of query and key (Bahdanau et al., 2015).

    ``softmax(v^T tanh(q W_q + k W_k)) V``: what section 3.2.1 compares dot-product attention with. The theoretical
    cost is similar, but every pair of positions passes through a tanh of width d_k instead of one matrix product.

    Args:
        query: What each position asks for.
        key: What each memory position offers to be matched on.
        value: What each memory position hands over when matched.
        query_kernel: ``W_q``, the hidden layer's matrix for queries.
        key_kernel: ``W_k``, the hidden layer's matrix for keys.
        score_vector: ``v``, the output layer.
        mask: True where a query may attend to a key; a row of False yields a zero context. None allows every pair.

    Returns:
        One weighted average of the values per query, in the dtype of ``query``.
    """
    hidden = np.tanh((query @ query_kernel)[:, :, None, :] + (key @ key_kernel)[:, None, :, :])  # [B, L, M, d_k]
    return softmax(hidden @ score_vector, mask) @ value


@dataclass(frozen=True)
class Spread:
    """The middle of many measurements, and where their lowest and their highest tenth begin."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float] | ndarray) -> Spread:
        """Summarise measurements."""
        array = values if isinstance(values, ndarray) else np.array(list(values))
        return cls(*np.quantile(array, [0.1, 0.5, 0.9]).tolist())


@dataclass(frozen=True)
class Saturation:
    """The softmax of the scores of random queries and keys."""

    d_k: int
    divided: bool  # by sqrt(d_k)
    variance: float  # of the scores
    largest: Spread  # weight of each query
    entropy: Spread  # of each query's weights, in nats
    gradient: Spread  # of each query: see softmax_gain


@dataclass(frozen=True)
class LayerGradient:
    """A random upstream gradient at the projections of a random multi-head attention layer."""

    d_k: int
    num_heads: int
    divided: bool  # by sqrt(d_k)
    carriers: Spread  # the smallest share of the queries that carries CARRIED of the squared gradient
    query_kernel: Spread  # the gradient's norm
    key_kernel: Spread


@dataclass(frozen=True)
class Cost:
    """What one call of dot-product and of additive attention costs, projections of queries and keys included."""

    length: int  # of queries and of keys
    d_k: int
    multiply_adds: int  # the same for both
    extra: int  # additions, and as many tanh, that additive attention takes besides
    rounds: int  # of timing
    dot_seconds: Spread
    additive_seconds: Spread
    ratio: Spread  # of the two times of each round
    dot_bytes: int  # the most memory held at any time, inputs not counted
    additive_bytes: int


@dataclass(frozen=True)
class Step:
    """One step of an attention function, alone."""

    name: str
    used_by: str  # dot, additive or both
    seconds: Spread
    operations: int
    bytes_moved: int  # in and out, each array once


def softmax_gain(weights: ndarray) -> ndarray:
    """Return how much of a gradient gets through each softmax: the norm of its Jacobian, diag(p) - p p^T.

    It is the root mean square of the gradient's norm at the scores if the gradient at the weights is random with
    variance 1. Uniform weights yield sqrt(M - 1) / M, and one weight of 1 yields 0.
    """
    products = weights[..., :, None] * weights[..., None, :]  # [..., M, M]
    np.einsum("...ii->...i", products)[...] = 0.0
    # The diagonal, p (1 - p), as the sum of the others: 1 - p has no digits left where the softmax is saturated.
    return np.sqrt(np.square(products).sum((-2, -1)) + np.square(products.sum(-1)).sum(-1))


def measure_saturation(d_k: int, *, divided: bool) -> Saturation:
    """Attend with queries and keys whose components are independent with mean 0 and variance 1 (footnote 4)."""
    rng = np.random.default_rng([SEED, d_k])
    query, key = rng.standard_normal((2, SEQUENCES, 1, POSITIONS, d_k))
    seen = ref.Recorder("scores", "weights")
    no_value = np.zeros((SEQUENCES, 1, POSITIONS, 1))
    scaled_dot_product_attention(query if divided else query * math.sqrt(d_k), key, no_value, tap=seen)
    weights = seen["weights"]
    logarithms = np.log(np.maximum(weights, np.finfo(weights.dtype).tiny))
    return Saturation(
        d_k,
        divided,
        variance=float(seen["scores"].var()),
        largest=Spread.of(weights.max(-1)),
        entropy=Spread.of(-(weights * logarithms).sum(-1)),
        gradient=Spread.of(softmax_gain(weights)),
    )


def measure_layer(d_k: int, *, divided: bool, d_model: int = D_MODEL) -> LayerGradient:
    """Send random gradients of norm 1 back through random layers with d_model / d_k heads, as d_k grows.

    Inputs have variance 1 and kernels variance 1 / d_model, so queries and keys start out as footnote 4 has them.
    """
    found = [_layer_gradients(np.random.default_rng([SEED, d_k, i]), d_k, divided, d_model) for i in range(LAYERS)]
    return LayerGradient(
        d_k,
        d_model // d_k,
        divided,
        carriers=Spread.of(carriers(at_query) for at_query, _, _ in found),
        query_kernel=Spread.of(float(np.linalg.norm(kernel)) for _, kernel, _ in found),
        key_kernel=Spread.of(float(np.linalg.norm(kernel)) for _, _, kernel in found),
    )


def carriers(gradient: ndarray) -> float:
    """Return the smallest share of the rows that together have CARRIED of the squared gradient."""
    squares = np.sort(np.square(gradient).sum(-1), axis=None)[::-1]
    return float((np.searchsorted(np.cumsum(squares), CARRIED * squares.sum()) + 1) / squares.size)


def random_layer(rng: np.random.Generator, d_k: int, d_model: int = D_MODEL) -> ref.MultiHeadAttention:
    """Return a multi-head attention layer of d_model / d_k heads with kernels of variance 1 / d_model."""
    config = ref.TransformerConfig(source_vocab_size=8, target_vocab_size=8, d_model=d_model, num_heads=d_model // d_k)
    layer = ref.MultiHeadAttention(config, "float64")
    for projection in (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj):
        projection.kernel = rng.standard_normal((d_model, d_model)) / math.sqrt(d_model)
    return layer


def _layer_gradients(
    rng: np.random.Generator, d_k: int, divided: bool, d_model: int
) -> tuple[ndarray, ndarray, ndarray]:
    """Return the gradient at the queries, at the query kernel and at the key kernel of one random layer."""
    layer = random_layer(rng, d_k, d_model)
    x, upstream = rng.standard_normal((2, 1, POSITIONS, d_model))
    upstream /= np.linalg.norm(upstream)
    # A layer that does not divide is one that divides, with sqrt(d_k) times the query kernel.
    undo = 1.0 if divided else math.sqrt(d_k)
    layer.query_proj.kernel *= undo
    at_query, query_kernel, key_kernel = layer_gradients(layer, x, upstream)
    return undo * at_query, undo * query_kernel, key_kernel


def layer_gradients(layer: ref.MultiHeadAttention, x: ndarray, upstream: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Send a gradient back through self-attention, to the queries, the query kernel and the key kernel."""
    seen, gradients = ref.Recorder(), ref.Recorder()
    layer(x, x, tap=seen)
    multi_head_attention_backward(layer, x, x, upstream, Trace(seen, gradients))
    return gradients["query"], gradients["query_proj.kernel"], gradients["key_proj.kernel"]


def count_multiply_adds(length: int, d_k: int, d_v: int, d_model: int = D_MODEL) -> int:
    """Count what dot-product and additive attention both take: two projections, the scores, and the average.

    2 L d_model d_k + L^2 d_k + L^2 d_v, for L queries and L keys.
    """
    return 2 * length * d_model * d_k + length**2 * (d_k + d_v)


def attention_inputs(length: int, d_k: int, d_v: int) -> dict[str, ndarray]:
    """Return random inputs of ``additive_attention``, of which ``dot_product_attention`` takes all but the last."""
    rng = np.random.default_rng([SEED, length, d_k])
    draw = rng.standard_normal
    return {
        "query": draw((1, length, D_MODEL), np.float32),
        "key": draw((1, length, D_MODEL), np.float32),
        "value": draw((1, length, d_v), np.float32),
        "query_kernel": draw((D_MODEL, d_k), np.float32) / np.float32(math.sqrt(D_MODEL)),
        "key_kernel": draw((D_MODEL, d_k), np.float32) / np.float32(math.sqrt(D_MODEL)),
        "score_vector": draw(d_k, np.float32),
    }


def dot_product_attention(
    query: ndarray, key: ndarray, value: ndarray, query_kernel: ndarray, key_kernel: ndarray
) -> ndarray:
    """Project and attend, as ``additive_attention`` does: one head of equation (1)."""
    return attend((query @ query_kernel)[:, None], (key @ key_kernel)[:, None], value[:, None])


def measure_cost(length: int, d_k: int, d_v: int = 64, seconds: float = SECONDS) -> Cost:
    """Time both functions in turn, on the same inputs, in float32."""
    inputs = attention_inputs(length, d_k, d_v)
    shared = {name: array for name, array in inputs.items() if name != "score_vector"}
    calls: dict[str, Callable[[], Any]] = {
        "dot": lambda: dot_product_attention(**shared),
        "additive": lambda: additive_attention(**inputs),
    }
    memory = {name: peak_bytes(call) for name, call in calls.items()}
    dot, additive = time_in_turn(calls, seconds).values()
    return Cost(
        length,
        d_k,
        multiply_adds=count_multiply_adds(length, d_k, d_v),
        extra=length**2 * d_k,
        rounds=len(dot),
        dot_seconds=Spread.of(dot),
        additive_seconds=Spread.of(additive),
        ratio=Spread.of(additive / dot),
        dot_bytes=memory["dot"],
        additive_bytes=memory["additive"],
    )


def measure_steps(length: int, d_k: int, d_v: int = 64, seconds: float = 3 * SECONDS) -> list[Step]:
    """Time the steps of both functions in turn, each on what the step before it made."""
    x, y, value, query_kernel, key_kernel, score_vector = attention_inputs(length, d_k, d_v).values()
    query, key = x @ query_kernel, y @ key_kernel
    total = query[:, :, None, :] + key[:, None, :, :]  # [B, L, M, d_k]
    hidden = np.tanh(total)
    scores = query @ key.mT / np.float32(math.sqrt(d_k))
    weights = softmax(scores)
    pairs, width = length**2, np.dtype(np.float32).itemsize
    inputs, projected, average = 2 * length * D_MODEL, 2 * length * d_k, length * d_v
    steps: dict[str, tuple[str, Callable[[], Any], int, int]] = {  # used by, function, operations, numbers moved
        "projections": (
            "both",
            lambda: (x @ query_kernel, y @ key_kernel),
            2 * inputs * d_k,
            inputs + 2 * D_MODEL * d_k + projected,
        ),
        "query @ key.mT": ("dot", lambda: query @ key.mT, 2 * pairs * d_k, projected + pairs),
        "query + key": (
            "additive",
            lambda: query[:, :, None, :] + key[:, None, :, :],
            pairs * d_k,
            projected + pairs * d_k,
        ),
        "tanh": ("additive", lambda: np.tanh(total), pairs * d_k, 2 * pairs * d_k),
        "hidden @ v": ("additive", lambda: hidden @ score_vector, 2 * pairs * d_k, pairs * d_k + d_k + pairs),
        "softmax": ("both", lambda: softmax(scores), 5 * pairs, 2 * pairs),
        "weights @ value": ("both", lambda: weights @ value, 2 * pairs * d_v, pairs + 2 * average),
    }
    times = time_in_turn({name: call for name, (_, call, _, _) in steps.items()}, seconds)
    return [
        Step(name, used_by, Spread.of(times[name]), operations, width * moved)
        for name, (used_by, _, operations, moved) in steps.items()
    ]


def time_in_turn(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, ndarray]:
    """Call each function once a round, so that disturbances affect all alike, and return their seconds."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < LEAST_ROUNDS:
        for name, call in calls.items():
            start = CLOCK()
            call()
            times[name].append(CLOCK() - start)
    return {name: np.array(found) for name, found in times.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most memory that a call holds at any time, its result included."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not already:
            tracemalloc.stop()
