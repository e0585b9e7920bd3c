"""Commands on this host: what they say, when they are cut, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from console.transport import local
from console.transport.container import ContainerRunner, lxc
from console.transport.local import LocalRunner
from console.transport.runner import OUTPUT_LIMIT, Stream

PYTHON = sys.executable


def alive(pid: int) -> bool:
    """True while the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def gone(pid: int, within: float = 3.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not alive(pid):
            return True
        await asyncio.sleep(0.02)
    return False


async def read_all(stream: Stream) -> list[bytes]:
    return [line async for line in stream.lines()]


async def test_output_error_and_status_are_told_apart():
    result = await LocalRunner().run(
        [PYTHON, "-c", "import sys; print('a'); print('why', file=sys.stderr); sys.exit(3)"], deadline=10
    )
    assert (result.stdout, result.stderr, result.returncode) == (b"a\n", b"why\n", 3)
    assert not result.ok
    assert result.reason == "why"


async def test_arguments_are_never_read_by_a_shell():
    result = await LocalRunner().run(["echo", "$HOME; *", "`id`"], deadline=10)
    assert result.ok
    assert result.stdout == b"$HOME; * `id`\n"


async def test_a_missing_command_is_a_value():
    result = await LocalRunner().run(["no-such-command-here"], deadline=1)
    assert (result.returncode, result.reason) == (None, "no-such-command-here: not found")


async def test_a_nul_byte_among_the_arguments_is_a_value():
    result = await LocalRunner().run(["echo", "a\0b"], deadline=1)
    assert result.returncode is None
    assert "null byte" in result.reason


async def test_commands_do_not_wait_for_the_keyboard_and_speak_plain_english():
    result = await LocalRunner().run(
        [PYTHON, "-c", "import os, sys; print(sys.stdin.read(), os.getenv('LC_ALL'), os.getenv('NO_COLOR'))"],
        deadline=10,
    )
    assert result.stdout == b" C.UTF-8 1\n"


async def test_past_its_deadline_the_whole_family_is_killed():
    family = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print(os.getpid(), child, flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    result = await LocalRunner().run([PYTHON, "-c", family], deadline=0.7)
    assert time.monotonic() - began < 4
    assert result.returncode is None
    assert result.reason.endswith("deadline passed")
    for pid in map(int, result.stdout.split()):
        assert await gone(pid)


async def test_cancelling_kills_the_command(tmp_path: Path):
    note = tmp_path / "pid"
    program = (
        f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    task = asyncio.create_task(LocalRunner().run([PYTHON, "-c", program], deadline=60))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(int(note.read_text()))


async def test_output_past_the_limit_is_cut_but_the_command_still_ends_by_itself():
    flood = f"import sys; sys.stdout.write('x' * ({OUTPUT_LIMIT} + 100_000))"
    result = await LocalRunner().run([PYTHON, "-c", flood], deadline=20)
    assert result.ok
    assert len(result.stdout) == OUTPUT_LIMIT


async def test_a_daemon_left_behind_neither_holds_us_up_nor_is_killed():
    daemon = (
        "import os, time\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True); os._exit(0)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    result = await LocalRunner().run([PYTHON, "-c", daemon], deadline=30)
    assert result.ok
    assert time.monotonic() - began < 3
    pid = int(result.stdout)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


async def test_a_stream_gives_lines_as_they_come_then_says_how_it_ended():
    talk = "import sys, time; print('one', flush=True); time.sleep(0.3); sys.stdout.write('two'); sys.exit(4)"
    async with LocalRunner().stream([PYTHON, "-c", talk]) as stream:
        lines = stream.lines()
        assert await anext(lines) == b"one"
        assert stream.reason is None
        assert [line async for line in lines] == [b"two"]
        assert stream.reason is not None
        assert stream.reason.endswith("exit status 4")


async def test_a_stream_that_was_killed_says_so():
    async with LocalRunner().stream([PYTHON, "-c", "import os; os.kill(os.getpid(), 9)"]) as stream:
        assert await read_all(stream) == []
        assert stream.reason == f"{PYTHON}: killed by signal 9"


async def test_a_stream_of_a_missing_command_ends_at_once_with_the_reason():
    async with LocalRunner().stream(["no-such-command-here"]) as stream:
        assert await read_all(stream) == []
        assert stream.reason == "no-such-command-here: not found"


async def test_leaving_a_stream_kills_its_command_and_children():
    family = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"
        "time.sleep(60)\n"
    )
    async with LocalRunner().stream([PYTHON, "-c", family]) as stream:
        lines = stream.lines()
        pids = [int(await anext(lines)), int(await anext(lines))]
    for pid in pids:
        assert await gone(pid)


async def test_a_slow_reader_holds_the_command_back_instead_of_filling_memory():
    async with LocalRunner().stream(["yes", "x" * 1000]) as stream:
        lines = stream.lines()
        await anext(lines)
        await asyncio.sleep(0.3)
        assert stream._output._held < 2 * local.STREAM_BUFFER
        for _ in range(20_000):
            assert await anext(lines) == b"x" * 1000


async def test_a_giant_line_is_cut_and_the_next_one_is_whole():
    talk = "import sys; sys.stdout.write('y' * 3_000_000 + '\\nnext\\n')"
    async with LocalRunner().stream([PYTHON, "-c", talk]) as stream:
        lines = await read_all(stream)
    assert [len(line) for line in lines] == [1024 * 1024, 4]


@pytest.mark.parametrize("with_setpriv", [True, False])
def test_a_stream_does_not_outlive_a_console_that_is_killed(tmp_path: Path, with_setpriv: bool):
    """Without setpriv the broken pipe ends it: a command that writes, or, as journalctl does, watches."""
    note = tmp_path / "pid"
    chatter = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "while True: print('line', flush=True); time.sleep(0.05)\n"
    )
    quiet = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    command = [PYTHON, "-c", quiet if with_setpriv else chatter]
    program = (
        "import asyncio\n"
        "from console.transport import local\n"
        + ("" if with_setpriv else "local._setpriv = lambda: None\n")
        + "async def main():\n"
        f"    async with local.LocalRunner().stream({command!r}) as s:\n"
        "        async for line in s.lines(): pass\n"
        "asyncio.run(main())\n"
    )
    console = subprocess.Popen([PYTHON, "-c", program])
    try:
        until = time.monotonic() + 10
        while not (note.exists() and note.read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        pid = int(note.read_text())
        assert alive(pid)
    finally:
        console.kill()
        console.wait()
    assert asyncio.run(gone(pid))


async def test_a_container_runs_the_command_behind_its_prefix():
    inner = ContainerRunner(LocalRunner(), ["env", "PLACE=ct"], "ct:1")
    assert inner.root == Path("/")
    result = await inner.run(["printenv", "PLACE"], deadline=10)
    assert result.stdout == b"ct\n"
    async with inner.stream(["printenv", "PLACE"]) as stream:
        assert await read_all(stream) == [b"ct"]


async def test_a_container_on_a_host_without_lxc_says_what_is_missing():
    here = lxc(LocalRunner(), 129)
    assert here.name == "ct:129"
    if local.shutil.which("lxc-attach") is None:
        result = await here.run(["true"], deadline=1)
        assert result.reason == "lxc-attach: not found"
