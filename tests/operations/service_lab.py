"""A box in a process of its own, quick enough for many switches, and jobs that are killed at any point."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import console.checks.smoke  # noqa: F401  imported once here, not in every process that is forked
from console.model.operation import (
    Actor,
    Direction,
    Event,
    JobEnd,
    JobStart,
    JobView,
    Plan,
    Progress,
    StepEvent,
)
from console.model.profile import Profile
from console.model.site import Site
from console.operations import context as contexts
from console.operations.job import carry_on
from console.operations.registry import steps_of
from console.operations.service import plan_switch
from console.operations.service.request import request_of
from console.operations.step import Context
from console.simulator.box import Box
from console.sources.files import load_profiles, load_site, shipped_profiles_directory
from console.store.job_directory import JobFile, SiteFile, create_job, journal_path, new_id
from console.store.jobs import get_job
from console.store.journal import Journal
from console.store.state import State, state_of
from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.runner import Result, Runner

UNIT = "/etc/systemd/system/sglang.service"

#: What changes something on the service's machine: a process may die just before and just after each.
_CHANGING = frozenset(
    {"dd", "mv", "cp", "chmod", "rm", "kill", "qm", "pct", "modprobe", "nvidia-smi", "nvidia-modprobe"}
)
_VERBS = frozenset({"stop", "start", "enable", "disable", "daemon-reload", "reset-failed"})


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Shorten the waits of both sides; what is waited for stays the same."""
    patch.setattr("console.simulator.chat.SINGLE_TOKENS_PER_S", 50_000.0)
    patch.setattr("console.simulator.traffic.SINGLE_TOKENS_PER_S", 5_000.0)
    patch.setattr("console.simulator.box.TICK_S", 0.03)
    patch.setattr("console.simulator.nvml.PERIOD_S", 0.05)
    patch.setattr("console.simulator.service.HISTORY_S", 5.0)
    patch.setattr("console.simulator.engine.HEALTH_S", 0.02)
    patch.setattr("console.sources.monitor.DRAW_S", 0.0)
    patch.setattr("console.sources.engine.sources.ModelsSource.period", 0.1)
    patch.setattr("console.sources.engine.sources.HealthSource.period", 0.5)
    patch.setattr("console.operations.service.world.BEAT_S", 0.02)
    patch.setattr("console.operations.service.following.LINES_S", 1.0)
    patch.setattr("console.sources.unit.UnitSource.__init__", _hasty_unit)


def _hasty_unit(self: object, runner: Runner, unit: str, period: float = 0.1) -> None:
    from console.sources.unit import SystemctlShow, UnitSource

    assert isinstance(self, UnitSource)
    self.period = period
    self.deadline = 3.0
    self._units = (unit,)
    self._show = SystemctlShow(runner)


class ServiceLab:
    """One box, its site, its state directory. ``profiles`` are the shipped ones and any others given."""

    def __init__(self, directory: Path, *faults: str, speed: float = 3000.0) -> None:
        self.directory = directory
        self._pid = _fork(lambda: _live(directory / "box", faults, speed))
        site = directory / "box/site.yaml"
        _until(site.exists, 15.0)
        self.site: Site = load_site(site)
        self.site_path = site
        self.profiles: tuple[Profile, ...] = load_profiles([shipped_profiles_directory()]).profiles
        self.state = state_of(self.site, {}, os.geteuid())
        self.runner = BoxRunner(directory / "box")
        self.container = lxc(self.runner, 129)
        self.rootfs = directory / "box/root/var/lib/lxc/129/rootfs"

    def close(self) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)

    # The world, read past gpuops ----------------------------------------------------------------

    @property
    def text(self) -> str:
        return (self.rootfs / UNIT.lstrip("/")).read_text()

    @text.setter
    def text(self, text: str) -> None:
        (self.rootfs / UNIT.lstrip("/")).write_text(text)

    @property
    def leftovers(self) -> list[str]:
        folder = (self.rootfs / UNIT.lstrip("/")).parent
        return [path.name for path in folder.iterdir() if path.name.endswith(".gpuops-new")]

    def inside(self, *argv: str) -> Result:
        return asyncio.run(self.container.run(argv, deadline=10))

    def host(self, *argv: str) -> Result:
        return asyncio.run(self.runner.run(argv, deadline=10))

    def write(self, path: str, value: str) -> None:
        """To a file of the host's kernel, past gpuops."""
        command = ("dd", f"of={path}", "conv=nocreat,notrunc", "status=none")
        result = asyncio.run(self.runner.run(command, deadline=10, stdin=value.encode()))
        assert result.ok, result.reason

    def property(self, name: str) -> str:
        shown = self.inside("systemctl", "show", "sglang.service", "-p", name).stdout.decode()
        return shown.strip().partition("=")[2]

    def served(self) -> str | None:
        """The model that answers; None when nobody does."""
        import httpx

        with httpx.Client(base_url=self.site.service.url, timeout=5, trust_env=False) as http:
            try:
                return str(http.get("/v1/models").json()["data"][0]["id"])
            except (httpx.HTTPError, KeyError, IndexError):
                return None

    def profile(self, name: str) -> Profile:
        return next(one for one in self.profiles if one.name.startswith(name))

    # Plans and jobs -----------------------------------------------------------------------------

    def plan(self, make: Callable[[Context], object] | str) -> Plan:
        """A plan made of the world as it is; a name stands for a switch to that profile."""

        async def work() -> Plan:
            async with contexts.opened(self.site, self.profiles, state=self.state) as context:
                made = (
                    plan_switch(context, self.profile(make).name) if isinstance(make, str) else make(context)
                )
                return await made  # type: ignore[misc]

        return asyncio.run(work())

    def again(self, plan: Plan) -> Plan:
        """A plan made earlier, for the run that is there now."""
        request = replace_request(plan, invocation=self.property("InvocationID"))
        return msgspec.structs.replace(plan, request=request)

    def put(self, plan: Plan) -> str:
        """Its job on the disk, whose process died before it could begin."""
        self.state.create()
        now = time.time()
        job = new_id(self.state, plan.action, now)
        file = JobFile(id=job, created_at=now, actor=Actor("tester"), note=None, plan=plan)
        begun = JobStart(at=now, direction="forward", pid=1, start_ticks=0, boot_id="another boot")
        create_job(self.state, file, SiteFile(site=self.site, profiles=self.profiles), begun)
        return job

    def run(
        self, job: str, direction: Direction = "resume", on_point: Callable[[str], None] | None = None
    ) -> int:
        """Carry it on in a forked process: its exit status, negative when a signal ended it."""

        def work() -> int:
            return carry_on(
                self.state,
                job,
                direction,
                steps_of=steps_of,
                opened=_pointed(on_point) if on_point is not None else contexts.opened,
                open_journal=_journal(on_point) if on_point is not None else Journal,
            )

        _, status = os.waitpid(_fork(work), 0)
        return os.waitstatus_to_exitcode(status)

    def run_as_a_program(self, job: str) -> int:
        """Carry it on as the program does, with all that goes on beside its steps."""
        from console.operations.kernel_lines import kept

        def work() -> int:
            return carry_on(self.state, job, "resume", steps_of=steps_of, opened=contexts.opened, beside=kept)

        _, status = os.waitpid(_fork(work), 0)
        return os.waitstatus_to_exitcode(status)

    def carried_out(self, make: Callable[[Context], object] | str) -> tuple[int, JobView]:
        """Plan it and carry it out: the exit status and how the job ended."""
        plan = self.plan(make)
        assert not plan.blocked, [one for one in plan.findings if one.verdict == "fail"]
        job = self.put(plan)
        return self.run(job), get_job(self.state, job)

    def view(self, job: str) -> JobView:
        return get_job(self.state, job)

    def journal_of(self, job: str) -> Path:
        return journal_path(self.state, job)


def replace_request(plan: Plan, **changes: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(request_of(plan), **changes)))


@contextlib.contextmanager
def service_lab(*faults: str, speed: float = 3000.0) -> Iterator[ServiceLab]:
    """A lab in memory where that can be: it ends with all that it left."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    lab = ServiceLab(place, *faults, speed=speed)
    try:
        yield lab
    finally:
        lab.close()
        shutil.rmtree(place)


def _live(directory: Path, faults: Sequence[str], speed: float) -> int:
    async def work() -> None:
        box = Box(directory, speed=speed, faults=tuple(faults), seed=7)
        await box.open()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        try:
            await ended.wait()
        finally:
            await box.close()

    asyncio.run(work())
    return 0


def _fork(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return child


def _until(holds: Callable[[], bool], within: float) -> None:
    ends = time.monotonic() + within
    while not holds():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.01)


# Points ------------------------------------------------------------------------------------------


class _Noisy:
    """A runner that names a point before and after each command that changes something."""

    def __init__(self, runner: Runner, at: Callable[[str], None]) -> None:
        self._runner = runner
        self._at = at
        self.name = runner.name
        self.root = runner.root

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        changing = argv[0] in _CHANGING or (argv[0] == "systemctl" and argv[1] in _VERBS)
        name = " ".join(argv[:2]) if argv[0] in ("systemctl", "qm", "pct") else argv[0]
        if changing:
            self._at(f"before {name}")
        result = await self._runner.run(argv, deadline=deadline, stdin=stdin)
        if changing:
            self._at(f"after {name}")
        return result

    def stream(self, argv: Sequence[str]) -> object:
        return self._runner.stream(argv)


def _pointed(at: Callable[[str], None]) -> Callable[..., object]:
    @asynccontextmanager
    async def opened(site: Site, profiles: tuple[Profile, ...], *, state: State) -> AsyncIterator[Context]:
        async with contexts.opened(site, profiles, state=state) as context:
            sources = context.monitor.sources
            context.monitor.sources = replace(
                sources, service=_Noisy(sources.service, at), host=_Noisy(sources.host, at)
            )
            yield context

    return opened


def _journal(at: Callable[[str], None]) -> Callable[[Path], Journal]:
    class Pointed(Journal):
        """A point before each event of a step and after it, and one while a step waits."""

        _told: str | None = None

        def append(self, event: Event, *, sync: bool = True) -> None:
            name = f"{event.step} {event.state}" if isinstance(event, StepEvent) else type(event).__name__
            told = isinstance(event, StepEvent | JobEnd)
            if told:
                at(f"before {name}")
            super().append(event, sync=sync)
            if told:
                at(f"after {name}")
            elif isinstance(event, Progress) and self._told != event.step:
                self._told = event.step
                at(f"while {event.step}")

    return Pointed


#: The steps that always have to wait for a while. Whether another one waits is a matter of the moment.
_SURE_TO_WAIT = frozenset({"free", "ready", "smoke"})


def points_in(notes: Path) -> list[str]:
    """The points that were noted, each once, in order: those that every run comes to."""
    points = dict.fromkeys(notes.read_text().splitlines())
    return [
        point
        for point in points
        if not point.startswith("while ") or point.removeprefix("while ") in _SURE_TO_WAIT
    ]


def noting(notes: Path) -> Callable[[str], None]:
    """Writes every point that is passed to a file, a line each."""

    def note(point: str) -> None:
        with notes.open("a") as file:
            file.write(point + "\n")

    return note


def side_by_side(work: Sequence[Callable[[], None]]) -> None:
    """Do all at once, each in a forked process. AssertionError with what went wrong in any of them."""
    problems: list[Path] = []
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(work):
            told = Path(folder, str(number))
            problems.append(told)

            def tell(one: Callable[[], None] = one, told: Path = told) -> int:
                try:
                    one()
                except BaseException:  # noqa: BLE001  the parent tells it
                    told.write_text(traceback.format_exc())
                    return 1
                return 0

            children.append(_fork(tell))
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        said = [path.read_text() for path in problems if path.exists()]
    assert not any(codes), "\n".join(said) or f"exit statuses {codes}"


def killer(wanted: str) -> Callable[[str], None]:
    """Kills its process when it comes to this point."""

    def kill(point: str) -> None:
        if point == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill
