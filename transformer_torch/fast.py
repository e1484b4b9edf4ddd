"""Faster ways to compute the same formulas. The model is the same without this module, up to rounding.

``accelerate`` lets a model use PyTorch's fused kernel for attention and keep its sines and cosines. Searches decode
with a twin of the model, whose weights have a layout for few rows, and choose the best continuations block by block.
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

from transformer_spec.checks import check_attention, check_attention_mask
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

FLASH_DEVICES = ("cuda",)  # types of devices that have the kernel
BLOCK = 32  # values per block; only the blocks with the largest maxima are sorted
KEPT_POSITIONS = 1024  # positions whose sines and cosines are kept
FEW_ROWS = 64  # rows; up to here, the other layout of the weights is faster
# These layers multiply the memory, once per search, so they have many rows.
MEMORY_PROJECTIONS = ("cross_attention.key_proj", "cross_attention.value_proj")


def accelerate(model: nn.Module) -> None:
    """Replace parts of a model that has just been built by faster ones."""
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
    """Keep the vectors of the first positions, in the model's dtype and on its device."""

    table: Tensor

    def __init__(self, config: TransformerConfig, dtype: torch.dtype | str = "float32") -> None:
        super().__init__(config, dtype)
        table = torch.empty(KEPT_POSITIONS, config.d_model, dtype=to_dtype(dtype))
        self.register_buffer("table", table, persistent=False)
        self._fill()

    def forward(self, x: Float[Tensor, "B L d_model"]) -> Float[Tensor, "B L d_model"]:
        """Return ``x`` with its positions. If parameters got another dtype, the table is too coarse or too fine."""
        if x.dtype == self.table.dtype:
            return super().forward(x)
        return x + super().vectors(x.shape[1]).to(x)

    def vectors(self, length: int) -> Float[Tensor, "L d_model"]:
        """Return the vector that is added at each of the first positions."""
        if torch.compiler.is_exporting() or length > KEPT_POSITIONS:  # an exported model takes any length
            return super().vectors(length).to(self.table)
        return self.table[:length]

    def _apply(self, fn, recurse=True):
        """Compute the table again if the module gets another dtype or device, because rounded values aren't exact."""
        super()._apply(fn, recurse)
        self._fill()
        return self

    def _fill(self):
        if type(self.table) is Tensor and not self.table.is_meta:  # a fake tensor has no values either
            self.table.copy_(super().vectors(KEPT_POSITIONS))


def _follow(model, incompatible_keys):
    """Move the positions to the device of parameters that ``load_state_dict(assign=True)`` put in place."""
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
) -> Float[Tensor, "B H L d_v"]:
    """Return the same as ``scaled_dot_product_attention``, if possible without ever storing the weights.

    The fused kernel has no taps, draws its own dropout, and can be slower than separate products.
    """
    rate = dropout.p if dropout is not None and dropout.training else 0.0
    is_fused = tap is no_tap and (rate == 0.0 or not isinstance(dropout, OwnDropout))
    if not is_fused or onednn.delays_attention(query, key):
        return scaled_dot_product_attention(query, key, value, mask, dropout, tap)
    check_attention(query.shape, key.shape, value.shape)
    if mask is not None:
        check_attention_mask(mask.shape, dtype_name(mask), query.shape, key.shape)
    if pattern := getattr(mask, "pattern", None):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=pattern == "causal")
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)


def _mark_masks(stack, args, kwargs):
    """Find out, once for all layers, whether masks allow everything or are causal: flash attention takes no others.

    Only on a GPU, where reading them waits for what it computes, so not while its work is recorded or traced.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not args or args[0].device.type not in FLASH_DEVICES:
        return None
    if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return tuple(map(_marked, args)), {name: _marked(value) for name, value in kwargs.items()}


def _marked(mask):
    if type(mask) is not Tensor or mask.dtype != torch.bool or debug_unwrap(mask) is not mask:
        return mask
    mask = mask.view(mask.shape)  # a tensor of its own: the caller may change the values of the given one
    is_all = mask.all()
    is_square = mask.shape[-1] == mask.shape[-2]
    is_causal = (mask == causal_mask(mask.shape[-1], mask.device)).all() if is_square else torch.zeros_like(is_all)
    found = dict(zip(("all", "causal"), torch.stack([is_all, is_causal]).tolist(), strict=True))
    mask.pattern = next((pattern for pattern in found if found[pattern]), None)
    return mask


@contextmanager
def decoding_twin(model: nn.Module, rows: int) -> Iterator[Any]:
    """Yield a model in inference mode that decodes this many rows fast, with the parameters and hooks of the given one.

    The given model doesn't change, so another thread may train it at the same time. But if torch.compile or a tool has
    changed what parts of it run, the model itself is yielded.
    """
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None or "forward" in vars(module):
            with inference(model):
                yield model
            return
    with torch.inference_mode():
        twin = _inference_twin(model)
        _lay_out_for_few_rows(twin, rows)
    yield twin


def _inference_twin(module):
    """Return a module in inference mode with the same parameters and hooks, whose attributes can be replaced."""
    twin = object.__new__(type(module))
    children = {name: None if child is None else _inference_twin(child) for name, child in module._modules.items()}
    # Also as plain attributes, because nn.Module.__getattr__ takes a twentieth of a small model's decoding step.
    vars(twin).update({**vars(module), **module._parameters, **children})
    vars(twin).update({"_modules": children, "training": False})
    return twin


def _lay_out_for_few_rows(model, rows):
    """Give each layer that multiplies in a decoding step a copy of its weight in a layout that suits few rows.

    A decoding step has one row per hypothesis. It spends its time on reading weights, and BLAS reads a transposed
    matrix badly: on a Xeon, a vocabulary of 37,000 takes half as long from oneDNN's layout, and small matrices from
    [in, out] take two thirds. In bfloat16, oneDNN computes the products anyway, and would convert the weights in each
    of them. The copies belong to one search, so they cannot be out of date.
    """
    if rows > FEW_ROWS or model.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return  # autocast cannot convert oneDNN's layout
    dtypes = {torch.float64, torch.float32, *([torch.bfloat16] if onednn.takes_bfloat16() else [])}
    for name, module in (*model.decoder.named_modules(), ("output_proj", model.output_proj)):
        if (
            type(module) in (nn.Linear, TiedProjection)
            and type(module.weight) in (Tensor, nn.Parameter)  # not a quantized tensor, say
            and module.weight.dtype in dtypes
            and not name.endswith(MEMORY_PROJECTIONS)
        ):
            module.forward = onednn.for_few_rows(module.weight, module.bias, rows)


def top_by_blocks(values: Float[Tensor, "B N"], count: int) -> tuple[Float[Tensor, "B K"], Int[Tensor, "B K"]]:
    """Return the largest values of each row and their indices. Of equal values, the first comes first.

    Sorting everything is slow, and ``topk`` orders equal values arbitrarily. The largest values are in the blocks with
    the largest maxima; of blocks with equal maxima, in the first ones.
    """
    if values.shape[1] <= BLOCK * count:
        best, index = values.sort(dim=-1, descending=True, stable=True)  # NaN comes first, so that it is noticed
        return best[:, :count].nan_to_num(inf, inf, -inf), index[:, :count]
    short = -values.shape[1] % BLOCK
    padded = F.pad(values, (0, short), value=-inf) if short else values  # F.pad copies even if it pads nothing
    blocks = padded.unflatten(1, (-1, BLOCK))
    _, block = top_by_blocks(blocks.amax(-1), count)
    block = block.sort().values  # in their original order, so that the first of equal values stays the first
    best, at = top_by_blocks(blocks.take_along_dim(block[:, :, None], 1).flatten(1), count)
    return best, block.gather(1, at // BLOCK) * BLOCK + at % BLOCK
