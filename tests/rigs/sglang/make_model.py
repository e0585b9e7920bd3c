"""Writes the folder of the scripted model, or of its draft: ``make_model.py FOLDER CLASS``.

Run by the rig's own Python, which has ``tokenizers``. There are no weights (``--load-format dummy``);
the tokenizer knows the markers of Kimi's and Qwen's parsers as single tokens, as theirs do.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "get_weather location Paris unit celsius",
    "The user wants the weather. I should call the tool.",
    '{"name": "get_weather", "arguments": {"location": "Paris", "unit": "celsius"}}',
    "Hello! How can I help you today?",
    "operations console server throughput running requests",
    # Long enough words that a chat costs about as many tokens as with a tokenizer of a real model.
    "The fans of the first row turn at half their speed, and the cards behind them stay below seventy.",
    "The second row gets warmer air; its cards reach eight degrees when all of them work.",
    "Nobody has seen a card throttle, but the filter should be cleaned before summer. 1, 2, 3, 4, 5, 6, 7, 8",
    "A graphics card turns numbers into pictures. It works on many at once; others compute with it.",
    '{"title": "", "count": 42, "ratio": 0.25, "urgent": true, "owner": {"name": "", "tags": []}}',
    "functions.save_record get_time city country population_millions landmarks zone temperature_celsius",
)
CONTEXT_LENGTH = 131072


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges: any text can be said, English in few tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        special_tokens=list(CONTROL[:1]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    # Not special: like the real ones they stay in the text that the parsers are given.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    return tokenizer


def config(architecture: str, tokenizer: Tokenizer) -> dict[str, object]:
    """A Qwen3 config in shape; hidden states are one-hot, so they are as wide as the vocabulary."""
    size = (tokenizer.get_vocab_size() + 63) // 64 * 64
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }


def write(folder: Path, architecture: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config(architecture, tokenizer),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": CONTEXT_LENGTH,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    shutil.copy(Path(__file__).with_name("chat_template.jinja"), folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
