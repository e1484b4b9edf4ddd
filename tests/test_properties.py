"""Properties that every correct model has, measured on a port."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from transformer_parity.transformer.cases.case import Case, tiny
from transformer_parity.transformer.cases.inputs import token_ids
from transformer_parity.transformer.diagnose.evidence.properties import lacking
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import DEFINITION

CONFIG = tiny(d_k=None, d_v=None)
CASE = Case("full/padded", "full model", CONFIG, "", token_ids(CONFIG))


def port(change):
    """Return the reference as a port that modifies the source and target IDs before it uses them."""

    def load(config, weights, placement):
        loaded = DEFINITION.load(config, weights, placement)

        def run(block, inputs, *, taps):
            source_ids, target_ids = (inputs[name].astype(int).copy() for name in ("source_ids", "target_ids"))
            change(source_ids, target_ids)
            return loaded.run(block, {"source_ids": source_ids, "target_ids": target_ids}, taps=taps)

        return SimpleNamespace(run=run)

    return SimpleNamespace(load=load)


def hide_last(source_ids, target_ids):
    """Mask the last source token of sentences without padding."""
    source_ids[:, -1] = CONFIG.pad_id


def hide_second_of_target(source_ids, target_ids):
    """Replace the second token of each target."""
    target_ids[:, 1] = 5


def test_reference_has_every_property():
    """In the reference, every token affects the logits, and padding doesn't."""
    assert lacking(CASE, port(lambda source_ids, target_ids: None), Placement("float64")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hide_last, "replacing the token at source position 8 (the last) of sentence 0 changes no logits"),
        (hide_second_of_target, "replacing the token at target position 1 of sentence 0 changes no later logits"),
    ],
)
def test_token_without_effect_is_detected(change, words):
    """A mask that hides too many positions makes tokens ineffective."""
    assert words in " | ".join(lacking(CASE, port(change), Placement("float64")))
