"""A profile as the text of its file: what ``parse_profile`` reads back as the same profile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from console.model.profile import PROFILE_SCHEMA, FlagValue, Load, Profile
from console.sources.files.table import AMBIGUOUS

_SAFE = re.compile(r"[A-Za-z0-9/._][A-Za-z0-9/._+@-]*")
_NOT_TEXT = AMBIGUOUS | {"true", "false", "null", "Null", "NULL"}


def profile_text(profile: Profile, heading: str) -> str:
    """The file of ``profile``, without reference and notes; ``heading`` is its first comment."""
    lines = [f"# {heading}", f"schema: {PROFILE_SCHEMA}", f"name: {_text(profile.name)}"]
    lines.append(f"title: {_text(profile.title)}")
    lines += [f"key: {profile.key}"] if profile.key is not None else []
    lines += [f"python: {_text(profile.python)}"] if profile.python is not None else []
    lines += [f"sglang: {_text(profile.sglang)}"] if profile.sglang is not None else []
    lines += ["", *_section("args", {flag: _flag(value) for flag, value in profile.args.items()})]
    if profile.env:
        lines += ["", *_section("env", {name: _text(value) for name, value in profile.env.items()})]
    if profile.load != Load():
        load = {"expect_s": profile.load.expect_s, "timeout_s": profile.load.timeout_s}
        load["stop_s"] = profile.load.stop_s
        lines += [
            "",
            *_section("load", {key: f"{value:g}" for key, value in load.items() if value is not None}),
        ]
    expect = dict(_expect(profile))
    if expect:
        lines += ["", *_section("expect", expect)]
    return "\n".join([*lines, ""])


def _expect(profile: Profile) -> Iterator[tuple[str, str]]:
    expect = profile.expect
    if expect.served_name is not None:
        yield "served_name", _text(expect.served_name)
    if expect.tool_calls:
        yield "tool_calls", "true"
    if expect.reasoning:
        yield "reasoning", "true"
    if expect.accept_length_min is not None:
        yield "accept_length_min", f"{expect.accept_length_min:g}"


def _section(name: str, values: Mapping[str, str]) -> list[str]:
    return [f"{name}:", *(f"  {key}: {value}" for key, value in values.items())]


def _flag(value: FlagValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return f"[{', '.join(map(_text, value))}]"


def _text(text: str) -> str:
    """A text as YAML that stays that text: as it is where that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text not in _NOT_TEXT:
        return text
    return json.dumps(text, ensure_ascii=False)
