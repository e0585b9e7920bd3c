"""``gpuops switch`` on a real systemd that runs a real SGLang as a managed unit, whatever comes between.

One machine for all tests; each begins with ``settled``, which brings about the state that it needs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from console.model.managed_unit import MARKER, parse
from tests.rigs.sglang.install import Installation
from tests.rigs.switch.host import UNIT, Container, Host, Line, lent_folders
from tests.rigs.systemd.machine import UNITS

pytestmark = pytest.mark.rig

#: The word of a model that dies when its layers are made, in the scheduler's process.
BROKEN = "one-hot hidden states need hidden_size == vocab_size"


@pytest.fixture(scope="module")
def host(
    sglang_installation: Installation, debian_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Host]:
    """The host, whose container has no unit yet."""
    folder = tmp_path_factory.mktemp("switch")
    shared = folder / "shared"
    shared.mkdir()
    broken = shared / "broken"
    shutil.copytree(sglang_installation.model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"hidden_size": config["vocab_size"] // 2}))
    garbled = shared / "garbled"
    garbled.mkdir()
    (garbled / "config.json").write_text('{"architectures": [')
    id = 500_000_000 + os.getpid()  # its own beside other runs
    container = Container(debian_root, folder / "ct", id, lent=lent_folders(sglang_installation, shared))
    try:
        container.start()
        host = Host(container, sglang_installation, folder, shared)
        host.profile("alpha")
        host.profile("beta")
        host.profile("unknown-flag", tensor_parallel_sizes="1")
        host.profile("unknown-parser", tool_call_parser="kimi_k9")
        host.profile("broken", model_path=str(broken))
        host.profile("garbled", model_path=str(garbled))
        yield host
        host.end()
    finally:
        container.stop()


def serves(host: Host, name: str) -> None:
    """The profile is what runs, what the disk has, what systemd knows, and what starts with the machine."""
    assert host.served() == name
    assert host.answer(name) == "Here I am."
    text = host.unit_text()
    unit = parse(text)
    assert text.startswith(f"{MARKER}: profile {name}, sha256 ")
    assert (unit.managed, unit.edited, unit.profile, unit.ignored) == (True, False, name, ())
    assert unit.argv[unit.argv.index("--served-model-name") + 1] == name
    shown = host.unit()
    assert (shown["ActiveState"], shown["UnitFileState"]) == ("active", "enabled"), shown
    assert shown["NeedDaemonReload"] == "no"
    process = host.container.run("cat", f"/proc/{shown['MainPID']}/cmdline").rstrip("\0").split("\0")
    assert tuple(process) == unit.argv
    assert host.container.run("systemd-analyze", "verify", f"/{UNITS}/{UNIT}", check=False) == ""


def settled(host: Host, name: str) -> None:
    """The profile serves, and no job is left in the middle: made so where the test before failed."""
    if (jobs := host.jobs()) and host.job()["state"] == "interrupted":
        host.gpuops("jobs", "rollback", jobs[0])
    if host.served() != name:
        ended = host.gpuops("switch", name, "--yes")
        assert ended.exit_code == 0, ended.words
    serves(host, name)


def doing(job: dict[str, Any], id: str) -> bool:
    """Whether the job is at the step of this id."""
    return any((step["id"], step["state"]) == (id, "doing") for step in job["steps"])


def loading(host: Host, name: str) -> dict[str, Any]:
    """Begin a switch and return once the engine's load is followed: the job then."""
    begun = host.gpuops("switch", name, "--yes", "--no-wait")
    assert begun.exit_code == 0, begun.words
    return host.job_until(begun.words.strip(), lambda job: doing(job, "ready"))


def test_a_switch_and_the_way_back(host: Host) -> None:
    settled(host, "alpha")  # the first unit of this machine, made by a switch as well
    for name in ("beta", "alpha"):
        before = host.unit()
        ended = host.gpuops("switch", name, "--yes")
        assert ended.exit_code == 0, ended.words
        assert ended.flat.endswith(f"switch to {name}: done")
        serves(host, name)
        assert host.unit()["InvocationID"] != before["InvocationID"]


@pytest.mark.parametrize(
    ("profile", "word"), [("unknown-flag", "tensor-parallel-sizes"), ("unknown-parser", "kimi_k9")]
)
def test_a_flag_that_sglang_rejects_is_refused_while_the_service_goes_on(
    host: Host, profile: str, word: str
) -> None:
    settled(host, "alpha")
    before, text, jobs = host.unit(), host.unit_text(), host.jobs()
    ended = host.gpuops("switch", profile, "--yes")
    assert ended.exit_code == 3, ended.words
    assert word in ended.words
    assert "The pre-flight forbids it: nothing is changed." in ended.words
    assert (host.unit(), host.unit_text(), host.jobs()) == (before, text, jobs)
    assert host.answer("alpha") == "Here I am."


def test_a_crash_in_the_load_brings_the_old_model_back(host: Host) -> None:
    settled(host, "alpha")
    text = host.unit_text()
    ended = host.gpuops("switch", "broken", "--yes")
    assert ended.exit_code == 4, ended.words
    assert "switch to broken: rolled back" in ended.flat
    assert BROKEN in ended.flat
    serves(host, "alpha")
    assert host.unit_text() == text
    job = host.job()
    assert job["state"] == "rolled-back"
    steps = {step["id"]: step for step in job["steps"]}
    assert steps["ready"]["state"] == "failed"
    assert BROKEN in " ".join((steps["ready"]["evidence"], *steps["ready"]["lines"]))
    assert steps["stop"]["state"] == "undone"
    assert "serves alpha" in steps["stop"]["evidence"]


def test_a_way_back_that_fails_as_well_stops_there_with_both_reasons(host: Host) -> None:
    settled(host, "alpha")
    host.speaks(sum="392", capital="Lyon")  # from now on alpha would not be taken either
    try:
        ended = host.gpuops("switch", "garbled", "--yes")
    finally:
        host.speaks()
    assert ended.exit_code == 5, ended.words
    job = host.job()
    assert job["state"] == "failed"
    first, second = job["reasons"]
    assert "garbled/config.json' is not a valid JSON file" in first
    assert "start alpha again" in second
    assert "smoke checks failed: sanity: expected 391, said “392”" in second
    for reason in job["reasons"]:
        assert unbroken(reason) in unbroken(ended.words)
    # Once the cause is gone the rest of the way back is open.
    again = host.gpuops("jobs", "rollback", job["id"])
    assert again.exit_code == 0, again.words
    serves(host, "alpha")


def unbroken(text: str) -> str:
    """Without any space, so that it does not matter where a line ended."""
    return "".join(text.split())


def test_a_lost_connection_leaves_a_job_that_goes_on_and_holds_the_host(host: Host) -> None:
    settled(host, "alpha")
    line = Line(host.command("switch", "beta"), host.environment)
    line.until("switch to beta? [y/N]", 60)
    line.type("y\n")
    line.until("begin   follow the load", 60)
    job = host.job()
    assert (job["state"], job["target"]) == ("running", "beta")
    line.hang_up()
    line.process.wait(10)

    second = host.gpuops("switch", "broken", "--yes", within=30)
    assert second.exit_code == 75, second.words
    assert f"switch, job {job['id']}, by {job['user']} since " in second.flat
    assert f"pid {job['pid']}" in second.flat

    ended = host.job_until(job["id"], lambda job: job["state"] != "running")
    assert ended["state"] == "done", ended
    assert host.jobs()[0] == job["id"]
    serves(host, "beta")


def test_of_two_at_once_one_has_the_host_and_the_other_is_told_which(host: Host) -> None:
    settled(host, "beta")
    jobs = host.jobs()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(host.gpuops, "switch", "alpha", "--yes", "--no-wait") for _ in range(2)]
        first, second = sorted((one.result() for one in asked), key=lambda ended: ended.exit_code)
    assert (first.exit_code, second.exit_code) == (0, 75), (first.words, second.words)
    job = first.words.strip()
    assert f"another operation holds the host: switch, job {job}, by " in second.flat
    ended = host.job_until(job, lambda job: job["state"] != "running")
    assert ended["state"] == "done", ended
    assert host.jobs() == [job, *jobs]
    serves(host, "alpha")


def killed_while_loading(host: Host, name: str) -> str:
    """A switch whose process is killed while the engine loads: the job's id."""
    job = loading(host, name)
    os.kill(job["pid"], signal.SIGKILL)
    host.job_until(job["id"], lambda job: job["state"] == "interrupted", within=30)
    refused = host.gpuops("switch", name, "--yes")
    assert refused.exit_code == 3, refused.words
    for way in ("resume", "rollback"):
        assert f"gpuops jobs {way} {job['id']}" in refused.flat
    assert host.unit()["UnitFileState"] == "disabled"  # nothing is proven yet
    return str(job["id"])


def test_a_killed_job_is_resumed(host: Host) -> None:
    settled(host, "alpha")
    job = killed_while_loading(host, "beta")
    loaded = host.unit()["InvocationID"]
    ended = host.gpuops("jobs", "resume", job)
    assert ended.exit_code == 0, ended.words
    assert host.job(job)["state"] == "done"
    serves(host, "beta")
    assert host.unit()["InvocationID"] == loaded  # the load that had begun went on


def test_a_killed_job_is_rolled_back(host: Host) -> None:
    settled(host, "beta")
    job = killed_while_loading(host, "alpha")
    ended = host.gpuops("jobs", "rollback", job)
    assert ended.exit_code == 0, ended.words
    assert host.job(job)["state"] == "rolled-back"
    serves(host, "beta")
