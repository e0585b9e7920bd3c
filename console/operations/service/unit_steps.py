"""Steps that concern the unit's file and its auto-start: check the plan, write, read in, enable."""

from __future__ import annotations

from console.operations.service.request import ServiceRequest
from console.operations.service.world import (
    PREVIOUS,
    file_now,
    is_new_run,
    loaded,
    put_file,
    reload_units,
    sweep,
    systemctl,
    unit_now,
)
from console.operations.step import Context, Step, StepFailed

#: States of a unit file that ``systemctl enable`` brings about.
_ENABLED = frozenset({"enabled", "enabled-runtime"})

_CHANGED = "the unit was changed since the plan was made: {path} is left as it is; look at it, then plan anew"


class Check(Step):
    """First of all: the world is still the one that the plan was made for."""

    id = "check"
    deadline = 30.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = "check that the unit is as the plan saw it"

    async def done(self, context: Context) -> str | None:
        # Looked at before the step counts as begun: a job that is refused here has changed nothing.
        request = self._request
        text = await file_now(context, request)
        # A job that goes on after a crash finds what it wrote itself.
        if text != request.old_text and not (request.replaces and text == request.new_text):
            raise StepFailed(_CHANGED.format(path=request.path))
        return f"{request.path} is unchanged" if text is not None else f"{request.path} is not there yet"

    async def do(self, context: Context) -> None:
        """There is never anything left to do."""

    async def verify(self, context: Context) -> str:
        return await self.done(context) or ""


class Disable(Step):
    """No auto-start while nothing is proven: a host that restarts in the middle starts nothing by itself."""

    id = "disable"
    deadline = 60.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = f"disable {request.unit} until the new profile is proven"
        self.undo_words = f"enable {request.unit} again" if request.was_enabled else None

    async def done(self, context: Context) -> str | None:
        unit = await unit_now(context)
        if unit.unit_file_state not in _ENABLED:
            return f"{unit.id} is {unit.unit_file_state or 'not installed'}"
        # A job that goes on after a crash may already have proven the new profile.
        return "the new run is under way" if await is_new_run(context, self._request, unit) else None

    async def do(self, context: Context) -> None:
        if (await unit_now(context)).unit_file_state in _ENABLED:
            await systemctl(context, "disable", "--", self._request.unit)

    async def verify(self, context: Context) -> str:
        state = (await unit_now(context)).unit_file_state
        if state in _ENABLED:
            raise StepFailed(f"{self._request.unit} is still {state}")
        return f"{self._request.unit} is {state or 'not installed'}"

    async def undo(self, context: Context) -> str:
        if not self._request.was_enabled:
            return "auto-start was off before"
        return await enable(context, self._request)


class Write(Step):
    """The new text takes the place of the old in one move, and systemd reads it."""

    id = "write"
    deadline = 90.0
    undo_deadline = 90.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        self.words = f"write {request.path}"
        self.undo_words = (
            f"remove {request.path}, daemon-reload"
            if request.old_text is None
            else f"put back {request.path} as it was, daemon-reload"
        )

    async def done(self, context: Context) -> str | None:
        if await file_now(context, self._request) != self._request.new_text:
            return None
        return f"{self._request.path} has the new text"

    async def do(self, context: Context) -> None:
        request = self._request
        text = await file_now(context, request)
        if text == request.new_text:
            return
        if text != request.old_text:
            raise StepFailed(_CHANGED.format(path=request.path))
        await put_file(context, request, request.new_text)

    async def verify(self, context: Context) -> str:
        request = self._request
        text = await file_now(context, request)
        if text is None or text != request.new_text:
            raise StepFailed(f"{request.path} does not hold what was written")
        problem = differs(text, request)
        if problem is not None:
            raise StepFailed(f"{request.path} does not read back as the profile: {problem}")
        kept = "" if request.old_text is None else f"; the version before is in {request.path}{PREVIOUS}"
        return f"it reads back as profile {request.new.name if request.new else '?'}{kept}"

    async def undo(self, context: Context) -> str:
        request = self._request
        await sweep(context, request)
        text = await file_now(context, request)
        if text != request.old_text:
            if text != request.new_text:
                raise StepFailed(
                    f"{request.path} was changed by somebody else while the job ran; it is left as it is"
                )
            await put_file(context, request, request.old_text)
            if await file_now(context, request) != request.old_text:
                raise StepFailed(f"{request.path} is not what it was")
        read = await reload_units(context)
        return f"{request.path} is as it was; {read}"


class Reload(Step):
    """systemd reads the new text."""

    id = "reload"
    words = "daemon-reload"
    deadline = 60.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request

    async def do(self, context: Context) -> None:
        await systemctl(context, "daemon-reload")

    async def verify(self, context: Context) -> str:
        return await loaded(context)


class Enable(Step):
    """The change is proven: from now on the host starts it by itself."""

    id = "enable"
    deadline = 60.0

    def __init__(self, request: ServiceRequest) -> None:
        self._request = request
        if request.enable:
            self.words = f"enable {request.unit}: it starts with the machine"
            self.undo_words: str | None = f"disable {request.unit}"
        else:
            self.words = f"leave {request.unit} disabled, as it was"
            self.undo_words = None

    async def do(self, context: Context) -> None:
        if self._request.enable:
            await enable(context, self._request)

    async def verify(self, context: Context) -> str:
        state = (await unit_now(context)).unit_file_state
        if self._request.enable and state not in _ENABLED:
            raise StepFailed(f"{self._request.unit} is {state or 'not installed'}, not enabled")
        return f"{self._request.unit} is {state or 'not installed'}"

    async def undo(self, context: Context) -> str:
        if not self._request.enable:
            return "auto-start was left as it was"
        if (await unit_now(context)).unit_file_state in _ENABLED:
            await systemctl(context, "disable", "--", self._request.unit)
        return f"{self._request.unit} does not start by itself"


async def enable(context: Context, request: ServiceRequest) -> str:
    """Auto-start, and a look whether it is on: the evidence. StepFailed."""
    if (await unit_now(context)).unit_file_state not in _ENABLED:
        await systemctl(context, "enable", "--", request.unit)
    state = (await unit_now(context)).unit_file_state
    if state not in _ENABLED:
        raise StepFailed(f"{request.unit} is {state or 'not installed'} after systemctl enable")
    return f"{request.unit} is {state}"


def differs(text: str, request: ServiceRequest) -> str | None:
    """In what a unit's text differs from the profile it was written from; None when in nothing."""
    from console.model.managed_unit import parse

    if request.new is None:
        return None
    unit = parse(text)
    if not unit.managed or unit.edited or unit.profile != request.new.name:
        return "its first line is not the one that was written"
    if unit.argv[-len(request.new.argv()) :] != request.new.argv():
        return "its command line is another"
    environment = {name: unit.environment.get(name) for name in request.new.env}
    return None if environment == dict(request.new.env) else "its environment is another"
