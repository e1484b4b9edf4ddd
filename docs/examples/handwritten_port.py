"""A port that uses hooks, for a PyTorch model with different names, fused projections, and tied embeddings."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from transformer_parity.plugin import Port, no_tap

# --- The model, as in an existing project, without any code for the comparison ---


class Attention(nn.Module):
    """Multi-head attention with a fused projection of query, key, and value (in cross-attention, of key and value)."""

    def __init__(self, d_model, heads, cross=False):
        super().__init__()
        self.heads, self.cross = heads, cross
        self.q = nn.Linear(d_model, d_model, bias=False) if cross else None
        self.fused = nn.Linear(d_model, (2 if cross else 3) * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, memory, mask):
        """Return the output [B, L, d_model]. The mask [B, 1, L or 1, M] is True where a query may attend to a key."""
        query, key, value = (self.q(x), *self.fused(memory).chunk(2, -1)) if self.cross else self.fused(x).chunk(3, -1)
        query, key, value = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        context = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(context.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """An encoder layer, or a decoder layer if it has cross-attention."""

    def __init__(self, d_model, heads, d_ff, epsilon, cross):
        super().__init__()
        self.attn = Attention(d_model, heads)
        self.src = Attention(d_model, heads, cross=True) if cross else None
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model, eps=epsilon) for _ in range(3 if cross else 2))

    def forward(self, x, mask, memory=None, memory_mask=None):
        """Return [B, L, d_model]."""
        first, *between, last = self.norms
        x = first(x + self.attn(x, x, mask))
        if self.src is not None:
            x = between[0](x + self.src(x, memory, memory_mask))
        return last(x + self.ff(x))


class Translator(nn.Module):
    """An encoder and a decoder that share one embedding matrix."""

    def __init__(self, config):
        super().__init__()
        self.pad_id, self.table = config.pad_id, nn.Embedding(config.source_vocab_size, config.d_model)
        sizes = config.d_model, config.num_heads, config.d_ff, config.layer_norm_epsilon
        self.enc = nn.ModuleList(Block(*sizes, cross=False) for _ in range(config.num_encoder_layers))
        self.dec = nn.ModuleList(Block(*sizes, cross=True) for _ in range(config.num_decoder_layers))

    def embed(self, ids):
        """Return the sum [B, L, d_model] of the scaled embeddings and the positional encodings."""
        x = self.table(ids) * math.sqrt(self.table.embedding_dim)
        position = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        angles = position / 10000 ** (torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
        return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(x.dtype)

    def forward(self, source_ids, target_ids):
        """Return the logits [B, T, V]."""
        source_mask = (source_ids != self.pad_id)[:, None, None, :]
        length = target_ids.shape[1]
        target_mask = (target_ids != self.pad_id)[:, None, None, :] & torch.ones(length, length).tril().bool()
        memory = self.embed(source_ids)
        for block in self.enc:
            memory = block(memory, source_mask)
        x = self.embed(target_ids)
        for block in self.dec:
            x = block(x, target_mask, memory, source_mask)
        return x @ self.table.weight.T


# --- The port ---

ATTENTIONS = {"self_attention": "attn", "cross_attention": "src"}


class MyPort(Port):
    """A port of the model. It registers a forward hook for each tap."""

    taps = ("*.layers.*.output", "*.layers.*.*.output")

    def load(self, config, weights, dtype):
        """Build the model and load the weights. An ``nn.Linear`` stores the transpose of a kernel [in, out]."""
        self.model = Translator(config).to(getattr(torch, dtype)).eval()
        self.modules = {}  # maps the name of a tap to the module whose output is the tap's value
        state = {"table.weight": weights["source_embedding.table"]}  # one matrix for both embeddings and the output
        for stack, blocks in (("encoder", self.model.enc), ("decoder", self.model.dec)):
            for i, block in enumerate(blocks):
                theirs, ours = f"{stack}.layers.{i}", f"{stack[:3]}.{i}"
                kernels = {}
                for name, attribute in ATTENTIONS.items():
                    if (attention := getattr(block, attribute)) is None:
                        continue
                    self.modules[f"{theirs}.{name}.output"] = attention
                    query, key, value, out = (
                        weights[f"{theirs}.{name}.{kind}_proj.kernel"] for kind in ("query", "key", "value", "output")
                    )
                    fused = (key, value) if attention.cross else (query, key, value)
                    kernels |= {f"{attribute}.fused": np.concatenate(fused, 1), f"{attribute}.out": out}
                    kernels |= {f"{attribute}.q": query} if attention.cross else {}
                for number, name in ((0, "inner"), (2, "output")):
                    kernels[f"ff.{number}"] = weights[f"{theirs}.feed_forward.{name}_proj.kernel"]
                    state[f"{ours}.ff.{number}.bias"] = weights[f"{theirs}.feed_forward.{name}_proj.bias"]
                state |= {f"{ours}.{name}.weight": kernel.T for name, kernel in kernels.items()}
                sublayers = [name for name in (*ATTENTIONS, "feed_forward") if f"{theirs}.{name}_norm.scale" in weights]
                for norm, (module, name) in enumerate(zip(block.norms, sublayers, strict=True)):
                    state[f"{ours}.norms.{norm}.weight"] = weights[f"{theirs}.{name}_norm.scale"]
                    state[f"{ours}.norms.{norm}.bias"] = weights[f"{theirs}.{name}_norm.bias"]
                    self.modules[f"{theirs}.{name}_norm.output"] = module
                self.modules |= {f"{theirs}.feed_forward.output": block.ff, f"{theirs}.output": block}
        self.model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in state.items()})

    def forward(self, source_ids, target_ids, tap):
        """Return the logits. The hooks return the values of ``tap``, so that `parity` can replace a module's output."""

        def shown(name):
            return lambda module, inputs, output: torch.from_numpy(tap(name, output.numpy()))

        hooks = [] if tap is no_tap else [one.register_forward_hook(shown(name)) for name, one in self.modules.items()]
        try:
            with torch.no_grad():
                return self.model(*(torch.from_numpy(np.array(ids)) for ids in (source_ids, target_ids))).numpy()
        finally:
            for hook in hooks:
                hook.remove()
