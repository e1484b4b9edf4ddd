"""Marian's .npz files: imported models compute the same as Marian, and exporting them reproduces the files."""

from __future__ import annotations

import numpy as np
import pytest
import third_party
import yaml
from conftest import assert_same_bits, random_weights, tiny_config
from imported_models import logits_of, ours
from programs import Marian, softmax
from tiers import first_alone

from transformer_parity.apps.checkpoints.formats import marian
from transformer_parity.apps.checkpoints.formats.marian_settings import SETTINGS, settings_of
from transformer_parity.apps.checkpoints.options import ReadOptions
from transformer_parity.apps.containers import npz
from transformer_spec.search import Search
from transformer_spec.search_rules import SearchRules

V, D = 17, 8
OPTIONS = {
    **settings_of(tiny_config("marian_cpp"), True),
    "dim-vocabs": [V, V],
    "dim-emb": D,
    "enc-depth": 2,
    "dec-depth": 1,
    "transformer-heads": 2,
    "transformer-dim-ffn": 12,
}
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
ALL = {"tied-embeddings-all": True, "tied-embeddings-src": False, "tied-embeddings": False}
SOURCE, OUTPUT = {**ALL, "tied-embeddings-all": False, "tied-embeddings-src": True}, {**ALL, "tied-embeddings": True}
OUTPUT["tied-embeddings-all"] = False
NONE = {**ALL, "tied-embeddings-all": False}


def arrays(options, seed=0):
    """Return random arrays with the names, order, and shapes that Marian saves for the given options."""
    rng = np.random.default_rng(seed)
    d, (vs, vt) = options["dim-emb"], options["dim-vocabs"]
    pre = options["transformer-preprocess"] == "n"
    shared = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    shapes = {"Wemb": (vs, d)} if shared else {"encoder_Wemb": (vs, d), "decoder_Wemb": (vt, d)}
    if options.get("transformer-train-positions"):
        shapes["Wpos"] = (9, d)

    def norm(prefix, suffix="_pre" if pre else ""):
        return {f"{prefix}_ln_{kind}{suffix}": (1, d) for kind in ("scale", "bias")}

    for stack, depth in (("encoder", options["enc-depth"]), ("decoder", options["dec-depth"])):
        shapes |= norm(f"{stack}_emb", "_pre") if "n" in options["transformer-postprocess-emb"] else {}
        for n in range(1, depth + 1):
            for block in ("self", "context")[: 2 if stack == "decoder" else 1]:
                for one in "qkvo":
                    shapes |= {f"{stack}_l{n}_{block}_W{one}": (d, d), f"{stack}_l{n}_{block}_b{one}": (1, d)}
                shapes |= norm(f"{stack}_l{n}_{block}_Wo")
            f = (options["transformer-decoder-dim-ffn"] if stack == "decoder" else 0) or options["transformer-dim-ffn"]
            ffn = f"{stack}_l{n}_ffn"
            shapes |= {f"{ffn}_W1": (d, f), f"{ffn}_b1": (1, f), f"{ffn}_W2": (f, d), f"{ffn}_b2": (1, d)}
            shapes |= norm(f"{ffn}_ffn")
        shapes |= norm(f"{stack}_top", "") if "n" in options["transformer-postprocess-top"] else {}
    if not (options["tied-embeddings-all"] or options["tied-embeddings"]):
        transposed = options.get("test-new-output")
        shapes["decoder_ff_logit_out_Wt" if transposed else "decoder_ff_logit_out_W"] = (
            (vt, d) if transposed else (d, vt)
        )
    if not options["output-omit-bias"]:
        shapes["decoder_ff_logit_out_b"] = (1, vt)
    found = {
        name: (rng.uniform(0.5, 1.5, shape) if "scale" in name else rng.normal(0, 0.5, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    text = yaml.safe_dump({k: v for k, v in options.items() if k != "test-new-output"}).encode() + b"\0"
    return {**found, SETTINGS: np.frombuffer(text, np.int8), "decoder_c0": np.zeros((1, 1), np.float32)}


@pytest.fixture
def save(tmp_path):
    def save(changes=None, edit=lambda tensors: tensors):
        options = {**OPTIONS, **(changes or {})}
        path = tmp_path / "model.npz"
        np.savez(path, **edit(arrays(options)))
        return path

    return save


def read(path, **options):
    return marian.read(path, ReadOptions(**options))


def both(path, imported):
    """Return Marian's logits, the reference's logits without and with the added padding entry, and the inputs."""
    program = Marian(path.read_bytes())
    vs, vt = program.options["dim-vocabs"]
    rng = np.random.default_rng(1)
    config = imported.config
    source, labels = rng.integers(1, vs, (3, 6)), rng.integers(1, vt, (3, 5))
    mask = np.ones(source.shape, bool)
    mask[1, 4:] = mask[2, 2:] = False
    theirs = program.logits(source, labels, mask)
    target = np.concatenate([np.full((3, 1), config.bos_id), labels[:, :-1]], axis=1)
    source = np.where(mask, source, config.pad_id)
    logits = logits_of(config, imported.weights, source, target)
    return theirs, logits[..., :vt], logits, source, target


VARIANTS = {
    "post, all tied": {},
    "pre": PRE,
    "pre without final norm": {**PRE, "transformer-postprocess-top": ""},
    "post and final norm": {"transformer-postprocess-top": "n"},
    "source tied": SOURCE,
    "source tied, new": {**SOURCE, "test-new-output": True},
    "output tied": {**OUTPUT, "dim-vocabs": [11, V]},
    "untied": {**NONE, "dim-vocabs": [V, 11], "dec-depth": 3},
    "untied, new": {**NONE, "test-new-output": True},
    "both flags for all": {"tied-embeddings-all": False, "tied-embeddings-src": True, "tied-embeddings": True},
    "embedding norm": {"transformer-postprocess-emb": "nd"},
    "trained positions": {"transformer-train-positions": True, "transformer-train-position-embeddings": True},
    "no output bias": {"output-omit-bias": True},
    "relu, wider decoder": {"transformer-ffn-activation": "relu", "transformer-decoder-dim-ffn": 20},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_imported_logits_match_marian(save, name):
    path = save(VARIANTS[name])
    imported = read(path)
    theirs, found, logits, *_ = both(path, imported)
    assert third_party.relative_error(found, theirs) <= 1e-12
    assert (softmax(logits)[..., theirs.shape[-1] :] == 0).all()
    pre_norm = "scores agree with marian-scorer, but translations can differ from marian-decoder's, which does not "
    assert [note.startswith(pre_norm) for note in imported.notes] == [True] * (imported.config.norm_order == "pre")
    assert (imported.origin.format, imported.origin.preset) == ("marian", "marian_cpp")
    assert imported.config.pad_id == imported.config.bos_id == max(OPTIONS["dim-vocabs"])


def test_imported_logits_match_the_transcription_of_marian(save):
    path = save()
    imported = read(path)
    theirs, _, _, source, target = both(path, imported)
    labels = np.concatenate([target[:, 1:], np.ones((3, 1), int)], axis=1)
    swish = lambda x: x * x.sigmoid()  # noqa: E731
    other = third_party.shifted_logits(imported.weights, 2, source, labels, imported.config.pad_id, swish)
    assert third_party.relative_error(other.numpy()[..., :V], theirs) <= 1e-12


@pytest.mark.parametrize(
    "change",
    [{"position_timescale": "m"}, {"layer_norm_epsilon": 1e-5}, {"scale_embedding": False}, {"position_offset": 1}],
    ids=lambda change: next(iter(change)),
)
def test_neighboring_conventions_give_different_logits(save, change):
    """The first two are the changes that Hugging Face's converter makes."""
    path = save()
    imported = read(path)
    theirs, _, _, source, target = both(path, imported)
    other = logits_of(imported.config.replace(**change), imported.weights, source, target)
    assert third_party.relative_error(other[..., :V], theirs) > 1e-7


def test_hugging_face_conversion_differs_from_the_original_model(save):
    """The conversion changes the frequencies and epsilon, so OPUS-MT checkpoints differ from the trained models."""
    path = save()
    imported = read(path)
    theirs, _, _, source, target = both(path, imported)
    converted = imported.config.replace(position_timescale="m", layer_norm_epsilon=1e-5)
    hugging_face = third_party.marian_logits(converted, imported.weights, source, target).numpy()
    assert third_party.relative_error(logits_of(converted, imported.weights, source, target), hugging_face) <= 1e-12
    assert np.abs(hugging_face[..., :V] - theirs).max() > 1e-3


@pytest.mark.parametrize("name", first_alone(VARIANTS, "formats"))
def test_export_to_marian_round_trips_bit_exactly(save, name, tmp_path):
    path = save(VARIANTS[name])
    before = npz.read(path)
    imported = read(path)
    marian.write(imported, tmp_path / "out")
    after = npz.read(tmp_path / "out/model.npz")
    if "test-new-output" in VARIANTS[name]:
        before["decoder_ff_logit_out_W"] = np.ascontiguousarray(before.pop("decoder_ff_logit_out_Wt").T)
    del before["decoder_c0"]
    said, wanted = (yaml.safe_load(one.pop(SETTINGS).tobytes().rstrip(b"\0")) for one in (after, before))
    assert_same_bits(after, before)
    if name == "both flags for all":
        wanted |= ALL
    assert said == {**wanted, "transformer-train-positions": name == "trained positions"}
    again = read(tmp_path / "out/model.npz")
    assert again.config == imported.config
    assert_same_bits(again.weights, imported.weights)
    assert again.search == imported.search
    theirs, found, *_ = both(tmp_path / "out/model.npz", again)
    assert third_party.relative_error(found, theirs) <= 1e-12


def test_model_trained_here_can_be_exported_to_marian(tmp_path):
    """The preset's padding ID is inside the vocabulary, so its row is kept and becomes Marian's zero start vector."""
    config = tiny_config("marian_cpp")
    weights = random_weights(config)
    weights["source_embedding.table"][config.pad_id] = 0.0
    marian.write(ours(config, weights), tmp_path)
    imported = read(tmp_path / "model.npz")
    theirs, found, *_ = both(tmp_path / "model.npz", imported)
    assert third_party.relative_error(found, theirs) <= 1e-12
    same = {name: imported.weights[name] for name in weights if "table" not in name and name != "output_proj.bias"}
    assert_same_bits(same, {name: weights[name] for name in same})
    assert imported.search.beam_size == 1


REFUSED = {
    "type": "s2s",
    "transformer-decoder-autoreg": "rnn",
    "transformer-ffn-activation": "gelu",
    "transformer-ffn-depth": 3,
    "transformer-decoder-ffn-depth": 3,
    "transformer-no-projection": True,
    "transformer-tied-layers": [1, 1],
    "transformer-pool": True,
    "transformer-no-bias": True,
    "transformer-attention-mask": "alibi",
    "transformer-postprocess-top": "a",
    "transformer-postprocess-emb": "r",
    "lemma-dim-emb": 4,
    "ulr": True,
    "right-left": True,
    "transformer-preprocess": "n",  # combined with postprocess dan
}


@pytest.mark.parametrize("option", REFUSED)
def test_unsupported_models_are_rejected_by_name(save, option):
    path = save(edit=lambda tensors: with_options(tensors, {option: REFUSED[option]}))
    with pytest.raises(ValueError, match=f"--{option} .*must be .*: got ") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def with_options(tensors, changes):
    options = {**yaml.safe_load(tensors[SETTINGS].tobytes().rstrip(b"\0")), **changes}
    return {**tensors, SETTINGS: np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)}


def test_missing_options_in_old_files_have_defaults(save):
    needed = ("type", "dim-vocabs", "dim-emb", "enc-depth", "dec-depth", "transformer-heads", "tied-embeddings-all")

    def only_needed(tensors):
        options = {name: OPTIONS[name] for name in needed}
        return {**tensors, SETTINGS: np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)}

    assert read(save(edit=only_needed)).config == read(save()).config


def test_config_follows_the_tensors_and_contradictions_are_noted(save):
    changes = {"tied-embeddings-all": False, "output-omit-bias": True, "transformer-train-position-embeddings": True}
    imported = read(save(edit=lambda tensors: with_options(tensors, changes)))
    assert imported.config == read(save()).config
    assert [note.split()[0] for note in imported.notes] == [
        "--tied-embeddings-src",
        "--tied-embeddings",
        "--transformer-train-position-embeddings",
        "--output-omit-bias",
    ]


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without(SETTINGS), "does not contain the array special:model.yml"),
        (without("encoder_l2_self_Wq"), r"missing encoder_l2_self_Wq \[8, 8\]"),
        (without("Wemb"), "there is no tensor encoder_Wemb; the file contains "),
        (without("encoder_l1_ffn_W1"), "there is no tensor encoder_l1_ffn_W1; the file contains "),
        (lambda t: {**t, "decoder_l1_rnn_Wf": t["Wemb"]}, r"unexpected decoder_l1_rnn_Wf \[17, 8\]"),
        (
            lambda t: {**t, "encoder_l1_self_bq": t["encoder_l1_self_bq"][0]},
            r"expected shape \[1, 8\] for encoder_l1_self_bq, got \[8\]",
        ),
        (lambda t: {**t, "Wemb": t["Wemb"].astype(np.int8)}, "for Wemb, got int8"),
    ],
)
def test_invalid_tensors_are_rejected_with_names_from_the_file(save, edit, message):
    with pytest.raises(ValueError, match=message):
        read(save(edit=edit))


def test_search_settings_are_read_from_the_decoder_file(save):
    path = save()
    rules = SearchRules.preset("marian", banned_ids=(1,))
    assert read(path).search == Search.preset("marian", beam_size=12, length_penalty=0.0, rules=rules)
    decoder = path.with_name("model.npz.decoder.yml")
    decoder.write_text("models: [/elsewhere/model.npz]\nbeam-size: 6\nnormalize: 0.6\nword-penalty: 0\n")
    imported = read(path)
    assert imported.search == Search.preset("marian", beam_size=6, length_penalty=0.6, rules=rules)
    assert set(imported.origin.files) == {"model.npz", "model.npz.decoder.yml"}
    decoder.write_text("word-penalty: 0.5")
    with pytest.raises(ValueError, match=r"word-penalty in model.npz.decoder.yml must be 0 because .*: got 0\.5"):
        read(path)


TOKENS = ["</s>", "<unk>", *(f"w{i}" for i in range(V - 2))]


def test_yml_vocabularies_determine_ids_and_round_trip(save, tmp_path):
    tables = [tmp_path / f"{side}.yml" for side in ("source", "target")]
    tables[0].write_text("".join(f"{token}: {i}\n" for i, token in enumerate(TOKENS)))
    other = [*TOKENS[2:5], *TOKENS[:2], *TOKENS[5:]]
    tables[1].write_text("".join(f"{token}: {i}\n" for i, token in enumerate(other)))
    imported = read(save(), vocab=tuple(tables))
    assert imported.vocabulary.ids("w0 w3 none") == [2, 5, 1, 0]
    assert imported.vocabulary.text([0, 1, 7]) == "w0 w1 w5"
    assert imported.config.eos_id == other.index("</s>") == 3
    assert set(imported.origin.files) == {"model.npz", "source.yml", "target.yml"}
    assert marian.write(imported, tmp_path / "out") == ()
    decoder = yaml.safe_load((tmp_path / "out/model.npz.decoder.yml").read_text())
    assert decoder["vocabs"] == ["vocab.yml", "target_vocab.yml"]
    again = read(tmp_path / "out/model.npz", vocab=tuple(tmp_path / "out" / name for name in decoder["vocabs"]))
    assert again.config == imported.config
    assert again.vocabulary.files() == imported.vocabulary.files()
    tables[0].write_text("".join(f"{token}: {i}\n" for i, token in enumerate([*TOKENS, "one more"])))
    with pytest.raises(ValueError, match="18"):
        read(save(), vocab=tuple(tables))


def test_unsupported_vocabulary_kind_is_not_exported(save, tmp_path):
    notes = marian.write(read(save()), tmp_path / "out")
    assert notes == (
        "the vocabulary is not written because Marian does not support its kind; add a vocabulary that Marian "
        "supports to model.npz.decoder.yml",
    )
