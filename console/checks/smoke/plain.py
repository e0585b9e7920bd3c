"""Smoke tests of the server and of plain answers: name, parsers, sanity, rubbish, numbers, forms."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from itertools import chain

from console.checks.smoke import prompts
from console.checks.smoke.answer import Answer
from console.checks.smoke.rubbish import rubbish
from console.checks.smoke.schema import violations
from console.checks.smoke.session import Session
from console.checks.smoke.trouble import NO_VERDICT, network, refusal
from console.checks.smoke.verdict import Problem, Result, cut_short, differing, evidence, quoted, settle
from console.checks.smoke.wire import Exchange
from console.model.text import clean
from console.model.words import latency
from console.sources.engine.identity import model_list

_STOP_AT = "7"
_USAGE_LIMIT = 24


async def served_name(session: Session) -> Result:
    """By ``/v1/models`` alone: a request with a wrong name is answered 200, and the name echoed."""
    got = session.models
    assert got is not None  # the session looks before it is used
    details = (f"request: GET /v1/models, {latency(got.probe.seconds)}", f"answer: {_shown(got.body)}")
    if got.probe.error is not None and got.probe.status is None:
        if got.probe.error == "timeout":
            return Result("fail", f"hangs: {got.probe.detail}", details)
        trouble = network(got.probe.error, got.probe.detail or "")
        return Result("fail", trouble.words, details, trouble.remedy)
    if got.probe.status != 200:
        trouble = refusal(
            got.probe.status or 0, got.body, session.target.api_key is not None, session.target.key_note
        )
        verdict = "unknown" if trouble.kind in NO_VERDICT else "fail"
        return Result("unknown" if verdict == "unknown" else "fail", trouble.words, details, trouble.remedy)
    names = [name for name, _ in model_list(got.body)]
    if not names:
        page = "an HTML page" if got.body.lstrip()[:1] == b"<" else "no list of models"
        return Result("fail", f"/v1/models is {page}", details, "check that service.url is SGLang itself")
    told = " ".join(names)
    expected = session.profile.served_name if session.profile is not None else None
    if expected is None:
        return Result("pass", f"serves {told}; no profile says what it should be", details)
    if expected in names:
        return Result("pass", f"serves {expected}", details)
    return Result(
        "fail",
        f"serves {told}, not {expected}",
        details,
        "another model runs, or --served-model-name is missing: gpuops audit shows the difference",
    )


async def parsers(session: Session) -> Result:
    """The parsers of the profile against those that run."""
    running = (session.identity.tool_call_parser, session.identity.reasoning_parser)
    told = f"tool calls: {running[0] or 'none'}; reasoning: {running[1] or 'none'}"
    if not session.said:
        return Result("unknown", "the engine does not say which parsers run", (), "see served-name")
    if session.profile is None:
        return Result("pass", f"{told}; no profile says what they should be")
    wrong = []
    for flag, runs in zip(("tool-call-parser", "reasoning-parser"), running, strict=True):
        wanted = session.profile.text(flag)
        if wanted not in (runs, "auto"):
            wrong.append(f"--{flag}: the profile has {wanted or 'none'}, {runs or 'none'} runs")
    if wrong:
        return Result("fail", "; ".join(wrong), (), "restart the service with the profile's flags")
    return Result("pass", told)


async def sanity(session: Session) -> Result:
    """Answers that everybody knows, at temperature 0."""
    asked = [(question, wanted, stream) for question, wanted in prompts.KNOWN for stream in (False, True)]
    exchanges = await asyncio.gather(
        *(session.chat(question, stream=stream) for question, _, stream in asked)
    )
    expected = {id(exchange): wanted for exchange, (_, wanted, _) in zip(exchanges, asked, strict=True)}

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        wanted = expected[id(exchange)]
        if wanted not in answer.content.casefold():
            yield from cut_short(answer)
            yield Problem(f"expected {wanted}, said {quoted(answer.content)}", remedy="see degenerate")

    return settle(session, exchanges, "17 * 23 and the capital of France are right", judge)


async def degenerate(session: Session) -> Result:
    """Whether a few sentences of English are a few sentences of English."""
    exchanges = await session.in_each_mode(prompts.PROSE, thinking=False, max_tokens=160)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        reason = rubbish(answer.content, latin=True, cut=answer.finish_reason == "length")
        if reason is not None:
            yield Problem(f"the text is rubbish: {reason}")

    return settle(session, exchanges, "reads like a text", judge)


async def logprobs(session: Session) -> Result:
    """Log probabilities must be numbers: where logits are NaN they come as null or NaN."""
    exchanges = await session.in_each_mode(
        prompts.KNOWN[1][0], thinking=False, max_tokens=16, logprobs=True, top_logprobs=0
    )
    refused = [
        one.trouble.words
        for one in exchanges
        if one.trouble is not None and one.trouble.kind == "rejected" and "logprob" in one.trouble.words
    ]
    if refused:
        return Result("skipped", f"this engine gives none: {refused[0]}", evidence(exchanges, exchanges[0]))
    answers = [one.answer for one in exchanges if one.answer is not None]
    if len(answers) == len(exchanges) and not any(answer.logprobs for answer in answers):
        return Result("skipped", "the engine gave no log probabilities", evidence(exchanges, exchanges[0]))

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        values = answer.logprobs or ()
        lost = sum(value is None or not math.isfinite(value) for value in values)
        if lost:
            yield Problem(
                f"{lost} of {len(values)} log probabilities are no numbers (NaN)",
                remedy="a kernel computes NaN: try other backends (--moe-runner-backend, --fp4-gemm-backend)",
            )
        elif any(value is not None and value > 0.01 for value in values):
            yield Problem("log probabilities above 0")

    known = [value for answer in answers for value in answer.logprobs or () if value is not None]
    good = f"{len(known)} numbers, the lowest {min(known):.2f}" if known else ""
    # What the text itself is worth, other checks tell: here NaN must be named even beside rubbish.
    broken = [one for one in exchanges if one.answer is not None and list(judge(one, one.answer))]
    if broken and broken[0].answer is not None:
        problem = next(iter(judge(broken[0], broken[0].answer)))
        return Result("fail", problem.words, evidence(exchanges, broken[0]), problem.remedy)
    return settle(session, exchanges, good, judge)


async def reasoning(session: Session) -> Result:
    """Thinking lands in ``reasoning_content``, the answer in ``content``, and no thinking means none."""
    question, wanted = prompts.KNOWN[0]
    exchanges = await session.in_each_mode(question)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        thinks = "not thinking" not in exchange.mode
        yield from cut_short(answer)
        if thinks and not answer.reasoning.strip():
            yield Problem(
                f"reasoning_content is empty; content is {quoted(answer.content)}",
                remedy=f"check --reasoning-parser ({session.reasoning_parser or 'none runs'})",
            )
        if not thinks and answer.reasoning.strip() and not session.always_thinks:
            yield Problem(
                f"thinks though thinking is switched off: {quoted(answer.reasoning)}",
                remedy="the chat template does not take the switch, or the reasoning parser takes the answer",
            )
        if answer.finish_reason == "stop" and wanted not in answer.content:
            yield Problem(f"expected {wanted}, said {quoted(answer.content)}")

    good = "parsed, and none when switched off"
    if session.always_thinks:
        good = f"parsed; {session.reasoning_parser} cannot be switched off"
    return settle(session, exchanges, good, judge, together=differing(exchanges))


async def structured(session: Session) -> Result:
    """An answer under a JSON schema is JSON, and fits it."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": prompts.CITY_SCHEMA, "strict": True},
    }
    exchanges = await session.in_each_mode(prompts.CITY, thinking=False, max_tokens=200, response_format=form)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        yield from cut_short(answer)
        if answer.finish_reason == "length":
            return
        try:
            value = json.loads(answer.content)
        except (ValueError, RecursionError):
            yield Problem(f"not JSON: {quoted(answer.content)}", remedy="look at --grammar-backend")
            return
        wrong = list(violations(value, prompts.CITY_SCHEMA))
        if wrong:
            yield Problem("does not fit the schema: " + "; ".join(wrong[:3]))
        elif "paris" not in value["name"].casefold():
            yield Problem(f"fits the schema, but the name is {quoted(value['name'])}")

    return settle(session, exchanges, "JSON that fits its schema", judge, together=differing(exchanges))


async def stop(session: Session) -> Result:
    """A stop string ends the answer and is not part of it."""
    exchanges = await session.in_each_mode(prompts.COUNTING, thinking=False, stop=[_STOP_AT])

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        if answer.finish_reason != "stop":
            yield Problem(f"went on past the stop string {_STOP_AT!r} ({answer.finish_reason})")
        elif _STOP_AT in answer.content:
            yield Problem(f"the stop string {_STOP_AT!r} is in the answer: {quoted(answer.content)}")
        elif "6" not in answer.content:
            yield Problem(f"stopped before the stop string: {quoted(answer.content)}")

    return settle(session, exchanges, "ends at the stop string", judge, together=differing(exchanges))


async def usage(session: Session) -> Result:
    """The counts of tokens are there and plausible; customers are billed by them."""
    exchanges = await session.in_each_mode(prompts.PROSE, thinking=False, max_tokens=_USAGE_LIMIT)

    def judge(exchange: Exchange, answer: Answer) -> Iterator[Problem]:
        used = answer.usage
        if used is None or used.prompt is None or used.completion is None:
            yield Problem("no counts of tokens in the answer")
            return
        limit = exchange.request["max_tokens"]
        written = len((answer.reasoning + " " + answer.content).split())
        if used.prompt < len(prompts.PROSE.split()):
            yield Problem(f"{used.prompt} prompt tokens for {len(prompts.PROSE.split())} words")
        if not 0 < used.completion <= limit:
            yield Problem(f"{used.completion} tokens written, the limit was {limit}")
        elif written > 2 * used.completion:
            yield Problem(f"{used.completion} tokens for {written} words")
        if used.total is not None and used.total != used.prompt + used.completion:
            yield Problem(f"{used.prompt} and {used.completion} are not {used.total} in all")
        if answer.finish_reason == "length" and used.completion != limit:
            yield Problem(f"ended by its limit of {limit} after {used.completion} tokens")

    counts = [
        one.answer.usage for one in exchanges if one.answer is not None and one.answer.usage is not None
    ]
    different: Iterator[Problem] = iter(())
    prompt_counts = {count.prompt for count in counts}
    if len(prompt_counts) > 1:
        different = iter([Problem(f"whole and streamed count the prompt differently: {prompt_counts}")])
    good = f"{counts[0].prompt} prompt tokens, {counts[0].completion} written" if counts else ""
    return settle(session, exchanges, good, judge, together=chain(different))


def _shown(body: bytes) -> str:
    return clean(body[:900].decode("utf-8", "replace"))
