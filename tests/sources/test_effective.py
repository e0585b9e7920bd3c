"""Reading one process and its Python: hostile bytes, real interpreters, nothing that is guessed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.command_line import parse_command_line, shown, starts_engine
from console.model.text import clean
from console.sources import service_python
from console.sources.processes import Process, ProcessProblem, engine_process, environment_of, words_of
from console.transport.local import LocalRunner
from console.transport.runner import Result

ENGINE = (b"/opt/python", b"-m", b"sglang.launch_server", b"--model-path", b"/m")
GROUP = "/system.slice/sglang.service"


def process(
    root: Path,
    pid: int,
    inner: int | None = None,
    *,
    cgroup: str = GROUP,
    argv: Sequence[bytes] = ENGINE,
    environ: bytes = b"A=1\0",
) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    pids = f"{pid}" if inner is None else f"{pid}\t{inner}"
    (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{pids}\n")
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "cmdline").write_bytes(b"".join(word + b"\0" for word in argv))
    (folder / "environ").write_bytes(environ)


def found(root: Path, pid: int, container: int | None = None, group: str | None = GROUP) -> Process:
    return engine_process(root, pid, group, container, starts_engine)


def test_a_process_of_the_host_itself(tmp_path: Path) -> None:
    process(tmp_path, 700)
    one = found(tmp_path, 700)
    assert (one.pid, one.inner_pid, one.environ) == (700, 700, {"A": "1"})
    assert one.argv[2] == "sglang.launch_server"


def test_a_container_counts_pids_of_its_own(tmp_path: Path) -> None:
    """Pid 700 of the host is somebody else, and another container has a unit of that name as well."""
    process(tmp_path, 700, cgroup="/system.slice/other.service", environ=b"A=other\0")
    process(tmp_path, 48274, 700, cgroup=f"/lxc/129/ns{GROUP}", environ=b"A=ours\0")
    process(tmp_path, 48999, 700, cgroup=f"/lxc/130/ns{GROUP}", environ=b"A=theirs\0")
    one = found(tmp_path, 700, container=129)
    assert (one.pid, one.inner_pid, one.environ) == (48274, 700, {"A": "ours"})


def test_two_that_cannot_be_told_apart_are_no_guess(tmp_path: Path) -> None:
    process(tmp_path, 48274, 700, cgroup=f"/machine/a{GROUP}")
    process(tmp_path, 48999, 700, cgroup=f"/machine/b{GROUP}")
    with pytest.raises(ProcessProblem, match="2 processes"):
        found(tmp_path, 700)


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    process(tmp_path, 701)
    with pytest.raises(ProcessProblem, match="ended just now"):
        found(tmp_path, 700)
    process(tmp_path, 702, argv=())
    with pytest.raises(ProcessProblem, match="argument list is empty"):
        found(tmp_path, 702)


def test_the_engine_below_a_wrapper_script(tmp_path: Path) -> None:
    process(tmp_path, 700, argv=(b"/bin/bash", b"/opt/start.sh"))
    process(tmp_path, 705, argv=(b"/bin/sleep", b"1"))
    process(tmp_path, 710, environ=b"A=engine\0")
    assert found(tmp_path, 700).pid == 710


def test_an_environment_that_may_not_be_read(tmp_path: Path) -> None:
    process(tmp_path, 700)
    (tmp_path / "proc/700/environ").unlink()
    (tmp_path / "proc/700/environ").mkdir()
    one = found(tmp_path, 700)
    assert one.environ is None
    assert one.problem is not None and "environ" in one.problem
    assert one.argv


def test_an_environment_of_a_megabyte(tmp_path: Path) -> None:
    content = b"".join(b"NAME_%d=%s\0" % (number, b"x" * 1000) for number in range(1100))
    process(tmp_path, 700, environ=content)
    one = found(tmp_path, 700)
    assert one.environ is not None
    assert len(one.environ) == 1100
    assert one.environ["NAME_1099"] == "x" * 1000


def test_escapes_newlines_and_broken_utf_8_in_an_argument_list() -> None:
    words = words_of(b"/py\0-m\0sglang.launch_server\0--host\0\x1b[31m\xff\xfe\n\xe2\x80\xae\0--flag\0\0")
    command = parse_command_line(words)
    told = shown(command.flags["host"])
    assert told is not None
    assert clean(told) == told
    assert told.isprintable()
    assert command.flags["flag"] is True


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(content: bytes) -> None:
    for value in environment_of(content).values():
        value.encode("utf-8")
    for word in words_of(content):
        word.encode("utf-8")


names = st.text(st.characters(codec="ascii", categories=["Lu", "Ll", "Nd"]), min_size=1, max_size=8)
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(names, values, max_size=8))
def test_an_environment_comes_back(environment: dict[str, str]) -> None:
    content = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    assert environment_of(content) == environment
    # Of a name that is there twice the first counts.
    assert environment_of(content + content.replace(b"=", b"=x")) == environment


# A real interpreter ------------------------------------------------------------------------------


class Started:
    """A Python that has started with this environment and waits."""

    def __init__(self, start_up: Path, environment: dict[str, str]) -> None:
        self.start_up = start_up
        given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(start_up), **environment}
        # Without site: the start-up files under test are for the one that is asked.
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", "input()"], env=given, stdin=subprocess.PIPE
        )

    def sitecustomize(self, text: str) -> None:
        (self.start_up / "sitecustomize.py").write_text(text)

    async def ask(self, *options: str, given: str | None = None) -> service_python.Interpreter:
        return await service_python.ask(
            LocalRunner(), program=sys.executable, options=options, pid=self.process.pid, given=given
        )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    one = Started(tmp_path, {"NCCL_ALGO": "Tree", "HF_TOKEN": "hf_secret", "SGLANG_X": "a b\nc\u202e"})
    try:
        yield one
    finally:
        one.process.communicate(b"\n")


async def test_what_sitecustomize_sets_is_seen(started: Started) -> None:
    started.sitecustomize(
        "import os\nos.environ['NCCL_PROTO'] = 'LL'\nos.environ.setdefault('NCCL_ALGO', 'Ring')\n"
    )
    seen = await started.ask()
    assert seen.environment["NCCL_PROTO"] == "LL"
    assert seen.environment["NCCL_ALGO"] == "Tree"
    assert seen.environment["SGLANG_X"] == "a b\nc\u202e"
    assert seen.own == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
    assert seen.loaded == {"sitecustomize": str(started.start_up / "sitecustomize.py")}
    assert seen.version == ".".join(map(str, sys.version_info[:3]))
    assert "hf_secret" not in repr(seen)


async def test_it_starts_with_the_options_of_the_process(started: Started) -> None:
    started.sitecustomize("import os\nos.environ['NCCL_PROTO'] = 'LL'\n")
    assert "NCCL_PROTO" not in (await started.ask("-S")).environment
    assert "NCCL_PROTO" not in (await started.ask("-I")).environment


async def test_no_card_is_seen_by_what_the_start_up_files_import(started: Started) -> None:
    started.sitecustomize(
        "import os\nos.environ['NCCL_SEEN'] = repr(os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    seen = await started.ask(given="0,1,2,3")
    assert seen.environment["NCCL_SEEN"] == "''"
    assert seen.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "CUDA_VISIBLE_DEVICES" not in (await started.ask()).environment
    started.sitecustomize("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '7'\n")
    assert (await started.ask(given="0")).environment["CUDA_VISIBLE_DEVICES"] == "7"


async def test_what_start_up_files_print_is_no_answer(started: Started) -> None:
    started.sitecustomize(
        "import os, sys\nprint('gpuops-{}' * 1000)\nsys.stdout.buffer.write(b'\\xff\\x1b[2J\\0')\n"
        "sys.stdout.flush()\nsys.stdout = None\nos.environ['NCCL_ALGO'] = 'x'\nraise RuntimeError('no')\n"
    )
    assert (await started.ask()).environment["NCCL_ALGO"] == "x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nos._exit(0)\n", "in its start-up files"),
        ("raise SystemExit('\\x1b[31mstop')\n", "stop"),
        ("while True: pass\n", "did not get past its start-up files"),
    ],
)
async def test_start_up_files_that_let_nothing_through(
    started: Started, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setattr(service_python, "DEADLINE", 1.0)
    started.sitecustomize(text)
    with pytest.raises(service_python.NoAnswer, match=reason):
        await started.ask()


async def test_no_key_is_on_a_command_line(started: Started) -> None:
    asked: list[tuple[str, ...]] = []

    class Watched(LocalRunner):
        async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
            asked.append(tuple(argv))
            return await super().run(argv, deadline=deadline, stdin=stdin)

    await service_python.ask(
        Watched(), program=sys.executable, options=(), pid=started.process.pid, given=None
    )
    assert asked
    assert "hf_secret" not in repr(asked)


async def test_a_process_that_ended_or_a_python_that_is_not_there() -> None:
    with pytest.raises(service_python.NoAnswer, match="No such file"):
        await service_python.ask(LocalRunner(), program=sys.executable, options=(), pid=2**22 + 1, given=None)
    with pytest.raises(service_python.NoAnswer, match="not found"):
        await service_python.ask(LocalRunner(), program="/opt/none/python", options=(), pid=1, given=None)
