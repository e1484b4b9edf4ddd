"""Common uses of NumPy models either work or raise an error that suggests an alternative."""

from __future__ import annotations

import array
import asyncio
import copy
import dataclasses
import gc
import inspect
import json
import pickle
import re
import warnings
import weakref
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest

import reference_numpy as ref

CONFIG = ref.TransformerConfig(
    source_vocab_size=37,
    target_vocab_size=37,
    d_model=8,
    num_heads=2,
    d_ff=16,
    num_encoder_layers=2,
    num_decoder_layers=1,
    dropout={"embedding": 0.1, "attention": 0.1, "residual": 0.1, "feed_forward": 0.1},
)
WEIGHTS = ref.init_weights(CONFIG, seed=0)
SOURCE, TARGET = np.array([[5, 6, 7, 2], [8, 9, 2, 0]]), np.array([[1, 3, 4], [1, 5, 0]])
LABELS = np.array([[3, 4, 2], [5, 2, 0]])
HEADS = np.random.default_rng(0).normal(size=(1, 2, 3, 4))
VALUE = "encoder.layers.0.self_attention.value_proj.kernel"


def build(dtype="float64"):
    return ref.Transformer.from_weights(CONFIG, WEIGHTS, dtype)


MODEL = build()
LOGITS = MODEL(SOURCE, TARGET)
MEMORY = MODEL.encode(SOURCE)
LINEAR = MODEL.encoder.layers[0].feed_forward.inner_proj


def same(found, expected=LOGITS):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def loads(weights):
    same(ref.Transformer.from_weights(CONFIG, weights, "float64")(SOURCE, TARGET))


def trainer():
    return ref.Trainer(build(), ref.TrainingConfig(warmup_steps=10))


def recorded():
    seen = ref.Recorder()
    MODEL(SOURCE, TARGET, tap=seen)
    return seen


class Wrapped:
    """An object that supports only the array protocol."""

    def __array__(self, dtype=None, copy=None):
        return SOURCE


class Tempered(ref.Transformer):
    """A model with an additional argument."""

    def __init__(self, config, temperature=1.0, **options):
        super().__init__(config, **options)


class Doubled(ref.Transformer):
    """A model with a custom forward pass."""

    def __call__(self, source_ids, target_ids):
        return 2 * super().__call__(source_ids, target_ids)


def attention_by_einsum():
    scores = np.einsum("bhld,bhmd->bhlm", HEADS, HEADS) / 2
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    same(ref.scaled_dot_product_attention(HEADS, HEADS, HEADS), np.einsum("bhlm,bhmd->bhld", weights, HEADS))


def loss_by_hand():
    log_p = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    right = np.take_along_axis(log_p, LABELS[..., None], -1)[..., 0]
    loss, count = ref.cross_entropy(LOGITS, LABELS, CONFIG.replace(label_smoothing=0.0))
    same(loss / count, -right[LABELS != 0].mean())


def gradient_by_differences():
    model, step = build(), 1e-6
    bias = model.encoder.layers[0].feed_forward.inner_proj.bias
    gradient = ref.gradients(model, SOURCE, TARGET, LABELS).parameters["encoder.layers.0.feed_forward.inner_proj.bias"]
    losses = []
    for offset in (step, -2 * step):
        bias[3] += offset
        losses.append(ref.gradients(model, SOURCE, TARGET, LABELS).loss)
    assert abs((losses[0] - losses[1]) / (2 * step) - gradient[3]) < 1e-7


def gradient_descent():
    model = build()
    before = ref.gradients(model, SOURCE, TARGET, LABELS)
    weights = model.export_weights()
    ref.set_weights(model, {name: weights[name] - 0.1 * before.parameters[name] for name in weights})
    assert ref.gradients(model, SOURCE, TARGET, LABELS).loss < before.loss


def flat_vector():
    sizes = [array.size for array in WEIGHTS.values()]
    pieces = np.split(np.concatenate([array.ravel() for array in WEIGHTS.values()]), np.cumsum(sizes)[:-1])
    loads({name: piece.reshape(WEIGHTS[name].shape) for name, piece in zip(WEIGHTS, pieces, strict=True)})


def assigned_after_the_trainer():
    run = trainer()
    layer = run.model.encoder.layers[0].self_attention.value_proj
    layer.kernel = assigned = np.array(layer.kernel)
    run.train_step(SOURCE, TARGET, LABELS)
    assert not np.array_equal(assigned, WEIGHTS[VALUE].astype(float))


def assigned_tied_table():
    model = build()
    model.source_embedding.table = np.zeros((37, 8))
    assert not model(SOURCE, TARGET).any()


def pickled_trainer():
    run = trainer()
    run.train_step(SOURCE, TARGET, LABELS)
    twin = pickle.loads(pickle.dumps(run))
    losses = [x.train_step(SOURCE, TARGET, LABELS).loss for x in (run, twin)]
    assert losses[0] == losses[1]


def layers_replaced():
    model = build()
    model.encoder.layers[0] = lambda x, mask, tap, rng, bias: x
    assert not np.array_equal(model(SOURCE, TARGET), LOGITS)


def copied_cache():
    cache = MODEL.init_cache(SOURCE, 3)
    twin = copy.deepcopy(cache)
    MODEL.decode_step([3, 3], cache)
    same(MODEL.decode_step([4, 4], twin)[0], MODEL.decode_step([4, 4], MODEL.init_cache(SOURCE, 3))[0])


def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = trainer()
        run.train_step(SOURCE, TARGET, LABELS)
        ref.beam_search(run.model, SOURCE, max_length=5)


def floating_point_errors_raise():
    with np.errstate(all="raise"):
        run = trainer()
        run.train_step(SOURCE, TARGET, LABELS)
        ref.beam_search(run.model, SOURCE, max_length=5)


def freed():
    reference = weakref.ref(build())
    gc.collect()
    assert reference() is None


def averaged():
    for name in ("a.safetensors", "b.safetensors"):
        ref.save_weights(name, CONFIG, WEIGHTS)
    same(ref.average_weights(np.array(["a.safetensors", "b.safetensors"]))[1][VALUE], WEIGHTS[VALUE])


def generator(seed):
    return MODEL(SOURCE, TARGET, rng=np.random.default_rng(seed))


def different(first, second):
    assert not np.array_equal(first, second)


WORKS = {
    "ids[None] of one sentence": lambda: same(MODEL(SOURCE[0][None], TARGET[0][None])[0], LOGITS[0]),
    "np.broadcast_to": lambda: same(MODEL(np.broadcast_to(SOURCE[:1], (2, 4)), TARGET)[0], LOGITS[0]),
    "ids[::-1]": lambda: same(MODEL(SOURCE[::-1], TARGET[::-1]), LOGITS[::-1]),
    "sliding_window_view": lambda: MODEL(np.lib.stride_tricks.sliding_window_view(np.arange(1, 6), 4), TARGET),
    "a list of ranges": lambda: MODEL([range(3, 7)], [range(1, 3)]),
    "a field of a record array": lambda: same(MODEL(np.rec.fromarrays([SOURCE], names="ids").ids, TARGET)),
    "an object with __array__": lambda: same(MODEL(Wrapped(), TARGET)),
    "array.array and memoryview": lambda: same(
        MODEL([array.array("q", row.tolist()) for row in SOURCE], memoryview(TARGET))
    ),
    "model(**batch)": lambda: same(MODEL(**{"source_ids": SOURCE, "target_ids": TARGET})),
    "a mask as lists of bool": lambda: same(MODEL(SOURCE, TARGET, (SOURCE != 0).tolist())),
    "a mask without allowed positions": lambda: same(np.isfinite(MODEL(SOURCE, TARGET, SOURCE < 0)), True),
    "masks of lists": lambda: [
        same(ref.padding_mask(SOURCE.tolist(), 0), SOURCE != 0),
        same(ref.target_padding_mask(TARGET.tolist(), 1), np.where(np.arange(3) == 0, True, TARGET != 1)),
    ],
    "an embedding of tuples": lambda: same(
        MODEL.source_embedding(tuple(map(tuple, SOURCE.tolist()))), MODEL.source_embedding(SOURCE)
    ),
    "a layer on a list": lambda: same(LINEAR([[1.0] * 8]), LINEAR(np.ones((1, 8)))),
    "an empty batch of vectors": lambda: same(
        MODEL.encoder.layers[0].feed_forward(np.zeros((0, 3, 8))).shape, (0, 3, 8)
    ),
    "average_weights of an array of paths": averaged,
    "a subclass with its own arguments": lambda: same(
        Tempered.from_weights(CONFIG, WEIGHTS, "float64").export_weights()[VALUE].dtype == np.float64, True
    ),
    "an overwritten result": lambda: [MODEL(SOURCE, TARGET).fill(0), same(MODEL(SOURCE, TARGET))],
    "attention by np.einsum": attention_by_einsum,
    "attention in float16": lambda: ref.scaled_dot_product_attention(*[HEADS.astype(np.float16)] * 3),
    "merge_heads(split_heads(x))": lambda: same(ref.merge_heads(ref.split_heads(MEMORY, 2)), MEMORY),
    "a handwritten loss": loss_by_hand,
    "the loss of nested lists": lambda: ref.cross_entropy(LOGITS.tolist(), LABELS.tolist(), CONFIG),
    "weights as lists": lambda: loads({name: array.tolist() for name, array in WEIGHTS.items()}),
    "weights in a different order": lambda: loads(OrderedDict(reversed(WEIGHTS.items()))),
    "weights in a MappingProxyType": lambda: loads(MappingProxyType(WEIGHTS)),
    "weights as one vector": flat_vector,
    "a kernel edited in place": lambda: build().encoder.layers[0].feed_forward.inner_proj.kernel.fill(0),
    "an array assigned to a tied table": assigned_tied_table,
    "an array assigned after Trainer(model)": assigned_after_the_trainer,
    "a different dtype": lambda: ref.Transformer.from_weights(CONFIG, MODEL.export_weights(), np.float32),
    "init_weights(seed=np.int64(3))": lambda: ref.init_weights(CONFIG, np.int64(3)),
    "dataclasses.replace(config)": lambda: dataclasses.replace(CONFIG, d_ff=32),
    "a config as a key": lambda: {CONFIG: 1}[ref.TransformerConfig.from_dict(CONFIG.to_dict())],
    "TransformerConfig(**json)": lambda: ref.TransformerConfig(**json.loads(json.dumps(CONFIG.to_dict()))),
    "a finite-difference gradient": gradient_by_differences,
    "handwritten gradient descent": gradient_descent,
    "a pickled trainer": pickled_trainer,
    "np.savez of moments": lambda: np.savez("s.npz", **trainer().export_state().first_moment),
    "f'{loss:.3f} {tokens:d}'": lambda: "{0.loss:.3f} {0.tokens:d}".format(
        trainer().train_step(SOURCE, TARGET, LABELS)
    ),
    "rng: a different generator": lambda: different(generator(0), LOGITS),
    "rng: the same seed": lambda: same(generator(0), generator(0)),
    "rng: Philox": lambda: MODEL(SOURCE, TARGET, rng=np.random.Generator(np.random.Philox(0))),
    "generated ids as JSON": lambda: json.dumps(ref.greedy_search(MODEL, SOURCE, 5).ids.tolist()),
    "a copied cache": copied_cache,
    "memory as lists": lambda: same(MODEL.decode(TARGET, MEMORY.tolist(), SOURCE)),
    "a tap that multiplies": lambda: same(MODEL(SOURCE, TARGET, tap=lambda name, value: value * 1.0)),
    "np.savez of a Recorder": lambda: np.savez("r.npz", **recorded()),
    "a layer that is a function": layers_replaced,
    "warnings as errors": warnings_are_errors,
    "np.errstate(all='raise')": floating_point_errors_raise,
    "np.apply_along_axis": lambda: np.apply_along_axis(lambda row: MODEL.encode(row[None])[0, 0], 1, SOURCE),
    "asyncio.to_thread": lambda: same(asyncio.run(asyncio.to_thread(MODEL, SOURCE, TARGET))),
    "a pickled bound method": lambda: same(pickle.loads(pickle.dumps(MODEL.encode))(SOURCE), MEMORY),
    "weakref and gc": freed,
    "f'{model}'": lambda: f"{MODEL}".index("parameters in float64"),
    "inspect.signature(model)": lambda: inspect.signature(MODEL).parameters["source_ids"],
    "a subclass": lambda: same(Doubled.from_weights(CONFIG, WEIGHTS, "float64")(SOURCE, TARGET), 2 * LOGITS),
    "a layer of float64": lambda: ref.EncoderLayer(CONFIG, np.float64)(MEMORY),
    "encoder and decoder": lambda: same(
        ref.Decoder.from_weights(CONFIG, WEIGHTS, "float64")(
            TARGET, ref.Encoder.from_weights(CONFIG, WEIGHTS, "float64")(SOURCE), SOURCE
        )
    ),
}
INTEGERS, MASK = (
    "source_ids must be integers: got ",
    "source_mask must be boolean, True where attention is allowed: got ",
)
BATCH, FLOATS = "must have shape [batch, length]: got ", "must be one of float64, float32, float16, bfloat16: got "
REFUSED = {
    "one sentence without a batch": (lambda: MODEL(SOURCE[0], TARGET[0]), f"source_ids {BATCH}(4,)"),
    "ids as objects": (lambda: MODEL(SOURCE.astype(object), TARGET), f"{INTEGERS}object"),
    "a generator of sentences": (lambda: MODEL(iter(SOURCE), TARGET), f"{INTEGERS}object"),
    "ids as bytes": (lambda: MODEL([[b"5"]], TARGET), f"{INTEGERS}bytes8"),
    "ids as dates": (lambda: MODEL(SOURCE.astype("M8[s]"), TARGET), f"{INTEGERS}datetime64[s]"),
    "NaN as padding": (lambda: MODEL(np.where(SOURCE == 0, np.nan, SOURCE), TARGET), f"{INTEGERS}float64"),
    "-1 as padding": (
        lambda: MODEL(np.where(SOURCE == 0, -1, SOURCE), TARGET),
        "source_ids must be in [0, 37): got -1",
    ),
    "ids in a masked array": (lambda: MODEL(np.ma.masked_equal(SOURCE, 0), TARGET), "source_ids must be a plain array"),
    "a mask of 0 and 1": (lambda: MODEL(SOURCE, TARGET, np.uint8(SOURCE != 0)), f"{MASK}uint8"),
    "an additive mask": (lambda: MODEL(SOURCE, TARGET, np.log(SOURCE + 1)), f"{MASK}float64"),
    "a mask of four axes": (
        lambda: MODEL(SOURCE, TARGET, SOURCE[:, None, None] != 0),
        "source_mask must have shape (2, 4)",
    ),
    "training=True": (lambda: MODEL(SOURCE, TARGET, training=True), "unexpected keyword argument 'training'"),
    "rng=0": (lambda: MODEL(SOURCE, TARGET, rng=0), "rng must be a numpy.random.Generator: got int"),
    "attention without heads": (
        lambda: ref.scaled_dot_product_attention(*[HEADS[0]] * 3),
        "query must have shape [batch,",
    ),
    "an odd d_model": (
        lambda: ref.sinusoidal_encoding(10, 7),
        "sinusoidal positional encodings require an even d_model: got 7",
    ),
    "an unknown layout": (
        lambda: ref.sinusoidal_encoding(10, 8, "sin"),
        "position_layout must be one of interleaved, split",
    ),
    "cross_entropy(labels, logits)": (
        lambda: ref.cross_entropy(LABELS, LOGITS, CONFIG),
        "labels must be integers: got",
    ),
    "labels in one row": (lambda: ref.cross_entropy(LOGITS, LABELS.ravel(), CONFIG), f"labels {BATCH}(6,)"),
    "labels of -100": (lambda: ref.cross_entropy(LOGITS, LABELS - 100, CONFIG), "labels must be in [0, 37): got -100"),
    "a config as a dict": (lambda: ref.Transformer(CONFIG.to_dict()), "write TransformerConfig(**config)"),
    "dtype=np.float16": (lambda: build(np.float16), "dtype must be one of float64, float32: got 'float16'"),
    "weights in a list": (lambda: loads([*WEIGHTS.values()]), "weights must be a mapping of names to arrays"),
    "weights in an array": (lambda: loads(np.array(WEIGHTS)), "weights must be a mapping of names to arrays"),
    "integer weights": (
        lambda: loads({n: a.astype(int) for n, a in WEIGHTS.items()}),
        f"source_embedding.table {FLOATS}int64",
    ),
    "transposed kernels": (lambda: loads({n: a.T for n, a in WEIGHTS.items()}), "must have shape [37, 8]: got [8, 37]"),
    "from_weights(weights, config)": (
        lambda: ref.Transformer.from_weights(WEIGHTS, CONFIG),
        "config must be a TransformerConfig",
    ),
    "some weights": (lambda: ref.set_weights(build(), {VALUE: WEIGHTS[VALUE]}), "too few for the config's 3 layers"),
    "set_weights(weights, model)": (lambda: ref.set_weights(WEIGHTS, build()), "model must be a Model: got dict"),
    "get_weights(trainer)": (lambda: ref.get_weights(trainer()), "model must be a Model: got Trainer"),
    "save_weights(path, config, model)": (
        lambda: ref.save_weights("m", CONFIG, MODEL),
        "as returned by export_weights()",
    ),
    "a layer removed, then exported": (lambda: shortened().export_weights(), "encoder.layers must have 2 layers"),
    "dropout=0.1": (lambda: CONFIG.replace(dropout=0.1), "dropout must be a DropoutRates or a dict: got float"),
    "config.d_model = 16": (lambda: setattr(CONFIG, "d_model", 16), "cannot assign to field 'd_model'"),
    "Trainer(model, dict)": (lambda: ref.Trainer(build(), {"warmup_steps": 3}), "write TrainingConfig(**settings)"),
    "Trainer(new model)": (lambda: ref.Trainer(ref.Transformer(CONFIG), ref.TrainingConfig()), "has no weights yet"),
    "train_step(batch)": (
        lambda: trainer().train_step((SOURCE, TARGET, LABELS)),
        "missing 2 required positional arguments",
    ),
    "gradients(weights)": (
        lambda: ref.gradients(WEIGHTS, SOURCE, TARGET, LABELS),
        "model must be a Transformer: got dict",
    ),
    "labels of a different length": (
        lambda: ref.gradients(MODEL, SOURCE, TARGET, SOURCE),
        "labels must have shape (2, 3)",
    ),
    "max_length=1e2": (
        lambda: ref.beam_search(MODEL, SOURCE, max_length=1e2),
        "max_length must be an integer: got 100.0",
    ),
    "a cache without positions": (lambda: MODEL.init_cache(SOURCE, 0), "capacity must be at least 1: got 0"),
    "decode without a source": (lambda: MODEL.decode(TARGET, MEMORY), "source_ids or source_mask must be given"),
    "memory of a different dtype": (
        lambda: MODEL.decode(TARGET, np.float32(MEMORY), SOURCE),
        "memory must be float64: got float32",
    ),
    "tap=print": (lambda: MODEL(SOURCE, TARGET, tap=print), "the tap must return the value of source_embedding.output"),
    "tap=None": (lambda: MODEL(SOURCE, TARGET, tap=None), "tap must be a function of a name and a value: got NoneType"),
    "a tap that returns a mean": (
        lambda: MODEL(SOURCE, TARGET, tap=lambda name, value: value.mean()),
        "end the tap with `return",
    ),
    "a Recorder for two calls": (lambda: MODEL(SOURCE, TARGET, tap=recorded()), "use a new Recorder for each call"),
    "device='cuda'": (
        lambda: ref.Transformer.from_weights(CONFIG, WEIGHTS, device="cuda"),
        "device must be one of cpu",
    ),
    "greedy_search(source, model)": (lambda: ref.greedy_search(SOURCE, MODEL), "must be a Transformer: got ndarray"),
    "beam_search(trainer)": (lambda: ref.beam_search(trainer(), SOURCE), "model must be a Transformer: got Trainer"),
    "score(source, model)": (lambda: ref.score(SOURCE, MODEL, TARGET), "model must be a Transformer: got ndarray"),
    "decode_step(masked array)": (
        lambda: MODEL.decode_step(np.ma.array([3, 4]), MODEL.init_cache(SOURCE, 3)),
        "target_ids must be a plain array: got a masked array",
    ),
    "a layer on a masked array": (lambda: LINEAR(np.ma.ones((1, 8))), "x must be a plain array: got a masked array"),
    "a prefix of None": (
        lambda: ref.greedy_search(MODEL, SOURCE, 5, prefix_ids=[[3], None]),
        "got NoneType in row 1; use [] for no prefix",
    ),
    "temperature=1e39": (
        lambda: ref.sample(MODEL, SOURCE, temperature=1e39),
        "temperature must be greater than 0 and at most 1e+30: got 1e+39",
    ),
    "length_penalty=400": (
        lambda: ref.beam_search(MODEL, SOURCE, length_penalty=400),
        "length_penalty must not overflow: got 400 for",
    ),
    "rules without an allowed token": (
        lambda: ref.greedy_search(MODEL, SOURCE, 39, 39, rules=ref.SearchRules(no_repeat_ngram_size=1)),
        "relax the rules or min_length, which may allow no token",
    ),
    "too many learned positions": (
        lambda: ref.LearnedPosition(CONFIG.replace(position_encoding="learned", max_length=5))(np.ones((1, 6, 8))),
        "length must be at most 5 for this model: got 6",
    ),
    "a padding mask for a layer": (
        lambda: MODEL.encoder.layers[0](MEMORY, SOURCE != 0),
        "mask must broadcast to (2, 2, 4, 4)",
    ),
}


def shortened():
    model = build()
    model.encoder.layers.pop()
    return model


@pytest.mark.parametrize("habit", WORKS)
def test_habit_gives_the_expected_result(habit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    WORKS[habit]()


@pytest.mark.parametrize("habit", REFUSED)
def test_habit_raises_a_helpful_error(habit):
    call, message = REFUSED[habit]
    with pytest.raises((TypeError, ValueError, AttributeError), match=re.escape(message)):
        call()
