"""Smoke tests: a server can answer 200 on ``/health`` and speak rubbish; these prompts show it.

``run_smoke`` fires them. Every check gives one finding, whatever happens to the others; the first line of
its evidence is a sentence, the lines after it are timings, one request and what came back for it.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Collection

import msgspec

from console.checks.smoke import plain, speed, tools
from console.checks.smoke.session import Session, Target, target_of
from console.checks.smoke.verdict import Result
from console.model.finding import Finding
from console.model.text import clean

__all__ = [
    "AFTER_START",
    "CHECKS",
    "Check",
    "Started",
    "Target",
    "UnknownCheck",
    "chosen",
    "run_smoke",
    "summary",
    "target_of",
]

#: Seconds for a whole run.
DEADLINE_S = 60.0

#: Seconds at the end of a run in which what is left is aborted.
_CLOSING_S = 3.0


class Started(msgspec.Struct, frozen=True):
    """A check has begun."""

    id: str
    title: str


class UnknownCheck(ValueError):
    """There is no check, and no group of checks, of this name; the message says which there are."""


def _always(session: Session) -> str | None:
    return None


def _with_tools(session: Session) -> str | None:
    if session.expects_tools:
        return None
    if session.profile is not None:
        return f"the profile {session.profile.name} expects no tool calls (expect.tool_calls)"
    return "the engine runs without a tool-call parser" if session.said else "no tool-call parser is known"


def _with_reasoning(session: Session) -> str | None:
    if session.expects_reasoning:
        return None
    if session.profile is not None:
        return f"the profile {session.profile.name} expects no reasoning (expect.reasoning)"
    return "the engine runs without a reasoning parser" if session.said else "no reasoning parser is known"


def _with_cache(session: Session) -> str | None:
    return "the cache is off (--disable-radix-cache)" if session.server.get("disable_radix_cache") else None


def _with_speculation(session: Session) -> str | None:
    if not session.server:
        profile = session.profile
        asked = profile is not None and profile.text("speculative-algorithm") is not None
        return None if asked else "the engine does not say whether it speculates"
    return None if session.identity.speculative_algorithm else "speculation is off"


class Check(msgspec.Struct, frozen=True):
    """One smoke test. ``id`` is stable; ``needs`` says why it does not apply, or None when it does.

    ``alone``: it measures, so it waits until the others are done.
    """

    id: str
    title: str
    ask: Callable[[Session], Awaitable[Result]]
    needs: Callable[[Session], str | None] = _always
    alone: bool = False

    async def run(self, session: Session) -> Finding:
        """The finding. Only a cancellation goes through: a defect in the check is told as one."""
        try:
            missing = self.needs(session)
            result = await self.ask(session) if missing is None else Result("skipped", missing)
        except Exception as defect:  # noqa: BLE001  it is told, and costs this check only
            words = f"defect in the check {self.id}: {type(defect).__name__}: {defect}"
            result = Result("unknown", words, (), "please report it")
        lines = [session.hide(clean(line)) for line in (result.summary, *result.details)]
        return Finding(self.id, self.title, result.verdict, "\n".join(lines), result.remedy)


#: In the order of the table: what decides first, what measures last.
CHECKS: tuple[Check, ...] = (
    Check("served-name", "Served name", plain.served_name),
    Check("parsers", "Parsers", plain.parsers),
    Check("sanity", "Known answers", plain.sanity),
    Check("degenerate", "Sound text", plain.degenerate),
    Check("logprobs", "Log probabilities", plain.logprobs),
    Check("tools-call", "Tool call", tools.one_call, _with_tools),
    Check("reasoning", "Reasoning", plain.reasoning, _with_reasoning),
    Check("tools-parallel", "Two calls at once", tools.parallel, _with_tools),
    Check("tools-unneeded", "No call unless needed", tools.unneeded, _with_tools),
    Check("tools-forced", "Forced call", tools.forced, _with_tools),
    Check("tools-arguments", "Call arguments", tools.arguments, _with_tools),
    Check("tools-result", "Tool round trip", tools.result, _with_tools),
    Check("structured", "JSON schema", plain.structured),
    Check("stop", "Stop string", plain.stop),
    Check("usage", "Token counts", plain.usage),
    Check("prefix-cache", "Prefix cache", speed.prefix_cache, _with_cache),
    Check("speculation", "Speculation", speed.speculation, _with_speculation),
    Check("burst", "Burst", speed.burst, alone=True),
)

#: What decides whether a new model stays: a failure of one of these means that it cannot be used.
AFTER_START = ("served-name", "parsers", "sanity", "degenerate", "logprobs", "reasoning", "tools-call")


def chosen(only: Collection[str]) -> tuple[Check, ...]:
    """The checks of these ids or groups (``tools``: all ``tools-…``), or all. Raises UnknownCheck."""
    names = {check.id for check in CHECKS}
    groups = {name.partition("-")[0] for name in names if "-" in name}
    for name in only:
        if not any(_matches(check, name) for check in CHECKS):
            near = difflib.get_close_matches(name, names | groups, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            listed = ", ".join(check.id for check in CHECKS)
            raise UnknownCheck(f"there is no smoke test {name!r}{hint} There are {listed}")
    return tuple(check for check in CHECKS if not only or any(_matches(check, name) for name in only))


def _matches(check: Check, name: str) -> bool:
    return check.id == name or check.id.startswith(f"{name}-")


def summary(finding: Finding) -> str:
    """The sentence with which a finding's evidence begins."""
    return finding.evidence.partition("\n")[0]


def _no_report(event: Finding | Started) -> None:
    pass


async def run_smoke(
    target: Target,
    *,
    only: Collection[str] = (),
    report: Callable[[Finding | Started], None] = _no_report,
    deadline: float = DEADLINE_S,
) -> tuple[Finding, ...]:
    """Fire the prompts; the findings in the order of CHECKS, within ``deadline`` seconds.

    ``report`` hears of every check as it starts and ends. What is not done at the deadline is a finding of
    its own, verdict ``unknown``. When this is cancelled, and at the deadline, the requests that are still
    with the engine are aborted there. Raises UnknownCheck, and nothing else.
    """
    checks = chosen(only)
    session = Session(target)
    found: dict[str, Finding] = {}

    def tell(finding: Finding) -> None:
        found[finding.id] = finding
        report(finding)

    async def one(check: Check) -> None:
        report(Started(check.id, check.title))
        tell(await check.run(session))

    try:
        async with asyncio.timeout(max(0.1, deadline - _CLOSING_S)):
            await session.look()
            await _together([one(check) for check in checks if not check.alone])
            for check in checks:
                if check.alone:
                    await one(check)
    except TimeoutError:
        for check in checks:
            if check.id not in found:
                words = f"not finished within {deadline:g} s"
                remedy = "the engine is slow or busy: try again, or --only this one"
                tell(Finding(check.id, check.title, "unknown", words, remedy))
    finally:
        await session.close()
    return tuple(found[check.id] for check in checks)


async def _together(work: list[Awaitable[None]]) -> None:
    """All at once; when we are cancelled, so are they, and waited for."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(_awaited(one))


async def _awaited(one: Awaitable[None]) -> None:
    await one
