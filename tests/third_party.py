"""Third-party Transformers with our weights, and transcriptions of implementations that aren't on any package index.

The first half maps canonical weights to the names that other implementations use. A kernel is [in, out] here and [out,
in] in torch. The second half transcribes three implementations from their formulas in a different style than the
reference: the head dimension follows the length dimension, masks are added to the scores, and positional encodings are
computed using logarithms.

``transformers`` is imported only in the functions that use it, because the import takes seconds.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from reference_numpy import sinusoidal_encoding, target_padding_mask
from transformer_bench.peers.marian import HUGGING_FACE_NAMES

TORCH_NAMES = {
    "encoder": {"self_attention_norm.": "norm1.", "feed_forward_norm.": "norm2."},
    "decoder": {"self_attention_norm.": "norm1.", "cross_attention_norm.": "norm2.", "feed_forward_norm.": "norm3."},
    "both": {
        "final_norm.": "norm.",
        "feed_forward.inner_proj.": "linear1.",
        "feed_forward.output_proj.": "linear2.",
        "scale": "weight",
        "kernel": "weight",
    },
}

FAMILY = {  # models of BART's family: preset name and prefix of Hugging Face's class names
    "bart": "Bart",
    "plbart": "PLBart",
    "mbart": "MBart",
    "m2m_100": "M2M100",
    "pegasus": "Pegasus",
    "blenderbot": "Blenderbot",
}


def relative_error(ours, theirs) -> float:
    """Return the L2 distance between two arrays relative to the norm of the second array."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == np.float64
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def tensor(array) -> Tensor:
    return torch.tensor(np.asarray(array, np.float64))


def under(weights, prefix):
    """Return the weights below a path, and remove the path from their names."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _renamed(weights, *tables):
    """Return torch's state dict entries for our weights: names are mapped and kernels are transposed."""
    state = {}
    for name, value in weights.items():
        new = name
        for table in tables:
            for ours, theirs in table.items():
                new = new.replace(ours, theirs)
        state[new] = tensor(value.T if name.endswith("kernel") else value)
    return state


def hugging_face_sizes(config):
    """Return our sizes with the names in the configs of MarianMTModel, FSMTForConditionalGeneration, and BartModel."""
    return {
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "max_position_embeddings": config.max_length,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
    }


def hugging_face_layers(weights):
    """Return layers with the names in MarianMTModel, FSMTForConditionalGeneration, and BartModel."""
    layers = {name: value for name, value in weights.items() if ".layers." in name}
    return {f"model.{name}": value for name, value in _renamed(layers, HUGGING_FACE_NAMES).items()}


def _replaced_positions(model, exact, error):
    """Return exact positional encodings after checking that the model's float32 values approximate them."""
    theirs = model.model.encoder.embed_positions.weight
    assert theirs.dtype == torch.float32
    assert (theirs - tensor(exact)).abs().max() <= error
    return {f"model.{stack}.embed_positions.weight": tensor(exact) for stack in ("encoder", "decoder")}


def marian_model(config, weights):
    """Return Hugging Face's MarianMTModel in float64."""
    import transformers

    special = {"scale_embedding": True, "activation_function": "swish", "decoder_start_token_id": config.bos_id}
    special["forced_eos_token_id"] = None  # the default forces EOS at the maximum length
    sizes = hugging_face_sizes(config)
    fields = transformers.MarianConfig(vocab_size=config.target_vocab_size, **sizes, **special)
    model = transformers.MarianMTModel(fields).eval()
    positions = sinusoidal_encoding(config.max_length, config.d_model, "split", "m")
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    state = {
        **hugging_face_layers(weights),
        **_replaced_positions(model, positions, 2.0**-24),  # one rounding error
        **{f"{name}.weight": tensor(weights["source_embedding.table"]) for name in tables},
        "final_logits_bias": tensor(weights["output_proj.bias"])[None],
    }
    model.double().load_state_dict(state)
    return model


@torch.no_grad()
def marian_logits(config, weights, source, target):
    """Return the logits of Hugging Face's MarianMTModel."""
    model = marian_model(config, weights)
    return model(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source != config.pad_id),
        decoder_input_ids=torch.tensor(target),
        # The first target token is PAD, but queries attend to it. Without this mask, Marian also attends to the other
        # PAD tokens.
        decoder_attention_mask=torch.tensor(target_padding_mask(target, config.pad_id)),
    ).logits


def marian_search(config, weights, source, max_length, **options):
    """Return the IDs [B, N, L] without the start token and the scores [B, N] or None from Hugging Face's search."""
    early = "never" if options["num_beams"] > 1 else False  # stops as soon as no better hypothesis is possible
    fields = {"max_new_tokens": max_length, "bad_words_ids": [[config.pad_id]], "early_stopping": early, **options}
    return marian_generate(config, weights, source, {"decoder_start_token_id": config.bos_id, **fields})


@torch.no_grad()
def marian_generate(config, weights, source, fields):
    """Search with Hugging Face and a generation config, and return the same results as ``marian_search``."""
    import transformers

    found = marian_model(config, weights).generate(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source != config.pad_id),
        generation_config=transformers.GenerationConfig(
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            return_dict_in_generate=True,
            output_scores=True,
            **fields,
        ),
    )
    ids = found.sequences[:, 1:].reshape(len(source), -1, found.sequences.shape[1] - 1)
    scores = found.sequences_scores.reshape(ids.shape[:2]).numpy() if fields["num_beams"] > 1 else None
    return ids.numpy(), scores


def hugging_face_model(name, config, weights):
    """Return a float64 model of BART's family, given the preset's name."""
    import transformers

    config_class = getattr(transformers, f"{FAMILY[name]}Config")
    model_class = getattr(transformers, f"{FAMILY[name]}ForConditionalGeneration")
    behind = config.position_offset if config.position_encoding == "learned" else 0
    sizes = {**hugging_face_sizes(config), "max_position_embeddings": config.max_length - behind}
    special = {"activation_function": config.activation, "scale_embedding": config.scale_embedding}
    model = model_class(config_class(vocab_size=config.target_vocab_size, **sizes, **special)).eval()
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    state = {
        **hugging_face_layers(weights),
        **{f"{name}.weight": tensor(weights["source_embedding.table"]) for name in tables},
    }
    if config.output_bias:
        state["final_logits_bias"] = tensor(weights["output_proj.bias"])[None]
    norms = {
        "source_embedding_norm": "encoder.layernorm_embedding",
        "target_embedding_norm": "decoder.layernorm_embedding",
    }
    norms |= {f"{stack}.final_norm": f"{stack}.layer_norm" for stack in ("encoder", "decoder")}
    for ours, theirs in norms.items():
        for kind, array in under(weights, f"{ours}.").items():
            state[f"model.{theirs}.{'weight' if kind == 'scale' else 'bias'}"] = tensor(array)
    if config.position_encoding == "learned":
        for side, stack in (("source", "encoder"), ("target", "decoder")):
            state[f"model.{stack}.embed_positions.weight"] = tensor(weights[f"{side}_position.table"])
    elif name == "pegasus":
        exact = sinusoidal_encoding(config.max_length, config.d_model, "split", "m")
        state |= _replaced_positions(model, exact, 2.0**-24)
    model.double().load_state_dict(state)
    if name == "m2m_100":  # its positional encodings aren't in the state dict
        exact = sinusoidal_encoding(config.max_length + 2, config.d_model, "split", "m_minus_1")
        exact[config.pad_id] = 0.0
        for stack in (model.model.encoder, model.model.decoder):
            assert (stack.embed_positions.weights - tensor(exact)).abs().max() <= 1e-6 * config.max_length
            stack.embed_positions.weights = tensor(exact)
    return model


@torch.no_grad()
def hugging_face_logits(name, config, weights, source, target):
    """Return the logits of a model of BART's family."""
    return hugging_face_model(name, config, weights)(
        input_ids=torch.tensor(source),
        attention_mask=torch.tensor(source != config.pad_id),
        decoder_input_ids=torch.tensor(target),
        decoder_attention_mask=torch.tensor(target_padding_mask(target, config.pad_id)),
    ).logits


@torch.no_grad()
def fairseq_logits(config, weights, source, target):
    """Return the logits of Hugging Face's FSMTForConditionalGeneration, the port of fairseq's WMT19 models."""
    import transformers

    vocabularies = {"src_vocab_size": config.source_vocab_size, "tgt_vocab_size": config.target_vocab_size}
    fields = transformers.FSMTConfig(**vocabularies, **hugging_face_sizes(config))
    model = transformers.FSMTForConditionalGeneration(fields).eval()
    positions = sinusoidal_encoding(config.max_length + config.pad_id + 1, config.d_model, "split", "m_minus_1")
    positions[config.pad_id] = 0.0
    state = {
        **hugging_face_layers(weights),
        **_replaced_positions(model, positions, 1e-6 * config.max_length),  # the angles are also float32
        "model.encoder.embed_tokens.weight": tensor(weights["source_embedding.table"]),
        "model.decoder.embed_tokens.weight": tensor(weights["target_embedding.table"]),
        "model.decoder.output_projection.weight": tensor(weights["output_proj.kernel"].T),
    }
    model.double().load_state_dict(state)
    source, target = torch.tensor(source), torch.tensor(target)
    real = source != config.pad_id
    # Call the encoder and the decoder directly, because the model builds its causal mask in float32, in which float64's
    # minimum overflows.
    memory = model.model.encoder(source, attention_mask=real).last_hidden_state
    future = torch.triu(torch.full((target.shape[1], target.shape[1]), -math.inf, dtype=torch.float64), diagonal=1)
    return model.model.decoder(target, memory, real, target == config.pad_id, future).last_hidden_state


def torch_sizes(config):
    """Return our sizes and conventions with torch.nn.Transformer's names."""
    return {
        "d_model": config.d_model,
        "nhead": config.num_heads,
        "num_encoder_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "dim_feedforward": config.d_ff,
        "activation": config.activation,
        "layer_norm_eps": config.layer_norm_epsilon,
        "norm_first": config.norm_order == "pre",
    }


def torch_attention(weights, path):
    """Return an attention block with torch.nn.MultiheadAttention's names. Biases that we don't have are zero."""

    def get(name, kind):
        kernel = weights[f"{path}.{name}_proj.kernel"]
        return tensor(
            kernel.T if kind == "kernel" else weights.get(f"{path}.{name}_proj.bias", np.zeros_like(kernel[0]))
        )

    return {
        "in_proj_weight": torch.cat([get(name, "kernel") for name in ("query", "key", "value")]),
        "in_proj_bias": torch.cat([get(name, "bias") for name in ("query", "key", "value")]),
        "out_proj.weight": get("output", "kernel"),
        "out_proj.bias": get("output", "bias"),
    }


def torch_stacks(weights):
    """Return the encoder and the decoder with torch.nn.Transformer's names."""
    state = {}
    for stack in ("encoder", "decoder"):
        rest = {
            name: value for name, value in weights.items() if name.startswith(f"{stack}.") and "_attention." not in name
        }
        state |= _renamed(rest, TORCH_NAMES[stack], TORCH_NAMES["both"])
        for name in weights:
            path, found, _ = name.partition("_attention.query_proj.kernel")
            if found and path.startswith(f"{stack}."):
                theirs = path.replace(".self", ".self_attn").replace(".cross", ".multihead_attn")
                state |= {
                    f"{theirs}.{key}": value for key, value in torch_attention(weights, f"{path}_attention").items()
                }
    return state


def split_heads_off(weights, path, num_heads):
    """Return an attention block with Flax's names and shapes: kernels [d_model, H, d], output [H, d, d_model]."""
    block = {}
    for name in ("query", "key", "value", "output"):
        layer = under(weights, f"{path}.{name}_proj.")
        if name == "output":
            layer["kernel"] = layer["kernel"].reshape(num_heads, -1, layer["kernel"].shape[-1])
        else:
            layer = {kind: array.reshape(*array.shape[:-1], num_heads, -1) for kind, array in layer.items()}
        block["out" if name == "output" else name] = layer
    return block


def assign_keras(layer, arrays):
    """Assign an array to every variable of a Keras layer by its path, excluding the layer's own name."""
    paths = {variable.path.partition("/")[2]: variable for variable in layer.variables}
    assert paths.keys() == arrays.keys()
    for path, variable in paths.items():
        variable.assign(np.asarray(arrays[path], np.float64))


def keras_attention(weights, path, num_heads):
    """Return an attention block with the paths in keras.layers.MultiHeadAttention."""
    return {
        f"{'attention_output' if name == 'out' else name}/{kind}": array
        for name, layer in split_heads_off(weights, path, num_heads).items()
        for kind, array in layer.items()
    }


def keras_hub_layer(weights, path, num_heads):
    """Return a layer with the paths in keras_hub's TransformerEncoder or TransformerDecoder."""
    names = {"self_attention": "self_attention", "cross_attention": "cross_attention"}
    if path.startswith("encoder"):
        names = {"self_attention": "self_attention_layer"}
    arrays = {}
    for ours, theirs in names.items():
        block = keras_attention(weights, f"{path}.{ours}", num_heads)
        arrays |= {f"{theirs}/{name}": array for name, array in block.items()}
    for sublayer in (*names, "feed_forward"):
        norm = f"{sublayer.replace('feed_forward', 'feedforward')}_layer_norm"
        arrays[f"{norm}/gamma"] = weights[f"{path}.{sublayer}_norm.scale"]
        arrays[f"{norm}/beta"] = weights[f"{path}.{sublayer}_norm.bias"]
    for ours, theirs in (("inner", "intermediate"), ("output", "output")):
        for kind in ("kernel", "bias"):
            arrays[f"feedforward_{theirs}_dense/{kind}"] = weights[f"{path}.feed_forward.{ours}_proj.{kind}"]
    return arrays


def keras_hub_logits(config, weights, source_ids, target_ids, **options):
    """Return the logits of keras_hub's layers in float64."""
    import keras
    import keras_hub

    def embed(side, vocab_size, ids):
        sizes = (vocab_size, config.max_length, config.d_model)
        layer = keras_hub.layers.TokenAndPositionEmbedding(*sizes, dtype="float64")
        layer.build(ids.shape)
        tables = {"token": weights[f"{side}_embedding.table"], "position": weights[f"{side}_position.table"]}
        assign_keras(layer, {f"{name}_embedding/embeddings": table for name, table in tables.items()})
        return layer(ids)

    def layer(kind, path, *inputs, **masks):
        one = kind(config.d_ff, config.num_heads, dtype="float64", **options)
        one.build(*(x.shape for x in inputs))
        assign_keras(one, keras_hub_layer(weights, path, config.num_heads))
        return one(*inputs, **masks)

    source_mask, target_mask = source_ids != config.pad_id, target_ids != config.pad_id
    x = embed("source", config.source_vocab_size, source_ids)
    for i in range(config.num_encoder_layers):
        x = layer(keras_hub.layers.TransformerEncoder, f"encoder.layers.{i}", x, padding_mask=source_mask)
    y = embed("target", config.target_vocab_size, target_ids)
    masks = {"decoder_padding_mask": target_mask, "encoder_padding_mask": source_mask}
    for i in range(config.num_decoder_layers):
        y = layer(keras_hub.layers.TransformerDecoder, f"decoder.layers.{i}", y, x, **masks)
    dense = keras.layers.Dense(config.target_vocab_size, dtype="float64")
    dense.build(y.shape)
    assign_keras(dense, under(weights, "output_proj."))
    return dense(y).numpy()


def labels_of(target_ids, pad_id, eos_id):
    """Return the labels for decoder inputs: the inputs shifted left by one position, followed by EOS.

    Tensor2tensor, Marian, and Flax's example accept labels and shift them to get the decoder inputs.
    """
    labels = np.concatenate([target_ids[:, 1:], np.full_like(target_ids[:, :1], pad_id)], axis=1)
    ends = (labels != pad_id).sum(axis=1)
    labels[np.arange(len(labels)), ends] = eos_id
    return labels


def paper_positions(length, d_model):
    """The Annotated Transformer's positional encodings: alternating sines and cosines, computed via logarithms."""
    frequencies = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    table = torch.zeros(length, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(angles)
    table[:, 1::2] = torch.cos(angles)
    return table


def timing_signal(length, d_model):
    """Tensor2tensor's timing signal: all sines, then all cosines, with timescales from 1 to 10000 inclusive."""
    increment = math.log(10000.0) / (d_model // 2 - 1)
    inverse_timescales = torch.exp(torch.arange(d_model // 2, dtype=torch.float64) * -increment)
    scaled_time = torch.outer(torch.arange(length, dtype=torch.float64), inverse_timescales)
    return torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)


def annotated_norm(x, a, b):
    """The Annotated Transformer's LayerNorm, which adds epsilon to torch's unbiased standard deviation."""
    return a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + b


def t2t_norm(x, scale, bias):
    """Tensor2tensor's and Marian's layer norm. Marian's operator defaults to 1e-9, but its Transformer passes 1e-6."""
    mean = torch.mean(x, -1, keepdim=True)
    variance = torch.mean(torch.square(x - mean), -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-6) * scale + bias


def _dense(w, path, x):
    return x @ w[f"{path}.kernel"] + w[f"{path}.bias"]


def _attend(w, path, heads, x, memory, bias):
    query = _dense(w, f"{path}.query_proj", x).unflatten(-1, (heads, -1))
    key = _dense(w, f"{path}.key_proj", memory).unflatten(-1, (heads, -1))
    value = _dense(w, f"{path}.value_proj", memory).unflatten(-1, (heads, -1))
    logits = torch.einsum("blhd,bmhd->bhlm", query * key.shape[-1] ** -0.5, key) + bias
    context = torch.einsum("bhlm,bmhd->blhd", torch.softmax(logits, -1), value)
    return _dense(w, f"{path}.output_proj", context.flatten(2))


def _stack(w, stack, heads, x, bias, norm, act, pre, memory=None, memory_bias=None):
    """Run every layer of a stack: x + f(norm(x)) if ``pre``, else norm(x + f(x))."""
    depth = sum(name.startswith(stack) and name.endswith("self_attention_norm.scale") for name in w)
    sublayers = (
        ["self_attention", "feed_forward"] if memory is None else ["self_attention", "cross_attention", "feed_forward"]
    )
    for path in (f"{stack}.layers.{i}.{sublayer}" for i in range(depth) for sublayer in sublayers):
        scale, shift = w[f"{path}_norm.scale"], w[f"{path}_norm.bias"]
        y = norm(x, scale, shift) if pre else x
        if path.endswith("feed_forward"):
            y = _dense(w, f"{path}.output_proj", act(_dense(w, f"{path}.inner_proj", y)))
        elif path.endswith("cross_attention"):
            y = _attend(w, path, heads, y, memory, memory_bias)
        else:
            y = _attend(w, path, heads, y, y, bias)
        x = x + y if pre else norm(x + y, scale, shift)
    return x


def _future(length):
    return -1e9 * torch.triu(torch.ones(length, length, dtype=torch.float64), diagonal=1)


def annotated_logits(weights, heads, source, target):
    """Return the Annotated Transformer's logits before its log-softmax. Its padding ID is 2."""
    w = {name: tensor(value) for name, value in weights.items()}
    source, target = torch.tensor(source), torch.tensor(target)
    d_model = w["source_embedding.table"].shape[1]
    options = {"norm": annotated_norm, "act": torch.relu, "pre": True}
    source_bias = -1e9 * (source == 2).double()[:, None, None, :]
    target_bias = torch.minimum(-1e9 * (target == 2).double()[:, None, None, :], _future(target.shape[1]))

    x = w["source_embedding.table"][source] * math.sqrt(d_model) + paper_positions(source.shape[1], d_model)
    x = _stack(w, "encoder", heads, x, source_bias, **options)
    memory = annotated_norm(x, w["encoder.final_norm.scale"], w["encoder.final_norm.bias"])
    y = w["target_embedding.table"][target] * math.sqrt(d_model) + paper_positions(target.shape[1], d_model)
    y = _stack(w, "decoder", heads, y, target_bias, **options, memory=memory, memory_bias=source_bias)
    y = annotated_norm(y, w["decoder.final_norm.scale"], w["decoder.final_norm.bias"])
    return _dense(w, "output_proj", y)


def shifted_logits(weights, heads, source, labels, pad_id, act):
    """Return the logits of Tensor2tensor's first release or of Marian, whose decoders start with a zero vector.

    Tensor2tensor has no output bias, and its embedding of the target space is omitted. Embeddings of padding are zero.
    """
    w = {name: tensor(value) for name, value in weights.items()}
    source, labels = torch.tensor(source), torch.tensor(labels)
    table = w["source_embedding.table"]
    options = {"norm": t2t_norm, "act": act, "pre": False}
    source_bias = -1e9 * (source == pad_id).double()[:, None, None, :]

    def embed(ids):
        return table[ids] * math.sqrt(table.shape[1]) * (ids != pad_id).double()[:, :, None]

    x = embed(source) + timing_signal(source.shape[1], table.shape[1])
    memory = _stack(w, "encoder", heads, x, source_bias, **options)
    y = torch.nn.functional.pad(embed(labels), (0, 0, 1, 0))[:, :-1] + timing_signal(labels.shape[1], table.shape[1])
    y = _stack(w, "decoder", heads, y, _future(labels.shape[1]), **options, memory=memory, memory_bias=source_bias)
    return y @ table.T + w.get("output_proj.bias", 0.0)
