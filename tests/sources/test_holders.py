"""Whose the processes on the cards are, by their cgroup as Proxmox and systemd write it."""

# ruff: noqa: E501  cgroup paths are as long as they are

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.model.card import CardProcess, Holder, NvmlSample
from console.model.snapshot import holder_complaints
from console.sources.holders import read_holders

FIRST, SECOND = "0000:41:00.0", "0000:61:00.0"
UNIT = "sglang.service"
V2 = "0::/lxc/129/ns/system.slice/sglang.service\n"


class Processes:
    """A /proc with the processes that a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, pid: int, cgroup: str, *, command: bytes = b"sglang::scheduler_TP0\0", inner: int | None = 88
    ) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True)
        pids = f"{pid}" if inner is None else f"{pid}\t{inner}"
        (folder / "status").write_text(f"Name:\tpython3\nPid:\t{pid}\nNSpid:\t{pids}\nVmRSS:\t 4096 kB\n")
        (folder / "cgroup").write_text(cgroup)
        (folder / "cmdline").write_bytes(command)
        (folder / "comm").write_text("python3\n")

    def holders(self, *pids: int, container: int | None = 129, unit: str = UNIT) -> tuple[Holder, ...]:
        sample = NvmlSample(
            processes={FIRST: tuple(CardProcess(pid, 90 << 30) for pid in pids)}, processes_at=1.0
        )
        return read_holders(self.root, sample, container=container, unit=unit)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


SERVICE = [
    ("cgroup v2", V2),
    ("cgroup v2, a child group", "0::/lxc/129/ns/system.slice/sglang.service/workers\n"),
    ("cgroup v1", "12:devices:/lxc/129/ns/system.slice\n3:memory:/lxc/129\n1:name=systemd:/lxc/129/ns/system.slice/sglang.service\n"),
    ("cgroup v1, other controllers deeper", "12:devices:/lxc/129/ns/system.slice/sglang.service/a/b/jupyter.service\n1:name=systemd:/lxc/129/ns/system.slice/sglang.service\n"),
    ("hybrid", "1:name=systemd:/lxc/129/ns/system.slice/sglang.service\n0::/lxc/129/ns\n"),
    ("plain LXC", "0::/lxc.payload.129/system.slice/sglang.service\n"),
    ("ended after its group", "0::/lxc/129/ns/system.slice/sglang.service (deleted)\n"),
    ("nested slices", "0::/lxc/129/ns/ai.slice/ai-llm.slice/sglang.service\n"),
]  # fmt: skip


@pytest.mark.parametrize("cgroup", [row[1] for row in SERVICE], ids=[row[0] for row in SERVICE])
def test_the_services_own_process_in_its_container(processes: Processes, cgroup: str):
    processes.add(5000, cgroup)
    (holder,) = processes.holders(5000)
    assert (holder.pid, holder.inner_pid, holder.container, holder.unit) == (5000, 88, 129, UNIT)
    assert (holder.name, holder.orphan) == ("sglang::scheduler_TP0", False)
    assert holder.memory_bytes == {FIRST: 90 << 30}


def test_the_services_own_process_on_the_host_itself(processes: Processes):
    processes.add(5000, "0::/system.slice/sglang.service\n", inner=None)
    (holder,) = processes.holders(5000, container=None)
    assert (holder.inner_pid, holder.container, holder.unit, holder.orphan) == (None, None, UNIT, False)


OTHERS = [
    ("a login shell on the host", "0::/user.slice/user-0.slice/session-4.scope\n", None, "session-4.scope"),
    ("the unit's name, but on the host", "0::/system.slice/sglang.service\n", None, UNIT),
    ("another container's", "0::/lxc/131/ns/system.slice/sglang.service\n", 131, UNIT),
    ("another unit of the container", "0::/lxc/129/ns/system.slice/jupyter.service\n", 129, "jupyter.service"),
    ("pct enter", "0::/lxc/129/ns/init.scope\n", 129, "init.scope"),
    ("no unit at all", "0::/\n", None, None),
    ("a container without a unit", "0::/lxc/129/ns\n", 129, None),
    ("docker in the container", "0::/lxc/129/ns/system.slice/docker-1f.scope\n", 129, "docker-1f.scope"),
    ("a virtual machine's", "0::/qemu.slice/100.scope\n", None, "100.scope"),
    ("the container's monitor", "0::/lxc.monitor/129\n", None, None),
    ("a user's unit", "0::/user.slice/user-0.slice/user@0.service/app.slice/train.service\n", None, "train.service"),
    ("a name that only begins alike", "0::/lxc/129/ns/system.slice/sglang.service.d\n", 129, None),
    ("an empty file", "", None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cgroup", "container", "unit"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS]
)
def test_a_process_that_is_not_the_services(
    processes: Processes, cgroup: str, container: int | None, unit: str | None
):
    processes.add(5000, cgroup)
    (holder,) = processes.holders(5000)
    assert (holder.container, holder.unit, holder.orphan) == (container, unit, True)
    assert holder.inner_pid == (88 if container is not None else None)


def test_an_escaped_unit_name_is_read(processes: Processes):
    processes.add(5000, "0::/lxc/129/ns/system.slice/sglang\\x2dtest.service\n")
    (holder,) = processes.holders(5000, unit="sglang-test.service")
    assert (holder.unit, holder.orphan) == ("sglang-test.service", False)


def test_one_process_on_several_cards_is_one_holder_and_the_largest_is_first(processes: Processes):
    for pid in (5000, 5001, 5002):
        processes.add(pid, V2)
    sample = NvmlSample(
        processes={
            FIRST: (CardProcess(5000, 1 << 30), CardProcess(5001, 60 << 30)),
            SECOND: (CardProcess(5001, None), CardProcess(5002, 61 << 30)),
        }
    )
    holders = read_holders(processes.root, sample, container=129, unit=UNIT)
    assert [holder.pid for holder in holders] == [5002, 5001, 5000]
    assert holders[1].memory_bytes == {FIRST: 60 << 30, SECOND: None}


def test_a_process_that_has_gone_meanwhile_is_left_out(processes: Processes):
    processes.add(5000, V2)
    assert [holder.pid for holder in processes.holders(5000, 5001)] == [5000]


def test_a_process_that_ends_while_it_is_read_accuses_nobody(processes: Processes):
    """Its status was still there, its group no more: that is no sign that it was a stranger's."""
    processes.add(501, V2)
    (processes.root / "proc/501/cgroup").unlink()
    assert processes.holders(501) == ()


def test_a_process_nested_deeper_is_named_by_its_innermost_pid(processes: Processes):
    processes.add(5000, V2)
    (processes.root / "proc/5000/status").write_text("NSpid:\t5000\t900\t7\n")
    assert processes.holders(5000)[0].inner_pid == 7


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (b"python3\0-m\0sglang.launch_server\0\0", "python3 -m sglang.launch_server"),
        (b"\x1b]0;owned\x07\x1b[2Jtrain\r\n\0--name=\xe2\x80\xaegnp\0", "train  --name=gnp"),
        (b"\0\0\0", "python3"),
        (b"", "python3"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 5000, "x" * 200),
    ],
)
def test_a_command_line_is_safe_to_print(processes: Processes, command: bytes, name: str):
    processes.add(5000, V2, command=command)
    assert processes.holders(5000)[0].name == name


def test_a_stranger_is_named_with_the_cards_it_holds(processes: Processes):
    processes.add(5000, V2)
    processes.add(4242, "0::/user.slice/user-0.slice/session-4.scope\n", command=b"python3\0train.py\0")
    complaints = holder_complaints(processes.holders(5000, 4242), {FIRST: 2})
    assert complaints == ("python3 train.py (pid 4242) holds card 2 and is not the service's",)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.fixed_dictionaries(
        {name: st.binary(max_size=80) for name in ("status", "cgroup", "cmdline", "comm")}
    )
)
def test_any_bytes_give_a_holder_that_is_safe_to_print(tmp_path: Path, files: dict[str, bytes]):
    folder = tmp_path / "proc/5000"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (holder,) = Processes(tmp_path).holders(5000)
    assert holder.name
    for text in (holder.name, holder.unit or ""):
        assert min(text, default=" ") >= " "
    assert holder.inner_pid is None or holder.inner_pid >= 0
