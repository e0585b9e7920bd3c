"""Follows one run of the engine until it is ready, in words for whoever watches, or says why it never was."""

from __future__ import annotations

import asyncio

import msgspec

from console.model.log import Crash, LoadProgress
from console.model.snapshot import Snapshot
from console.model.text import clean
from console.model.unit import UnitStatus
from console.model.words import span
from console.operations.service import world
from console.operations.service.world import ENDED, SILENCE_S
from console.operations.step import Context, StepFailed
from console.sources.engine.identity import model_list
from console.sources.engine.sources import describe
from console.sources.listeners import Listener, listeners
from console.sources.source import Unavailable

#: Seconds for the engine's own check, which generates a token; it gives up after 20 s itself.
HEALTH_S = 25.0
MODELS_S = 5.0

#: Seconds for which a run may look hung before it counts as that: a warm-up has long silences.
HUNG_S = 60.0

#: Seconds that the journal has to bring the lines that tell why an engine died.
LINES_S = 4.0

#: States that the monitor derives for a run that serves; cards may have something to say against it.
_SERVES = frozenset({"ready", "busy", "degraded"})


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has to come to. ``profile`` is its name, by which loads of the past are known.

    ``before`` is the invocation that the unit had before its start was asked for: what is read of
    that one was asked too early, and says nothing of the run that is followed. None: there was none.
    """

    unit: str
    profile: str | None
    served_name: str | None
    limit_s: float
    before: str | None = None


async def follow_to_ready(context: Context, wanted: Followed) -> str:
    """Until the unit's present run is ready: the evidence. StepFailed with the root cause when it dies.

    Ready: the unit runs on, ``/v1/models`` names the served model, a process of the unit itself
    owns the listening socket, and ``/health`` says 200. Not the log's word, and no lone 200.
    """
    follower = _Follower(context, wanted)
    while not follower.late:
        unit = await follower.look()
        evidence = None if unit is None else await follower.ready()
        if evidence is not None:
            return evidence
        await asyncio.sleep(world.BEAT_S)
    raise follower.too_late()


class _Follower:
    def __init__(self, context: Context, wanted: Followed) -> None:
        self._context = context
        self._wanted = wanted
        self._began = self._heard = self._met = context.clock()
        self._began_wall = context.wall_clock()
        self._invocation: str | None = None
        self._started_at: float | None = None  # Unix seconds, of the unit's main process
        self._hung_since: float | None = None
        self._doubt: UnitStatus | None = None  # the last look, where it showed a run that is over
        self._lacks = "the unit has not been read yet"

    @property
    def late(self) -> bool:
        return self._context.clock() - self._began > self._wanted.limit_s

    async def look(self) -> UnitStatus | None:
        """The unit, still in the run that is followed; None when this look does not tell.

        That is when systemctl gives no answer, when the answer is of the run before, and the first
        time that the run looks dead. StepFailed when two looks in a row say that it is over.
        """
        context = self._context
        try:
            unit = await context.monitor.sources.unit.read()
        except Unavailable as problem:
            if context.clock() - self._heard > SILENCE_S:
                raise StepFailed(f"systemctl does not answer for a minute: {problem}") from None
            return None
        now = self._heard = context.clock()
        if self._is_before(unit.invocation_id):
            if now - self._met > SILENCE_S:
                raise StepFailed(
                    f"{unit.id} was not started: for a minute systemctl tells of the run before only, "
                    f"which is {unit.active_state}"
                )
            context.say("waiting for the first word of the new run")
            return None
        self._met = now
        doubt, self._doubt = self._doubt, None
        if self._is_over(unit, doubt):
            if doubt is None:
                self._doubt = unit  # what comes next agrees, or shows that this look came too early
                return None
            raise await self._over(doubt, unit)
        if self._invocation is None:
            self._invocation, self._started_at = unit.invocation_id, unit.started_at
        snapshot = context.monitor.snapshot()
        if self._is_ours(snapshot):
            # Its own lines say that it died. The unit itself may go on for a while: workers die first.
            if snapshot.state.name in ("crashed", "crash-looping") and self._crash() is not None:
                raise await self._over(unit, unit)
            self._note_hung(snapshot)
        self._tell(snapshot)
        return unit

    async def ready(self) -> str | None:
        """The evidence that the run is ready; None when it is not yet."""
        context, wanted = self._context, self._wanted
        client = context.monitor.sources.client
        answer = await client.get("/v1/models", MODELS_S)
        if not answer.probe.ok:
            self._lacks = describe(answer.probe)
            return None
        names = [name for name, _ in model_list(answer.body)]
        owners = await self._owners()
        strangers = [owner for owner in owners if not owner.own]
        if owners and len(strangers) == len(owners):
            self._lacks = f"the port belongs to {_named(strangers[0])}"
            return None
        if wanted.served_name is not None and wanted.served_name not in names:
            self._lacks = f"it serves {', '.join(names) or 'nothing'}, not {wanted.served_name}"
            if owners:  # it is the unit's own word, which will not change
                raise StepFailed(
                    f"the engine serves {', '.join(names) or 'nothing'}, not {wanted.served_name}"
                )
            return None
        health = await client.get("/health", HEALTH_S)
        if not health.probe.ok:
            self._lacks = describe(health.probe)
            return None
        if not owners:
            self._lacks = "no process of the unit was found that owns the listening socket"
            return None
        if await self.look() is None:  # it answers, and the same run still runs
            return None
        return self._evidence(", ".join(names), health.probe.seconds)

    def too_late(self) -> StepFailed:
        """Not ready within the time that the profile gives: where it stands, and its last words."""
        snapshot = self._context.monitor.snapshot()
        lines = tuple(line.text for line in snapshot.log[-12:] if line.kind != "noise")
        where = snapshot.state.words.lower() if self._is_ours(snapshot) else "not seen to load"
        return StepFailed(
            f"not ready after {self._wanted.limit_s:.0f} s: {where}; {self._lacks} "
            "(load.timeout_s in the profile)",
            lines,
        )

    async def _owners(self) -> tuple[Listener, ...]:
        site = self._context.site
        container = site.container.id if site.container.kind == "lxc" else None
        port = port_of(site.service.url)
        root = self._context.host.root
        return await asyncio.to_thread(listeners, root, port, container=container, unit=site.service.unit)

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """Whether the monitor has seen the run that is followed."""
        seen = snapshot.unit.value
        return seen is not None and self._invocation is not None and seen.invocation_id == self._invocation

    def _is_over(self, unit: UnitStatus, doubt: UnitStatus | None) -> bool:
        """Whether this look shows the run ended, ending or followed by another.

        ``doubt`` is a look that showed the same just before. Where the run had not been seen alive
        by then, another one now is what was started, unless systemd counts a restart between them.
        """
        if unit.active_state in ENDED or unit.sub_state.startswith("auto-restart"):
            return True
        if unit.active_state == "deactivating" and unit.result == "success":
            return True
        if self._invocation is not None:
            return unit.invocation_id not in (None, self._invocation)
        return doubt is not None and _restarted(doubt, unit)

    def _note_hung(self, snapshot: Snapshot) -> None:
        now = self._context.clock()
        if snapshot.state.name != "hung":
            self._hung_since = None
        elif self._hung_since is None:
            self._hung_since = now
        elif now - self._hung_since > HUNG_S:
            raise StepFailed(f"hung: {'; '.join(snapshot.state.reasons)}", _last_lines(snapshot))

    async def _over(self, first: UnitStatus, unit: UnitStatus) -> StepFailed:
        """Why the run ended: the root cause in the engine's own lines, else what systemd says.

        ``first`` and ``unit`` are the two looks that agree on it, in their order.
        """
        if first.active_state == "deactivating" and unit.result == first.result == "success":
            return StepFailed(f"somebody stopped {unit.id} while it was loading")
        if self._invocation is None:  # it died before it was ever seen alive
            self._invocation = first.invocation_id
        ends = self._context.clock() + LINES_S
        crash = self._crash()
        while crash is None and self._context.clock() < ends:
            await asyncio.sleep(min(world.BEAT_S, 0.2))
            crash = self._crash()
        if crash is not None:
            remedy = f" ({crash.remedy})" if crash.remedy else ""
            return StepFailed(f"the engine died: {crash.reason}{remedy}", crash.lines)
        # A run that followed it says nothing of how it ended.
        told = first if first.result != "success" else unit
        status = "" if told.exit_status is None else f", exit status {told.exit_status}"
        if told.result == "success" and told.active_state == "inactive":
            return StepFailed(f"{unit.id} was stopped while it was loading{status}")
        return StepFailed(
            f"{unit.id} ended while it was loading: {_how(told, unit)}{status}",
            _last_lines(self._context.monitor.snapshot()),
        )

    def _crash(self) -> Crash | None:
        """The crash of the run that is followed; of a later attempt of it when its own is not kept."""
        load = self._context.monitor.load
        seen: list[LoadProgress] = [one for one in (load.progress, load.previous) if one is not None]
        own = [one.crash for one in seen if one.crash and one.invocation == self._invocation]
        later = [
            one.crash
            for one in seen
            if one.crash and one.crash.at >= self._began_wall - 1.0 and not self._is_before(one.invocation)
        ]
        return next(iter((*own, *later)), None)

    def _is_before(self, invocation: str | None) -> bool:
        """Whether this is the run before the start, whose death is no news of the one that is followed."""
        return invocation is not None and invocation == self._wanted.before

    def _tell(self, snapshot: Snapshot) -> None:
        if not self._is_ours(snapshot):
            self._context.say("waiting for the first word of the new run")
            return
        state = snapshot.state
        if state.name in _SERVES:
            self._context.say("it answers; asking whether it generates")
            return
        words = [state.words.lower()]
        if state.detail:
            words.append(state.detail)
        if state.elapsed_s is not None:
            words.append(f"{span(state.elapsed_s)} so far")
        words += state.reasons
        self._context.say(clean(", ".join(words)), percent=state.percent, eta_s=state.eta_s)

    def _evidence(self, names: str, seconds: float) -> str:
        took = ""
        if self._started_at is not None:
            took = f" {max(0.0, self._context.wall_clock() - self._started_at):.0f} s after its start"
        return f"ready{took}: serves {names}, the unit owns the port, /health 200 in {seconds:.1f} s"


def _restarted(first: UnitStatus, then: UnitStatus) -> bool:
    """Whether systemd itself began another run between two looks."""
    return first.restarts is not None and then.restarts is not None and then.restarts > first.restarts


def _how(told: UnitStatus, now: UnitStatus) -> str:
    """How a run ended in systemd's words; ``now`` is the latest look, which may show another run."""
    if told.active_state in world.RUNNING and not told.sub_state.startswith("auto-restart"):
        count = f" (restart {now.restarts})" if now.restarts else ""
        return f"another run has taken its place{count}"
    return f"{told.active_state}, result {told.result}"


def port_of(url: str) -> int:
    """The TCP port of an http or https address."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _named(owner: Listener) -> str:
    return owner.name if owner.pid is None else f"{owner.name} (pid {owner.pid})"


def _last_lines(snapshot: Snapshot) -> tuple[str, ...]:
    return tuple(line.text for line in snapshot.log[-60:] if line.kind not in ("noise", "prefill", "decode"))[
        -12:
    ]
