"""Embedding matrices in Hugging Face directories: infer from the tensors which of the matrices are tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy import ndarray

from transformer_parity.apps.checkpoints.name_mapping import same


class TieNames(NamedTuple):
    """Names of the tensors that may be tied.

    Attributes:
        shared: Matrix of both embeddings.
        encoder: Embedding of the encoder.
        decoder: Embedding of the decoder.
        output: Weight of the output projection.
    """

    shared: str
    encoder: str
    decoder: str
    output: str


def settle_tables(
    found: Mapping[str, ndarray], names: TieNames, fields: Mapping[str, Any]
) -> tuple[str, dict[str, ndarray], list[str]]:
    """Determine from the tensors which embeddings are tied, and report flags that contradict the tensors.

    Args:
        found: Tensors by name.
        names: Names of the tensors that may be tied.
        fields: Content of config.json.

    Returns:
        The value of ``tie_embeddings``, the tensors, and the notes. If two or three matrices are tied, the tensors
        contain only one of them: the encoder embedding if it is tied, and otherwise the decoder embedding.

    Raises:
        ValueError: If there is no embedding matrix.
    """
    shared, _, _, output = names
    if not any(name in found for name in names):
        raise ValueError(f"the file does not contain an embedding matrix, such as {shared} or {names.encoder}")
    fallback = next(found[name] for name in (shared, names.decoder, names.encoder, output) if name in found)
    encoder = found.get(names.encoder, found.get(shared, fallback))
    decoder = found.get(names.decoder, found.get(shared, fallback))
    projection = found.get(output, decoder)
    alike, is_out = same(encoder, decoder), same(decoder, projection)
    tied = "all" if alike and is_out else "target_output" if is_out else "none"
    notes = []
    if fields["tie_word_embeddings"] is True and not is_out:
        notes.append(f"tie_word_embeddings is true, but {output} differs from the embedding, so the two are not tied")
    elif fields["tie_word_embeddings"] is False and is_out:
        why = "equals the target embedding" if output in found else "is missing"
        notes.append(
            f"tie_word_embeddings is false, but {output} {why}, so the target embedding and the output projection are "
            "tied"
        )
    if fields["tie_word_embeddings"] and fields.get("share_encoder_decoder_embeddings", True) and not alike:
        notes.append(
            "according to the flags, source and target share one embedding, but the tensors differ, so two embeddings "
            "are used"
        )
    if shared in found and not same(found[shared], encoder):
        notes.append(f"{shared} differs from the embedding of the encoder and is ignored")
    kept = {name: array for name, array in found.items() if name not in names}
    kept[names.encoder] = encoder
    if tied != "all":
        kept[names.decoder] = decoder
    if tied == "none":
        kept[output] = projection
    return tied, kept, notes
