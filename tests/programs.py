"""Transcriptions of third-party programs. They read the programs' own files.

Comparing with them checks an import completely, from the array names to the logits.
"""

from __future__ import annotations

import io
import math

import numpy as np
import yaml


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attention(q, k, v, heads, mask):
    """Return the attention output for queries q [B, L, d] and values v [B, M, d].

    The mask [B, L, M] or [B, 1, M] is True for positions that may be attended to.
    """

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, v = split(q), split(k), split(v)
    z = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    x = softmax(np.where(mask[:, None], z, -99999999.0)) @ v
    return x.swapaxes(1, 2).reshape(*x.shape[:1], x.shape[2], -1)


def layer_norm(x, scale, bias, epsilon):
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def gelu(x):
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


class Marian:
    """The Transformer in marian-nmt/marian-dev, src/models/transformer.h, with teacher forcing in float64.

    Args:
        data: The contents of a ``model.npz`` file, as bytes.
    """

    def __init__(self, data: bytes) -> None:
        arrays = np.load(io.BytesIO(data))
        self.options = yaml.safe_load(arrays["special:model.yml"].tobytes().rstrip(b"\0"))
        self.graph = {name: arrays[name].astype(np.float64) for name in arrays.files if not name.startswith("special")}

    def param(self, name):
        value = self.graph[name]
        assert value.ndim == 2
        return value

    def embed(self, ids, prefix, shift=False):
        o = self.options
        shared = o["tied-embeddings-src"] or o["tied-embeddings-all"]
        x = self.param("Wemb" if shared else f"{prefix}_Wemb")[ids]
        if shift:  # the decoder input starts with zeros
            x = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        length, d = x.shape[1:]
        if "Wpos" in self.graph:
            x = x + self.param("Wpos")[:length]
        else:
            timescales = d // 2
            inverse = np.exp(np.arange(timescales) * -(math.log(10000.0) / (timescales - 1)))
            angles = np.arange(length)[:, None] * inverse
            x = math.sqrt(d) * x + np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        return self.process(f"{prefix}_emb", o["transformer-postprocess-emb"], x, suffix="_pre")

    def process(self, prefix, operations, x, previous=None, suffix=""):
        for operation in operations:
            if operation == "a":
                x = x + previous
            elif operation == "n":
                x = layer_norm(x, *(self.param(f"{prefix}_ln_{kind}{suffix}") for kind in ("scale", "bias")), 1e-6)
            else:
                assert operation == "d"
        return x

    def dense(self, prefix, suffix, x):
        return x @ self.param(f"{prefix}_W{suffix}") + self.param(f"{prefix}_b{suffix}")

    def layer_attention(self, prefix, x, memory, mask):
        y = self.process(f"{prefix}_Wo", self.options["transformer-preprocess"], x, suffix="_pre")
        memory = y if memory is None else memory
        qkv = [self.dense(prefix, "q", y), self.dense(prefix, "k", memory), self.dense(prefix, "v", memory)]
        y = self.dense(prefix, "o", attention(*qkv, self.options["transformer-heads"], mask))
        return self.process(f"{prefix}_Wo", self.options["transformer-postprocess"], y, x)

    def layer_ffn(self, prefix, x):
        y = self.process(f"{prefix}_ffn", self.options["transformer-preprocess"], x, suffix="_pre")
        y = self.dense(prefix, "1", y)
        y = np.maximum(y, 0) if self.options["transformer-ffn-activation"] == "relu" else y / (1.0 + np.exp(-y))
        return self.process(f"{prefix}_ffn", self.options["transformer-postprocess"], self.dense(prefix, "2", y), x)

    def logits(self, source, labels, source_mask):
        o = self.options
        top, mask = o["transformer-postprocess-top"], source_mask[:, None, :]
        x = self.embed(source, "encoder")
        for n in range(1, o["enc-depth"] + 1):
            x = self.layer_attention(f"encoder_l{n}_self", x, None, mask)
            x = self.layer_ffn(f"encoder_l{n}_ffn", x)
        memory = self.process("encoder_top", top, x)
        y = self.embed(labels, "decoder", shift=True)
        past = np.tril(np.ones((1, y.shape[1], y.shape[1]), bool))
        for n in range(1, o["dec-depth"] + 1):
            y = self.layer_attention(f"decoder_l{n}_self", y, None, past)
            y = self.layer_attention(f"decoder_l{n}_context", y, memory, mask)
            y = self.layer_ffn(f"decoder_l{n}_ffn", y)
        y = self.process("decoder_top", top, y)
        return y @ self.output() + (0.0 if o["output-omit-bias"] else self.param("decoder_ff_logit_out_b"))

    def output(self):
        o, name = self.options, "decoder_ff_logit_out"
        if o["tied-embeddings"] or o["tied-embeddings-all"]:
            shared = o["tied-embeddings-all"] or o["tied-embeddings-src"]
            return self.param("Wemb" if shared else "decoder_Wemb").T
        return self.param(f"{name}_W") if f"{name}_W" in self.graph else self.param(f"{name}_Wt").T
