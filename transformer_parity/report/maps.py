"""The attention maps of the page, as pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy import ndarray
from PIL import Image, ImageColor

from transformer_parity.figures.style import MINUS, PLUS, ZERO

VISIBLE = 1e-3  # the smallest difference that a map is stretched to show


def attention_maps(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each attention layer's maps as pictures: of the reference, of the port, and of their difference."""
    layers = []
    for entry in result["attention"]:
        expected, actual = np.array(entry["expected"], float), np.array(entry["actual"], float)
        comparable = expected.shape == actual.shape
        difference = actual - expected if comparable else np.zeros_like(expected)
        largest = float(np.abs(difference).max(initial=0.0)) if comparable else math.nan
        scale = max(largest, VISIBLE) if math.isfinite(largest) else 1.0
        heads = [
            {
                "expected": picture(expected[head]),
                "actual": picture(actual[head]) if head < len(actual) else "",
                "difference": picture(difference[head] / scale) if comparable else "",
            }
            for head in range(len(expected))
        ]
        shapes = list(actual.shape), list(expected.shape)
        layers.append(
            {**entry, "heads": heads, "largest": largest, "scale": scale, "shapes": shapes, "size": expected.shape}
        )
    return layers


def picture(values: ndarray) -> str:
    """Return a map as a PNG in a data URI: one pixel per number; 0 is white, 1 blue, -1 orange, NaN black."""
    zero, plus, minus = (np.array(ImageColor.getrgb(colour)) for colour in (ZERO, PLUS, MINUS))
    known = np.nan_to_num(np.clip(values, -1.0, 1.0))[..., None]
    colours = np.where(known >= 0, zero + known * (plus - zero), zero - known * (minus - zero))
    colours = np.where(np.isnan(values)[..., None], 0, colours).round().astype(np.uint8)
    png = io.BytesIO()
    Image.fromarray(colours).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
