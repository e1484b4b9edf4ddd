"""Optimized functions and layers.

A model with ``fast=False`` doesn't use them, but computes the same results up to rounding. ``accelerate`` makes a model
use PyTorch's fused attention kernel and cache its sinusoidal encodings. Searches use a shallow copy of the model, the
decoding twin, whose weights have layouts that are faster for inputs with few rows. They also select the best extensions
block by block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the usual name
from torch import Tensor, nn
from torch.func import debug_unwrap

from transformer_spec.checks import check_attention, check_attention_bias, check_attention_mask
from transformer_spec.config import TransformerConfig
from transformer_spec.shapes import Bool, Float, Int
from transformer_spec.taps import Tap, no_tap
from transformer_torch import onednn
from transformer_torch.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_torch.decoder import DecoderStack
from transformer_torch.embedding import SinusoidalPosition, TiedProjection
from transformer_torch.encoder import EncoderStack
from transformer_torch.layers import Dropout, OwnDropout, inference
from transformer_torch.masks import causal_mask
from transformer_torch.runtime import dtype_name, to_dtype

FLASH_DEVICES = ("cuda",)  # device types that support flash attention
BLOCK = 32  # values per block; only the blocks with the largest maxima are sorted
KEPT_POSITIONS = 1024  # number of positions whose sinusoidal encodings are cached
FEW_ROWS = 64  # maximum number of rows for which the alternative layout is faster
# These layers project the encoder memory once per search, so their inputs have many rows.
MEMORY_PROJECTIONS = ("cross_attention.key_proj", "cross_attention.value_proj")


def accelerate(model: nn.Module) -> None:
    """Replace layers and functions of a newly constructed model with faster ones that compute the same results."""
    dtype = next(model.parameters()).dtype
    for name, module in [*model.named_modules()]:
        if isinstance(module, MultiHeadAttention):
            module.attend = fused_attention
        if isinstance(module, EncoderStack | DecoderStack):
            module.register_forward_pre_hook(_mark_masks, with_kwargs=True)
        if isinstance(module, SinusoidalPosition):
            model.set_submodule(name, FastSinusoidalPosition(module.config, dtype))
    model.register_load_state_dict_post_hook(_follow)


class FastSinusoidalPosition(SinusoidalPosition):
    """Sinusoidal positional encoding. It caches the vectors of the first positions, rounded to the model's dtype."""

    table: Tensor

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config, dtype)
        table = torch.empty(KEPT_POSITIONS, config.d_model, dtype=to_dtype(dtype))
        self.register_buffer("table", table, persistent=False)
        self._fill()

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` plus the encoding of each position.

        The cached vectors are used only if they have the dtype and device of ``x``.
        """
        if x.dtype == self.table.dtype and x.device == self.table.device:
            return super().forward(x)
        return x + super().vectors(x.shape[1]).to(x)

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the vectors that are added at the first ``length`` positions."""
        if torch.compiler.is_exporting() or length > KEPT_POSITIONS:  # an exported model supports any length
            return super().vectors(length).to(self.table)
        return self.table[:length]

    def _apply(self, fn, recurse=True):
        """Recompute the cached vectors if their dtype or device changes, because casting rounded vectors is inexact."""
        super()._apply(fn, recurse)
        self._fill()
        return self

    def _fill(self):
        if type(self.table) is Tensor and not self.table.is_meta:  # skip fake and meta tensors
            self.table.copy_(super().vectors(KEPT_POSITIONS))


def _follow(model, incompatible_keys):
    """Move the cached vectors to the device of the parameters, which ``load_state_dict(assign=True)`` may change."""
    for position in model.modules():
        if isinstance(position, FastSinusoidalPosition) and position.table.device != model.device:
            position.to_empty(device=model.device).to(next(model.parameters()).dtype)


def fused_attention(
    query: Float[Tensor, "B H L d_k"],
    key: Float[Tensor, "B H M d_k"],
    value: Float[Tensor, "B H M d_v"],
    mask: Bool[Tensor, "#B #H #L #M"] | None = None,
    dropout: Dropout | None = None,
    tap: Tap = no_tap,
    bias: Float[Tensor, "#B #H #L #M"] | None = None,
) -> Float[Tensor, "B H L d_v"]:
    """Compute ``scaled_dot_product_attention`` without storing the attention weights, if possible.

    The function doesn't use the fused kernel if there are taps, if the dropout layer was replaced or has hooks, if
    several devices share a dropout mask, or if separate matmuls are faster than the kernel.
    """
    is_plain = dropout is None or (
        type(dropout) in (Dropout, OwnDropout)
        and not (is_hooked(dropout) or dropout._backward_hooks or dropout._backward_pre_hooks)
    )
    rate = dropout.p if is_plain and dropout is not None and dropout.training else 0.0
    is_fused = is_plain and tap is no_tap and (rate == 0.0 or not isinstance(dropout, OwnDropout))
    if not is_fused or onednn.delays_attention(query, key):
        return scaled_dot_product_attention(query, key, value, mask, dropout, tap, bias)
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, dtype_name(mask), query.shape, key.shape)
    if bias is not None:
        check_attention_bias(bias.shape, query.shape, key.shape)
        added = bias if mask is None else bias.masked_fill(~mask, -inf)
        return F.scaled_dot_product_attention(query, key, value, added, dropout_p=rate)
    if pattern := getattr(mask, "pattern", None):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=pattern == "causal")
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)


def _mark_masks(stack, args, kwargs):
    """Mark masks that allow every key or are causal, because flash attention supports only these two patterns.

    The masks are checked once for all layers, and only on a GPU. Reading a mask's values waits for the GPU, so this
    check is skipped in traced code and while a CUDA graph is captured.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not args or args[0].device.type not in FLASH_DEVICES:
        return None
    if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return tuple(map(_marked, args)), {name: _marked(value) for name, value in kwargs.items()}


def _marked(mask):
    if type(mask) is not Tensor or mask.dtype != torch.bool or debug_unwrap(mask) is not mask:
        return mask
    mask = mask.view(mask.shape)  # set the attribute on a view, because the caller may modify its tensor
    is_all = mask.all()
    is_square = mask.shape[-1] == mask.shape[-2]
    is_causal = (mask == causal_mask(mask.shape[-1], mask.device)).all() if is_square else torch.zeros_like(is_all)
    found = dict(zip(("all", "causal"), torch.stack([is_all, is_causal]).tolist(), strict=True))
    mask.pattern = next((pattern for pattern in found if found[pattern]), None)
    return mask


@contextmanager
def decoding_twin(model: nn.Module, rows: int) -> Iterator[Any]:
    """Yield a shallow copy of a model in inference mode that decodes faster if there are only a few rows.

    The copy has the same parameters. This function doesn't modify the original model, so another thread can train it at
    the same time. The function yields the original model instead if a module is compiled, has hooks or replaced
    methods, or is an instance of a user's class. In these cases, user code or compiled code may refer to the original
    modules.
    """
    if any(map(_is_custom, model.modules())):
        with inference(model):
            yield model
        return
    with torch.inference_mode():
        twin = _inference_twin(model)
        _lay_out_for_few_rows(twin, rows)
    yield twin


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling the module runs a user's hook or a replaced ``forward`` method."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if hook is not _mark_masks]
    return bool(hooks or module._forward_hooks or "forward" in vars(module))


def check_addition(position: nn.Module, vectors: Float[Tensor, "L d_model"]) -> None:
    """Check that a position module with custom code only adds vectors to its input.

    A search adds these vectors without calling the module.

    Args:
        position: Positional encoding.
        vectors: Output of the module for an input of zeros.

    Raises:
        ValueError: If the module also changes the vectors that it receives.
    """
    if _is_custom(position):
        ones, tolerance = torch.ones_like(vectors), 16 * torch.finfo(vectors.dtype).eps
        if not torch.allclose(position(ones[None])[0], ones + vectors, tolerance, tolerance):
            raise ValueError(
                f"target_position must only add one vector per position: got a {type(position).__name__} that also "
                "changes the vectors it receives; change target_embedding instead"
            )


def _is_custom(module):
    """Return whether a module may run compiled code, or code that isn't part of PyTorch or this package."""
    is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
    is_own = type(module).__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])
    replaced = (name for name, value in vars(module).items() if callable(value) and hasattr(type(module), name))
    return is_compiled or not is_own or is_hooked(module) or any(replaced)


def _inference_twin(module):
    """Return a shallow copy of a module. The copy has the same parameters and is in inference mode."""
    twin = object.__new__(type(module))
    children = {name: None if child is None else _inference_twin(child) for name, child in module._modules.items()}
    # Also store parameters and submodules as plain attributes, because nn.Module.__getattr__ takes 5% of a small
    # model's decoding step.
    vars(twin).update({**vars(module), **module._parameters, **children})
    vars(twin).update({"_modules": children, "training": False})
    return twin


def _lay_out_for_few_rows(model, rows):
    """Give each linear layer of a decoding step a copy of its weight in a layout that is fast for few rows.

    The inputs of a decoding step have few rows (one per hypothesis), so the step spends most of its time reading
    weights. BLAS reads a transposed matrix slowly. The following measurements are from a Xeon processor. Compared with
    the original layout, oneDNN's layout reduces the time of the output projection by 50% for a vocabulary of 37,000
    tokens, and the layout [in, out] reduces the time of matmuls with small matrices by 33%. In bfloat16, PyTorch always
    uses oneDNN. Without the copies, oneDNN would convert the weights to its layout in every matmul. The copies are used
    in only one search, so they are never outdated.
    """
    if rows > FEW_ROWS or model.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return  # autocast can't convert oneDNN's layout
    dtypes = {torch.float64, torch.float32, *([torch.bfloat16] if onednn.takes_bfloat16() else [])}
    for name, module in (*model.decoder.named_modules(), ("output_proj", model.output_proj)):
        if (
            type(module) in (nn.Linear, TiedProjection)
            and type(module.weight) in (Tensor, nn.Parameter)  # excludes quantized tensors
            and module.weight.layout == torch.strided
            and module.weight.dtype in dtypes
            and not name.endswith(MEMORY_PROJECTIONS)
        ):
            module.forward = onednn.for_few_rows(module.weight, module.bias, rows)


def top_by_blocks(values: Float[Tensor, "B N"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Ties go to the lower index.

    Sorting all values is slow, and ``topk`` orders ties arbitrarily. The largest values are in the blocks with the
    largest maxima. If blocks have the same maximum, earlier blocks are preferred.
    """
    if values.shape[1] <= BLOCK * count:
        # The sort ranks NaN first, so that the search raises an error.
        best, index = values.sort(dim=-1, descending=True, stable=True)
        return best[:, :count].nan_to_num(inf, inf, -inf), index[:, :count]
    short = -values.shape[1] % BLOCK
    padded = F.pad(values, (0, short), value=-inf) if short else values  # F.pad always copies
    blocks = padded.unflatten(1, (-1, BLOCK))
    _, block = top_by_blocks(blocks.amax(-1), count)
    block = block.sort().values  # keep the original order, so that ties go to the lower index
    best, at = top_by_blocks(blocks.take_along_dim(block[:, :, None], 1).flatten(1), count)
    return best, block.gather(1, at // BLOCK) * BLOCK + at % BLOCK
