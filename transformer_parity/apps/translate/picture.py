"""A picture of the cross-attention of one translation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from transformer_parity.apps.figures.attention import TAPS, draw_heads
from transformer_parity.apps.translate.lines import Translation
from transformer_parity.apps.translate.trained import Trained
from transformer_parity.engine.style import STYLE, write
from transformer_parity.transformer.ports.protocol import LoadedPort


def draw_translation(port: LoadedPort, trained: Trained, translation: Translation, path: Path) -> None:
    """Draw the heads of the last decoder layer: for each token, which source tokens it attends to.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib

    config, line, best = trained.config, translation.line, translation.hypotheses[0]
    start = config.bos_id if trained.search.start_id is None else trained.search.start_id
    inputs = {"source_ids": np.array([line.ids]), "target_ids": np.array([[start, *best.ids[:-1]]])}
    last = config.num_decoder_layers - 1
    heads = port.run("", inputs, taps=True).taps[TAPS["cross"].format(last)][0].astype(np.float64)  # [H, T, S]
    source = trained.vocabulary.pieces(line.text)
    title = f"Cross-attention of decoder layer {last}, the last one; {trained.path.name}"
    with matplotlib.rc_context(STYLE):
        write(draw_heads(heads, best.pieces, source, title), path)
