"""What transformers builds from a config.json, with no memory for it: what the reader must say."""

import json
from typing import Any

import torch
from torch import nn

BESIDE = ("vision", "projector")  # parts of a model of text and more that are not counted
ALIASES = {"kimi_k2": "deepseek_v3"}  # the same code under another name
ALL_LAYERS = ("mistral", "ministral3", "mixtral", "phi3", "starcoder2", "qwen3_moe")


def configuration(values: dict[str, Any]) -> Any:
    """Return transformers' configuration of the fields of a config.json."""
    from transformers import CONFIG_MAPPING

    values = json.loads(json.dumps(values))  # it changes what it is given
    kind = values.pop("model_type")
    return CONFIG_MAPPING[ALIASES.get(kind, kind)](**values)


def built(config: Any) -> nn.Module:
    """Return the model of a configuration on the meta device, without memory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    of_more = hasattr(config, "vision_config")
    with torch.device("meta"):
        return (AutoModelForImageTextToText if of_more else AutoModelForCausalLM).from_config(
            config
        )


def parameters(model: nn.Module) -> int:
    """Return the number of parameters of the model of text."""
    named = model.named_parameters()
    return sum(one.numel() for name, one in named if not any(word in name for word in BESIDE))


def windows(config: Any) -> list[int | None]:
    """Return the window of each layer as the code of the architecture takes it."""
    config = config.get_text_config()
    kind, layers = config.model_type, config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if kind in ALL_LAYERS:
        return [config.sliding_window] * layers
    if kind == "llama4_text":
        return [config.attention_chunk_size if "chunk" in one else None for one in types]
    if kind == "smollm3" and not config.use_sliding_window:
        return [None] * layers
    sliding = types or ["full_attention"] * layers
    return [config.sliding_window if "sliding" in one else None for one in sliding]
