"""Third-party vocabularies: IDs and texts match the original software, and malformed files are rejected."""

import base64
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import sentencepiece
from conftest import tiny_config
from vocabulary_files import LINES, marian_files, pieces_of, train, write

from transformer_parity.apps.text.kinds import build_vocabulary, read_vocabulary_directory
from transformer_parity.apps.text.maps import read_yaml_map
from transformer_parity.apps.text.marian import read_marian_vocabulary
from transformer_parity.apps.text.moses import MosesVocabulary, PairEncoding, read_dictionary
from transformer_spec.files import VocabularyFiles

ACCENTS = "a" + "\u0301" * 50
HARD = [
    *("", " ", "   ", " a  b ", "\ta\tb", "a\rb", "\u00a0nbsp\u00a0", "\u3000wide\u3000", "line\u2028sep", "a\x00b"),
    *(
        "a\x07b\x1b[0m",
        "\u200bzero\u200dwidth",
        "\ufeffbom",
        "é e\u0301 \uff46\uff55\uff4c\uff4c",
        "ﬁ ½ ² ㎏ ™ ŉ İ ẞ",
        ACCENTS,
    ),
    *(
        "😀 👨‍👩‍👧‍👦 🇩🇪 🤷🏽‍♀️",
        "漢字仮名交じり文を空白なしで。次の文",
        "שלום עולם",
        "مرحبا بالعالم",
        "x" * 3000,
        "Where is it? " * 200,
    ),
    *(">>deu<< Hello there.", "Hello >>deu<< there.", ">>xxx<< Hello", ">>deu<<", ">>deu Hello", "a </s> b", "</s>"),
    *("<unk>", "b<s>c", "it <mask> is", "<mask>it", "__de__ hello", "eng_Latn hello deu_Latn", "en_XX hello de_DE"),
    *(
        "▁a ▁▁b",
        "Wait ... what ? It 's n't !",
        '&amp; &lt; "quoted" \u201ccurly\u201d \u2018x\u2019',
        "10,000.50 €",
        "http://a.b/c?d=e-f",
    ),
]
PAD_TOO = [
    *HARD,
    "<pad> a <pad>",
    "it <extra_id_0> is",
    "a<extra_id_3>b <extra_id_12> <extra_id_99>",
    "x</s>  </s> y",
    "<pad>  <unk>  a",
]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def unigram():
    return train()


@pytest.fixture(scope="module")
def bpe():
    return train("bpe")


def marian(directory, model):
    from transformers import MarianTokenizer

    write(directory, marian_files(model))
    return "marian", MarianTokenizer.from_pretrained(directory), ()


def marian_separate(directory, model):
    from transformers import MarianTokenizer

    # The target has fewer pieces than the source: see OUT_OF_RANGE.
    files = marian_files(model, separate_vocabs=True) | {"target.spm": train(size=300)}
    target = ["</s>", "<unk>", *pieces_of(files["target.spm"])[3:], "<pad>"]
    write(directory, files | {"target_vocab.json": {piece: number for number, piece in enumerate(target)}})
    return "marian", MarianTokenizer.from_pretrained(directory), ()


def nllb(directory, model, legacy=False):
    """Write NLLB's files. Given only a SentencePiece model, transformers 5.23 wouldn't add the language codes."""
    from transformers import NllbTokenizer
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    write(directory, {"sentencepiece.bpe.model": model})
    made = json.loads(NllbTokenizer.from_pretrained(directory)._tokenizer.to_str())
    table = [piece for piece in made["model"]["vocab"] if piece != "<mask>"]
    table = {piece: number for number, piece in enumerate([*table, *FAIRSEQ_LANGUAGE_CODES, "<mask>"])}
    charsmap = made["normalizer"]["normalizers"][0]["precompiled_charsmap"]
    NllbTokenizer(
        table,
        [tuple(merge) for merge in made["model"]["merges"]],
        extra_special_tokens=FAIRSEQ_LANGUAGE_CODES,
        _spm_precompiled_charsmap=base64.b64decode(charsmap),
        legacy_behaviour=legacy,
    ).save_pretrained(directory)
    direction = ("eng_Latn", "deu_Latn")
    return "m2m_100", NllbTokenizer.from_pretrained(directory, src_lang=direction[0], tgt_lang=direction[1]), direction


def nllb_legacy(directory, model):
    return nllb(directory, model, legacy=True)


def m2m_100(directory, model):
    from transformers import M2M100Tokenizer
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

    kept = [piece for number, piece in enumerate(pieces_of(model)[3:]) if number % 17]
    table = {piece: number for number, piece in enumerate([*SPECIAL, *kept])}
    write(directory, {"sentencepiece.bpe.model": model, "vocab.json": table})
    codes = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    options = {"src_lang": "en", "tgt_lang": "de", "additional_special_tokens": codes}
    return "m2m_100", M2M100Tokenizer.from_pretrained(directory, **options), ("en", "de")


def of_form(name, direction):
    def write_form(directory, model):
        import transformers

        write(directory, {"sentencepiece.bpe.model": model})
        options = dict(zip(("src_lang", "tgt_lang"), direction, strict=True))
        tokenizer = getattr(transformers, f"{name}Tokenizer").from_pretrained(directory, **options)
        tokenizer.save_pretrained(directory)
        return name.lower(), tokenizer, direction

    return write_form


def bart(directory, model):
    from tokenizers import ByteLevelBPETokenizer
    from transformers import BartTokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES, vocab_size=600, special_tokens=[*SPECIAL, "<mask>"], show_progress=False)
    directory.mkdir()
    trained.save_model(str(directory))
    return "bart", BartTokenizer.from_pretrained(directory), ()


def bart_saved(directory, model):
    family, tokenizer, direction = bart(directory, model)
    tokenizer.save_pretrained(directory)
    return family, tokenizer, direction


def learned_merges(words, count):
    """Return byte-pair merges, most frequent pair first, and all pieces."""
    cut = {word: [*word[:-1], f"{word[-1]}</w>"] for word in words}
    merges = []
    for _ in range(count):
        pairs = Counter()
        for word, pieces in cut.items():
            for pair in pairwise(pieces):
                pairs[pair] += words[word]
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        for word, pieces in cut.items():
            joined = []
            for piece in pieces:
                if joined and (joined[-1], piece) == merges[-1]:
                    joined[-1] += piece
                else:
                    joined.append(piece)
            cut[word] = joined
    return merges, sorted({piece for pieces in cut.values() for piece in pieces})


def fsmt(directory, model):
    from transformers import FSMTTokenizer

    merges, pieces = learned_merges(Counter(word for line in LINES for word in line.split()), 200)
    tables = {"vocab-src.json": [*SPECIAL, *pieces], "vocab-tgt.json": [*SPECIAL, *reversed(pieces)]}
    files = {name: {piece: number for number, piece in enumerate(table)} for name, table in tables.items()}
    files["merges.txt"] = "".join(f"{' '.join(pair)}\n" for pair in merges)
    write(directory, files | {"tokenizer_config.json": {"langs": ["en", "de"]}})
    return "fsmt", FSMTTokenizer.from_pretrained(directory), ()


def t5(directory, model, **settings):
    from transformers import T5Tokenizer

    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    write(directory, {"spiece.model": train(**special), "tokenizer_config.json": settings})
    return "t5", T5Tokenizer.from_pretrained(directory), ()


def t5_saved(directory, model):
    family, tokenizer, direction = t5(directory, model)
    tokenizer.save_pretrained(directory)
    return family, tokenizer, direction


def mt5(directory, model):
    return "mt5", *t5(directory, model, extra_ids=0)[1:]


def byt5(directory, model):
    from transformers import ByT5Tokenizer

    write(directory, {"tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"}})
    return "t5", ByT5Tokenizer.from_pretrained(directory), ()


OURS = {
    **{"marian": marian, "nllb": nllb, "m2m_100": m2m_100, "bart": bart},
    **{"marian_separate": marian_separate, "nllb_legacy": nllb_legacy, "bart_saved": bart_saved, "fsmt": fsmt},
    **{"t5": t5, "t5_saved": t5_saved, "mt5": mt5, "byt5": byt5},
    "mbart": of_form("MBart", ("en_XX", "de_DE")),
    "mbart50": of_form("MBart50", ("en_XX", "de_DE")),
    "plbart": of_form("PLBart", ("java", "python")),
}


# In targets, Hugging Face reads <pad> as the source vocabulary's ID and removes the target token with that ID.
OUT_OF_RANGE = {"marian_separate"}
# sentencepiece and the tokenizers library, which T5Tokenizer uses, split the letter and its accents differently.
DIFFERENT = {("t5", ACCENTS), ("mt5", ACCENTS)}


@pytest.mark.filterwarnings("ignore:This sequence already has")  # a warning of ByT5Tokenizer
@pytest.mark.parametrize(
    "name",
    [*list(OURS)[:4], *(pytest.param(name, marks=pytest.mark.extended("vocabularies")) for name in list(OURS)[4:])],
)
def test_ids_and_texts_match_hugging_face(tmp_path, name, unigram, bpe):
    family, theirs, direction = OURS[name](tmp_path / "model", bpe if name.startswith("nllb") else unigram)
    ours = read_vocabulary_directory(tmp_path / "model", family, {})
    ours = ours.between(*direction) if direction else ours
    lines = [*LINES, *(HARD if name in OUT_OF_RANGE else PAD_TOO)]
    lines = [line for line in lines if (name, line) not in DIFFERENT]
    assert [ours.ids(line) for line in lines] == theirs(lines, verbose=False).input_ids
    targets = [ours.target_ids(line) for line in lines]
    if name != "fsmt":  # FSMT doesn't tokenize targets
        codes = {ours.start_id, *ours.forced_ids}  # Hugging Face may place them after EOS
        said = theirs(text_target=lines, verbose=False).input_ids
        assert [without(codes, ids) for ids in targets] == [without(codes, ids) for ids in said]
    most = ours.sizes[1] - (name in OUT_OF_RANGE)
    targets += np.random.default_rng(0).integers(0, most, (100, 12)).tolist()
    texts = theirs.batch_decode(targets, skip_special_tokens=True)
    if ours.kind == "t5":  # sentencepiece omits all leading spaces
        texts = [text.lstrip(" ") for text in texts]
    assert [ours.text(ids) for ids in targets] == texts
    assert ours.names(targets[-1]) == theirs.convert_ids_to_tokens(targets[-1])
    assert "".join(ours.names(ours.ids("is it"), source=True)).count("i") >= 2
    size = max(ours.sizes)
    config = tiny_config(source_vocab_size=size, target_vocab_size=size)
    again = build_vocabulary(VocabularyFiles(ours.kind, ours.files()), config)
    again = again.between(*direction) if direction else again
    assert [again.ids(line) for line in HARD] == [ours.ids(line) for line in HARD]
    assert [again.text(ids) for ids in targets[-9:]] == [ours.text(ids) for ids in targets[-9:]]


def without(codes, ids):
    return [token for token in ids if token not in codes]


def test_standalone_sentencepiece_model_uses_fairseq_numbering(tmp_path, bpe):
    """Pieces start at ID 4, followed by the language codes and the mask.

    Lines are split as by the tokenizer, except that leading and trailing spaces are ignored.
    """
    _, theirs, direction = nllb(tmp_path / "model", bpe)
    (tmp_path / "model" / "tokenizer.json").unlink()
    ours = read_vocabulary_directory(tmp_path / "model", "m2m_100", {}).between(*direction)
    assert ours.sizes == (len(theirs), len(theirs))
    lines = [line for line in LINES if line == line.strip()]
    assert [ours.ids(line) for line in lines] == theirs(lines).input_ids
    assert [ours.text(ours.target_ids(line)) for line in lines] == lines
    assert ours.ids(" a  b ") == ours.ids("a b")
    assert ours.names([*ours.forced_ids, ours.sizes[0] - 1]) == ["deu_Latn", "<mask>"]


def test_normalization_of_a_sentencepiece_model_is_applied(tmp_path, unigram):
    """transformers 5.23 ignores the normalization for some models such as mBART, although they were trained with it."""
    directory = write(tmp_path / "model", {"sentencepiece.bpe.model": unigram})
    ours = read_vocabulary_directory(directory, "mbart", {}).between("en_XX", "de_DE")
    assert ours.ids("\uff46\uff55\uff4c\uff4c") == ours.ids("full")
    assert ours.forced_ids == ()
    assert ours.names([ours.start_id, *ours.ids("a")[-2:]]) == ["de_DE", "</s>", "en_XX"]


# Marian vocabularies
def test_spm_vocabulary_ids_match_the_sentencepiece_models(tmp_path):
    options = {"bos_id": -1, "eos_id": 0, "unk_id": 1, "pad_id": -1}  # Marian's training options
    models = [train(size=300, **options), train(size=400, **options)]
    paths = [tmp_path / "source.en.spm", tmp_path / "target.de.spm"]
    for path, model in zip(paths, models, strict=True):
        path.write_bytes(model)
    processors = [sentencepiece.SentencePieceProcessor(model_proto=model) for model in models]
    ours = read_marian_vocabulary(paths)
    assert ours.sizes == tuple(processor.get_piece_size() for processor in processors)
    for line in LINES[:100]:
        assert ours.ids(line) == [*processors[0].encode(line), 0]
        assert ours.target_ids(line) == [*processors[1].encode(line), 0]
        assert ours.text(ours.target_ids(line)) == line
    joint = read_marian_vocabulary(paths[:1])
    assert joint.target_ids("Hello") == joint.ids("Hello") == [*processors[0].encode("Hello"), 0]


def test_yml_table_overrides_sentencepiece_ids(tmp_path, unigram):
    pieces = ["</s>", "<unk>", ">>deu<<", *reversed(pieces_of(unigram)[3:])]
    lines = [f"{json.dumps(piece, ensure_ascii=False)}: {number}\n" for number, piece in enumerate(pieces)]
    (tmp_path / "vocab.yml").write_text("".join(lines), "utf-8")
    (tmp_path / "joint.spm").write_bytes(unigram)
    ours = read_marian_vocabulary([tmp_path / "joint.spm", tmp_path / "vocab.yml"]).between(None, "deu")
    assert ours.names(ours.ids("Hello!"), source=True)[0] == ">>deu<<"
    assert [pieces[token] for token in ours.ids("Hello!")[1:-1]] == ours.names(ours.target_ids("Hello!"))[:-1]
    assert ours.text(ours.target_ids(LINES[1])) == LINES[1]
    words = read_marian_vocabulary([tmp_path / "vocab.yml"])
    assert words.text(words.ids(f"{pieces[5]} zebra  {pieces[9]} </s>")) == f"{pieces[5]} {pieces[9]}"


def test_marian_tables_with_invalid_yaml_are_read():
    lines = {
        **{
            "</s>: 0": "</s>",
            "<unk>: 1": "<unk>",
            ":: 2": ":",
            r'"\"": 3': '"',
            "'''s': 4": "'s",
            r'"\x85": 5': "\x85",
        },
        **{"- : 6": "- ", r'"\u2028b": 7': "\u2028b", "!: 8": "!", "a:b: 9": "a:b", "? long\n: 10": "long"},
    }
    content = "".join(f"{line}\r\n" for line in lines)
    assert read_yaml_map(content.encode(), "vocab.yml") == {
        piece: number for number, piece in enumerate(lines.values())
    }


# fairseq vocabularies
def test_fairseq_numbers_the_lines_of_its_dictionaries():
    table = read_dictionary(b"der 100\nHund@@ 7\ne 3 #fairseq:overwrite\n", "dict.de.txt")
    assert list(table) == [*SPECIAL, "der", "Hund@@", "e"]
    ours = MosesVocabulary(dict.fromkeys(("dict.src.txt", "dict.tgt.txt"), b"der 9\nHund@@ 7\ne 3\n"))
    assert ours.ids("der Katze Hund@@ e") == [4, 3, 5, 6, 2]
    assert ours.text([4, 5, 6, 2]) == "der Hunde"
    for content, message in (
        (b"a 1\na 1\n", "duplicate symbol 'a' in dict.de.txt"),
        (b"a\n", "line 1 of dict.de.txt must be `symbol count`"),
    ):
        with pytest.raises(ValueError, match=message):
            read_dictionary(content, "dict.de.txt")


def test_fairseq_vocabulary_with_a_sentencepiece_model_matches(unigram):
    pieces = pieces_of(unigram)[3:]
    table = "".join(f"{piece} 1\n" for piece in pieces).encode()
    ours = MosesVocabulary({"dict.src.txt": table, "dict.tgt.txt": table, "sentencepiece.bpe.model": unigram})
    assert [ours.text(ours.ids(line)) for line in LINES[:50]] == LINES[:50]
    assert ours.ids("a")[:-1] == [4 + pieces.index(piece) for piece in ours.names(ours.ids("a"))[:-1]]


def test_bpe_merges_the_first_pair_everywhere():
    cut = PairEncoding("#version: 0.2\na a\naa b</w>\nl o 17\n").cut
    assert cut("aaab") == ["aa", "a", "b</w>"]
    assert cut("aab") == ["aab</w>"]
    assert cut("lolo") == ["lo", "l", "o</w>"]
    assert cut("a") == ["a</w>"]


# Translation directions
def test_missing_or_unknown_language_raises_an_error_naming_it(tmp_path, bpe, unigram):
    directory = write(tmp_path / "model", {"sentencepiece.bpe.model": bpe})
    ours = read_vocabulary_directory(directory, "nllb", {})
    with pytest.raises(ValueError, match=r"requires a source language; choose one of ace_Arab, .* and 198 others$"):
        ours.ids("a")
    for direction, message in (
        (("eng_Latn", None), "requires a target language"),
        (("eng", "deu_Latn"), "has no source language 'eng': did you mean eng_Latn"),
        (("eng_Latn", "de"), r"has no target language 'de': did you mean .*deu_Latn"),
        (("eng_Latn", "???"), "has no target language .*: the vocabulary supports ace_Arab"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.between(*direction)
    there, back = ours.between("eng_Latn", "deu_Latn"), ours.between("deu_Latn", "eng_Latn")
    assert there.ids("a")[0] == back.forced_ids[0] != there.forced_ids[0]
    tagged = read_vocabulary_directory(write(tmp_path / "marian", marian_files(unigram)), "marian", {})
    assert tagged.target_languages == ["deu", "fra"]
    assert tagged.between(None, "deu").ids("a b") == tagged.ids(">>deu<< a b")
    with pytest.raises(ValueError, match="does not use source language codes: got 'eng'"):
        tagged.between("eng", "deu")
    with pytest.raises(ValueError, match=r"has no target language 'ger': .*deu"):
        tagged.between(None, "ger")


def test_languages_added_to_a_tokenizer_are_found(tmp_path, bpe):
    nllb(tmp_path / "model", bpe)
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 604, "content": "tyv_Cyrl"})
    path.write_text(json.dumps(content), "utf-8")
    ours = read_vocabulary_directory(tmp_path / "model", "m2m_100", {})
    assert ours.between("eng_Latn", "tyv_Cyrl").forced_ids == (604,)


# T5 vocabularies
def test_characters_without_a_piece_are_split_into_bytes(tmp_path):
    """mT5 was trained with byte pieces, but T5Tokenizer of transformers 5 has only the unknown token."""
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    model = train(size=700, byte_fallback=True, **special)
    ours = read_vocabulary_directory(write(tmp_path / "model", {"spiece.model": model}), "mt5", {})
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.sizes[0] == processor.get_piece_size() + 100
    assert ours.ids("漢") == [*processor.encode("漢"), 1]
    assert ours.names(ours.ids("漢"))[-4:] == ["<0xE6>", "<0xBC>", "<0xA2>", "</s>"]
    assert ours.text(ours.ids("a 漢 <extra_id_7>")) == "a 漢"
    assert ours.ids("<extra_id_0>") == [ours.sizes[0] - 1, 1]


def test_ids_of_added_tokens_are_read_from_the_settings(tmp_path):
    added = {"700": {"content": "<extra_id_0>", "special": True}, "650": {"content": "<task>", "special": True}}
    files = {"spiece.model": train(), "tokenizer_config.json": {"added_tokens_decoder": added, "eos_token": "<task>"}}
    ours = read_vocabulary_directory(write(tmp_path / "model", files), "t5", {"vocab_size": 704})
    assert ours.sizes == (701, 701)
    assert ours.ids("<extra_id_0>") == [700, 650]
    assert ours.text([700, 650, 703, 630]) == ""


def test_byt5_vocabulary_needs_no_file(tmp_path):
    directory = write(tmp_path / "model", {})
    ours = read_vocabulary_directory(directory, "t5", {"tokenizer_class": "ByT5Tokenizer"})
    assert ours.ids("hé") == [107, 198, 172, 1]
    assert json.loads(ours.files()["tokenizer_config.json"]) == {"tokenizer_class": "ByT5Tokenizer"}
    assert ours.text([107, 198, 259, 600, 1]) == "h"
    assert ours.names([0, 107, 258, 383, 600]) == ["<pad>", "h", "ÿ", "<extra_id_124>", "<unk>"]
