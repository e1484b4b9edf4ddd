"""More pairs of transformers (the Original) and mlx-lm (the Port)."""

from functools import partial

from tests.wild.mlx_model import pair as pair_in

TABLE = {}
pair = partial(pair_in, globals())
pair(
    "DeepseekV3",
    "deepseek_v3",
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=4,
    topk_group=2,
)
pair(
    "DeepseekV32",
    "deepseek_v32",
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    n_group=4,
    topk_group=2,
    index_head_dim=16,
    index_n_heads=8,
    index_topk=4,
)
pair(
    "GLMMoEDSA",
    "glm_moe_dsa",
    moe_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    index_head_dim=16,
    index_n_heads=8,
    index_topk=4,
    hub={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
)
pair(
    "Dots1",
    "dots1",
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
pair("Ernie45", "ernie4_5", head_dim=12)
pair(
    "Ernie45MoE",
    "ernie4_5_moe",
    moe_intermediate_size=24,
    moe_num_experts=4,
    moe_k=2,
    moe_num_shared_experts=1,
    moe_layer_start_index=1,
)
pair(
    "EXAONE4",
    "exaone4",
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    hub={"head_dim": 12, "sliding_window_pattern": "LG"},
)
pair(
    "EXAONEMoE",
    "exaone_moe",
    sliding_window=4,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    num_shared_experts=1,
    layer_types=["sliding_attention", "full_attention"],
    first_k_dense_replace=1,
    hub={"head_dim": 12, "is_moe_layer": [False, True]},
)
pair(
    "FalconH1",
    "falcon_h1",
    head_dim=12,
    mamba_d_ssm=48,
    mamba_n_heads=3,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=4,
)
pair("Helium", "helium", head_dim=12)
pair("HunyuanDense", "hunyuan_v1_dense", head_dim=12)
pair(
    "Jamba",
    "jamba",
    num_experts=4,
    num_experts_per_tok=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=8,
    mamba_dt_rank=6,
    use_mamba_kernels=False,
)
pair("LFM2", "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, hub={"block_dim": 48})
pair(
    "LFM2MoE",
    "lfm2_moe",
    layer_types=["conv", "full_attention"],
    num_dense_layers=1,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
)
pair("Mamba", "mamba", state_size=8, time_step_rank=6)
pair("Mamba2", "mamba2", state_size=8, num_heads=6, head_dim=16, n_groups=1, chunk_size=4)
pair("GPTOSS", "gpt_oss", head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
pair("Ministral3", "ministral3", head_dim=12)
pair(
    "Minimax",
    "minimax_m2",
    "minimax",
    head_dim=12,
    num_local_experts=4,
    num_experts_per_tok=2,
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    hub={"shared_intermediate_size": 0, "rotary_dim": 6},
)
pair("NanoChat", "nanochat")
pair("Nemotron", "nemotron")
pair(
    "NemotronH",
    "nemotron_h",
    layers_block_type=["mamba", "attention", "moe", "mlp"],
    mamba_num_heads=6,
    mamba_head_dim=16,
    ssm_state_size=8,
    n_groups=1,
    chunk_size=4,
    head_dim=12,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=24,
)
pair(
    "OLMoHybrid",
    "olmo_hybrid",
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)
pair(
    "OLMoHybridRenamed",
    "olmo_hybrid",
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    base={
        "rename": (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
    },
)
pair(
    "Qwen3Next",
    "qwen3_next",
    head_dim=16,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    hub={"full_attention_interval": 2},
)
pair(
    "Qwen35",
    "qwen3_5_text",
    "qwen3_5",
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    hub={"full_attention_interval": 2},
)
pair(
    "RecurrentGemma",
    "recurrent_gemma",
    rope_theta=None,
    num_hidden_layers=3,
    num_key_value_heads=1,
    lru_width=48,
    attention_window_size=4,
    head_dim=12,
    block_types=["recurrent", "recurrent", "attention"],
)
pair(
    "RecurrentGemmaTheta",
    "recurrent_gemma",
    num_hidden_layers=3,
    num_key_value_heads=1,
    lru_width=48,
    attention_window_size=4,
    head_dim=12,
    block_types=["recurrent", "recurrent", "attention"],
)
pair("SeedOSS", "seed_oss", head_dim=12)
pair("SmolLM3", "smollm3", no_rope_layers=[1, 0])
pair("Apertus", "apertus", hub={"mlp_bias": False, "post_norm": False, "qk_norm": True})
pair(
    "AFMoE",
    "afmoe",
    head_dim=12,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    num_dense_layers=1,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)
pair("BitNet", "bitnet")
pair(
    "Llama4",
    "llama4_text",
    head_dim=12,
    intermediate_size_mlp=64,
    moe_layers=[],
    tie_word_embeddings=True,
    attention_chunk_size=4,
    no_rope_layers=[1, 0],
)
pair(
    "Llama4AllRoPE",
    "llama4_text",
    head_dim=12,
    intermediate_size_mlp=64,
    moe_layers=[],
    tie_word_embeddings=True,
    attention_chunk_size=64,
    no_rope_layers=[1, 1],
)
pair(
    "LongcatFlash",
    "longcat_flash",
    unused=r"experts\.[45]\.",
    num_layers=2,
    ffn_hidden_size=64,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    head_dim=8,
    num_key_value_heads=4,
    moe_topk=2,
    n_routed_experts=4,
    zero_expert_num=2,
    expert_ffn_hidden_size=24,
    hub={
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
)
pair(
    "MiniCPM3",
    "minicpm3",
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    num_key_value_heads=4,
    rope_theta=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.0, 1.2, 1.5, 2.0],
    },
)
pair(
    "MiniCPM3Untied",
    "minicpm3",
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    num_key_value_heads=4,
    rope_theta=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 700.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.3, 1.6],
        "long_factor": [1.0, 1.2, 1.5, 2.0],
    },
    tie_word_embeddings=False,
)
pair(
    "SolarOpen",
    "solar_open",
    head_dim=12,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    hub={"first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
)
pair(
    "MiMoV2Flash",
    "mimo_v2_flash",
    rope_theta=None,
    head_dim=12,
    v_head_dim=8,
    sliding_window=4,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    layer_types=["full_attention", "sliding_attention"],
    hub={
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 4,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 10000.0,
        "rope_theta": 5000000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 12,
        "swa_v_head_dim": 8,
    },
)
pair("Laguna", "laguna", head_dim=12)

pair("InternLM3", "internlm3", head_dim=12)

pair(
    "Mellum",
    "mellum",
    head_dim=12,
    moe_intermediate_size=24,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
)

pair(
    "Gemma4",
    "gemma4_text",
    head_dim=16,
    sliding_window=4,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=101,
)
