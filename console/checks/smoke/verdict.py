"""From what came back to a finding: what is wrong with an answer, and the evidence for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from console.checks.markers import TOOL_PARSERS, leaked
from console.checks.smoke.answer import Answer
from console.checks.smoke.rubbish import rubbish
from console.checks.smoke.trouble import NO_VERDICT
from console.checks.smoke.wire import Exchange
from console.model.finding import Verdict
from console.model.text import clean
from console.model.words import latency

if TYPE_CHECKING:
    from console.checks.smoke.session import Session

#: Characters of a request and of an answer that stand in the evidence.
SHOWN = 900

_WORST: tuple[Verdict, ...] = ("fail", "unknown", "warn", "pass", "skipped")
_TOLD = 3


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong with one answer."""

    words: str
    verdict: Verdict = "fail"
    remedy: str | None = None


class Result(msgspec.Struct, frozen=True):
    """A check's answer before it has an id: ``summary`` is one line, ``details`` are further ones."""

    verdict: Verdict
    summary: str
    details: tuple[str, ...] = ()
    remedy: str | None = None


Judge = Callable[[Exchange, Answer], Iterable[Problem]]


def settle(
    session: Session,
    exchanges: Sequence[Exchange],
    good: str,
    judge: Judge,
    *,
    together: Iterable[Problem] = (),
    call_expected: bool = False,
) -> Result:
    """The result of several exchanges: each is judged by itself, for leaks, rubbish and emptiness too.

    ``together`` are problems that only the exchanges side by side show.
    """
    found: list[tuple[Exchange, Problem]] = []
    for exchange in exchanges:
        problems: Iterable[Problem]
        if exchange.trouble is not None:
            verdict: Verdict = "unknown" if exchange.trouble.kind in NO_VERDICT else "fail"
            problems = [Problem(exchange.trouble.words, verdict, exchange.trouble.remedy)]
        elif exchange.answer is not None:
            answer = exchange.answer
            general = list(always_wrong(session, answer, call_expected))
            if not general and exchange.capped and answer.finish_reason == "length":
                words = "cut short: the engine speaks rubbish, so no more tokens were asked for"
                general = [Problem(words, "unknown", "see degenerate")]
            # What is rubbish or empty is wrong in every further respect as well: one reason is enough.
            problems = general or judge(exchange, answer)
        else:
            problems = [Problem("no answer was read", "unknown")]
        found += [(exchange, problem) for problem in problems]
    if not found and exchanges:
        found = [(exchanges[0], problem) for problem in together]
    if not found:
        return Result("pass", good, evidence(exchanges, exchanges[-1] if exchanges else None))
    found.sort(key=lambda pair: _WORST.index(pair[1].verdict))
    worst, problem = found[0]
    same = [pair for pair in found if pair[1].verdict == problem.verdict]
    return Result(
        problem.verdict,
        _told(same, len(exchanges)),
        evidence(exchanges, worst),
        next((one.remedy for _, one in same if one.remedy), None),
    )


def _told(found: list[tuple[Exchange, Problem]], of: int) -> str:
    """The problems in one line, those that several modes share told once."""
    modes: dict[str, list[str]] = {}
    for exchange, problem in found:
        modes.setdefault(problem.words, []).append(exchange.mode)
    told = []
    for words, where in list(modes.items())[:_TOLD]:
        everywhere = len(where) == of
        told.append(words if everywhere else f"{words} ({'; '.join(dict.fromkeys(where))})")
    if len(modes) > _TOLD:
        told.append(f"and {len(modes) - _TOLD} more")
    return "; ".join(told)


def evidence(exchanges: Sequence[Exchange], shown: Exchange | None) -> tuple[str, ...]:
    """Timings of all exchanges, and request and answer of one, each cleaned and bounded."""
    lines = []
    if exchanges:
        lines.append("timings: " + "; ".join(map(_timing, exchanges)))
    if shown is not None:
        asked = json.dumps(shown.request, ensure_ascii=False)
        lines.append(f"request ({shown.mode}): POST {shown.path} {_bounded(asked)}")
        lines.append(f"answer ({shown.mode}): {_bounded(_said(shown)) or 'nothing'}")
        if shown.answer is not None and shown.answer.events:
            lines.append(f"raw ({shown.mode}): {_bounded(shown.raw, SHOWN // 2)}")
    return tuple(lines)


def _timing(exchange: Exchange) -> str:
    first = exchange.first_token_s
    told = "" if first is None else f", first token {latency(first)}"
    return f"{exchange.mode} {latency(exchange.seconds)}{told}"


def _said(exchange: Exchange) -> str:
    """A stream put together reads better than its events; anything else is shown as it came."""
    answer = exchange.answer
    if answer is None or not answer.events:
        return exchange.raw
    parts = {
        "reasoning_content": answer.reasoning,
        "content": answer.content,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.calls
        ],
        "finish_reason": answer.finish_reason,
    }
    return json.dumps(parts, ensure_ascii=False)


def _bounded(text: str, limit: int = SHOWN) -> str:
    text = clean(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text)} characters)"


def quoted(text: str, limit: int = 60) -> str:
    """A few words of an answer for a summary."""
    text = " ".join(clean(text[: 4 * limit]).split())
    return f"“{text}”" if len(text) <= limit else f"“{text[:limit]}…”"


def always_wrong(session: Session, answer: Answer, call_expected: bool) -> Iterator[Problem]:
    """What no answer may have, whatever was asked: leaked markers, rubbish, nothing at all."""
    places = [("content", answer.content), ("reasoning_content", answer.reasoning)]
    places += [("the arguments of a call", call.arguments) for call in answer.calls]
    places += [("the name of a call", call.name) for call in answer.calls]
    for where, text in places:
        found = leaked(text, tool_parser=session.tool_parser, reasoning_parser=session.reasoning_parser)
        if found:
            words = f"parser markers leaked into {where}: {' '.join(found[:3])}"
            remedy = (
                f"check --tool-call-parser ({session.tool_parser or 'none runs'}) and "
                f"--reasoning-parser ({session.reasoning_parser or 'none runs'})"
            )
            yield Problem(words, remedy=remedy)
    for where, text in places[:2]:
        reason = rubbish(text, cut=answer.finish_reason == "length")
        if reason is not None:
            yield Problem(
                f"{where} is rubbish: {reason}",
                remedy="the weights, the quantisation or a kernel is wrong: try other backends "
                "(--attention-backend, --moe-runner-backend, --fp4-gemm-backend)",
            )
    if answer.finish_reason is None:
        yield Problem("no finish_reason")
    elif answer.finish_reason == "abort":
        yield Problem("the engine aborted the request", "unknown", "look at the journal for the reason")
    elif not answer.content.strip() and not answer.calls and answer.finish_reason in ("stop", "tool_calls"):
        landed = "; all text landed in reasoning_content" if answer.reasoning.strip() else ""
        swallowed = " and no tool call: a wrong parser swallows it so" if call_expected else ""
        yield Problem(
            f"empty content{swallowed}{landed}",
            remedy=f"check --tool-call-parser ({session.tool_parser or 'none runs'}) and "
            f"--reasoning-parser ({session.reasoning_parser or 'none runs'}) against the model",
        )


def cut_short(answer: Answer) -> Iterator[Problem]:
    """The limit was reached before the answer came: no fault of the parsers, but no proof either."""
    if answer.finish_reason == "length":
        where = "while it was still thinking" if answer.reasoning and not answer.content else "too early"
        yield Problem(f"reached its limit of tokens {where}", "warn")


def differing(exchanges: Sequence[Exchange]) -> Iterator[Problem]:
    """Whole and streamed must give the same parts: what one mode parses the other must not swallow."""
    pairs: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        pairs.setdefault(exchange.mode.partition(",")[2], []).append(exchange)
    for pair in pairs.values():
        answers = [one.answer for one in pair if one.answer is not None]
        if len(answers) == 2 and all(answer.finish_reason != "length" for answer in answers):
            parts = [_parts(answer) for answer in answers]
            wrong = [name for name in parts[0] if parts[0][name] != parts[1][name]]
            if wrong:
                yield Problem(f"whole and streamed differ in {', '.join(wrong)}{_suffix(pair[0])}")


def _suffix(exchange: Exchange) -> str:
    rest = exchange.mode.partition(", ")[2]
    return f" ({rest})" if rest else ""


def _parts(answer: Answer) -> dict[str, object]:
    return {
        "reasoning_content": bool(answer.reasoning.strip()),
        "tool calls": [call.name for call in answer.calls],
        "finish_reason": answer.finish_reason,
    }


def call_id_problem(session: Session, call_id: str | None, name: str) -> Problem | None:
    """A call's id must be there, and have the form that its parser gives."""
    import re

    if call_id is None:
        return Problem("a tool call without an id")
    parser = TOOL_PARSERS.get(session.tool_parser or "")
    if parser is None or re.fullmatch(parser.call_id, call_id):
        return None
    shape = "functions.NAME:N" if parser.name == "kimi_k2" else f"those of {parser.name}"
    return Problem(f"the id {quoted(call_id, 40)} of {name} has not the form of {shape}")
