"""Measurements that test two claims of section 3.2.1, which the paper makes without evidence.

According to the first claim, the scores must be divided by sqrt(d_k). This module measures how the division changes the
softmax and the gradient through the softmax. According to the second claim, dot-product attention is faster than
additive attention, although both require the same number of multiply-adds.
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
POSITIONS = 64  # number of queries and of keys in a sequence
SEQUENCES = 16  # Each quantile is computed from SEQUENCES * POSITIONS queries.
D_MODEL = 512  # d_model of the paper's base model
LAYERS = 8  # number of random layers from which each quantile is computed
CARRIED = 0.9  # fraction of the squared gradient that the ``carriers`` contain
SECONDS, LEAST_ROUNDS = 0.8, 7  # minimum time in seconds, and minimum number of rounds, per size
# The CPU time of this thread doesn't include other programs. On Windows, its resolution of 16 ms is too coarse.
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
    """Return the average of the values, weighted by a network with one hidden layer (Bahdanau et al., 2015).

    Section 3.2.1 compares this function, ``softmax(v^T tanh(q W_q + k W_k)) V``, with dot-product attention. The
    theoretical complexity is similar, but this function computes d_k hidden units for every pair of positions, whereas
    dot-product attention computes all scores with a single matmul.

    Args:
        query: One query vector per position.
        key: One key vector per memory position.
        value: One value vector per memory position.
        query_kernel: ``W_q``, the hidden layer's matrix for queries.
        key_kernel: ``W_k``, the hidden layer's matrix for keys.
        score_vector: ``v``, the output layer.
        mask: True where a query may attend to a key. If a row contains only False, the context is zero. With None,
            every query may attend to every key.

    Returns:
        One weighted average of the values per query, in the dtype of ``query``.
    """
    hidden = np.tanh((query @ query_kernel)[:, :, None, :] + (key @ key_kernel)[:, None, :, :])  # [B, L, M, d_k]
    return softmax(hidden @ score_vector, mask) @ value


@dataclass(frozen=True)
class Spread:
    """The 10th percentile, the median, and the 90th percentile of many measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float] | ndarray) -> Spread:
        """Summarize measurements."""
        array = values if isinstance(values, ndarray) else np.array(list(values))
        return cls(*np.quantile(array, [0.1, 0.5, 0.9]).tolist())


@dataclass(frozen=True)
class Saturation:
    """Measurements of the scores and the softmax for random queries and keys."""

    d_k: int
    divided: bool  # whether the scores are divided by sqrt(d_k)
    variance: float  # variance of the scores
    largest: Spread  # largest weight of each query
    entropy: Spread  # entropy of each query's weights, in nats
    gradient: Spread  # softmax_gain of each query


@dataclass(frozen=True)
class LayerGradient:
    """Measurements of the gradients in random multi-head attention layers for random upstream gradients."""

    d_k: int
    num_heads: int
    divided: bool  # whether the scores are divided by sqrt(d_k)
    carriers: Spread  # smallest fraction of the queries that contains CARRIED of the squared gradient
    query_kernel: Spread  # norm of the gradient with respect to the query kernel
    key_kernel: Spread  # norm of the gradient with respect to the key kernel


@dataclass(frozen=True)
class Cost:
    """The cost of one call to each attention function, including the projections of queries and keys."""

    length: int  # number of queries and of keys
    d_k: int
    multiply_adds: int  # the same for both functions
    extra: int  # number of additions, and of tanh evaluations, that only additive attention requires
    rounds: int  # number of rounds of the timing
    dot_seconds: Spread
    additive_seconds: Spread
    ratio: Spread  # ratio of the two times within each round
    dot_bytes: int  # peak memory without the inputs
    additive_bytes: int  # peak memory without the inputs


@dataclass(frozen=True)
class Step:
    """The cost of one step of an attention function, such as the softmax."""

    name: str
    used_by: str  # "dot", "additive", or "both"
    seconds: Spread
    operations: int
    bytes_moved: int  # size of all inputs and outputs


def softmax_gain(weights: ndarray) -> ndarray:
    """Return the norm of the Jacobian diag(p) - p p^T of each softmax, which measures the gradient through the softmax.

    If the gradient with respect to the weights is random with variance 1, this norm is the root mean square of the norm
    of the gradient with respect to the scores. For uniform weights, the norm is sqrt(M - 1) / M. If one weight is 1,
    the norm is 0.
    """
    products = weights[..., :, None] * weights[..., None, :]  # [..., M, M]
    np.einsum("...ii->...i", products)[...] = 0.0
    # The diagonal, p (1 - p), is computed as the sum of the other entries because 1 - p loses all digits if the softmax
    # is saturated.
    return np.sqrt(np.square(products).sum((-2, -1)) + np.square(products.sum(-1)).sum(-1))


def measure_saturation(d_k: int, *, divided: bool) -> Saturation:
    """Measure the softmax for queries and keys with independent components of mean 0 and variance 1 (footnote 4)."""
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
    """Measure the gradients of random layers with d_model / d_k heads, for random upstream gradients of norm 1.

    Inputs have variance 1 and kernels have variance 1 / d_model, so queries and keys have variance 1, as in footnote 4.
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
    """Return the smallest fraction of the rows that together contain CARRIED of the squared gradient."""
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
    """Return the gradients with respect to the queries, the query kernel, and the key kernel of one random layer."""
    layer = random_layer(rng, d_k, d_model)
    x, upstream = rng.standard_normal((2, 1, POSITIONS, d_model))
    upstream /= np.linalg.norm(upstream)
    # To undo the division in a layer, multiply its query kernel by sqrt(d_k).
    undo = 1.0 if divided else math.sqrt(d_k)
    layer.query_proj.kernel *= undo
    at_query, query_kernel, key_kernel = layer_gradients(layer, x, upstream)
    return undo * at_query, undo * query_kernel, key_kernel


def layer_gradients(layer: ref.MultiHeadAttention, x: ndarray, upstream: ndarray) -> tuple[ndarray, ndarray, ndarray]:
    """Return the gradients of self-attention with respect to the queries, the query kernel, and the key kernel."""
    seen, gradients = ref.Recorder(), ref.Recorder()
    layer(x, x, tap=seen)
    multi_head_attention_backward(layer, x, x, upstream, Trace(seen, gradients))
    return gradients["query"], gradients["query_proj.kernel"], gradients["key_proj.kernel"]


def count_multiply_adds(length: int, d_k: int, d_v: int, d_model: int = D_MODEL) -> int:
    """Return the number of multiply-adds, which is the same for dot-product and additive attention.

    For L queries and L keys, the projections require 2 L d_model d_k multiply-adds, the scores require L^2 d_k, and the
    weighted average requires L^2 d_v.
    """
    return 2 * length * d_model * d_k + length**2 * (d_k + d_v)


def attention_inputs(length: int, d_k: int, d_v: int) -> dict[str, ndarray]:
    """Return random inputs of ``additive_attention``. ``dot_product_attention`` doesn't use ``score_vector``."""
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
    """Project queries and keys, and compute one head of equation (1)."""
    return attend((query @ query_kernel)[:, None], (key @ key_kernel)[:, None], value[:, None])


def measure_cost(length: int, d_k: int, d_v: int = 64, seconds: float = SECONDS) -> Cost:
    """Measure the time and memory of both functions on the same float32 inputs, in alternating calls."""
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
    """Measure the time of each step of both functions. The input of a step is the result of the previous step."""
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
    """Call each function once per round, so that noise affects all functions equally, and return the times."""
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
    """Return the peak memory of a call in bytes, including its result."""
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
