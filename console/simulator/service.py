"""The engine's unit: how systemd starts, stops, restarts and gives up on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from pathlib import Path

from console.simulator import definition
from console.simulator.cards import Cards
from console.simulator.clock import Clock
from console.simulator.engine import Engine
from console.simulator.faults import Faults
from console.simulator.journal import Journal
from console.simulator.load import UNBALANCED, Source, Step, duration, port_taken, steps
from console.simulator.machine import GIB, READY_SINCE_S
from console.simulator.processes import Engine as EngineProcesses
from console.simulator.processes import Processes
from console.simulator.spec import EngineSpec, spec_of
from console.simulator.systemd import Unit, span

RESTART_S = 15.0
DRAIN_S = 2.0
STOP_TIMEOUT_S = 90.0
START_LIMIT_S = 3600.0
START_LIMIT_BURST = 3

#: Seconds of traffic that lie in the journal when the box starts.
HISTORY_S = 180.0

#: Seconds since the container's files were written, when the box starts.
FILES_WRITTEN_S = 30 * 86400.0

#: However fast the box runs, its own work takes time between two starts.
_SHORTEST_LIMIT_S = 10.0

#: Memory of the engine's processes without the host cache, bytes.
_PROCESS_MEMORY = 46 * GIB

_TOO_OFTEN = """\
Job for {unit} failed because start of the service was attempted too often.
See "systemctl status {unit}" and "journalctl -xeu {unit}" for details.
To force a start use "systemctl reset-failed {unit}"
followed by "systemctl start {unit}" again.
"""


class EngineService:
    """``sglang.service`` in the container. Loads and stops run ``speed`` times as fast as real ones."""

    def __init__(
        self,
        *,
        rootfs: Path,
        engine: Engine,
        journal: Journal,
        processes: Processes,
        cards: Cards,
        faults: Faults,
        rng: random.Random,
        clock: Clock,
        speed: float,
    ) -> None:
        self.unit = Unit(definition.UNIT, "SGLang inference server")
        self.pinned_bytes = 0
        self.port = 0
        self._rootfs = rootfs
        self._engine = engine
        self._journal = journal
        self._processes = processes
        self._cards = cards
        self._faults = faults
        self._rng = rng
        self._clock = clock
        self._speed = speed
        self._lock = asyncio.Lock()
        self._run: EngineProcesses | None = None
        self._life: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[tuple[int, str]]] = set()
        self._starts: deque[float] = deque(maxlen=START_LIMIT_BURST)
        self._next_job = 4_117
        self._definition: definition.Definition | None = None

    # For the box -------------------------------------------------------------------------------

    async def revive(self, port: int) -> None:
        """The service as it is after hours of work: ready, its load and its last minutes in the journal."""
        now = self._clock.wall()
        self.port = await self._engine.bind(port)
        definition.install(self._rootfs)
        for path in self._rootfs.rglob("*"):  # the operator wrote them long before
            os.utime(path, (now - FILES_WRITTEN_S, now - FILES_WRITTEN_S))
        self.reload()
        spec = self._spec()
        ready = now - READY_SINCE_S
        began = ready - duration(spec)
        self._start_run(spec, began)
        at = began
        for step in steps(spec):
            at += step.after
            self._show(step, spec, at)
        self._engine.up(now - HISTORY_S, READY_SINCE_S)
        self._listen(spec.host)
        moment = now - HISTORY_S
        while moment < now - 0.25:
            moment += 0.25
            self._engine.advance(moment)

    def refresh(self, unit: Unit) -> None:
        """Bring the numbers that move up to date."""
        running = unit.active_state in ("active", "deactivating")
        unit.memory_bytes = self.memory_bytes if running else None
        unit.tasks = 1_874 if running else None
        unit.cpu_s = 9.2 * (self._clock.wall() - unit.started_at) if running else None
        known = self._definition.stamp if self._definition else ()
        unit.need_daemon_reload = definition.stamp(self._rootfs) != known

    @property
    def memory_bytes(self) -> int:
        """Host RAM of the engine's processes, its pinned cache included."""
        running = self.unit.active_state in ("active", "deactivating")
        return _PROCESS_MEMORY + self.pinned_bytes if running else 0

    def reload(self) -> None:
        """``daemon-reload``: read the unit's files anew."""
        found = definition.read(self._rootfs)
        self._definition = found
        self.unit.description = found.description
        self._write_properties()

    async def shut_down(self) -> None:
        """The box ends: nothing of the service is left."""
        for task in (*self._jobs, *((self._life,) if self._life else ())):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._engine.close()

    # systemctl ---------------------------------------------------------------------------------

    def start(self) -> asyncio.Task[tuple[int, str]]:
        return self._job(self._start_job())

    def stop(self) -> asyncio.Task[tuple[int, str]]:
        return self._job(self._stop_job())

    def restart(self) -> asyncio.Task[tuple[int, str]]:
        return self._job(self._restart_job())

    def reset_failed(self) -> None:
        self._starts.clear()
        if self.unit.active_state == "failed":
            self.unit.state("inactive", "dead", self._clock.wall())
            self.unit.result = "success"

    def _job(self, work: Coroutine[None, None, tuple[int, str]]) -> asyncio.Task[tuple[int, str]]:
        """A job of the manager: it goes on when the systemctl that asked for it has gone."""
        self._next_job += 97
        number = self._next_job

        async def run() -> tuple[int, str]:
            self.unit.job = number
            async with self._lock:
                try:
                    return await work
                finally:
                    if self.unit.job == number:
                        self.unit.job = 0

        task = asyncio.create_task(run())
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _start_job(self) -> tuple[int, str]:
        if self.unit.active_state == "active":
            return 0, ""
        await self._end_life()  # an automatic restart that waits gives way
        if self.unit.active_state == "failed" and self._too_often():
            self._manager_says(f"{self.unit.id}: Start request repeated too quickly.", 4)
            self._manager_says(f"{self.unit.id}: Failed with result '{self.unit.result}'.", 4)
            self._manager_says(f"Failed to start {self.unit.id} - {self.unit.description}.", 3)
            return 1, _TOO_OFTEN.format(unit=self.unit.id)
        self._starts.clear()
        self._faults.start_by_hand()
        self.unit.restarts = 0
        await self._launch()
        return 0, ""

    async def _stop_job(self) -> tuple[int, str]:
        unit = self.unit
        if unit.active_state == "activating":  # between two automatic restarts
            await self._end_life()
            unit.state("inactive", "dead", self._clock.wall())
            self._manager_says(f"Stopped {unit.id} - {unit.description}.")
            return 0, ""
        if unit.active_state != "active" or self._run is None:
            return 0, ""
        self._manager_says(f"Stopping {unit.id} - {unit.description}...")
        unit.state("deactivating", "stop-sigterm", self._clock.wall())
        await self._end_life()
        left = len(self._engine.traffic.running) if self._engine.traffic else 0
        self._engine.drain()
        for text in (
            "SIGTERM received. signum=None frame=None. Draining requests and shutting down...",
            f"Gracefully exiting... Remaining number of requests {left}. "
            "Remaining requests remaining_rids=[].",
        ):
            self.log(text, "main", 0, None)
        if "hang" in self._faults:  # what the scheduler does not finish is not drained
            await asyncio.sleep(STOP_TIMEOUT_S / self._speed)
            self._manager_says(f"{unit.id}: State 'stop-sigterm' timed out. Killing.", 4)
            self._manager_says(f"{unit.id}: Main process exited, code=killed, status=9/KILL", 5)
            self._manager_says(f"{unit.id}: Failed with result 'timeout'.", 4)
            await self._gone(2, 9)
            unit.result = "timeout"
            unit.state("failed", "failed", self._clock.wall())
            self._manager_says(f"Stopped {unit.id} - {unit.description}.")
            return 0, ""
        await asyncio.sleep(DRAIN_S / self._speed)
        await self._gone(1, 0)
        now = self._clock.wall()
        unit.result = "success"
        unit.state("inactive", "dead", now)
        self._manager_says(f"{unit.id}: Deactivated successfully.")
        self._manager_says(f"Stopped {unit.id} - {unit.description}.")
        self._manager_says(f"{unit.id}: Consumed {span(9.2 * max(1.0, now - unit.started_at))} CPU time.")
        return 0, ""

    async def _restart_job(self) -> tuple[int, str]:
        await self._stop_job()
        return await self._start_job()

    # A run -------------------------------------------------------------------------------------

    async def _launch(self) -> None:
        self._manager_says(f"Starting {self.unit.id} - {self.unit.description}...")
        self._starts.append(self._clock.wall())
        try:
            spec = self._spec()
        except ValueError as problem:
            spec = None
            self._life = asyncio.create_task(self._refused(str(problem)))
        self._start_run(spec, self._clock.wall())
        if spec is not None:
            self._life = asyncio.create_task(self._live(spec))

    def _spec(self) -> EngineSpec:
        """ValueError when the command line is not one the engine takes."""
        assert self._definition is not None
        return spec_of(self._definition.argv, self.port)

    def _start_run(self, spec: EngineSpec | None, at: float) -> None:
        unit = self.unit
        run = self._processes.numbers(spec.tp_size if spec else 1)
        self._run = run
        unit.invocation = f"{self._rng.getrandbits(128):032x}"
        unit.main_pid = unit.exec_pid = run.inner_main
        unit.exit_code = unit.exit_status = 0
        unit.started_at = at
        unit.result = "success"
        unit.state("active", "running", at)
        self._write_properties()
        argv = self._definition.argv if self._definition else ()
        self._processes.start(run, unit.id, argv, self._environ(), at)
        if spec is not None:
            self._engine.start(spec, run.inner_schedulers[0], at)
        self._manager_says(f"Started {unit.id} - {unit.description}.", at=at)

    def _environ(self) -> tuple[str, ...]:
        """What systemd gives the main process: its own variables, then those of the unit."""
        pid = self.unit.main_pid
        given = [
            "LANG=C.UTF-8",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"INVOCATION_ID={self.unit.invocation}",
            f"JOURNAL_STREAM=9:{7_000_000 + pid}",
            f"SYSTEMD_EXEC_PID={pid}",
            *(self._definition.environment if self._definition else ()),
        ]
        return tuple({pair.partition("=")[0]: pair for pair in given}.values())

    async def _refused(self, problem: str) -> None:
        """argparse does not take a flag."""
        await asyncio.sleep(6.0 / self._speed)
        self.log(
            "usage: launch_server.py [-h] --model-path MODEL_PATH [--tokenizer-path TOKENIZER_PATH] ...\n"
            f"launch_server.py: error: {problem}",
            "bare",
            0,
            None,
        )
        await self._died(2)

    async def _live(self, spec: EngineSpec) -> None:
        """Load, then serve until somebody ends it."""
        status = await self._load(spec, self._load_fault())
        if status is not None:
            await self._died(status)

    def _load_fault(self) -> str | None:
        if any(card.foreign_bytes for card in self._cards):
            return UNBALANCED
        return self._faults.load

    async def _load(self, spec: EngineSpec, fault: str | None) -> int | None:
        """The exit status when the load fails, None when the engine is up."""
        due = self._clock.mono()
        script: Iterator[Step] = steps(spec, fault)
        while (step := next(script, None)) is not None:
            due += step.after / self._speed
            wait = due - self._clock.mono()
            if wait > 0.001:
                await asyncio.sleep(wait)
            if step.exit is not None:
                return step.exit
            if step.event == "bind":
                try:
                    await self._engine.bind(self.port)
                except OSError:  # somebody else has the port by now
                    script = port_taken(spec)
                    continue
                self._listen(spec.host)
            now = self._clock.wall()
            self._show(step, spec, now)
            if step.event == "up":
                self._engine.up(now)
        return None

    def _show(self, step: Step, spec: EngineSpec, at: float) -> None:
        if step.memory_gb is not None:
            self._engine.memory_gb = step.memory_gb
        if step.pinned is not None:
            self.pinned_bytes = int(step.pinned * spec.host_gb * 1e9 * spec.tp_size)
        if step.text is not None:
            text = step.text
            if "{main}" in text and self._run is not None:
                text = text.replace("{main}", str(self._run.inner_main))
            if "{client}" in text:
                text = text.replace("{client}", str(self._rng.randint(33_000, 60_900)))
            self.log(text, step.source, step.rank, at)

    def _listen(self, host: str) -> None:
        if self._run is not None:
            self._processes.listen(self._run, host, self.port)

    async def _died(self, status: int) -> None:
        """The main process ended by itself; ``status`` above 128 is a signal."""
        unit = self.unit
        killed = status > 128
        await self._gone(2 if killed else 1, status - 128 if killed else status)
        words = "killed, status=9/KILL" if killed else f"exited, status={status}/{_STATUS.get(status, 'n/a')}"
        unit.result = "signal" if killed else "exit-code"
        self._manager_says(f"{unit.id}: Main process exited, code={words}", 5)
        self._manager_says(f"{unit.id}: Failed with result '{unit.result}'.", 4)
        unit.state("activating", "auto-restart", self._clock.wall())
        await asyncio.sleep(RESTART_S / self._speed)
        unit.restarts += 1
        self._manager_says(f"{unit.id}: Scheduled restart job, restart counter is at {unit.restarts}.")
        if self._too_often():
            self._manager_says(f"{unit.id}: Start request repeated too quickly.", 4)
            self._manager_says(f"{unit.id}: Failed with result '{unit.result}'.", 4)
            self._manager_says(f"Failed to start {unit.id} - {unit.description}.", 3)
            unit.state("failed", "failed", self._clock.wall())
            return
        await self._launch()

    def _too_often(self) -> bool:
        window = max(START_LIMIT_S / self._speed, _SHORTEST_LIMIT_S)
        recent = [at for at in self._starts if self._clock.wall() - at < window]
        return len(recent) >= START_LIMIT_BURST

    async def _end_life(self) -> None:
        """Stop what drives the run: its load, or its wait for a restart."""
        life, self._life = self._life, None
        if life is not None and not life.done():
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life

    async def _gone(self, code: int, status: int) -> None:
        """All processes of the run have ended: port, memory and /proc are free."""
        await self._engine.close()
        if self._run is not None:
            self._processes.stop(self._run)
            self._run = None
        self._faults.clear("hang")  # the next scheduler runs
        self.pinned_bytes = 0
        self.unit.main_pid = 0
        self.unit.exit_code, self.unit.exit_status = code, status
        self.unit.exited_at = self._clock.wall()
        self._write_properties()

    # What is told ------------------------------------------------------------------------------

    def log(self, text: str, source: Source, rank: int, at: float | None) -> None:
        """A line of the engine, with the prefix its process writes."""
        run = self._run
        if run is None:
            return
        moment = self._clock.wall() if at is None else at
        pid = run.inner_main
        if source == "rank" and rank < len(run.inner_schedulers):
            pid = run.inner_schedulers[rank]
        if source != "bare":
            tag = f" TP{rank}" if source == "rank" and len(run.schedulers) > 1 else ""
            text = f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))}{tag}] {text}"
        self._journal.write(
            text,
            pid=pid,
            identifier="python",
            at=moment,
            unit=self.unit.id,
            invocation=self.unit.invocation,
        )

    def _manager_says(self, text: str, priority: int = 6, at: float | None = None) -> None:
        self._journal.write(
            text,
            pid=1,
            identifier="systemd",
            at=at,
            unit="init.scope",
            about=self.unit.id,
            invocation=self.unit.invocation or None,
            priority=priority,
            transport="journal",
        )

    def processes(self) -> EngineProcesses | None:
        """The run's process ids; None while there is none."""
        return self._run

    def _write_properties(self) -> None:
        found, unit = self._definition, self.unit
        if found is None:
            return
        argv = " ".join(found.argv)
        stop = found.options.get("TimeoutStopSec", "")
        began = (
            time.strftime("%a %Y-%m-%d %H:%M:%S UTC", time.gmtime(unit.started_at))
            if unit.started_at
            else "n/a"
        )
        unit.properties = {
            "Type": found.options.get("Type", "exec"),
            "Restart": found.options.get("Restart", "no"),
            "RestartUSec": "15s",
            "TimeoutStartUSec": "1min 30s",
            "TimeoutStopUSec": span(float(stop) if stop.isdigit() else STOP_TIMEOUT_S),
            "StartLimitIntervalUSec": span(START_LIMIT_S),
            "StartLimitBurst": str(START_LIMIT_BURST),
            "ExecStart": f"{{ path={argv.partition(' ')[0]} ; argv[]={argv} ; ignore_errors=no ; "
            f"start_time=[{began}] ; stop_time=[n/a] ; pid={unit.main_pid} ; code=(null) ; status=0/0 }}",
            "Environment": " ".join(found.environment),
            "UnitFileState": unit.properties.get("UnitFileState", "enabled"),
            "FragmentPath": found.fragment,
            "DropInPaths": " ".join(found.drop_ins),
        }


#: How systemd names an exit status.
_STATUS = {1: "FAILURE", 2: "INVALIDARGUMENT", 3: "NOTIMPLEMENTED"}
