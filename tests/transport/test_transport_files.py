"""Files replaced through a runner: whole or not at all, on this machine and on the simulated box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.demo import running_box
from console.transport.files import FileProblem, exists, read_text, remove, replace
from console.transport.local import LocalRunner
from console.transport.runner import Runner


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    directory = tmp_path_factory.mktemp("box")
    with running_box(directory, []):
        yield lxc(BoxRunner(directory), 129)


@pytest.fixture(params=["here", "box"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Runner, str]:
    if request.param == "here":
        return LocalRunner(), str(tmp_path / "a.service")
    return request.getfixturevalue("box"), "/etc/systemd/system/a.service"


async def test_a_file_is_replaced_and_the_one_before_is_kept(place: tuple[Runner, str]) -> None:
    runner, path = place
    await remove(runner, path)
    assert await read_text(runner, path) is None
    await replace(runner, path, "one $HOME %n \\ ü\n", keep=f"{path}.previous")
    assert await read_text(runner, path) == "one $HOME %n \\ ü\n"
    assert not await exists(runner, f"{path}.previous")
    await replace(runner, path, "two\n", keep=f"{path}.previous")
    assert await read_text(runner, path) == "two\n"
    assert await read_text(runner, f"{path}.previous") == "one $HOME %n \\ ü\n"
    assert not await exists(runner, f"{path}.gpuops-new")
    await remove(runner, path)
    assert not await exists(runner, path)


async def test_what_is_in_the_way_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.service"
    path.write_text("one\n")
    (tmp_path / "a.service.gpuops-new").mkdir()
    with pytest.raises(FileProblem, match=r"a\.service: .*Is a directory"):
        await replace(LocalRunner(), str(path), "two\n")
    assert path.read_text() == "one\n"
    with pytest.raises(FileProblem, match="Is a directory"):
        await read_text(LocalRunner(), str(tmp_path))
    path.write_bytes(b"ab\xff")
    with pytest.raises(FileProblem, match="not UTF-8 text at byte 2"):
        await read_text(LocalRunner(), str(path))


async def test_a_command_reads_all_that_it_is_given() -> None:
    content = bytes(range(256)) * 4096
    result = await LocalRunner().run(("cat",), deadline=5.0, stdin=content)
    assert result.stdout == content
    assert (await LocalRunner().run(("true",), deadline=5.0, stdin=content)).ok
    assert (await LocalRunner().run(("cat",), deadline=5.0)).stdout == b""
