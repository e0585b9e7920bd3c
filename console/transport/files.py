"""Files of the machine behind a runner: read whole, replaced whole, through its own coreutils.

So a file in a container gets its owner and its place from the container itself, whatever
its root is mapped to and wherever its file system is mounted.
"""

from __future__ import annotations

import posixpath

from console.transport.runner import Result, Runner

#: Seconds for one small command on files.
DEADLINE = 10.0

#: A file larger than this, in bytes, is none that we read or write.
LARGEST = 1024 * 1024


class FileProblem(Exception):
    """A file could not be read or written; the message names it and says why."""


async def read_text(runner: Runner, path: str) -> str | None:
    """The file as UTF-8 text; None when it is not there. FileProblem when it cannot be read."""
    result = await runner.run(("cat", "--", path), deadline=DEADLINE)
    if not result.ok:
        if await exists(runner, path):
            raise FileProblem(f"{path}: {result.reason}")
        return None
    if len(result.stdout) > LARGEST:
        raise FileProblem(f"{path}: larger than {LARGEST} bytes")
    try:
        return result.stdout.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise FileProblem(f"{path}: not UTF-8 text at byte {problem.start}") from None


async def exists(runner: Runner, path: str, kind: str = "-e") -> bool:
    """Whether it is there: ``-e`` anything, ``-f`` a file, ``-d`` a directory, ``-r`` readable."""
    result = await runner.run(("test", kind, path), deadline=DEADLINE)
    if result.returncode not in (0, 1):
        raise FileProblem(f"{path}: {result.reason}")
    return result.returncode == 0


async def replace(runner: Runner, path: str, text: str, *, keep: str | None = None) -> None:
    """Put ``text`` in place of the file, in one move: a reader sees the old or the new, never a part.

    ``keep`` is where the version before stays. What was written is read back and compared
    before the move. FileProblem with the file as it was when anything is in the way.
    """
    unfinished = f"{path}.gpuops-new"
    await _must(path, runner, ("dd", f"of={unfinished}", "conv=fsync", "status=none"), text.encode("utf-8"))
    if await read_text(runner, unfinished) != text:
        raise FileProblem(f"{path}: what was written to {unfinished} is not what is read from it")
    await _must(path, runner, ("chmod", "644", "--", unfinished))
    if keep is not None and await exists(runner, path):
        await _must(path, runner, ("cp", "-p", "--", path, keep))
    await _must(path, runner, ("mv", "-f", "-T", "--", unfinished, path))
    await _must(path, runner, ("sync", "--", posixpath.dirname(path)))


async def remove(runner: Runner, path: str) -> None:
    """Remove the file; nothing happens when it is not there. FileProblem when it stays."""
    await _must(path, runner, ("rm", "-f", "--", path))
    await _must(path, runner, ("sync", "--", posixpath.dirname(path)))


async def _must(path: str, runner: Runner, argv: tuple[str, ...], stdin: bytes = b"") -> Result:
    result = await runner.run(argv, deadline=DEADLINE, stdin=stdin)
    if not result.ok:
        raise FileProblem(f"{path}: {result.reason}")
    return result
