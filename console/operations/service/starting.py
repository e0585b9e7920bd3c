"""Steps that bring the engine up: start it, follow its load until it is ready, ask it a few questions."""

from __future__ import annotations

from console.model.finding import Finding
from console.model.profile import Load, Profile
from console.model.unit import UnitStatus
from console.operations.service.following import Followed, follow_to_ready
from console.operations.service.request import ServiceRequest
from console.operations.service.world import (
    ENDED,
    RUNNING,
    file_now,
    is_new_run,
    patience_of,
    systemctl,
    unit_now,
    wait_cards_free,
    wait_for_unit,
    wait_inactive,
)
from console.operations.step import Context, Step, StepFailed

#: Seconds that systemd may take to execute the unit's program.
EXECUTE_S = 60.0

#: Seconds that the smoke checks have, and the longest that a stop on the way back waits for free cards.
SMOKE_S = 90.0
FREE_S = 90.0

#: What one start must show before it counts as ready: that a real generation comes back and makes sense.
GENERATION = ("sanity",)


class Start(Step):
    """``start --no-block``, and a look that another run has begun."""

    id = "start"
    deadline = EXECUTE_S + 60.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = f"start {request.unit}"
        self.undo_words = f"stop {request.unit} again and wait for free cards"
        self.undo_deadline = patience_of(request.stop_timeout_s) + FREE_S + 60.0

    async def done(self, context: Context) -> str | None:
        unit = await unit_now(context)
        if not _runs(unit) or not await is_new_run(context, self._request, unit):
            return None
        return f"{unit.id} is {unit.active_state}, pid {unit.main_pid}"

    async def do(self, context: Context) -> None:
        if await self.done(context) is None:
            await start(context, self._request)

    async def verify(self, context: Context) -> str:
        unit = await unit_now(context)
        if unit.active_state in RUNNING:
            return f"{unit.id} is {unit.active_state}, pid {unit.main_pid}"
        # It may have died already; the next step finds out why, from the journal.
        return f"{unit.id} was started and is {unit.active_state} ({unit.result}) already"

    async def undo(self, context: Context) -> str:
        request = self._request
        unit = await unit_now(context)
        if request.replaces and await file_now(context, request) != request.new_text:
            return "what runs is not the new profile"
        # A start that is queued only has not taken hold yet: a stop takes it back.
        if unit.active_state not in ENDED or unit.tasks or unit.job:
            await systemctl(context, "stop", "--no-block", "--", request.unit)
        ended = await wait_inactive(context, request)
        return f"{ended}; {await wait_cards_free(context, request, FREE_S)}"


async def start(context: Context, request: ServiceRequest) -> str | None:
    """Start the unit, whatever kept it from starting before, and wait until its program runs. StepFailed.

    Returns the invocation that the unit had before: what is read of that one was asked for too early.
    """
    unit = await unit_now(context)
    before = unit.invocation_id
    if _runs(unit) and before != request.invocation:
        return None  # a start that was asked for earlier took hold just now: there is no other to wait for
    if unit.load_state != "loaded":
        raise StepFailed(f"{request.unit} cannot be started: it is {unit.load_state}")
    await _forget_starts(context, request)
    await systemctl(context, "start", "--no-block", "--", request.unit)

    async def begun(found: UnitStatus) -> bool:
        return found.invocation_id not in (None, before)

    if await wait_for_unit(context, begun, EXECUTE_S) is None:
        unit = await unit_now(context)
        raise StepFailed(
            f"{request.unit} was not started within {EXECUTE_S:.0f} s: it is {unit.active_state}"
        )
    return before


def _runs(unit: UnitStatus) -> bool:
    return unit.active_state in RUNNING and not unit.sub_state.startswith("auto-restart")


async def _forget_starts(context: Context, request: ServiceRequest) -> None:
    """The count of starts that systemd remembers is that of the run before. StepFailed."""
    try:
        await systemctl(context, "reset-failed", "--", request.unit)
    except StepFailed as failed:
        # A unit that has ended and is disabled, or was just written, nothing holds in systemd's memory: it
        # has no count. Its show loads it for a moment only (systemd.unit(5), "garbage collected").
        if "not loaded" not in str(failed):
            raise


class Ready(Step):
    """Follows the phases of the load; ready is what answers, generates and owns the port itself."""

    id = "ready"

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        profile = request.new
        limit = ready_limit(profile)
        named = f" as {profile.served_name}" if profile is not None and profile.served_name else ""
        self.words = f"follow the load until it is ready{named} (at most {limit:.0f} s)"
        self.deadline = limit + 60.0

    async def do(self, context: Context) -> None:
        """Waiting is all there is to do."""

    async def verify(self, context: Context) -> str:
        request = self._request
        return await follow_to_ready(context, followed(request, request.new, before=request.invocation))


class Smoke(Step):
    """The smoke checks that decide whether a model can be used. A failed one sends the new model back."""

    id = "smoke"
    deadline = SMOKE_S + 15.0

    def __init__(self, request: ServiceRequest, only: tuple[str, ...]) -> None:
        self._request = request
        self._only = only
        self.words = f"smoke checks: {', '.join(only)}"

    async def do(self, context: Context) -> None:
        """Nothing is changed."""

    async def verify(self, context: Context) -> str:
        return await ask_questions(context, self._request.new, self._only)


async def ask_questions(context: Context, profile: Profile | None, only: tuple[str, ...]) -> str:
    """Run these smoke checks: the evidence. StepFailed with the evidence of those that failed."""
    from console.checks.smoke import Started, run_smoke, summary, target_of

    total = len(only)
    answered = 0

    def report(event: Finding | Started) -> None:
        nonlocal answered
        if isinstance(event, Finding):
            answered += 1
        context.say(f"{event.title.lower()}", percent=100.0 * answered / total if total else None)

    target = target_of(context.site, profile)
    found = await run_smoke(target, only=only, report=report, deadline=SMOKE_S)
    bad = [one for one in found if one.verdict == "fail"]
    if not bad:
        # A busy engine leaves a check unknown: that is no reason to take a working model away,
        # unless no check at all could be carried out.
        bad = [one for one in found if one.verdict == "unknown"] if not _any_passed(found) else []
    if bad:
        lines = [line for one in bad for line in (f"{one.title}:", *one.evidence.splitlines()[:12])]
        remedies = [f"remedy: {one.remedy}" for one in bad if one.remedy]
        reason = "; ".join(f"{one.id}: {summary(one)}" for one in bad)
        raise StepFailed(f"smoke checks failed: {reason}", (*lines, *remedies))
    passed = sum(one.verdict == "pass" for one in found)
    rest = [f"{one.id} {one.verdict}" for one in found if one.verdict not in ("pass", "skipped")]
    return f"{passed} smoke checks passed" + (f" ({', '.join(rest)})" if rest else "")


def _any_passed(found: tuple[Finding, ...]) -> bool:
    return any(one.verdict == "pass" for one in found)


def followed(request: ServiceRequest, profile: Profile | None, *, before: str | None = None) -> Followed:
    """What a load has to come to. ``before`` is the invocation that the unit had before its start."""
    return Followed(
        unit=request.unit,
        profile=profile.name if profile is not None else None,
        served_name=profile.served_name if profile is not None else None,
        limit_s=ready_limit(profile),
        before=before,
    )


def ready_limit(profile: Profile | None) -> float:
    """Seconds past which a load counts as failed."""
    return (profile.load if profile is not None else Load()).timeout_s


async def bring_back(context: Context, request: ServiceRequest, only: tuple[str, ...]) -> str:
    """Start what ran before the switch and wait until it is ready again: the evidence. StepFailed.

    Its file must be the old one again. A run of it that has begun already is only followed.
    """
    text = await file_now(context, request)
    if text != request.old_text:
        raise StepFailed(f"{request.path} is not what it was: {request.unit} is not started")
    unit = await unit_now(context)
    # "active" with a job: a stop is queued, such as that of a job that died just after it.
    going = unit.active_state == "deactivating" or (unit.active_state == "active" and unit.job is not None)
    if going or unit.sub_state.startswith("auto-restart"):
        await systemctl(context, "stop", "--no-block", "--", request.unit)
        await wait_inactive(context, request)
        unit = await unit_now(context)
    before = None if unit.active_state in RUNNING else await start(context, request)
    ready = await follow_to_ready(context, followed(request, request.old, before=before))
    return f"{ready}; {await ask_questions(context, request.old, only)}"
