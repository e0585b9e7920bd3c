"""Run by the rig's own Python: what the installed parsers are called, and what they make of a text.

Reads one JSON list of jobs from standard input and writes one JSON list of answers. A job is
``{"list": true}`` or ``{"tool": NAME, "reasoning": NAME, "pieces": [TEXT, ...], "splits": bool}``, where
either parser may be missing. The pieces are given whole, then one by one as a stream; with ``splits``
also in two halves, cut at every piece. No server, no GPU; nothing in SGLang is changed.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES

PACKAGES = ("sglang.srt.function_call.", "sglang.srt.parser.")
#: These would give every detector the strings of all.
EVERY_DETECTOR = ("function_call_parser", "parser_names", "template_detection", "conversation")

TOOL = Tool.model_validate(
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
)


def kept(detector: Any) -> list[str]:
    """Every literal string that a detector keeps, as an attribute or inside a list; no pattern."""
    found: set[str] = set()
    for name in dir(detector):
        value = getattr(detector, name, None)
        if not name.startswith("__") and not callable(value):
            several = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
            found |= {text for text in several if isinstance(text, str) and "regex" not in name}
    return sorted(found)


def written(detector: Any) -> list[str]:
    """Every string in the source of a detector's classes, and of what they import from beside them."""
    modules = {kind.__module__ for kind in type(detector).__mro__ if kind.__module__.startswith(PACKAGES)}
    for module in list(modules):
        values = vars(sys.modules[module]).values()
        modules |= {getattr(value, "__module__", None) or "" for value in values}
        modules |= {imported for imported in imports(module) if imported.startswith(PACKAGES)}
    found: set[str] = set()
    for module in modules:
        if module.startswith(PACKAGES) and not module.endswith(EVERY_DETECTOR):
            found |= {node.value for node in nodes(module, ast.Constant) if isinstance(node.value, str)}
    return sorted(text.replace("\\", "") for text in found)


def nodes(module: str, kind: type) -> list[Any]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def imports(module: str) -> set[str]:
    return {node.module or "" for node in nodes(module, ast.ImportFrom)}


def every_name() -> dict[str, dict[str, Any]]:
    """By kind and name, the detector's strings; None where a detector needs the model's own template."""
    answer: dict[str, dict[str, Any]] = {"tool": {}, "reasoning": {}}
    for kind, names in (("tool", TOOL_CALL_PARSER_NAMES), ("reasoning", REASONING_PARSER_NAMES)):
        for name in names:
            try:
                detector = make(kind, name).detector
            except ValueError as error:
                if "response_template is required" not in str(error):
                    raise
                answer[kind][name] = None
            else:
                answer[kind][name] = {"kept": kept(detector), "written": written(detector)}
                if kind == "reasoning":
                    answer[kind][name]["tags"] = [detector.think_start_token, detector.think_end_token]
    return answer


def make(kind: str, name: str) -> Any:
    if kind == "tool":
        return FunctionCallParser([TOOL], name)
    return ReasoningParser(model_type=name, stream_reasoning=True)


def whole(job: dict[str, Any], text: str) -> dict[str, Any]:
    """What a client would get that does not stream: the reasoning parser first, then the tool parser."""
    reasoning, calls = "", []
    if job.get("reasoning"):
        reasoning, text = make("reasoning", job["reasoning"]).parse_non_stream(text)
    if job.get("tool"):
        text, found = make("tool", job["tool"]).parse_non_stream(text or "")
        calls = [[call.name, call.parameters] for call in found]
    return {"reasoning": reasoning or "", "text": text or "", "calls": calls}


def streamed(job: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """The same as a stream: each piece, then the end, then what a call still lacks."""
    reasoning, text = "", ""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    thoughts = make("reasoning", job["reasoning"]) if job.get("reasoning") else None
    tools = make("tool", job["tool"]) if job.get("tool") else None
    for piece in [*pieces, None]:
        if thoughts is not None:
            thought, piece = (
                thoughts.parse_stream_end() if piece is None else thoughts.parse_stream_chunk(piece)
            )
            reasoning += thought or ""
        if tools is not None and piece:
            piece, calls = tools.parse_stream_chunk(piece)
            gather(calls, names, arguments)
        text += piece or ""
    if tools is not None:
        said, calls = tools.parse_stream_end()
        text += said or ""
        gather(calls, names, arguments)
        rest(tools, arguments)
    return {
        "reasoning": reasoning,
        "text": text,
        "calls": [[names.get(index, ""), arguments[index]] for index in sorted(arguments)],
    }


def gather(calls: list[Any], names: dict[int, str], arguments: dict[int, str]) -> None:
    for call in calls:
        names[call.tool_index] = names.get(call.tool_index) or call.name or ""
        arguments[call.tool_index] = arguments.get(call.tool_index, "") + (call.parameters or "")


def rest(parser: FunctionCallParser, arguments: dict[int, str]) -> None:
    """The server's own last step: send what the last call's arguments still lack."""
    sent = OpenAIServingChat._check_for_unstreamed_tool_args(
        None, parser, {"meta_info": {"id": ""}}, SimpleNamespace(model=""), 0, created=0
    )
    if sent is not None:
        call = json.loads(sent.removeprefix("data: "))["choices"][0]["delta"]["tool_calls"][0]
        index = call["index"]
        arguments[index] = arguments.get(index, "") + call["function"]["arguments"]


def answer(job: dict[str, Any]) -> Any:
    if job.get("list"):
        return every_name()
    pieces = job["pieces"]
    found: dict[str, Any] = {"whole": whole(job, "".join(pieces)), "stream": streamed(job, pieces)}
    if job.get("splits"):
        halves = (["".join(pieces[:cut]), "".join(pieces[cut:])] for cut in range(1, len(pieces)))
        found["splits"] = [streamed(job, pair) for pair in halves]
    return found


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    print(json.dumps([answer(job) for job in jobs]))
