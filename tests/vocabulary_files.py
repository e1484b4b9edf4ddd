"""Vocabulary files in the formats of other software, written for tests."""

import io
import json

import sentencepiece

from transformer_parity.transformer.sentences.pairs import read_pairs

LINES = [line for pair in read_pairs() for line in pair]


def train(kind="unigram", size=400, **options):
    """Return a SentencePiece model with few pieces."""
    model = io.BytesIO()
    options |= {"character_coverage": 1.0, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type=kind, vocab_size=size, **options
    )
    return model.getvalue()


def pieces_of(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(token) for token in range(processor.get_piece_size())]


def write(directory, files):
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, bytes | str) else json.dumps(content)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return directory


def marian_files(model, **settings):
    """Return the files in a Marian directory. Some pieces are missing, and the IDs are in a different order."""
    table = {piece: number for number, piece in enumerate(["</s>", "<unk>", ">>deu<<", ">>fra<<"])}
    for number, piece in enumerate(reversed(pieces_of(model)[3:])):
        table[piece if number % 23 else f"not {piece}"] = len(table)
    return {
        **{"source.spm": model, "target.spm": train(size=500), "vocab.json": table | {"<pad>": len(table)}},
        "tokenizer_config.json": {"source_lang": "en", "target_lang": "de", **settings},
    }
