"""What the code of each architecture takes for a field that its `config.json` does not have.

Sizes are not among them: a file without its sizes is refused, but for the two architectures whose
published files leave some out. The tests compare all values with the configurations of
transformers 5.
"""

from typing import Any

_ALL: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_ONE_GROUP = {"num_key_value_heads": None}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_NOPE = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_GEMMA = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "rotary_emb_base": 10000.0,
        "rotary_pct": 0.25,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "llama": _ONE_GROUP,
    "mistral": {"sliding_window": 4096},
    "ministral3": {"sliding_window": None, "head_dim": 128, "rms_norm_eps": 1e-5},
    "mixtral": {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": _QWEN,
    "qwen2_moe": {**_QWEN, **_QWEN_MOE, "qkv_bias": True},
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {**_QWEN, **_QWEN_MOE},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **_GEMMA,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "deepseek_v2": {"topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": {},
    "kimi_k2": {},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "use_qk_norm": False},
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "granite": _ONE_GROUP,
    "llama4_text": {
        **_NOPE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
    },
    "olmo2": {**_ONE_GROUP, "rms_norm_eps": 1e-5},
    "olmoe": {**_ONE_GROUP, "rms_norm_eps": 1e-5, "norm_topk_prob": False},
    "phi3": {**_ONE_GROUP, "rms_norm_eps": 1e-5, "sliding_window": None},
    "smollm3": {
        **_NOPE,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "starcoder2": {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": True,
        "sliding_window": None,
    },
}
USUAL = {kind: {**_ALL, **own} for kind, own in _OWN.items()}
