"""Each preset computes the same values as the implementation that it's named after, and its neighbors don't.

A neighbor is a config that differs in one convention. Logits are compared in float64 at all positions except padding.
Implementations that can be installed are run with our weights; the others are transcribed in ``third_party``.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import third_party
import torch
from conftest import random_weights, tiny_config
from third_party import assign_keras, relative_error, tensor, under
from tiers import first_alone

import reference_numpy as ref

AGREES = 1e-12
DIFFERS = 1e-7  # the closest neighbors, which have different epsilons, differ by at least 3e-7

# Published Transformers differ along these axes. If the logits didn't depend on a convention, the neighbors
# along that axis would agree too, and the comparison would fail.
AXES = {
    "norm_order": ("post", "pre"),
    "final_norm": (True, False),
    "embedding_norm": (True, False),
    "layer_norm_epsilon": (1e-9, 1e-6, 1e-5, 1e-3),
    "layer_norm_kind": ("standard", "annotated"),
    "position_encoding": ("sinusoidal", "learned"),
    "position_layout": ("interleaved", "split"),
    "position_timescale": ("m", "m_minus_1"),
    "position_offset": (0, 1, 2),
    "scale_embedding": (True, False),
    "attention_bias": (False,),
    "feed_forward_bias": (False,),
    "output_bias": (False,),
    "activation": ("relu", "gelu", "gelu_tanh", "swish"),
}


def sentences(config: ref.TransformerConfig):
    """Return source and target IDs with S != T and with padding in two of the three sentences on each side."""
    rng = np.random.default_rng(5)
    source = rng.integers(3, config.source_vocab_size, (3, 7))
    target = rng.integers(3, config.target_vocab_size, (3, 6))
    source[1, 4:] = source[2, 6:] = config.pad_id
    target[0, 5:] = target[2, 3:] = config.pad_id
    target[:, 0] = config.bos_id
    return source, target


def assert_only_we_agree(theirs, config: ref.TransformerConfig, weights):
    """Compare the logits at real positions with our model and with every neighboring convention."""
    source, target = sentences(config)
    real = ref.target_padding_mask(target, config.pad_id)

    def error(config, **masks):
        kept = {  # a neighbor's additional parameters have no effect by themselves
            name: weights.get(name, np.full(shape, float(name.endswith("scale")), np.float32))
            for name, shape in ref.parameter_shapes(config).items()
        }
        logits = ref.Transformer.from_weights(config, kept, dtype="float64")(source, target, **masks)
        return relative_error(logits[real], np.asarray(theirs)[real])

    assert error(config) <= AGREES
    assert error(config, source_mask=np.ones_like(source, dtype=bool)) > DIFFERS
    for axis, values in AXES.items():
        if config.position_encoding == "learned" and axis in ("position_layout", "position_timescale"):
            continue
        for value in values:
            assert value == getattr(config, axis) or error(config.replace(**{axis: value})) > DIFFERS, (axis, value)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # three heads, or pre-norm: no fast path
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("torch", {}),
        ("torch", {"norm_order": "pre"}),
        ("torch", {"final_norm": False}),
        ("torch", {"activation": "gelu"}),
        ("torch", {"tie_embeddings": "target_output"}),
        ("paper_base", {}),
    ],
    ids=["post and final norm", "pre", "post without final norm", "gelu", "tied output", "paper_base"],
)
def test_torch_transformer_matches_only_its_preset(preset, changes):
    config = tiny_config(preset, **changes)
    weights = random_weights(config)
    model = torch.nn.Transformer(**third_party.torch_sizes(config), batch_first=True, dtype=torch.float64).eval()
    if not config.final_norm:
        model.encoder.norm = model.decoder.norm = None
    model.load_state_dict(third_party.torch_stacks(weights))

    def embed(table, ids):  # the user provides the embeddings and the output layer
        positions = third_party.paper_positions(ids.shape[1], config.d_model)
        return tensor(table)[ids] * math.sqrt(config.d_model) + positions

    source_table = weights["source_embedding.table"]
    target_table = weights.get("target_embedding.table", source_table)
    kernel = weights.get("output_proj.kernel", target_table.T)
    source, target = map(torch.tensor, sentences(config))
    states = model(
        embed(source_table, source),
        embed(target_table, target),
        tgt_mask=torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1),  # True = must not attend
        src_key_padding_mask=source == config.pad_id,
        memory_key_padding_mask=source == config.pad_id,
        tgt_key_padding_mask=target == config.pad_id,
    ).detach()
    logits = states @ tensor(kernel) + tensor(weights.get("output_proj.bias", 0.0))
    assert_only_we_agree(logits, config, weights)


def attention_case(config: ref.TransformerConfig):
    """Return an attention block with random weights, queries, memory, and a mask that allows a key for every query."""
    rng = np.random.default_rng(2)
    weights = random_weights(config)
    path = "encoder.layers.0.self_attention"
    block = ref.Transformer.from_weights(config, weights, dtype="float64").encoder.layers[0].self_attention
    query, memory = rng.normal(size=(2, 5, config.d_model)), rng.normal(size=(2, 7, config.d_model))
    mask = rng.random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    return block, weights, path, query, memory, mask


def test_torch_multihead_attention_matches_ours():
    config = tiny_config("torch")
    block, weights, path, query, memory, mask = attention_case(config)
    theirs = torch.nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(third_party.torch_attention(weights, path))
    forbidden = ~torch.tensor(mask).expand(-1, config.num_heads, -1, -1).flatten(0, 1)  # opposite meaning
    query_, memory_ = torch.tensor(query), torch.tensor(memory)
    output, averages = theirs(query_, memory_, memory_, attn_mask=forbidden, average_attn_weights=False)
    seen = ref.Recorder("weights")
    assert relative_error(block(query, memory, mask, seen), output.detach()) <= AGREES
    assert relative_error(seen["weights"], averages.detach()) <= AGREES
    assert relative_error(block(query, memory), output.detach()) > DIFFERS


def test_torch_scaled_dot_product_attention_matches_ours():
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(2, 3, 5, 4)), rng.normal(size=(2, 3, 7, 4)), rng.normal(size=(2, 3, 7, 6))
    mask = rng.random((2, 1, 5, 7)) < 0.5
    mask[1, :, 2] = False  # torch also returns zeros for a query without allowed keys
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.tensor, (query, key, value)), attn_mask=torch.tensor(mask)
    )
    assert relative_error(ref.scaled_dot_product_attention(query, key, value, mask), theirs) <= AGREES
    assert not theirs[1, :, 2].any()


def test_feed_forward_equals_two_convolutions_with_kernel_size_one():
    """Section 3.3 describes the feed-forward network this way."""
    config = tiny_config()
    weights = random_weights(config)
    ours = ref.Transformer.from_weights(config, weights, dtype="float64").encoder.layers[0].feed_forward
    w = {name: tensor(value) for name, value in under(weights, "encoder.layers.0.feed_forward.").items()}
    x = np.random.default_rng(4).normal(size=(2, 5, config.d_model))
    conv1d = torch.nn.functional.conv1d
    inner = conv1d(torch.tensor(x).mT, w["inner_proj.kernel"].T[:, :, None], w["inner_proj.bias"]).relu()
    theirs = conv1d(inner, w["output_proj.kernel"].T[:, :, None], w["output_proj.bias"]).mT
    assert relative_error(ours(x), theirs) <= AGREES


LOGITS = {
    "marian": third_party.marian_logits,
    "fairseq": third_party.fairseq_logits,
    **{name: partial(third_party.hugging_face_logits, name) for name in third_party.FAMILY},
}


@pytest.mark.parametrize("preset", ["marian", "fairseq", *first_alone(third_party.FAMILY, "presets")])
def test_hugging_face_models_match_only_their_presets(preset):
    config = tiny_config(preset)
    weights = random_weights(config)
    assert_only_we_agree(LOGITS[preset](config, weights, *sentences(config)), config, weights)


@pytest.mark.only("tf")
def test_keras_hub_layers_match_only_their_preset(port):
    # Keras rounds 1 / sqrt(d_k) to float32, which is exact only for powers of four, so d_k is 4 here.
    config = tiny_config("keras_hub", d_model=12)
    weights = random_weights(config)
    assert_only_we_agree(third_party.keras_hub_logits(config, weights, *sentences(config)), config, weights)


@pytest.mark.only("tf")
def test_keras_multi_head_attention_matches_ours(port):
    import keras

    config = tiny_config("keras_hub", d_k=4, d_v=5)  # d_k = 4, as in test_keras_hub_layers_match_only_their_preset
    block, weights, path, query, memory, mask = attention_case(config)
    theirs = keras.layers.MultiHeadAttention(config.num_heads, config.d_k, config.d_v, dtype="float64")
    theirs.build(query.shape, memory.shape)
    assign_keras(theirs, third_party.keras_attention(weights, path, config.num_heads))
    output = theirs(query=query, value=memory, key=memory, attention_mask=mask[:, 0]).numpy()
    assert relative_error(block(query, memory, mask), output) <= AGREES
    assert relative_error(block(query, memory), output) > DIFFERS


@pytest.mark.only("jax")
def test_flax_nnx_multi_head_attention_matches_ours(port):
    import jax
    from flax import nnx

    config = tiny_config("flax_wmt", attention_bias=True)
    block, weights, path, query, memory, mask = attention_case(config)
    theirs = nnx.MultiHeadAttention(
        config.num_heads,
        config.d_model,
        param_dtype=np.float64,
        decode=False,
        dropout_rate=0.5,  # disabled, but a rate of zero selects jax.nn's kernel, whose softmax is always float32
        deterministic=True,
        rngs=nnx.Rngs(0),
    )
    for name, layer in third_party.split_heads_off(weights, path, config.num_heads).items():
        for kind, array in layer.items():
            getattr(getattr(theirs, name), kind)[...] = jax.numpy.asarray(array, np.float64)
    output = theirs(query, memory, mask=mask)
    assert relative_error(block(query, memory, mask), output) <= AGREES
    assert relative_error(block(query, memory), output) > DIFFERS


@pytest.mark.only("jax")
def test_flax_wmt_example_matches_only_its_preset(port):
    import jax
    import third_party_flax

    config = tiny_config("flax_wmt")
    weights = random_weights(config)
    source, target = sentences(config)
    model = third_party_flax.WmtTransformer(config)
    parameters = third_party_flax.wmt_parameters(config, weights)
    expected = jax.eval_shape(model.init, jax.random.key(0), source, target)["params"]
    assert jax.tree.map(np.shape, parameters) == jax.tree.map(np.shape, expected)
    logits = model.apply({"params": parameters}, source, third_party.labels_of(target, config.pad_id, config.eos_id))
    assert_only_we_agree(logits, config, weights)


def test_annotated_transformer_matches_only_its_preset():
    config = tiny_config("annotated")
    weights = random_weights(config)
    logits = third_party.annotated_logits(weights, config.num_heads, *sentences(config))
    assert_only_we_agree(logits, config, weights)


@pytest.mark.parametrize("preset", ["t2t_2017", "marian_cpp"])
def test_decoder_starting_from_a_zero_vector_matches_third_party_code(preset):
    config = tiny_config(preset)
    weights = random_weights(config)
    # Both implementations start with a zero vector. We start with PAD, whose row in the embedding matrix is set to
    # zero.
    assert config.bos_id == config.pad_id
    weights["source_embedding.table"][config.pad_id] = 0.0
    source, target = sentences(config)
    labels = third_party.labels_of(target, config.pad_id, config.eos_id)
    act = torch.relu if preset == "t2t_2017" else lambda x: x * torch.sigmoid(x)
    logits = third_party.shifted_logits(weights, config.num_heads, source, labels, config.pad_id, act)
    assert_only_we_agree(logits, config, weights)


# Table 3 of the paper, with parameters in millions, and our exact counts without and with biases in the attention,
# first for the vocabulary of 37,000 tokens that the paper reports, then for 41,096 tokens, one of the sizes that match
# most rows.
TABLE_3 = {
    "paper_base": (65, 63_045_632, 63_082_496, 65_142_784, 65_179_648),
    "paper_dk16": (58, 55_967_744, 55_990_784, 58_064_896, 58_087_936),
    "paper_dk32": (60, 58_327_040, 58_354_688, 60_424_192, 60_451_840),
    "paper_n2": (36, 33_644_544, 33_656_832, 35_741_696, 35_753_984),
    "paper_n4": (50, 48_345_088, 48_369_664, 50_442_240, 50_466_816),
    "paper_n8": (80, 77_746_176, 77_795_328, 79_843_328, 79_892_480),
    "paper_d256": (28, 26_816_512, 26_834_944, 27_865_088, 27_883_520),
    "paper_d1024": (168, 163_815_424, 163_889_152, 168_009_728, 168_083_456),
    "paper_ff1024": (53, 50_450_432, 50_487_296, 52_547_584, 52_584_448),
    "paper_ff4096": (90, 88_236_032, 88_272_896, 90_333_184, 90_370_048),
    "paper_big": (213, 214_171_648, 214_245_376, 218_365_952, 218_439_680),
}


def parameters(preset, vocab_size, **changes):
    sizes = {"source_vocab_size": vocab_size, "target_vocab_size": vocab_size}
    return ref.count_parameters(ref.TransformerConfig.preset(preset, **sizes, **changes))


@pytest.mark.parametrize("preset", TABLE_3)
def test_parameter_counts_of_table_3_match_the_listed_counts(preset):
    cases = [(vocab_size, bias) for vocab_size in (37_000, 41_096) for bias in (False, True)]
    assert tuple(parameters(preset, size, attention_bias=bias) for size, bias in cases) == TABLE_3[preset][1:]


def test_no_single_vocabulary_size_explains_table_3():
    def explained(vocab_size):
        return {name for name, row in TABLE_3.items() if round(parameters(name, vocab_size) / 1e6) == row[0]}

    assert explained(37_000) == set()
    assert explained(41_096) == TABLE_3.keys() - {"paper_big"}
    assert explained(36_000) == {"paper_big"}
    for heads in (1, 4, 16, 32):  # row A of Table 3
        assert parameters(f"paper_h{heads}", 37_000) == parameters("paper_base", 37_000)


@pytest.mark.parametrize(
    ("larger", "smaller", "difference"),
    [
        ("paper_n4", "paper_n2", 2 * 7_350_272),
        ("paper_base", "paper_n4", 2 * 7_350_272),
        ("paper_n8", "paper_base", 2 * 7_350_272),
        ("paper_dk32", "paper_dk16", 2_359_296),
        ("paper_base", "paper_dk32", 4_718_592),
        ("paper_base", "paper_ff1024", 12_595_200),
        ("paper_ff4096", "paper_base", 25_190_400),
    ],
)
def test_differences_in_table_3_do_not_depend_on_the_vocabulary(larger, smaller, difference):
    assert parameters(larger, 10) - parameters(smaller, 10) == difference
    assert abs(difference / 1e6 - (TABLE_3[larger][0] - TABLE_3[smaller][0])) < 1.0  # both are rounded to 1e6


def test_torch_transformer_has_the_same_number_of_parameters():
    model = torch.nn.Transformer(512, 8, 6, 6, 2048, batch_first=True, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 44_140_544
    assert parameters("torch", 10) == 44_140_544 + 3 * 10 * 512 + 10  # two embeddings, the output layer, and its bias
