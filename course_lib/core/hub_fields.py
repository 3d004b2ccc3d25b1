"""The fields of a Hugging Face `config.json`: which were read, and which change no size."""

from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.plain_values import build

REQUIRED: Any = object()
# they belong to tokenizers, generation, losses, files, heads of other tasks, dropout and start
NO_SIZE = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_pdrop attn_scale auto_map aux_loss_alpha bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout cross_attention_hidden_size dtype embd_pdrop
    embedding_dropout eos_token_id ep_size experts_per_token finetuning_task floor_scale
    for_llm_class gradient_checkpointing hidden_dropout id2label initial_context_length
    initializer_factor initializer_range is_decoder is_llama_config keys_to_ignore_at_inference
    label2id max_length mm_tokens_per_image n_group name_or_path norm_topk_prob
    num_logits_to_keep num_nextn_predict_layers original_max_position_embeddings
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp
    problem_type qk_head_dim quantization_config reorder_and_upcast_attn resid_pdrop
    residual_dropout return_dict rope_interleave routed_scaling_factor router_aux_loss_coef
    router_dtype router_jitter_noise router_z_loss_coef scoring_func sep_token_id seq_aux
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params temperature tie_encoder_decoder tokenizer_class topk_group topk_method
    torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_mambapy
"""
# they change what is computed, but no size; the value at which they change nothing
EXTRAS: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "attn_temperature_tuning": False,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "use_bidirectional_attention": False,
}
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"},
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
}


class Config:
    """The fields of a config.json, and which of them were read."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values
        self.read = {"model_type", "text_config"}

    def take(self, key: str, kind: Any = int, default: Any = REQUIRED) -> Any:
        """Return the value of a field as `kind`; what is missing or null is the default.

        Raises: CourseError when the field is not there and has no default, or is of another kind
        """
        self.read.add(key)
        value = self.values.get(key)
        if value is not None:
            return build(kind, value, f"{self.path}, {key}")
        if default is REQUIRED:
            raise CourseError(f"{self.path}: need the field {key!r}; it is not there.")
        return default

    def there(self, key: str) -> "Config":
        """Return itself, if the field is there; its value may be null.

        Raises: CourseError when it is not there
        """
        if key not in self.values:
            raise CourseError(f"{self.path}: need the field {key!r}; it is not there.")
        return self

    def word(self, key: str, allowed: dict[str, str], default: str) -> str:
        """Return what one of the allowed words stands for."""
        found = self.take(key, str, default)
        if found not in allowed:
            raise CourseError(
                f"{self.path}, {key}: need one of {', '.join(allowed)}; got {found[:60]!r}."
            )
        return allowed[found]

    def refuse(self, key: str, why: str) -> None:
        """Raise the error of a value that this reader cannot count."""
        got = repr(self.values.get(key))[:60]
        raise CourseError(f"{self.path}, {key}: {why}; got {got}.")

    def refuse_unread(self) -> None:
        """Raise CourseError for a field that is switched on, and that nobody has read."""
        for key, value in self.values.items():
            off = value is None or value is False or value in ([], {}, "")
            if not off and key not in self.read and key not in NO_SIZE.split():
                raise CourseError(
                    f"{self.path}: the field {str(key)[:60]!r} ({repr(value)[:60]}) is not known "
                    "here: if it changes the model's sizes, every count would be wrong. Take it "
                    "out of a copy of the file if it changes none."
                )
