"""Pairs of transformers (the Original) and keras-hub (the Port): one line per architecture in ``TABLE``."""

import os
from functools import partial

import numpy as np

from tests.wild.originals import TransformersModel, capture, hub_config, without_padding
from transformer_parity.pair import Implementation

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def array_loader(weights):
    """A loader for keras-hub's converters that takes the tensors from arrays rather than from a file."""
    from contextlib import ExitStack

    from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

    class ArrayLoader(SafetensorLoader):
        def __init__(self):
            ExitStack.__init__(self)
            self.prefix = None
            self.safetensor_config = None

        def get_tensor(self, hf_weight_key):
            return weights[self.get_prefixed_key(hf_weight_key, weights)]

    return ArrayLoader()


class KerasModel(Implementation):
    """A model of keras-hub, with the configuration and the weights from keras-hub's own converter."""

    original = TransformersModel
    converter = ""
    task = None
    hub = {}

    def load(self, weights, dtype):
        import importlib
        from inspect import signature

        import keras_hub

        self.dtype = dtype
        converter = importlib.import_module(f"keras_hub.src.utils.transformers.convert_{self.converter}")
        config = hub_config(self.original().config()) | self.hub
        backbone_class = converter.backbone_cls
        several = len(signature(converter.convert_backbone_config).parameters) != 1
        arguments = converter.convert_backbone_config(*((config, backbone_class) if several else (config,)))
        self.model = backbone_class(**arguments, dtype=dtype)
        with array_loader(weights) as loader:
            converter.convert_weights(self.model, loader, config)
        if self.task:
            self.model = getattr(keras_hub.models, self.task)(backbone=self.model, preprocessor=None, dtype=dtype)

    def forward(self, inputs, tap):
        import keras

        values = dict(inputs)
        decoder = "decoder_input_ids" in values
        if "pixel_values" in values:
            given = np.transpose(values.pop("pixel_values"), (0, 2, 3, 1)).astype(self.dtype)
            expected = self.model.input
            given = dict.fromkeys(expected, given) if isinstance(expected, dict) else given
        else:
            encoder = "encoder_" if decoder else ""
            names = {
                "input_ids": encoder + "token_ids",
                "attention_mask": encoder + "padding_mask",
                "token_type_ids": "segment_ids",
                "decoder_input_ids": "decoder_token_ids",
                "decoder_attention_mask": "decoder_padding_mask",
            }
            given = {names[name]: np.asarray(value, np.int32) for name, value in values.items()}
            given = {name: value for name, value in given.items() if name in self.model.input}
        with capture.keras(self.model, tap):
            outputs = self.model(given, training=False)
        if self.task:
            result = {"logits": outputs}
        elif decoder:
            result = {"hidden": outputs["decoder_sequence_output"], "encoder": outputs["encoder_sequence_output"]}
        else:
            result = {"hidden": outputs["sequence_output"] if isinstance(outputs, dict) else outputs}
        result = {name: keras.ops.convert_to_numpy(value) for name, value in result.items()}
        return without_padding(result, inputs) if self.original.valid_rows else result


TABLE = {}


def pair(name, kind, converter=None, task=None, *, hub=None, base=None, **changes):
    """Define the classes ``<name>Original`` and ``<name>Port`` of this module."""
    place = {"__module__": __name__}
    settings = {"automatic": "AutoModelForCausalLM" if task else "AutoModel", "masked": True}
    original = type(
        f"{name}Original", (TransformersModel,), place | {"kind": kind, "changes": changes} | settings | (base or {})
    )
    port = type(
        f"{name}Port",
        (KerasModel,),
        place
        | {
            "original": original,
            "converter": converter or kind,
            "task": task,
            "dtypes": ("float32",),  # Keras rounds constants such as 1 / sqrt(key_dim) to float32 in every dtype
            "hub": hub or {},
        },
    )
    globals().update({f"{name}Original": original, f"{name}Port": port})
    TABLE[name] = (original, port)


encoder = partial(pair, num_key_value_heads=None, rope_theta=None, type_vocab_size=2)
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SEGMENTS = {"segments": True}
IMAGE = {"image_size": 32}
encoder("Bert", "bert", base=SEGMENTS)
encoder("Albert", "albert", base=SEGMENTS | {"rename": (("^", "albert."),)}, embedding_size=24, inner_group_num=1)
encoder(
    "Roberta",
    "roberta",
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    layer_norm_eps=1e-5,
    base={"valid_rows": True, "rename": (("^", "roberta."),)},
)
encoder(
    "XLMRoberta",
    "xlm-roberta",
    "xlm_roberta",
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    layer_norm_eps=1e-5,
    base={"valid_rows": True},
)
encoder(
    "XLMRobertaPadding",
    "xlm-roberta",
    "xlm_roberta",
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    layer_norm_eps=1e-5,
)
encoder(
    "XLMRobertaEpsilon",
    "xlm-roberta",
    "xlm_roberta",
    type_vocab_size=1,
    pad_token_id=1,
    bos_token_id=0,
    layer_norm_eps=1e-12,
    base={"valid_rows": True},
)
encoder(
    "DistilBert",
    "distilbert",
    dim=48,
    n_heads=4,
    n_layers=2,
    hidden_dim=80,
    hidden_size=None,
    num_attention_heads=None,
    num_hidden_layers=None,
    base={"rename": (("^", "distilbert."),)},
)
encoder(
    "ESM",
    "esm",
    pad_token_id=1,
    position_embedding_type="rotary",
    mask_token_id=100,
    token_dropout=False,
    base={"rename": ((r"gamma$", "weight"), (r"beta$", "bias"))},
)
encoder(
    "Bart",
    "bart",
    base={"decoder": True},
    d_model=48,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=80,
    decoder_ffn_dim=80,
    hidden_size=None,
    num_attention_heads=None,
    num_hidden_layers=None,
    init_std=0.15,
)
pair("Llama", "llama", "llama3", "Llama3CausalLM")
pair("Llama3", "llama", "llama3", "Llama3CausalLM", rms_norm_eps=1e-5)
pair("Llama31", "llama", "llama3", "Llama3CausalLM", rope_theta=None, rope_parameters=LLAMA_3_1)
pair("Mistral", "mistral", None, "MistralCausalLM", sliding_window=4)
pair("Mixtral", "mixtral", None, "MixtralCausalLM", num_local_experts=4, sliding_window=4)
pair("Qwen2", "qwen2", "qwen", "QwenCausalLM")
pair("Qwen3", "qwen3", None, "Qwen3CausalLM", head_dim=16)
pair(
    "Qwen2MoE",
    "qwen2_moe",
    "qwen_moe",
    "QwenMoeCausalLM",
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=4,
)
pair(
    "Qwen3MoE",
    "qwen3_moe",
    None,
    "Qwen3MoeCausalLM",
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    head_dim=16,
)
pair(
    "Qwen35",
    "qwen3_5_text",
    "qwen3_5",
    "Qwen3_5CausalLM",
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    base={"rename": ((r"^model\.", "model.language_model."),)},
)
pair("Gemma", "gemma", None, "GemmaCausalLM", head_dim=16, rope_theta=None)
pair("GemmaTheta", "gemma", None, "GemmaCausalLM", head_dim=16)
pair("GemmaEpsilon", "gemma", None, "GemmaCausalLM", head_dim=16, rope_theta=None, rms_norm_eps=1e-5)
pair(
    "Gemma2",
    "gemma2",
    "gemma",
    "GemmaCausalLM",
    head_dim=16,
    sliding_window=4,
    query_pre_attn_scalar=16,
    rope_theta=None,
)
pair(
    "Gemma3",
    "gemma3_text",
    "gemma3",
    "Gemma3CausalLM",
    head_dim=16,
    sliding_window=4,
    query_pre_attn_scalar=16,
    num_hidden_layers=6,
    rope_theta=None,
)
pair(
    "Gemma3Theta",
    "gemma3_text",
    "gemma3",
    "Gemma3CausalLM",
    head_dim=16,
    sliding_window=4,
    query_pre_attn_scalar=16,
    num_hidden_layers=6,
)
pair("GPT2", "gpt2", None, "GPT2CausalLM", n_embd=48, n_head=4, n_layer=2, n_positions=64, num_key_value_heads=None)
pair(
    "GPTOSS",
    "gpt_oss",
    None,
    "GptOssCausalLM",
    head_dim=12,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
)
pair("SmolLM3", "smollm3", None, "SmolLM3CausalLM", no_rope_layers=[1, 0])
encoder("ViT", "vit", base=IMAGE | {"rename": (("^", "vit."),)}, image_size=32, patch_size=8)
encoder("DeiT", "deit", base=IMAGE | {"rename": (("^", "deit."),)}, image_size=32, patch_size=8)
encoder("DINOv2", "dinov2", base=IMAGE, image_size=32, patch_size=8, mlp_ratio=2)
encoder(
    "DINOv3", "dinov3_vit", "dinov3", base=IMAGE, image_size=32, patch_size=8, num_register_tokens=2, rope_theta=100.0
)
encoder(
    "Swin",
    "swin",
    "swin_transformer",
    base=IMAGE,
    image_size=32,
    patch_size=4,
    embed_dim=24,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=4,
    hidden_size=None,
    num_attention_heads=None,
    num_hidden_layers=None,
)
