"""What a model writes for each parser: one call of ``get_weather``, and one thought before an answer.

The formats are those that the parsers of SGLang 0.5.23 read. ``auto`` and ``response_template`` are not
here: their format comes with the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

ARGUMENTS: Mapping[str, object] = {"city": "Paris", "days": 3}
NAME = "get_weather"
THOUGHT = "The user wants the weather."
ANSWER = "It will be sunny."

_ARGS = '{"city": "Paris", "days": 3}'
_CALL = f'{{"name": "{NAME}", "arguments": {_ARGS}}}'
_PAIRS = (
    "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>"
)
_GLM = f"<tool_call>{NAME}\n{_PAIRS}\n</tool_call>"
_GLM47 = f"<tool_call>{NAME}{_PAIRS}</tool_call>".replace("\n", "")
_CODER = (
    f"<tool_call>\n<function={NAME}>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_INVOKE = (
    f'<invoke name="{NAME}">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n'
)


def _dsml(section: str, space: str = "", sign: str = "｜DSML｜") -> str:
    return (
        f'<{sign}{section}>\n<{sign}{space}invoke name="{NAME}">\n'
        f'<{sign}{space}parameter name="city" string="true">Paris</{sign}{space}parameter>\n'
        f'<{sign}{space}parameter name="days" string="false">3</{sign}{space}parameter>\n'
        f"</{sign}{space}invoke>\n</{sign}{section}>"
    )


_JSON = f"<tool_call>\n{_CALL}\n</tool_call>"

CALLS: Mapping[str, str] = {
    "apertus2509": f'<|tools_prefix|>[{{"{NAME}": {_ARGS}}}]<|tools_suffix|>',
    "beam": (
        f" to={NAME}<|channel|>analysis <|constrain|>xml<|message|>"
        '<rfl:parameter name="city">\nParis\n</rfl:parameter>'
        '<rfl:parameter name="days">\n3\n</rfl:parameter><|call|>'
    ),
    "cohere_command4": (
        f'<|START_ACTION|>[\n{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {_ARGS}}}\n]'
        "<|END_ACTION|>"
    ),
    "deepseekv3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{_ARGS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseekv31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{_ARGS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "deepseekv41": _dsml(" calls", " "),
    "dots": f"<dots_function_call>\n{_INVOKE}</dots_function_call>",
    "glm": _GLM,
    "glm45": _GLM,
    "glm47": _GLM47,
    "gpt-oss": (
        f"<|start|>assistant<|channel|>commentary to=functions.{NAME}<|constrain|>json<|message|>"
        f"{_ARGS}<|call|>"
    ),
    "k2_horizon": (
        f"<ifm|tool_calls>\n<ifm|tool_call>{NAME}\n<ifm|arg_key>city</ifm|arg_key>"
        "<ifm|arg_value>Paris</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key><ifm|arg_value>3</ifm|arg_value>"
        "\n</ifm|tool_call>\n</ifm|tool_calls>"
    ),
    "kimi_k2": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{_ARGS}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        f'<|open|>tools<|sep|><|open|>call tool="{NAME}" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": f'<|tool_call_start|>[{NAME}(city="Paris", days=3)]<|tool_call_end|>',
    "ling3": _GLM,
    "llama3": f'<|python_tag|>{{"name": "{NAME}", "parameters": {_ARGS}}}',
    "mimo": _CODER.replace("\nParis\n", "Paris").replace("\n3\n", "3"),
    "minicpm5": (
        f'<function name="{NAME}"><param name="city">Paris</param><param name="days">3</param></function>'
    ),
    "mistral": f"[TOOL_CALLS] [{_CALL}]",
    "muse": (
        f' to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="{NAME}">\n'
        '<atem:parameter name="city">Paris</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
    ),
    "poolside_v1": _GLM,
    "pythonic": f'[{NAME}(city="Paris", days=3)]',
    "qwen": _JSON,
    "qwen25": _JSON,
    "qwen3_coder": _CODER,
    "spark25": f"<tool_call>{NAME}\n" + _PAIRS.replace("</arg_key>\n", "</arg_key>") + "\n</tool_call>",
    "step3": (
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        f'<steptml:invoke name="{NAME}">\n<steptml:parameter name="city">Paris</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>"
    ),
    "step3p5": _CODER,
    "minimax-m2": f"<minimax:tool_call>\n{_INVOKE}</minimax:tool_call>",
    "minimax-m3": (
        "]<]minimax[>[<tool_call>\n"
        f'~<invoke name="{NAME}">~<city>Paris~</city>~<days>3~</days>~</invoke>\n'
        "]<]minimax[>[</tool_call>"
    ).replace("~", "]<]minimax[>["),
    "nanbeige": _CODER,
    "trinity": _JSON,
    "interns1": f'<|action_start|> <|plugin|>\n{{"name": "{NAME}", "parameters": {_ARGS}}}<|action_end|>',
    "hermes": _JSON,
    "hunyuan": f"<tool_calls>\n<tool_call>{NAME}<tool_sep>\n{_PAIRS}\n</tool_call>\n</tool_calls>",
    "gigachat3": f"<|function_call|>{_CALL}",
    "gigachat35": _dsml("tool_calls", sign="｜GCML｜"),
    "gemma4": f'<|tool_call>call:{NAME}{{city:<|"|>Paris<|"|>,days:3}}<tool_call|>',
    "inkling": (
        f'<|message_model|>{NAME}<|content_invoke_tool_json|>{{"name": "{NAME}", "args": {_ARGS}}}'
        "<|end_message|>"
    ),
    "iquest_q1": f"<iquest_tool_call>{NAME}{_PAIRS}</iquest_tool_call>".replace("\n", ""),
}

_THINK = f"<think>{THOUGHT}</think>{ANSWER}"
#: The chat template has opened the thought: the model only closes it.
_OPENED = f"{THOUGHT}</think>{ANSWER}"

THOUGHTS: Mapping[str, str] = {
    "apertus2509": f"<|inner_prefix|>{THOUGHT}<|inner_suffix|>{ANSWER}",
    "beam": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{ANSWER}<|return|>"
    ),
    "deepseek-r1": _OPENED,
    "deepseek-v3": _THINK,
    "deepseek-v4": _THINK,
    "deepseek-v41": _THINK,
    "dots": _THINK,
    "glm45": _THINK,
    "ling3": _THINK,
    "hunyuan": _THINK,
    "gpt-oss": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
    ),
    "k2_horizon": f"<ifm|think>{THOUGHT}</ifm|think>{ANSWER}",
    "kimi": f"◁think▷{THOUGHT}◁/think▷{ANSWER}",
    "kimi_k2": _THINK,
    "kimi_k3": (
        f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|>"
        f"<|open|>response<|sep|>{ANSWER}<|close|>response<|sep|><|close|>message<|sep|>"
    ),
    "mimo": _THINK,
    "muse": f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant to=user<|message|>{ANSWER}<|eot|>",
    "poolside_v1": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _OPENED,
    "minimax": _OPENED,
    "minimax-m3": f"<mm:think>{THOUGHT}</mm:think>{ANSWER}",
    "nanbeige": _THINK,
    "step3": _OPENED,
    "step3p5": _OPENED,
    "mistral": f"[THINK]{THOUGHT}[/THINK]{ANSWER}",
    "nemotron_3": _THINK,
    "granite_thinking_parser": _THINK,
    "interns1": _THINK,
    "gemma4": f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
    "inkling": (
        f"<|message_model|><|content_thinking|>{THOUGHT}<|end_message|>"
        f"<|message_model|><|content_text|>{ANSWER}<|end_message|><|content_model_end_sampling|>"
    ),
    "iquest_q1": _OPENED,
    "cohere_command4": f"{THOUGHT}<|END_THINKING|><|START_TEXT|>{ANSWER}<|END_TEXT|>",
    "gigachat35": _OPENED,
}

#: Gives the opening tag back to the client on purpose: what it is for.
APPENDS_THINK = "minimax-append-think"

#: What a tokenizer keeps whole: the special tokens, tags, words; the rest is sign by sign.
_TOKEN = re.compile(
    r"<\|\"\|>|\]<\]minimax\[>\[|<\|?[｜|]?[^\s<>\"'=]*?[｜|]?>|\[/?(?:THINK|TOOL_CALLS|ARGS)\]|◁/?think▷|\w+|\s+|.",
    re.S,
)


def tokens(text: str) -> list[str]:
    """The text in pieces as a server streams it: a special token is never cut."""
    return _TOKEN.findall(text)
