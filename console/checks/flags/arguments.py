"""What argparse would say of each flag of a profile, one by one: its name, how many values, their type.

The rules are those of Python's argparse as SGLang uses it: a name that begins exactly one other is taken
for it, a list follows its flag once, and what is left over ends the start.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator

from console.checks.flags.judged import Judged, argument_line, quoted
from console.checks.flags.renames import instead_lines, moved
from console.checks.flags.table import Flag, FlagTable, past
from console.model.profile import FlagValue, flag_rule

#: What argparse takes for a negative number, and so for a value.
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")

#: SGLang's human_readable_int (srt/utils/common.py).
_COUNT = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|T)|(\d+)(Ki|Mi|Gi|Ti)")

_SUFFIXES = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}

#: More choices than this are not listed.
_LISTED = 12

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "count": "a whole number such as 8192, 8k or 8Ki",
    "json": "JSON",
    "object": "a JSON object",
}


def judge_arguments(args: dict[str, FlagValue], table: FlagTable) -> list[Judged]:
    """Everything to say of the flags one by one, in their order; nothing where all is well."""
    if len(args) > len(table.flags):
        told = f"{len(args)} flags; SGLang {table.version} has {len(table.flags)}"
        return [Judged(id="flags.count", title="Flags", verdict="fail", evidence=told)]
    found: list[Judged] = []
    first: dict[str, str] = {}
    for name, value in args.items():
        found += _flag(name, value, args, table)
        flag = table.find(name)
        if flag is not None and flag.dest in first:
            other = first[flag.dest]
            found.append(
                Judged(
                    id=f"flag.{name}.twice",
                    title=f"--{name}",
                    verdict="fail",
                    evidence=f"sets what --{other} sets already; only the last one would count",
                    remedy=f"keep one of the two: {argument_line(name, value)}",
                    name=name,
                )
            )
        elif flag is not None:
            first[flag.dest] = name
    return found


def _flag(name: str, value: FlagValue, args: dict[str, FlagValue], table: FlagTable) -> Iterator[Judged]:
    if flag_rule(name) is not None:
        yield _fail(name, "", f"not the name of a flag; expected {flag_rule(name)}", None)
        return
    if name == "help":
        yield _fail(name, "", "prints the help and ends at once", "remove the line")
        return
    flag = table.by_name.get(name)
    if flag is None:
        flag = table.find(name)
        known = moved(name, table, args)
        if known is not None:
            yield known
            return
        if flag is None:
            yield _unknown(name, value, args, table)
            return
        yield Judged(
            id=f"flag.{name}",
            title=f"--{name}",
            verdict="warn",
            evidence=f"no flag of its own: taken as an abbreviation of --{flag.name}, "
            "until a version has two that begin so",
            remedy=f"write it out: {argument_line(flag.name, value)}",
            name=name,
        )
    yield from _standing(name, flag, value, args, table)
    yield from judge_value(name, flag, value, table)


def _standing(
    name: str, flag: Flag, value: FlagValue, args: dict[str, FlagValue], table: FlagTable
) -> Iterator[Judged]:
    """Whether a flag that is known is refused all the same, or on its way out."""
    if flag.refused is not None:
        yield _fail(name, "", f"SGLang {table.version} refuses it: {flag.refused}", "remove the line")
    elif flag.deprecated:
        known = moved(name, table, args)
        if known is not None:
            yield known
            return
        lines = instead_lines(flag.instead, value, args, table)
        yield Judged(
            id=f"flag.{name}",
            title=f"--{name}",
            verdict="warn",
            evidence=f"deprecated in SGLang {table.version}; it still works",
            remedy=f"replace it with: {lines}"
            if lines
            else "a later version will refuse it; remove the line",
            name=name,
        )


def _unknown(name: str, value: FlagValue, args: dict[str, FlagValue], table: FlagTable) -> Judged:
    """A name that argparse would refuse: what it was, or what it may have meant."""
    ambiguous = table.beginning(name)
    before = past(name)
    if before is not None:
        lines = instead_lines(before.flag.instead, value, args, table)
        span = before.first if before.first == before.last else f"{before.first} to {before.last}"
        told = f"unknown to SGLang {table.version}; of the versions known here {span} had it"
        if before.flag.instead and lines:
            return _fail(name, "", f"{told}, renamed since", f"replace it with: {lines}")
        if not ambiguous:
            return _fail(name, "", told, "remove the line, or use a version that has it")
    if ambiguous:
        listed = ", ".join(f"--{one}" for one in ambiguous[:_LISTED])
        remedy = f"write one of them out: {argument_line(ambiguous[0], value)}"
        return _fail(name, "", f"ambiguous: it could be {listed}", remedy)
    close = _close(name, table)
    if close is None:
        return _fail(name, "", f"unknown to SGLang {table.version}", "remove the line")
    return _fail(
        name, "", f"unknown to SGLang {table.version}", f"did you mean this: {argument_line(close, value)}"
    )


def _close(name: str, table: FlagTable) -> str | None:
    return next(iter(difflib.get_close_matches(name[:100], table.by_name, n=1, cutoff=0.7)), None)


# Values ----------------------------------------------------------------------------------------


def judge_value(name: str, flag: Flag, value: FlagValue, table: FlagTable) -> Iterator[Judged]:
    """How many values follow a flag, and whether each is one that it takes."""
    if value is False:
        yield _fail(name, ".value", "false would pass nothing", "to leave the flag out, remove the line")
        return
    words = () if value is True else (value,) if isinstance(value, str) else value
    swallowed = next((word for word in words if _looks_like_a_flag(word)), None)
    if swallowed is not None:
        yield _fail(
            name, ".value", f"{quoted(name, swallowed)} would be read as a flag of its own", _example(flag)
        )
        return
    if not _fits(flag.arity, len(words)):
        yield _fail(name, ".value", _arity_words(flag, name, words), _arity_remedy(flag, words))
        return
    for word in words:
        problem = _word(name, flag, word, table)
        if problem is not None:
            yield problem
            return


def _fits(arity: str, count: int) -> bool:
    match arity:
        case "?":
            return count <= 1
        case "*":
            return True
        case "+":
            return count >= 1
    return count == int(arity) if arity.isdigit() else True


def _arity_words(flag: Flag, name: str, words: tuple[str, ...]) -> str:
    if flag.arity == "0":
        return f"takes no value, found {quoted(name, words)}"
    if not words:
        return "a value is missing"
    wanted = "one value" if flag.arity in ("1", "?") else f"{flag.arity} values"
    return f"takes {wanted}, found {len(words)}: {quoted(name, words)}"


def _arity_remedy(flag: Flag, words: tuple[str, ...]) -> str:
    if flag.arity == "0" and words[0].lower() in ("false", "no", "off", "0"):
        return "to leave the flag out, remove the line"
    if flag.arity == "0":
        return f"write: {argument_line(flag.name, True)}"
    if flag.arity in ("1", "?") and words:
        return f"keep one: {argument_line(flag.name, words[0])}"
    return _example(flag)


def _example(flag: Flag) -> str:
    if flag.choices:
        return f"write one of {_listed(flag.choices)}: {argument_line(flag.name, flag.choices[0])}"
    return f"write {_WORDS.get(flag.type, 'a value')}: {argument_line(flag.name, _sample(flag))}"


def _sample(flag: Flag) -> str:
    """A value that the flag takes: its default where that is one."""
    try:
        default = ast.literal_eval(flag.default)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        default = None
    if isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != "":
        return str(default)
    return {"int": "1", "float": "0.5", "count": "8192", "json": "{}", "object": "{}"}.get(flag.type, "VALUE")


def _looks_like_a_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NEGATIVE.fullmatch(word)


def _word(name: str, flag: Flag, word: str, table: FlagTable) -> Judged | None:
    """What is wrong with one value; None when argparse takes it."""
    read = convert(flag.type, word)
    if read is None:
        told = f"expected {_WORDS[flag.type]}, found {quoted(name, word)}"
        whole = _as_whole(word) if flag.type == "int" else None
        remedy = _example(flag) if whole is None else f"write: {argument_line(flag.name, whole)}"
        return _fail(name, ".value", told, remedy)
    if flag.choices is None or read in flag.choices:
        return None
    return _not_a_choice(name, flag, word, table)


def convert(kind: str, word: str) -> str | None:
    """A value as its converter reads it, as text; None when the converter refuses it."""
    try:
        match kind:
            case "int":
                return str(int(word))
            case "float":
                return str(float(word))
            case "json":
                json.loads(word)
            case "object":
                return word if isinstance(json.loads(word), dict) else None
            case "count":
                return word if _COUNT.fullmatch(word.strip()) else str(int(word))
    except (ValueError, RecursionError):
        return None
    return word


def _as_whole(word: str) -> str | None:
    """``8k`` and ``8.0`` as the whole numbers that they are; None for anything else."""
    count = _COUNT.fullmatch(word.strip())
    if count is not None:
        number, suffix = (count[1], count[2]) if count[1] else (count[3], count[4])
        return str(int(float(number) * _SUFFIXES[suffix]))
    return word[:-2] if re.fullmatch(r"\d{1,9}\.0", word) else None


def _not_a_choice(name: str, flag: Flag, word: str, table: FlagTable) -> Judged:
    choices = flag.choices or ()
    told = f"{quoted(name, word)} is none of its choices in SGLang {table.version}"
    match = _meant(flag.name, word, choices) or _nearest_choice(word, choices)
    other = {"tool-call-parser": "reasoning-parser", "reasoning-parser": "tool-call-parser"}.get(flag.name)
    sibling = None if other is None else table.by_name.get(other)
    if sibling is not None and word in (sibling.choices or ()):
        told += f"; it is one of --{other}"
    if match is None:
        return _fail(
            name, ".value", told, f"one of {_listed(choices)}: {argument_line(flag.name, choices[0])}"
        )
    return _fail(name, ".value", told, f"write: {argument_line(flag.name, match)}")


#: What people write, and what they mean by it, by flag.
_REASONING = {
    "kimi_k25": "kimi_k2",
    "kimi-k2": "kimi_k2",
    "kimi_k2.5": "kimi_k2",
    "kimi-k2.5": "kimi_k2",
    "glm47": "glm45",
    "qwen3_coder": "qwen3",
    "qwen25": "qwen3",
    "qwen3.5": "qwen3",
    "qwen3_5": "qwen3",
}
_MEANT = {
    "reasoning-parser": _REASONING,
    "tool-call-parser": {
        **_REASONING,
        "kimi": "kimi_k2",
        "qwen3": "qwen3_coder",
        "qwen3.5": "qwen3_coder",
        "qwen3_5": "qwen3_coder",
    },
    "kv-cache-dtype": {"fp8": "fp8_e4m3", "fp16": "auto", "float16": "auto"},
}


def _meant(flag: str, word: str, choices: tuple[str, ...]) -> str | None:
    meant = _MEANT.get(flag, {}).get(word.lower())
    return meant if meant in choices else None


def _nearest_choice(word: str, choices: tuple[str, ...]) -> str | None:
    lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower()[:100], lower, n=1, cutoff=0.6)
    if close:
        return lower[close[0]]
    within = [choice for choice in choices if len(word) > 2 and word.lower() in choice.lower()]
    return within[0] if len(within) == 1 else None


def _listed(choices: tuple[str, ...]) -> str:
    shown = ", ".join(choices[:_LISTED])
    return shown if len(choices) <= _LISTED else f"{shown} and {len(choices) - _LISTED} more"


def _fail(name: str, aspect: str, evidence: str, remedy: str | None) -> Judged:
    return Judged(
        id=f"flag.{name}{aspect}",
        title=f"--{name}",
        verdict="fail",
        evidence=evidence,
        remedy=remedy,
        name=name,
    )
