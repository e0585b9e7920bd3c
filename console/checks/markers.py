"""The marker strings of every tool-call and reasoning parser of SGLang, and a search for those that leaked.

A marker opens, parts or closes a section of what the model writes. The parser takes it away; when it is
the wrong parser, or the model writes something broken, the marker stays in the text that a client gets.

The table is that of SGLang 0.5.23: ``sglang/srt/function_call/*_detector.py`` and
``sglang/srt/parser/reasoning_parser.py``. ``tests/rigs/test_real_parsers.py`` holds it to an installed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Literal

import msgspec

#: What SGLang makes when the model gives a call no id of its own (``OpenAIServingChat``).
_RANDOM_ID = r"call_[0-9a-f]{24}"
_KIMI_K2_ID = r"functions\.[\w.-]+:\d+"
_KIMI_K3_ID = r"[\w.-]+:\d+"


class ParserMarkers(msgspec.Struct, frozen=True):
    """One value of ``--tool-call-parser`` or ``--reasoning-parser``.

    ``markers`` are literal strings, without the white space that the parser wants around them; there are
    none where the format has none (``pythonic``) or where the model's tokenizer brings them
    (``response_template``). ``call_id`` is a regular expression that a call's whole id matches
    (``re.fullmatch``), empty for a reasoning parser.
    """

    name: str
    kind: Literal["tool", "reasoning"]
    markers: tuple[str, ...]
    call_id: str


_JSON_CALL = ("<tool_call>", "</tool_call>")
_ARGUMENT_PAIRS = (*_JSON_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_XML_CALL = (*_JSON_CALL, "<function=", "</function>", "<parameter=", "</parameter>")
_INVOKE = ("<invoke name=", "</invoke>", "<parameter name=", "</parameter>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_HARMONY = (
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
)
_KIMI_K2 = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",  # the singular is seen as well
    "<|tool_call_section_end|>",
)
_KIMI_K3 = ("<|open|>", "<|close|>", "<|sep|>")
_INKLING = (
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_invoke_tool|>",
    "<|content_thinking|>",
    "<|content_text|>",
    "<|content_xml|>",
    "<|content_tool_error|>",
    "<|content_model_end_sampling|>",
    "<|model_trigger_generation|>",
    "<|message_model|>",
    "<|message_user|>",
    "<|message_system|>",
    "<|message_tool|>",
    "<|end_message|>",
)
_MUSE = ("<|message|>", "<|eom|>", "<|eot|>", "<|start|>")
_BEAM = (*_HARMONY, "<rfl:parameter", "</rfl:parameter>")
_THINK = ("<think>", "</think>")
_HUNYUAN_SUFFIXED = ("<tool_calls:", "<tool_call:", "<tool_sep:", "<arg_key:", "<arg_value:")

_TOOL_MARKERS: dict[str, tuple[str, ...]] = {
    "auto": (),  # SGLang picks one of the others by the chat template
    "apertus2509": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "beam": _BEAM,
    "cohere_command4": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "deepseekv3": _DEEPSEEK,
    "deepseekv31": _DEEPSEEK,
    "deepseekv32": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    "deepseekv4": ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜"),
    "deepseekv41": ("<｜DSML｜ calls>", "</｜DSML｜ calls>", "｜DSML｜"),
    "dots": ("<dots_function_call>", "</dots_function_call>", *_INVOKE),
    "glm": _ARGUMENT_PAIRS,
    "glm45": _ARGUMENT_PAIRS,
    "glm47": _ARGUMENT_PAIRS,
    "gpt-oss": _HARMONY,
    "k2_horizon": (
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        "<ifm|tool_call>",
        "</ifm|tool_call>",
        "<ifm|arg_key>",
        "</ifm|arg_key>",
        "<ifm|arg_type>",
        "</ifm|arg_type>",
        "<ifm|arg_value>",
        "</ifm|arg_value>",
    ),
    "kimi_k2": _KIMI_K2,
    "kimi_k3": _KIMI_K3,
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "ling3": _ARGUMENT_PAIRS,
    "llama3": ("<|python_tag|>",),
    "mimo": _XML_CALL,
    "minicpm5": ("<function name=", "</function>", "<param name=", "</param>"),
    "mistral": ("[TOOL_CALLS", "[ARGS]"),
    "muse": (
        "<atem:function_calls>",
        "</atem:function_calls>",
        "<atem:invoke",
        "</atem:invoke>",
        "<atem:parameter",
        "</atem:parameter>",
        *_MUSE,
    ),
    "poolside_v1": _ARGUMENT_PAIRS,
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "qwen": _JSON_CALL,
    "qwen25": _JSON_CALL,
    "qwen3_coder": _XML_CALL,
    "spark25": _ARGUMENT_PAIRS,
    "step3": (
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
        "<steptml:invoke",
        "</steptml:invoke>",
        "<steptml:parameter",
        "</steptml:parameter>",
    ),
    "step3p5": _XML_CALL,
    "minimax-m2": ("<minimax:tool_call>", "</minimax:tool_call>", *_INVOKE),
    "minimax-m3": ("]<]minimax[>[", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    "nanbeige": _XML_CALL,
    "trinity": _JSON_CALL,
    "interns1": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "hermes": _JSON_CALL,
    # Some of its tokenizers write each tag with a suffix of their own: <tool_calls:opensource>.
    "hunyuan": ("<tool_calls>", "</tool_calls>", "<tool_sep>", *_ARGUMENT_PAIRS, *_HUNYUAN_SUFFIXED),
    "gigachat3": ("function call<|role_sep|>", "<|role_sep|>", "<|function_call|>", "<|message_sep|>"),
    "gigachat35": ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>", "｜GCML｜", "<|message_sep|>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "inkling": _INKLING,
    "iquest_q1": (
        "<iquest_tool_call>",
        "</iquest_tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "response_template": (),
}

_REASONING_MARKERS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "apertus2509": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "beam": _BEAM,
    "deepseek-r1": _THINK,
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "deepseek-v41": _THINK,
    "dots": _THINK,
    "glm45": _THINK,
    "ling3": _THINK,
    "hunyuan": (*_THINK, "<think:", "</think:"),
    "gpt-oss": _HARMONY,
    "k2_horizon": (
        "<ifm|think>",
        "</ifm|think>",
        "<ifm|think_fast>",
        "</ifm|think_fast>",
        "<ifm|think_faster>",
        "</ifm|think_faster>",
    ),
    "kimi": ("◁think▷", "◁/think▷"),  # the format before K2: wrong for K2 and K2.5
    "kimi_k2": _THINK,
    "kimi_k3": (*_KIMI_K3, "<|end_of_msg|>"),
    "mimo": _THINK,
    "muse": _MUSE,
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK,
    "minimax": _THINK,
    "minimax-append-think": _THINK,
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "nanbeige": _THINK,
    "step3": _THINK,
    "step3p5": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "nemotron_3": _THINK,
    "granite_thinking_parser": _THINK,
    "interns1": _THINK,
    "gemma4": ("<|channel>", "<channel|>"),
    "inkling": _INKLING,
    "iquest_q1": _THINK,
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "gigachat35": _THINK,
    "response_template": (),
}

#: Tokens that a chat template puts around a turn; they reach a client when a stop token is missing.
CHAT_MARKERS: tuple[str, ...] = (
    "<|im_start|>",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|endoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<eop>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)

#: The tokens of Kimi's vocabulary that look like words in brackets: searched where one of these parsers runs.
_KIMI_CHAT_MARKERS = ("[EOS]", "[EOT]", "[BOS]")
_KIMI_PARSERS = frozenset({"kimi", "kimi_k2", "kimi_k3"})

#: Markers that ordinary XML, HTML or the usage line of a command contain as well.
_ALSO_ORDINARY = frozenset(
    {*_INVOKE, "</function>", "<function name=", "<param name=", "</param>", "</parameter>", "[ARGS]"}
)
#: So many different ones of one parser together are that parser's markers, whichever parser is configured.
_TOGETHER = 3


def _call_id(name: str) -> str:
    if name == "auto":
        return f"{_KIMI_K2_ID}|{_KIMI_K3_ID}|{_RANDOM_ID}"
    return {"kimi_k2": _KIMI_K2_ID, "kimi_k3": _KIMI_K3_ID}.get(name, _RANDOM_ID)


TOOL_PARSERS: Mapping[str, ParserMarkers] = {
    name: ParserMarkers(name, "tool", markers, _call_id(name)) for name, markers in _TOOL_MARKERS.items()
}
REASONING_PARSERS: Mapping[str, ParserMarkers] = {
    name: ParserMarkers(name, "reasoning", markers, "") for name, markers in _REASONING_MARKERS.items()
}


def leaked(text: str, *, tool_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """The markers in the text, each once: the configured parsers' first, then any other's, then the chat's.

    A parser that is not in the table, or None, has no markers of its own. Strings that ordinary text
    contains as well count when their parser is configured, or beside others of the same parser.
    """
    configured = chain(_of(TOOL_PARSERS, tool_parser), _of(REASONING_PARSERS, reasoning_parser))
    found = dict.fromkeys(marker for marker in configured if marker in text)
    for parser in chain(TOOL_PARSERS.values(), REASONING_PARSERS.values()):
        found |= dict.fromkeys(_of_another(parser, text))
    found |= dict.fromkeys(marker for marker in CHAT_MARKERS if marker in text)
    if not _KIMI_PARSERS.isdisjoint((tool_parser, reasoning_parser)):
        found |= dict.fromkeys(marker for marker in _KIMI_CHAT_MARKERS if marker in text)
    return tuple(found)


def _of(parsers: Mapping[str, ParserMarkers], name: str | None) -> tuple[str, ...]:
    parser = parsers.get(name) if name is not None else None
    return () if parser is None else parser.markers


def _of_another(parser: ParserMarkers, text: str) -> Iterator[str]:
    present = [marker for marker in parser.markers if marker in text]
    together = len(present) >= _TOGETHER
    return (marker for marker in present if together or marker not in _ALSO_ORDINARY)
