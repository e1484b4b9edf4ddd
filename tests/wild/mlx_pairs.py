"""Pairs of transformers (the Original) and mlx-lm (the Port): one entry per architecture in ``TABLE``."""

from functools import partial

from tests.wild.mlx_model import pair as pair_in

TABLE = {}
pair = partial(pair_in, globals())
pair("Llama", "llama")
pair("LlamaConfig5", "llama", v5_config=True)
pair(
    "Llama31",
    "llama",
    rope_theta=None,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 700.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)
pair(
    "LlamaLinear", "llama", rope_theta=None, rope_parameters={"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
)
pair(
    "LlamaYarn",
    "llama",
    rope_theta=None,
    rope_parameters={"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16},
)
pair(
    "Qwen3Yarn",
    "qwen3",
    head_dim=16,
    rope_theta=None,
    rope_parameters={"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16},
)
pair("Mistral", "mistral", "llama", sliding_window=None)
pair("Qwen2", "qwen2")
pair("Qwen3", "qwen3", head_dim=16)
pair("Gemma", "gemma", head_dim=16)
pair("Gemma2", "gemma2", head_dim=16, sliding_window=4, query_pre_attn_scalar=16)
pair("Gemma2Short", "gemma2", head_dim=16, sliding_window=64, query_pre_attn_scalar=16)
pair(
    "Gemma3",
    "gemma3_text",
    head_dim=16,
    sliding_window=4,
    query_pre_attn_scalar=16,
    sliding_window_pattern=2,
    hub={"sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
)
pair("Cohere", "cohere", use_qk_norm=True)
pair("Cohere2", "cohere2", head_dim=12, sliding_window=4, sliding_window_pattern=2, hub={"sliding_window_pattern": 2})
pair(
    "GPT2",
    "gpt2",
    n_embd=48,
    n_head=4,
    n_layer=2,
    n_positions=64,
    num_key_value_heads=None,
    hub={"n_ctx": 64},
    base={"rename": ((r"^transformer\.", ""),)},
)
pair("GPTBigCode", "gpt_bigcode", n_embd=48, n_head=4, n_layer=2, n_positions=64, num_key_value_heads=None, n_inner=96)
pair("GPTJ", "gptj", n_embd=48, n_head=4, n_layer=2, n_positions=64, num_key_value_heads=None, rotary_dim=8)
pair(
    "GPTNeoX",
    "gpt_neox",
    intermediate_size=192,
    num_key_value_heads=None,
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    hub={"rotary_emb_base": 700.0, "rotary_pct": 0.5},
)
pair("Phi", "phi")
pair("Phi3", "phi3")
pair(
    "Phi3Partial",
    "phi3",
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
)
pair(
    "Phi3LongRoPE",
    "phi3",
    original_max_position_embeddings=8,
    rope_theta=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
        "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    },
)
pair(
    "Phi3LongRoPEShort",
    "phi3",
    original_max_position_embeddings=64,
    rope_theta=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
        "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    },
)
pair("PhiMoE", "phimoe", attention_bias=True, lm_head_bias=True, num_local_experts=4)

pair("OLMo2", "olmo2")
pair(
    "OLMo3",
    "olmo3",
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    rope_theta=None,
    rope_parameters={k: {"rope_type": "default", "rope_theta": 700.0} for k in ("sliding_attention", "full_attention")},
)
pair("StarCoder2", "starcoder2", sliding_window=4)
pair("StarCoder2Short", "starcoder2", sliding_window=None)
pair(
    "StableLM",
    "stablelm",
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
)
pair("Mixtral", "mixtral")
pair("Qwen2MoE", "qwen2_moe", moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4)
pair("Qwen3MoE", "qwen3_moe", moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=16)
pair("OLMoE", "olmoe", num_experts=4, num_experts_per_tok=2)
pair(
    "DBRX",
    "dbrx",
    d_model=48,
    n_heads=4,
    n_layers=2,
    max_seq_len=64,
    attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 700.0},
    ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
)
pair(
    "Granite",
    "granite",
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    logits_scaling=2.0,
    attention_multiplier=0.2,
)
pair(
    "GraniteMoE",
    "granitemoe",
    num_local_experts=4,
    num_experts_per_tok=2,
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    logits_scaling=2.0,
    attention_multiplier=0.2,
)
pair(
    "GraniteMoEHybrid",
    "granitemoehybrid",
    position_embedding_type="rope",
    layer_types=["mamba", "attention"],
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=40,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=4,
    hub={"layer_types": ["mamba", "attention"]},
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    logits_scaling=2.0,
    attention_multiplier=0.2,
)
pair(
    "GraniteMoEHybridNoPE",
    "granitemoehybrid",
    layer_types=["mamba", "attention"],
    num_local_experts=4,
    num_experts_per_tok=2,
    shared_intermediate_size=40,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=4,
    hub={"layer_types": ["mamba", "attention"]},
    embedding_multiplier=3.0,
    residual_multiplier=0.6,
    logits_scaling=2.0,
    attention_multiplier=0.2,
)
pair("GLM", "glm", head_dim=12)
pair("GLM4", "glm4", head_dim=12)
pair(
    "GLM4MoE",
    "glm4_moe",
    head_dim=12,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    use_qk_norm=True,
)
pair(
    "GLM4MoELite",
    "glm4_moe_lite",
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
)
pair(
    "DeepseekV2",
    "deepseek_v2",
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    rope_theta=None,
    rope_parameters={
        "rope_type": "yarn",
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "rope_theta": 700.0,
    },
)
