"""Jobs in processes of their own: they outlive who asked for them, and say what became of them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from console.model.finding import Finding
from console.model.operation import Actor, JobView, Plan
from console.model.site import Site
from console.operations import launch
from console.operations.journal import follow
from console.operations.step import Refused
from console.store import audit
from console.store.jobs import get_job, list_jobs, survey
from console.store.lock import Holder, Locked, hold, holder
from console.store.process import this_process
from console.store.state import State, StateProblem
from tests.operations.job_lab import in_a_process, make_old, own_children, plan_in, put_on_disk, world

ACTOR = Actor("tester", "10.0.0.9 50022 10.0.0.1 22")

#: Asks for a job as the console does it, says its id, and waits.
LAUNCHER = """
import sys, time
from pathlib import Path
from tests.operations import test_launch as here
state, files = map(Path, sys.argv[1:])
here.launch.job_command = here.lab_command
print(here.submitted(here.State(state), here.plan_in(files, "slow")), flush=True)
time.sleep(60)
"""


def lab_command(state: State, job: str, direction: str) -> list[str]:
    """The process that knows the lab's operation instead of the real ones."""
    module = [sys.executable, "-P", "-m", "tests.operations.job_lab"]
    return [*module, "--state", str(state.directory), "--job", job, "--direction", direction]


def submitted(state: State, plan: Plan, note: str | None = None) -> str:
    return launch.submit(state, Site(), (), plan, ACTOR, note)


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "job_command", lab_command)
    monkeypatch.setattr(launch, "SYSTEMD", Path("/nowhere"))
    with own_children(monkeypatch):
        yield


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return make_old(tmp_path / "files")


def until(holds: Callable[[], object], within: float = 20.0) -> None:
    ends = time.monotonic() + within
    while not holds():
        assert time.monotonic() < ends, "it did not come true in time"
        time.sleep(0.01)


def ended(state: State, job: str) -> JobView:
    until(lambda: get_job(state, job).state != "running")
    return get_job(state, job)


def waiting(state: State, job: str) -> int:
    """The pid of a slow job's process, once it waits in its middle."""
    until(lambda: get_job(state, job).progress is not None)
    pid = get_job(state, job).pid
    assert pid is not None
    return pid


# --- a job's life ---------------------------------------------------------------------------------


async def test_a_job_is_done_by_another_process_and_recorded(state: State, files: Path) -> None:
    job = await asyncio.to_thread(submitted, state, plan_in(files), "because\x1b[31m")
    seen = [view async for view in follow(state, job)]
    assert world(files) == "new"
    assert seen[-1].state == "done"
    assert seen[-1].note == "because"
    assert [view.state for view in seen[:-1]] == ["running"] * (len(seen) - 1)
    until(lambda: holder(state) is None)
    (run,) = audit.runs_of(state, job)
    assert (run.actor, run.outcome, run.direction) == (ACTOR, "done", "forward")
    assert run.pid not in (None, os.getpid())
    assert list_jobs(state) == (get_job(state, job),)
    assert job.endswith("-test")


def test_while_one_works_another_is_told_who_and_which(state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    pid = waiting(state, job)
    assert pid != os.getpid()
    with pytest.raises(Locked) as locked:
        submitted(state, plan_in(files))
    assert locked.value.holder is not None
    assert (locked.value.holder.job, locked.value.holder.process.pid) == (job, pid)
    with pytest.raises(Locked, match=job):
        launch.resume(state, job)
    assert [view.id for view in list_jobs(state)] == [job]
    (files / "go").touch()
    assert ended(state, job).state == "done"


def test_one_that_only_closes_what_it_opened_is_waited_for(state: State, files: Path) -> None:
    """Between its last line in the journal and letting go of the host a job still takes a moment."""
    job = submitted(state, plan_in(files))
    ended(state, job)
    inside, leave = threading.Event(), threading.Event()
    mine = Holder(process=this_process(), job=job, action="test", user="tester", since=1.0)

    def close() -> None:
        with hold(state, mine, wait_s=10):
            inside.set()
            leave.wait(10)

    closing = threading.Thread(target=close)
    closing.start()
    assert inside.wait(10)
    threading.Timer(0.2, leave.set).start()
    launch.need_free(state)
    assert leave.is_set()
    closing.join()

    inside.clear()
    leave.clear()
    closing = threading.Thread(target=close)
    closing.start()
    assert inside.wait(10)
    threading.Timer(0.2, leave.set).start()
    later = submitted(state, plan_in(files))
    closing.join()
    assert ended(state, later).state == "done"


def test_whether_one_could_begin_is_known_without_beginning(state: State, files: Path) -> None:
    launch.need_free(state)
    assert not state.directory.exists()
    job = submitted(state, plan_in(files, "slow"))
    pid = waiting(state, job)
    with pytest.raises(Locked, match=job):
        launch.need_free(state)
    os.kill(pid, signal.SIGKILL)
    assert ended(state, job).state == "interrupted"
    with pytest.raises(Refused, match=f"gpuops jobs rollback {job}"):
        launch.need_free(state)


def test_of_many_at_the_same_moment_one_begins(state: State, files: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                until(gate.exists)
                submitted(state, plan_in(files, "slow"))
                code = 0
            except Locked:
                code = 75
            except BaseException:  # noqa: BLE001  a child must not go on as a second pytest
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    gate.touch()
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    (files / "go").touch()
    assert codes == [0, 75, 75, 75, 75, 75]
    (view,) = list_jobs(state)
    assert ended(state, view.id).state == "done"
    assert world(files) == "new"


def test_a_killed_job_comes_first_and_goes_on_when_told(state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    os.kill(waiting(state, job), signal.SIGKILL)
    assert ended(state, job).state == "interrupted"
    with pytest.raises(Refused, match=f"gpuops jobs resume {job}, or gpuops jobs rollback {job}"):
        submitted(state, plan_in(files))
    (files / "go").touch()
    launch.resume(state, job, Actor("ann"))
    assert ended(state, job).state == "done"
    assert world(files) == "new"
    assert [(run.direction, run.actor.user) for run in audit.runs_of(state, job)] == [
        ("forward", "tester"),
        ("resume", "ann"),
    ]


def test_a_job_told_to_end_leaves_things_as_they_are_and_can_be_taken_back(state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    os.kill(waiting(state, job), signal.SIGTERM)
    view = ended(state, job)
    assert view.state == "interrupted"
    assert view.progress is not None
    assert "SIGTERM" in view.progress.words
    assert world(files).startswith("between")
    launch.rollback(state, job)
    assert ended(state, job).state == "rolled-back"
    assert world(files) == "old"


def test_a_job_outlives_a_hangup_who_asked_for_it_and_the_terminal(state: State, files: Path) -> None:
    master, slave = pty.openpty()
    launcher = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-c", LAUNCHER, str(state.directory), str(files)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=Path(__file__).parents[2],
    )
    os.close(slave)
    said = b""
    while b"\n" not in said:
        said += os.read(master, 4096)
    job = said.decode().strip()
    pid = waiting(state, job)
    assert os.getsid(pid) == pid  # a session of its own, so no terminal's
    os.kill(pid, signal.SIGHUP)
    launcher.kill()
    launcher.wait()
    os.close(master)
    (files / "go").touch()
    assert ended(state, job).state == "done"
    assert world(files) == "new"


# --- what is refused ------------------------------------------------------------------------------


def test_a_plan_that_the_pre_flight_forbids_is_no_job(state: State, files: Path) -> None:
    plan = plan_in(files)
    bad = Plan(
        action=plan.action,
        title=plan.title,
        target=plan.target,
        made_at=0.0,
        steps=plan.steps,
        findings=(Finding("port", "Port", "fail", "30000 is taken by nginx"),),
    )
    with pytest.raises(Refused, match="30000 is taken by nginx"):
        submitted(state, bad)
    assert not state.directory.exists()


def test_what_is_over_neither_goes_on_nor_back(state: State, files: Path) -> None:
    job = submitted(state, plan_in(files))
    assert ended(state, job).state == "done"
    for way in (launch.resume, launch.rollback):
        with pytest.raises(Refused, match=f"job {job} is over: done"):
            way(state, job)


def test_what_has_turned_back_only_goes_back(state: State, files: Path) -> None:
    state.create()
    job = put_on_disk(state, plan_in(files, "broken"))
    (files / "c").unlink()
    (files / "c").mkdir()  # c can neither be made new nor put back
    assert in_a_process(state, job, "resume") == 5
    view = get_job(state, job)
    assert (view.state, view.turned_back, len(view.reasons)) == ("failed", True, 2)
    with pytest.raises(Refused, match=f"go on with gpuops jobs rollback {job}"):
        launch.resume(state, job)
    (files / "c").rmdir()
    launch.rollback(state, job)
    assert ended(state, job).state == "rolled-back"
    assert world(files) == "old"


def test_what_failed_long_ago_is_not_taken_back_under_a_later_job(state: State, files: Path) -> None:
    state.create()
    job = put_on_disk(state, plan_in(files, "broken"))
    (files / "c").unlink()
    (files / "c").mkdir()
    assert in_a_process(state, job, "resume") == 5
    (files / "c").rmdir()
    later = submitted(state, plan_in(files))
    assert ended(state, later).state == "done"
    with pytest.raises(Refused, match=f"job {later} has changed this host after job {job}"):
        launch.rollback(state, job)
    assert world(files) == "new"


@pytest.mark.parametrize("name", ["plan.json", "site.json", "journal.jsonl"])
def test_a_job_of_a_newer_gpuops_is_left_alone(state: State, files: Path, name: str) -> None:
    state.create()
    job = put_on_disk(state, plan_in(files))
    path = state.jobs / job / name
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(first) | {"schema": 2}).encode() + b"\n" + rest)
    before = path.read_bytes()
    with pytest.raises((StateProblem, Refused)) as problem:
        submitted(state, plan_in(files))
    if name == "site.json":  # it is read only by who goes on
        with pytest.raises(StateProblem) as problem:
            launch.resume(state, job)
    else:
        assert "newer gpuops" in survey(state).problems[0]
    assert f"{path}: schema 2 is of a newer gpuops; this one knows 1" in str(problem.value)
    assert path.read_bytes() == before
    assert world(files) == "old"
    assert len(list(state.jobs.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_said_and_nothing_is_begun(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StateProblem, match="Not a directory; gpuops keeps its jobs there"):
        submitted(State(tmp_path / "file"), plan_in(files))
    with pytest.raises(StateProblem, match="/proc/gpuops"):
        submitted(State(Path("/proc/gpuops")), plan_in(files))
    assert world(files) == "old"


def test_a_full_disk_is_said_and_leaves_no_half_a_job(state: State, files: Path) -> None:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))  # enough for the lock
            submitted(state, plan_in(files))
        except StateProblem as problem:
            code = 0 if "no job was begun and nothing was changed" in str(problem) else 98
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list_jobs(state) == ()
    job = submitted(state, plan_in(files))  # what was left is no obstacle
    assert ended(state, job).state == "done"
    assert [path.name for path in state.jobs.iterdir()] == [job]


# --- trouble on the way ---------------------------------------------------------------------------


def test_a_disk_that_fills_up_stops_the_job_before_what_it_cannot_announce(state: State, files: Path) -> None:
    job = submitted(state, plan_in(files, "slow"))
    pid = waiting(state, job)
    journal = state.jobs / job / "journal.jsonl"
    size = journal.stat().st_size
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
    (files / "go").touch()
    view = ended(state, job)
    assert view.state == "interrupted"
    assert (files / "b").exists() is False  # the step after it was not begun
    assert "File too large; nothing is changed" in (state.jobs / job / "output").read_text()
    launch.resume(state, job)
    assert ended(state, job).state == "done"
    assert world(files) == "new"


def test_a_broken_audit_trail_stops_no_job_and_is_noted(state: State, files: Path) -> None:
    state.create()
    state.database.write_bytes(b"no database" * 1000)
    job = submitted(state, plan_in(files))
    view = ended(state, job)
    assert view.state == "done"
    assert world(files) == "new"
    assert "file is not a database" in view.notices[0].words


def test_a_process_that_does_not_begin_is_said_with_its_last_word(
    state: State, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no module named \\x1b[31mnothing')"]
    monkeypatch.setattr(launch, "job_command", lambda *_: command)
    with pytest.raises(StateProblem, match="did not begin: no module named nothing"):
        submitted(state, plan_in(files))
    (view,) = list_jobs(state)
    assert view.outcome is not None
    assert view.outcome.startswith("failed, nothing was changed: ")
    monkeypatch.setattr(launch, "job_command", lab_command)
    assert ended(state, submitted(state, plan_in(files))).state == "done"


def test_the_real_process_refuses_a_plan_of_unknown_kind(
    state: State, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "SYSTEMD", Path("/nowhere"))
    view = ended(state, submitted(state, plan_in(files)))
    assert view.state == "failed"
    assert view.reasons == ("this gpuops knows no operation 'test'; use the one that made the plan",)
    assert not view.begun


def test_under_systemd_the_process_is_a_unit_of_its_own(
    state: State, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in notes what it was asked and runs it; the real one is in tests/rigs."""
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\n'
        'while [ "$1" != -- ]; do shift; done; shift; "$@" & exit 0\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    job = submitted(state, plan_in(files))
    assert ended(state, job).state == "done"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert f"--unit=gpuops-job-{job}.service" in asked
    assert {"--collect", "--quiet", "--no-block", "--property=KillMode=mixed"} <= set(asked)
    assert asked[asked.index("--") + 1 :] == lab_command(state, job, "forward")


def test_systemd_replaces_no_name_in_the_command() -> None:
    asked = launch.unit_command(["python", "/srv/$HOME/${x}"], "j", Path("/o"), {})
    assert asked[asked.index("--") + 1 :] == ["python", "/srv/$$HOME/$${x}"]
