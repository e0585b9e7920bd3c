"""What the pre-flight asks beside the inventory: one part that cannot be told does not cost the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rebind_values import slot

from console.sources import rebind_facts
from console.sources.rebind_facts import read_facts, service_memory_mib
from console.transport.runner import Result

XID = (
    b'{"__REALTIME_TIMESTAMP":"1796000000000000",'
    b'"MESSAGE":"NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."}'
)


class Host:
    """A machine whose commands answer what a test says; any other is not there."""

    name = "scripted"

    def __init__(self, root: Path, **answers: Result) -> None:
        self.root = root
        self._answers = answers

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        return self._answers.get(argv[0], Result(tuple(argv), None, b"", b"", "not found"))

    def stream(self, argv: Sequence[str]) -> object:
        raise AssertionError("nothing is followed here")


def answer(name: str, text: bytes) -> Result:
    return Result((name,), 0, text, b"")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "proc/812/fd"
    folder.mkdir(parents=True)
    (folder / "3").symlink_to("/dev/nvidia2")
    return tmp_path


async def test_all_of_it(root: Path):
    host = Host(root, journalctl=answer("journalctl", XID), modinfo=answer("modinfo", b"595.45.04\n"))
    facts = await read_facts(host, (slot("41"),), root=True, own=[812], returned_mib=7)  # type: ignore[arg-type]
    assert (facts.root, facts.module_on_disk, facts.returned_mib) == (True, "595.45.04", 7)
    assert facts.holders is not None
    assert [(one.pid, one.own) for one in facts.holders.holders] == [(812, True)]
    assert facts.log is not None
    assert [event.kind for event in facts.log] == ["lost"]


async def test_what_cannot_be_told_is_unknown_with_its_reason(tmp_path: Path):
    facts = await read_facts(Host(tmp_path), (slot("41"),), root=False)  # type: ignore[arg-type]
    assert (facts.log, facts.log_problem) == (None, "journalctl: not found")
    assert facts.holders is None
    assert "proc" in (facts.holders_problem or "")
    assert facts.module_on_disk is None


async def test_processes_that_keep_a_look_waiting_are_told(root: Path, monkeypatch: pytest.MonkeyPatch):
    """A descriptor on a dead network file system does not answer: the plan is refused, not kept waiting."""

    async def never(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(rebind_facts.Apart, "__call__", never)
    facts = await read_facts(Host(root), (slot("41"),), root=True)  # type: ignore[arg-type]
    assert (facts.holders, facts.holders_problem) == (
        None,
        "the processes could not be looked through within 5 s",
    )


def test_memory_that_the_service_gives_back(tmp_path: Path):
    assert service_memory_mib(tmp_path, 129, "sglang.service") == 0, "the kernel does not tell"
    folder = tmp_path / "sys/fs/cgroup/lxc/129/ns/system.slice/sglang.service"
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text(f"anon {3 << 30}\nfile {9 << 30}\nshmem {1 << 30}\n")
    assert service_memory_mib(tmp_path, 129, "sglang.service") == 4096, "its page cache was free before"
