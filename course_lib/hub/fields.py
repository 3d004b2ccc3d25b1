"""The fields of a Hugging Face `config.json`: which were read, and which change no size."""

from pathlib import Path
from typing import Any

from course_lib.core.errors import CourseError, ShapeError
from course_lib.core.plain_values import build
from course_lib.core.specs import MOST, MOST_OF_OTHERS

Fields = dict[str, Any]  # of a ModelSpec
# they belong to tokenizers, generation, losses, files, heads of other tasks, dropout and start
NO_SIZE = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    attn_pdrop auto_map aux_loss_alpha bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout dtype embd_pdrop embedding_dropout eos_token_id ep_size finetuning_task
    for_llm_class for_llm_compressor gradient_checkpointing hidden_dropout id2label
    initial_context_length initializer_factor initializer_range is_decoder is_llama_config
    keys_to_ignore_at_inference label2id max_length name_or_path num_logits_to_keep
    num_mtp_layers num_nextn_predict_layers original_max_position_embeddings output_attentions
    output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
    qk_head_dim quantization_config reorder_and_upcast_attn resid_pdrop residual_dropout return_dict
    rope_interleave router_aux_loss_coef router_dtype router_jitter_noise router_z_loss_coef
    sep_token_id seq_aux summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params temperature tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache
"""
# they change what is computed, but no size; the value at which they change nothing
EXTRAS: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "attn_temperature_tuning": False,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}
OF_EXTRAS = ("attn_scale", "floor_scale")  # numbers of attn_temperature_tuning
# switches of what is not counted here, and the one value they may have
ONLY: dict[str, Any] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "moe_layer_freq": 1,
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "use_bidirectional_attention": False,
    "use_mrope": False,
}
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"},
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
}


class Config:
    """The fields of a config.json, and which of them were read.

    usual   what the architecture's code takes for fields that the file does not have
    """

    def __init__(self, path: Path, values: dict[str, Any], usual: dict[str, Any]) -> None:
        self.path, self.given, self.values = path, values, {**usual, **values}
        self.read = {"model_type", *ONLY, *EXTRAS, *OF_EXTRAS, *NO_SIZE.split()}

    def take(self, key: str, kind: Any = int) -> Any:
        """Return the value of a field as `kind`, or as the code's usual value.

        Raises: CourseError when there is neither, or the value is of another kind
        """
        self.read.add(key)
        if key not in self.values:
            raise CourseError(f"{self.path}: need the field {key!r}; it is not there.")
        return build(kind, self.values[key], f"{self.path}, {key}")

    def size(self, key: str, kind: Any = int, least: int = 1) -> Any:
        """Return a field as a whole number that is neither too small nor absurdly large."""
        found, most = (
            self.take(key, kind),
            MOST_OF_OTHERS if "layer" not in key else MOST["num_layers"],
        )
        if found is not None and not least <= found <= most:
            self.refuse(key, f"need a whole number from {least} to {most:,}")
        return found

    def size_of(self, *names: str) -> int:
        """Return the one size that a config.json has under one of these names."""
        found = {self.size(name) for name in names if name in self.values}
        if len(found) > 1:
            self.refuse(names[0], f"need the same as {' and '.join(names[1:])}")
        return int(*found) if found else self.size(names[0])

    def layers(self, key: str, num_layers: int) -> tuple[int, ...] | None:
        """Return a list of layers, or None for null.

        Raises: CourseError when one of them does not exist
        """
        found = self.take(key, list[int] | None)
        if found is not None and not set(found) <= set(range(num_layers)):
            self.refuse(key, f"need layers from 0 to {num_layers - 1}")
        return None if found is None else tuple(found)

    def word(self, key: str, allowed: dict[str, str]) -> str:
        """Return what one of the allowed words stands for."""
        if (found := self.take(key, str)) not in allowed:
            self.refuse(key, f"need one of {', '.join(allowed)}")
        return allowed[found]

    def refuse(self, key: str, why: str) -> None:
        """Raise the error of a value that this reader cannot count."""
        got = repr(self.values.get(key))[:60]
        raise ShapeError(f"{self.path}, {key}: {why}; got {got}.")

    def divides(self, parts: str, whole: str) -> None:
        """Raise ShapeError when the first field does not divide the second."""
        if self.values[whole] % self.values[parts]:
            self.refuse(parts, f"need a divisor of {whole} = {self.values[whole]}")

    def refuse_others(self) -> None:
        """Raise CourseError for a field that is switched on, and that is not known here."""
        for key, value in self.given.items():
            off = value is None or value is False or value in ([], {}, "")
            if key in ONLY and not off and value != ONLY[key]:
                self.refuse(key, f"need {ONLY[key]!r}; models with another value are not counted")
            if not off and key not in self.read:
                raise CourseError(
                    f"{self.path}: the field {str(key)[:60]!r} ({repr(value)[:60]}) is not known "
                    "here: if it changes the model's sizes, every count would be wrong. Take it "
                    "out of a copy of the file if it changes none."
                )

    def extras(self) -> tuple[str, ...]:
        """Return the fields of EXTRAS that are on."""
        found = {key: self.values.get(key) for key in EXTRAS}
        return tuple(k for k, value in found.items() if value is not None and value != EXTRAS[k])
