"""The models' files in the container: as much of each as tells its geometry and its size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: The commit that the hub's cache has of the second profile's model.
COMMIT = "7e0c4d1f5b92a86333fd0c1be8a45f9d27c06b41"
HUB = "root/.cache/huggingface/hub/models--nvidia--Qwen3.5-397B-A17B-NVFP4"

#: Bytes of all safetensors files.
KIMI_WEIGHTS = 547_042_177_536
QWEN_WEIGHTS = 245_031_948_288
DRAFT_WEIGHTS = 6_640_121_344

KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 262_144,
        "vocab_size": 163_840,
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
    },
    "vision_config": {"model_type": "moonvit3d"},
}

DRAFT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "vocab_size": 163_840,
    "draft_vocab_size": 32_000,
}

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": None},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 15,
        "linear_num_value_heads": 64,
        "linear_num_key_heads": 16,
        "linear_value_head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "num_experts": 512,
        "max_position_embeddings": 262_144,
        "vocab_size": 248_320,
    },
    "vision_config": {"model_type": "qwen3_5_moe"},
}


def install(rootfs: Path) -> None:
    """Put them where the shipped profiles name them; the second in the hub's cache."""
    _model(rootfs / "shared/kimi-k2.5-int4", KIMI, KIMI_WEIGHTS)
    draft = rootfs / "data/eagle3/output_100k_sglang/4"
    _model(draft, DRAFT, None)
    # One file needs no index. It has holes instead of weights, and takes no room.
    (draft / "model.safetensors").touch()
    os.truncate(draft / "model.safetensors", DRAFT_WEIGHTS)
    hub = rootfs / HUB
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text(COMMIT)
    _model(hub / "snapshots" / COMMIT, QWEN, QWEN_WEIGHTS)


def _model(folder: Path, config: dict[str, Any], weights: int | None) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if weights is not None:
        index = {
            "metadata": {"total_size": weights},
            "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
