"""The audit on a real systemd with a real Python, and on a real engine that is a real service."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from console.checks.audit import audit, judge, naming
from console.model.audit_report import Audit, audit_document
from console.model.configuration import Effective
from console.model.finding import Finding
from console.model.profile import Profile, Reference
from console.model.site import Service, Site
from console.model.unit_file import read_unit, split_cat
from console.sources import service_python
from console.sources.connect import Sources, connect
from console.sources.effective import read_effective
from console.sources.unit import UnitSource
from tests.rigs.sglang.install import Installation
from tests.rigs.sglang.server import SERVED_NAME, EngineUnit, folders, free_port
from tests.rigs.systemd.machine import UNITS, Machine

pytestmark = pytest.mark.rig

PYTHON = "/usr/bin/python3"
START_UP = "/opt/start-up/sitecustomize.py"

#: What runs in place of the engine: a Python that is started as the engine is, and stays.
LAUNCHER = "import pathlib, time\npathlib.Path('/tmp/launched').touch()\ntime.sleep(3600)\n"


def sources(machine: Machine, site: Site) -> Sources:
    runner = machine.runner()
    return dataclasses.replace(connect(site), service=runner, unit=UnitSource(runner, site.service.unit))


def site_of(unit: str) -> Site:
    return Site(service=Service(unit=unit, url=f"http://127.0.0.1:{free_port()}"))


async def read(machine: Machine, unit: str) -> Effective:
    site = site_of(unit)
    watched = sources(machine, site)
    try:
        return await read_effective(watched, None, lambda version: naming(version, None))
    finally:
        await watched.client.close()


def unit_text(*lines: str, flags: str = "--model-path /m --tp-size 8") -> str:
    command = f"ExecStart={PYTHON} /opt/launch_server.py {flags}"
    return "\n".join(["[Unit]", "Description=Test", "[Service]", command, *lines, ""])


async def start(machine: Machine, name: str, text: str) -> None:
    """Start a unit, and wait until its Python is past its start-up files."""
    machine.write("/opt/launch_server.py", LAUNCHER)
    machine.write_unit(name, text)
    machine.run("rm", "-f", "/tmp/launched")
    machine.run("systemctl", "start", name)
    ends = time.monotonic() + 10
    while not (machine.root / "tmp/launched").exists():
        assert time.monotonic() < ends, machine.run("systemctl", "status", name, check=False)
        await asyncio.sleep(0.05)


def finding(found: Audit, id: str) -> Finding:
    (one,) = [one for one in found.findings if one.id == id]
    return one


PROFILE = Profile(
    name="test",
    title="Test",
    args={"model-path": "/m", "tp-size": "8"},
    env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "SGLANG_ENABLE_SPEC_V2": "True"},
    reference=Reference(
        args={"model-path": "/m", "tp-size": "8"},
        env={"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "SGLANG_ENABLE_SPEC_V2": "True"},
    ),
)


async def test_flags_variables_and_sitecustomize_of_a_real_service(machine: Machine) -> None:
    """Drop-ins, a file of variables, and a sitecustomize that assigns one and offers another."""
    machine.write(
        START_UP,
        'import os\nos.environ["NCCL_PROTO"] = "LL"\nos.environ.setdefault("NCCL_ALGO", "Ring")\n'
        'os.environ.setdefault("NCCL_NTHREADS", "512")\n',
    )
    machine.write("/etc/default/full", "SGLANG_ENABLE_SPEC_V2=True\nHF_TOKEN=hf_verysecret\n")
    machine.write(f"{UNITS}/full.service.d/10-nccl.conf", "[Service]\nEnvironment=NCCL_ALGO=Tree\n")
    await start(
        machine,
        "full.service",
        unit_text(
            "Environment=PYTHONPATH=/opt/start-up NCCL_PROTO=Simple NCCL_ALGO=Ring",
            "EnvironmentFile=/etc/default/full",
        ),
    )
    effective = await read(machine, "full.service")
    assert effective.problems.keys() <= {"engine"}, effective.problems
    assert effective.basis == "process"
    assert effective.flags == {"model-path": "/m", "tp-size": "8"}
    assert effective.python is not None
    assert effective.python.loaded == {"sitecustomize": START_UP}
    assert effective.python.environment["NCCL_PROTO"] == "LL"
    assert effective.python.environment["NCCL_NTHREADS"] == "512"
    found = judge(effective, PROFILE)
    assert found.answer == (
        "production differs from the benchmark: 1 of 3 variables different; it adds 2, "
        "1 of which may change the numbers"
    )
    evidence = finding(found, "twice").evidence
    assert f"NCCL_PROTO is Simple in /{UNITS}/full.service, and LL in {START_UP}, which counts" in evidence
    assert (
        f"NCCL_ALGO is Ring in {START_UP}, Ring in /{UNITS}/full.service, "
        f"and Tree in /{UNITS}/full.service.d/10-nccl.conf, which counts"
    ) in evidence
    rows = {row["name"]: row for row in audit_document(found)["items"]}
    assert rows["SGLANG_ENABLE_SPEC_V2"]["where"] == "/etc/default/full"
    assert rows["NCCL_NTHREADS"]["where"] == START_UP
    assert rows["HF_TOKEN"]["effective"] == "(hidden)"
    told = json.dumps(msgspec.to_builtins(audit_document(found)))
    assert "verysecret" not in told
    assert "verysecret" not in repr(effective)
    assert finding(found, "edited").verdict == "pass"
    machine.run("systemctl", "stop", "full.service")


async def test_a_unit_edited_after_the_start(machine: Machine) -> None:
    await start(machine, "edited.service", unit_text())
    before = judge(await read(machine, "edited.service"), PROFILE)
    assert finding(before, "daemon-reload").verdict == "pass"
    assert finding(before, "edited").verdict == "pass"
    await asyncio.sleep(2.1)  # systemd tells whole seconds of when it started
    machine.write(f"{UNITS}/edited.service", unit_text(flags="--model-path /m --tensor-parallel-size 4"))
    ends = time.monotonic() + 10
    while True:
        found = judge(await read(machine, "edited.service"), PROFILE)
        if finding(found, "daemon-reload").verdict == "warn":
            break
        assert time.monotonic() < ends
        await asyncio.sleep(0.2)
    edited = finding(found, "edited")
    assert edited.verdict == "warn"
    assert f"/{UNITS}/edited.service" in edited.evidence
    assert "the next start will have --tp-size 4 instead of 8" in edited.evidence
    machine.run("systemctl", "daemon-reload")
    loaded = judge(await read(machine, "edited.service"), PROFILE)
    assert finding(loaded, "daemon-reload").verdict == "pass"
    assert finding(loaded, "edited").verdict == "warn"  # it still runs what it was started with
    machine.run("systemctl", "stop", "edited.service")


async def test_a_service_of_another_user_is_asked_as_that_user(machine: Machine) -> None:
    machine.write(START_UP, 'import os\nos.environ["NCCL_SOCKET_IFNAME"] = str(os.getuid()) + os.getcwd()\n')
    lines = ("User=nobody", "WorkingDirectory=/opt", "Environment=PYTHONPATH=start-up")
    await start(machine, "user.service", unit_text(*lines))
    effective = await read(machine, "user.service")
    assert effective.python is not None, effective.problems
    assert effective.python.environment["NCCL_SOCKET_IFNAME"] == "65534/opt"
    machine.run("systemctl", "stop", "user.service")


async def test_a_stopped_service_is_compared_by_its_unit(machine: Machine) -> None:
    machine.write_unit("idle.service", unit_text("Environment=NCCL_ALGO=Ring"))
    found = judge(await read(machine, "idle.service"), PROFILE)
    assert found.answer.endswith("it does not run")
    assert finding(found, "service").verdict == "unknown"
    absent = judge(await read(machine, "absent.service"), PROFILE)
    assert absent.verdict == "unknown"
    assert "absent.service is not-found" in absent.answer


QUOTING = r"""--a 'one two' "three four" --b=x'y z' --c a\x20b \u00e4 \\ --d ${ONE} $TWO "${TWO}" $$ \
# a comment
  --e "tab\tend" '' "" --f=${NONE}x"""


async def test_a_command_line_is_read_as_systemd_reads_it(machine: Machine) -> None:
    text = unit_text('Environment="ONE=1 one" "TWO=2 two"', flags=QUOTING)
    await start(machine, "quoting.service", text)
    runner = machine.runner()
    shown = await UnitSource(runner, "quoting.service").read()
    assert shown.main_pid is not None
    real = machine.run("cat", f"/proc/{shown.main_pid}/cmdline").rstrip("\0").split("\0")
    cat = machine.run("systemctl", "cat", "quoting.service")
    command = read_unit(split_cat(cat, (shown.fragment_path or "",)), {}).command
    assert list(command) == real
    assert "--b=xy z" in real
    machine.run("systemctl", "stop", "quoting.service")


# Start-up files that do what they should not -----------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import time\ntime.sleep(60)\n", "did not get past its start-up files"),
        ("import os\nos._exit(0)\n", "in its start-up files"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "exit status"),
    ],
)
async def test_a_sitecustomize_that_never_lets_go(
    machine: Machine, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put there after the start, as the process itself would not get past it either."""
    monkeypatch.setattr(service_python, "DEADLINE", 2.0)
    machine.write(START_UP, "")
    await start(machine, "bad.service", unit_text("Environment=PYTHONPATH=/opt/start-up"))
    machine.write(START_UP, source)
    effective = await read(machine, "bad.service")
    assert effective.python is None
    found = judge(effective, PROFILE)
    told = finding(found, "python")
    assert told.verdict == "unknown"
    assert reason in told.evidence
    assert {row["verdict"] for row in audit_document(found)["items"] if row["kind"] == "variable"} == {
        "unknown"
    }
    machine.run("systemctl", "stop", "bad.service")


async def test_a_sitecustomize_that_prints_and_raises(machine: Machine) -> None:
    """Python says so and goes on; what was set before it raised counts."""
    machine.write(
        START_UP,
        'import os, sys\nprint("{}" * 5000)\nsys.stdout.buffer.write(b"\\xff\\x1b[2J\\0")\n'
        'os.environ["NCCL_ALGO"] = "Ring"\nsys.stdout.flush()\nraise RuntimeError("\\x1b[31mno")\n',
    )
    await start(machine, "loud.service", unit_text("Environment=PYTHONPATH=/opt/start-up"))
    effective = await read(machine, "loud.service")
    assert effective.python is not None, effective.problems
    assert effective.python.environment["NCCL_ALGO"] == "Ring"
    machine.run("systemctl", "stop", "loud.service")


# The engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(
    sglang_installation: Installation, debian_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnit]:
    """A real SGLang as sglang.service, ready."""
    machine = Machine(
        debian_root,
        tmp_path_factory.mktemp("audit") / "scratch",
        name="gpuaudit",
        host_network=True,
        folders=folders(sglang_installation),
    )
    try:
        machine.start()
        yield EngineUnit(sglang_installation, machine)
    finally:
        machine.stop()


async def test_a_real_engine(engine: EngineUnit) -> None:
    """Its own flags as a benchmark: all there; with one more and one other: named."""
    engine.start()
    ends = time.monotonic() + 150
    site = Site(service=Service(unit=engine.unit, url=engine.url))
    probe = connect(site).client
    while not (await probe.get("/v1/models", 5)).probe.ok:
        assert time.monotonic() < ends
        await asyncio.sleep(0.5)
    await probe.close()
    watched = sources(engine.machine, site)
    effective = await read_effective(watched, None, lambda version: naming(version, None))
    await watched.client.close()
    assert effective.problems == {}
    assert effective.engine_version is not None
    assert effective.flags["served-model-name"] == SERVED_NAME
    flags = dict(effective.flags)
    benchmark = Reference(args={name: flags[name] for name in ("model-path", "device", "max-total-tokens")})
    profile = Profile(name="real", title="Real", sglang=">=0.5.9", args=flags, reference=benchmark)
    found = judge(effective, profile)
    assert found.answer.startswith("production runs the benchmark's 3 flags and 0 variables; it adds")
    assert finding(found, "version").verdict == "pass"
    assert finding(found, "resolved").verdict == "pass", finding(found, "resolved")
    other = msgspec.structs.replace(benchmark, args={**benchmark.args, "tp-size": "8", "page-size": "64"})
    differs = await audit(
        site, (), msgspec.structs.replace(profile, reference=other), sources(engine.machine, site)
    )
    assert differs.verdict == "fail"
    assert "1 of 5 flags missing, 1 of 5 flags different" in differs.answer
