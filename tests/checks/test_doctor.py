"""The doctor's findings on hosts that lack this or that."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from console.checks import doctor
from console.checks.doctor import Surroundings, Terminal, examine, look_around
from console.model.finding import Finding
from console.model.site import Container, Service, Site, Vm
from console.sources.connect import Sources, connect
from console.sources.files import (
    FileProblem,
    ProfileSet,
    load_profiles,
    load_site,
    shipped_profiles_directory,
)
from console.sources.nvml import NvmlSource
from console.sources.pci import PciSource
from console.sources.unit import UnitSource
from console.transport.demo import running_box
from console.transport.runner import Result

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 14\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:00:00 UTC 2025\n"
BLACKWELL, ADA = "0x2bb1", "0x26b1"

RUNNING = (
    "Id=sglang.service\nLoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\n"
    "NeedDaemonReload=no\n"
)


def ended(stdout: str = "", stderr: str = "", status: int = 0) -> Result:
    return Result(("program",), status, stdout.encode(), stderr.encode())


class Host:
    """A host whose /proc and /sys are a folder and whose commands answer by their program."""

    name = "host"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: dict[str, Result | None] = {
            "systemctl": ended(RUNNING),
            "journalctl": ended('{"MESSAGE":"hello"}\n'),
            "true": ended(),
            "timedatectl": ended("yes\n"),
        }
        self.nvml: tuple[dict[str, Any], ...] = (
            {"kind": "hello", "at": 1.0, "pid": 7, "driver_version": "580.95.05"},
            {"kind": "cards", "at": 1.0, "cards": [{"address": "0000:41:00.0"}]},
        )

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        answer = self.answers.get(argv[0], Result(tuple(argv), None, b"", b"", "not found"))
        if answer is None:  # blocked in the kernel: no deadline of ours ends it
            await asyncio.Event().wait()
        assert answer is not None
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Any]:
        yield self

    reason = "ended"

    async def lines(self) -> AsyncIterator[bytes]:
        for message in self.nvml:
            yield json.dumps(message).encode()
        await asyncio.Event().wait()

    def card(
        self, device: str = BLACKWELL, driver: str | None = "nvidia", address: str = "0000:41:00.0"
    ) -> None:
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, value in {"vendor": "0x10de", "device": device, "class": "0x030000"}.items():
            (folder / name).write_text(value + "\n")
        groups = self.root / "sys/kernel/iommu_groups/14"
        groups.mkdir(parents=True, exist_ok=True)
        (folder / "iommu_group").symlink_to(groups)
        if driver is not None:
            (folder / "driver").symlink_to(Path("/sys/bus/pci/drivers") / driver)

    def driver(self, words: str) -> None:
        path = self.root / "proc/driver/nvidia/version"
        path.parent.mkdir(parents=True)
        path.write_text(words)


ANYWHERE = Site()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def here(site: Site = ANYWHERE, **changes: Any) -> Surroundings:
    around = Surroundings(
        site=site,
        site_path=Path("/etc/gpuops/site.yaml"),
        site_problems=(),
        notices=(),
        profiles=load_profiles([shipped_profiles_directory()]),
        environ={"TERM": "xterm-256color", "COLORTERM": "truecolor"},
        root=True,
        terminal=Terminal((120, 40), 256, "utf-8"),
        wall=1_796_000_000.0,
    )
    return dataclasses.replace(around, **changes)


def sources(host: Host, site: Site) -> Sources:
    runner: Any = host
    return dataclasses.replace(
        connect(site),
        host=runner,
        service=runner,
        pci=PciSource(host.root),
        nvml=NvmlSource(runner, command=["nvml"]),
        unit=UnitSource(runner, site.service.unit),
    )


async def findings(host: Host, around: Surroundings | None = None) -> dict[str, Finding]:
    around = around or here()
    return {one.id: one for one in await examine(around, sources(host, around.site))}


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    with running_box(None, []) as running:
        yield running.site


async def test_a_whole_box_has_nothing_to_complain_of(box: Path) -> None:
    profiles = load_profiles([shipped_profiles_directory()])
    found = await examine(look_around(load_site(box), box, profiles))
    # Whoever runs the tests may do so in any terminal.
    troubled = {one.id for one in found if one.verdict not in ("pass", "skipped")}
    assert troubled <= {"terminal", "tmux"}
    passed = {one.id for one in found if one.verdict == "pass"}
    assert passed >= {"site", "profiles", "pci", "iommu", "driver", "nvml", "driver-match"}
    assert passed >= {"container", "unit", "journal", "engine", "metrics", "clock"}


async def test_a_sound_host_passes_but_for_the_engine(host: Host) -> None:
    host.card()
    host.driver(OPEN)
    found = await findings(host, here(Site(service=Service(url="http://127.0.0.1:1"))))
    verdicts = {id: one.verdict for id, one in found.items()}
    assert verdicts.pop("engine") == "warn"
    assert verdicts.pop("metrics") == "skipped"
    assert set(verdicts.values()) <= {"pass", "skipped"}
    assert "may still load" in found["engine"].evidence


async def test_a_bare_host_says_what_is_missing(host: Host) -> None:
    host.answers.clear()
    host.nvml = ({"kind": "unavailable", "at": 1.0, "reason": "libnvidia-ml.so.1 is not found"},)
    found = await findings(host, here(Site(container=Container("lxc", 129)), site_path=None, root=False))
    failed = {id for id, one in found.items() if one.verdict == "fail"}
    assert failed == {"pci", "driver", "nvml", "container", "unit", "journal", "engine"}
    assert found["site"].verdict == "warn"
    assert found["site"].remedy == "write one: gpuops config init"
    assert "lxc-attach needs root" in found["root"].evidence
    assert all(one.remedy for one in found.values() if one.verdict == "fail")


@pytest.mark.parametrize(
    ("words", "device", "verdict"),
    [
        (OPEN, BLACKWELL, "pass"),
        (PROPRIETARY, BLACKWELL, "fail"),
        (PROPRIETARY, ADA, "warn"),
    ],
)
async def test_blackwell_needs_the_open_modules(host: Host, words: str, device: str, verdict: str) -> None:
    host.card(device)
    host.driver(words)
    found = await findings(host)
    assert found["driver"].verdict == verdict
    assert "580.95.05" in found["driver"].evidence


async def test_a_driver_half_upgraded_is_told(host: Host) -> None:
    host.card()
    host.driver(OPEN.replace("580.95.05", "575.57.08"))
    found = await findings(host)
    assert found["driver-match"].verdict == "fail"
    assert found["driver-match"].evidence == "kernel module 575.57.08, library 580.95.05"
    host.nvml = ({"kind": "unavailable", "at": 1.0, "reason": "NVML: Driver/library version mismatch"},)
    found = await findings(host)
    assert found["driver-match"].verdict == "fail"
    assert found["nvml"].verdict == "fail"


async def test_cards_that_the_vm_has_are_no_fault_of_the_driver(host: Host) -> None:
    host.card(driver="vfio-pci")
    host.nvml = ({"kind": "unavailable", "at": 1.0, "reason": "driver not loaded"},)
    found = await findings(host, here(Site(vm=Vm(100))))
    assert found["driver"].verdict == "skipped"
    assert found["nvml"].verdict == "skipped"
    assert found["iommu"].verdict == "pass"
    assert found["pci"].evidence == "1 found: 1 on vfio-pci"


async def test_a_vm_without_an_iommu_gets_no_cards(host: Host) -> None:
    assert (await findings(host, here(Site(vm=Vm(100)))))["iommu"].verdict == "fail"
    assert (await findings(host))["iommu"].verdict == "skipped"


@pytest.mark.parametrize(
    ("show", "verdict", "words"),
    [
        (RUNNING.replace("loaded", "not-found"), "fail", "sglang.service is not-found"),
        (RUNNING.replace("Reload=no", "Reload=yes"), "warn", "its file changed"),
        (RUNNING, "pass", "active (running), enabled"),
    ],
)
async def test_the_unit(host: Host, show: str, verdict: str, words: str) -> None:
    host.answers["systemctl"] = ended(show)
    found = await findings(host)
    assert found["unit"].verdict == verdict
    assert words in found["unit"].evidence


async def test_a_journal_that_hides_its_lines(host: Host) -> None:
    hint = "Hint: You are currently not seeing messages from other users and the system."
    host.answers["journalctl"] = ended("", hint)
    assert (await findings(host))["journal"].verdict == "fail"
    host.answers["journalctl"] = ended("", "-- No entries --")
    assert (await findings(host))["journal"].verdict == "warn"


async def test_the_key_file(host: Host, tmp_path: Path) -> None:
    key = tmp_path / "key"

    async def verdict() -> tuple[str, str]:
        found = (await findings(host, here(Site(service=Service(api_key_file=str(key))))))["api-key"]
        return found.verdict, found.evidence

    assert await verdict() == ("fail", f"{key}: No such file or directory")
    key.write_text("sk-very-secret\n")
    key.chmod(0o600)
    assert await verdict() == ("pass", f"{key}, mode 0600")
    key.chmod(0o644)
    assert await verdict() == ("warn", f"{key} has mode 0644")
    key.chmod(0o600)
    key.write_text("two words\n")
    told = await verdict()
    assert told[0] == "fail"
    assert "two words" not in told[1]


@pytest.mark.parametrize(
    ("environ", "terminal", "verdict"),
    [
        ({"TERM": "xterm-256color"}, Terminal((120, 40), 256, "utf-8"), "pass"),
        ({"TERM": "dumb"}, Terminal((120, 40), None, "utf-8"), "fail"),
        ({}, Terminal((120, 40), None, "utf-8"), "fail"),
        ({"TERM": "xterm"}, Terminal((120, 40), 8, "iso8859-1"), "warn"),
        ({"TERM": "xterm"}, Terminal((79, 40), 8, "UTF-8"), "warn"),
        ({"TERM": "xterm"}, Terminal(None, None, "utf-8"), "skipped"),
    ],
)
async def test_the_terminal(host: Host, environ: dict[str, str], terminal: Terminal, verdict: str) -> None:
    found = await findings(host, here(environ=environ, terminal=terminal))
    assert found["terminal"].verdict == verdict


async def test_tmux_without_colours(host: Host) -> None:
    found = await findings(host, here(environ={"TERM": "screen", "TMUX": "/tmp/tmux-0/default,1,0"}))
    assert found["tmux"].verdict == "warn"
    assert "tmux-256color" in (found["tmux"].remedy or "")


async def test_the_clock(host: Host) -> None:
    assert (await findings(host, here(wall=12.0)))["clock"].verdict == "fail"
    host.answers["timedatectl"] = ended("no\n")
    assert (await findings(host))["clock"].verdict == "warn"


async def test_bad_files_are_told_and_the_rest_is_examined(host: Host) -> None:
    problem = FileProblem("/etc/gpuops/profiles/x.yaml", 3, 1, "unknown key agrs; did you mean args?")
    around = here(
        site_problems=("/etc/gpuops/site.yaml:2:1: unknown key",), profiles=ProfileSet((), (problem,))
    )
    found = await findings(host, around)
    assert found["site"].verdict == found["profiles"].verdict == "fail"
    assert "/etc/gpuops/site.yaml:2:1" in found["site"].evidence
    assert "x.yaml:3:1" in found["profiles"].evidence
    assert found["unit"].verdict == "pass"


async def test_what_never_answers_costs_its_own_checks_only(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DEADLINE", 0.4)
    host.answers["systemctl"] = host.answers["true"] = None
    began = time.monotonic()
    found = await findings(host, here(Site(container=Container("lxc", 129))))
    assert time.monotonic() - began < 2.0
    assert found["unit"].verdict == found["container"].verdict == "unknown"
    assert found["container"].evidence == "no answer within 0.4 s"
    assert found["journal"].verdict == found["clock"].verdict == "pass"


async def test_evidence_is_safe_to_print(host: Host) -> None:
    host.answers["true"] = ended("", "lxc-attach: \x1b]0;owned\x07\x1b[31mno\u202e", 1)
    found = await findings(host, here(Site(container=Container("lxc", 129))))
    assert found["container"].evidence == "CT 129: lxc-attach: no"


async def test_a_defect_in_one_check_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path) -> str:
        raise ZeroDivisionError("oops")

    replaced: Callable[[Path], str] = broken
    monkeypatch.setattr(doctor, "_driver_words", replaced)
    found = await findings(host)
    assert found["driver"].verdict == "unknown"
    assert found["driver"].evidence == "defect in check driver: ZeroDivisionError: oops"
    assert found["unit"].verdict == "pass"
