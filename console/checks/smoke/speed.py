"""Smoke tests of what makes the engine fast: prefix cache, speculation, and several requests at once."""

from __future__ import annotations

import asyncio
import statistics
import time

from console.checks.smoke import prompts
from console.checks.smoke.answer import Answer
from console.checks.smoke.session import AT_ONCE, Session
from console.checks.smoke.verdict import Problem, Result, evidence, settle
from console.checks.smoke.wire import Exchange
from console.model.words import latency
from console.sources.engine.fields import integer, number

_BURST_TOKENS = 64
_DRAFTED_TOKENS = 96

#: Names under which a profile's ``reference.results`` may hold figures of a burst.
_RATE_NAMES = ("burst_tokens_per_s", "output_tokens_per_s", "tokens_per_s")
_TTFT_NAMES = ("burst_ttft_s", "ttft_s")

#: So much worse than the reference counts: the burst is short, and others use the engine too.
_WORSE = 2.0


async def prefix_cache(session: Session) -> Result:
    """The same prompt again must not be computed again: ``meta_info.cached_tokens`` of ``/generate``."""
    text = prompts.long_text(session.nonce())
    exchanges = [await session.generate(text, 2, "first time")]
    if exchanges[0].answer is not None:
        exchanges.append(await session.generate(text, 2, "second time"))
    if not _cached(exchanges[-1]) and len(exchanges) == 2 and exchanges[-1].answer is not None:
        # A model with state-space layers keeps states only where a request ended: a longer prompt finds one.
        exchanges.append(await session.generate(text + exchanges[-1].answer.content + " And", 2, "longer"))
    last = exchanges[-1]
    if all(one.answer is not None for one in exchanges) and _cached(last) is None:
        return Result("skipped", "the engine does not report cached tokens", evidence(exchanges, last))

    def judge(exchange: Exchange, answer: Answer) -> list[Problem]:
        if exchange is last and not _cached(exchange):
            remedy = "the cache is full, or off for this model: look at the cache hit rate in the console"
            return [Problem("no token of the same prompt came from the cache", remedy=remedy)]
        return []

    asked = last.answer.usage.prompt if last.answer is not None and last.answer.usage is not None else None
    return settle(session, exchanges, f"{_cached(last)} of {asked} tokens from the cache", judge)


def _cached(exchange: Exchange) -> int | None:
    usage = exchange.answer.usage if exchange.answer is not None else None
    return None if usage is None else usage.cached


async def speculation(session: Session) -> Result:
    """Tokens per verify step of our own requests, against the least that the profile expects."""
    texts = (
        "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is",
        "for (int i = 0; i < n; i++) { sum += values[i]; }\nfor (int i = 0; i < n; i++) {",
    )
    exchanges = await asyncio.gather(
        *(session.generate(text, _DRAFTED_TOKENS, f"text {number}") for number, text in enumerate(texts, 1))
    )
    measured = _accept_length([one.answer for one in exchanges if one.answer is not None])
    least = session.profile.expect.accept_length_min if session.profile is not None else None
    average = session.average_accept_length
    told = "" if average is None else f"; {average:.2f} on average since the start"
    if measured is None:
        if any(one.trouble is not None for one in exchanges):
            return settle(session, exchanges, "", lambda exchange, answer: ())
        return Result(
            "unknown", f"the engine does not report verify steps{told}", evidence(exchanges, exchanges[0])
        )
    words = f"{measured:.2f} tokens per verify step{told}"
    details = evidence(exchanges, exchanges[0])
    remedy = "the draft model may not fit the target: check --speculative-draft-model-path"
    if least is not None and measured < least:
        return Result("fail", f"{words}, less than the {least:g} expected", details, remedy)
    if measured <= 1.05:
        return Result("warn", f"{words}: speculation gains nothing", details, remedy)
    return Result("pass", words + (f", at least {least:g} expected" if least is not None else ""), details)


def _accept_length(answers: list[Answer]) -> float | None:
    """Tokens by verify steps over all answers; what the engine computed itself where it tells no steps."""
    steps = [integer(answer.meta.get("spec_verify_ct")) for answer in answers]
    tokens = [answer.usage.completion if answer.usage is not None else None for answer in answers]
    counted = [(one, other) for one, other in zip(tokens, steps, strict=True) if one and other]
    if counted:
        return sum(one for one, _ in counted) / sum(other for _, other in counted)
    given = [number(answer.meta.get("spec_accept_length")) for answer in answers]
    known = [value for value in given if value]
    return sum(known) / len(known) if known else None


async def burst(session: Session) -> Result:
    """A handful of requests at once: time to the first token, and tokens a second of all together."""
    began = time.monotonic()
    exchanges = await asyncio.gather(
        *(
            session.chat(f"{prompts.PROSE} ({session.nonce()})", stream=True, max_tokens=_BURST_TOKENS)
            for _ in range(AT_ONCE)
        )
    )
    took = time.monotonic() - began
    first = [one.first_token_s for one in exchanges if one.first_token_s is not None]
    written = [
        one.answer.usage.completion
        for one in exchanges
        if one.answer is not None and one.answer.usage is not None and one.answer.usage.completion is not None
    ]
    if len(first) < len(exchanges) or len(written) < len(exchanges):
        return settle(
            session,
            exchanges,
            "",
            lambda exchange, answer: (
                [Problem("no counts of tokens in the answer")] if not answer.usage else []
            ),
        )
    rate, ttft = sum(written) / took, statistics.median(first)
    words = f"{len(exchanges)} at once: first token after {latency(ttft)}, {rate:.0f} tokens/s together"
    problems = list(_against_reference(session, rate, ttft))
    if problems:
        words += "; " + "; ".join(problems)
        remedy = "the engine is busy with others, or not as fast as it was: gpuops audit shows what changed"
        return Result("warn", words, evidence(exchanges, exchanges[0]), remedy)
    return settle(session, exchanges, words, lambda exchange, answer: ())


def _against_reference(session: Session, rate: float, ttft: float) -> list[str]:
    profile = session.profile
    figures = profile.reference.results if profile is not None and profile.reference is not None else {}
    problems = []
    for name in _RATE_NAMES:
        if name in figures and rate * _WORSE < figures[name]:
            problems.append(f"the reference has {name} {figures[name]:g}")
    for name in _TTFT_NAMES:
        if name in figures and ttft > figures[name] * _WORSE:
            problems.append(f"the reference has {name} {figures[name]:g}")
    return problems
