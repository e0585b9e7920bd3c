"""The programs of the box that read and write files: what coreutils do, as far as commands ask for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

#: What each answers: exit status, stdout, stderr.
Answer = tuple[int, str, str]

#: Free space of every file system of the box, bytes.
_FREE_BYTES = 412_316_860_416


def answer(name: str, words: Sequence[str], files: Path, stdin: str) -> Answer | None:
    """Run ``name`` on the machine whose files lie under ``files``; None when it is none of these."""
    program = _PROGRAMS.get(name)
    if program is None:
        return None
    options = [word for word in words if word.startswith("-") and word not in ("-", "--")]
    rest = [word for word in words if not word.startswith("-") or word == "-"]
    try:
        return program(files, options, rest, stdin)
    except OSError as problem:
        return 1, "", f"{name}: {problem.filename2 or problem.filename or ''}: {problem.strerror}\n"


def located(files: Path, path: str) -> Path:
    """Where a path of the machine lies. FileNotFoundError for one that leads out of it."""
    place = files / path.lstrip("/")
    if not place.parent.resolve().is_relative_to(files.resolve()):
        raise FileNotFoundError(2, "No such file or directory", path)
    return place


def _cat(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    out, err = [], []
    for word in words:
        place = located(files, word)
        if place.resolve().is_relative_to(files.resolve()) and place.is_file():
            out.append(place.read_text(encoding="utf-8", errors="replace"))
        elif place.is_dir():
            err.append(f"cat: {word}: Is a directory\n")
        else:
            err.append(f"cat: {word}: No such file or directory\n")
    return (1 if err else 0), "".join(out), "".join(err)


def _dd(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    operands = dict(word.partition("=")[::2] for word in words)
    located(files, operands["of"]).write_text(stdin, encoding="utf-8")
    return 0, "", ""


def _mv(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    located(files, words[0]).replace(located(files, words[1]))
    return 0, "", ""


def _cp(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    shutil.copy2(located(files, words[0]), located(files, words[1]))
    return 0, "", ""


def _rm(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    for word in words:
        located(files, word).unlink(missing_ok="-f" in options)
    return 0, "", ""


def _mkdir(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    for word in words:
        # The machine's own tree: every folder below its root is made.
        (files / word.lstrip("/")).mkdir(parents="-p" in options, exist_ok="-p" in options)
    return 0, "", ""


def _chmod(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    for word in words[1:]:
        located(files, word).chmod(int(words[0], 8))
    return 0, "", ""


def _test(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    place = located(files, words[0])
    questions: dict[str, Callable[[Path], bool]] = {
        "-e": Path.exists,
        "-f": Path.is_file,
        "-d": Path.is_dir,
        "-r": lambda path: os.access(path, os.R_OK),
    }
    return (0 if questions[options[0]](place) else 1), "", ""


def _stat(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    """``stat -L -c %Y``: when each was last written, in Unix seconds."""
    places = [located(files, word) for word in words if word != "%Y"]
    return 0, "".join(f"{int(place.stat().st_mtime)}\n" for place in places), ""


def _od(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    """``od -An -v -tx1 -NCOUNT FILE``: bytes in hexadecimal, sixteen a line."""
    count = next((int(option[2:]) for option in options if option.startswith("-N")), None)
    data = located(files, words[0]).read_bytes()[:count]
    lines = [data[start : start + 16] for start in range(0, len(data), 16)]
    return 0, "".join(f" {line.hex(' ')}\n" for line in lines), ""


def _sync(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    return 0, "", ""


def _df(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    return 0, f"Avail\n{_FREE_BYTES}\n", ""


def _find(files: Path, options: list[str], words: list[str], stdin: str) -> Answer:
    """``find -L FOLDER -maxdepth 1 -name PATTERN -printf '%s\\n'``."""
    place = located(files, words[0])
    if not place.is_dir():
        return 1, "", f"find: '{words[0]}': No such file or directory\n"
    found = sorted(path for path in place.iterdir() if fnmatch(path.name, words[2]))
    return 0, "".join(f"{path.stat().st_size}\n" for path in found), ""


_PROGRAMS: dict[str, Callable[[Path, list[str], list[str], str], Answer]] = {
    "cat": _cat,
    "chmod": _chmod,
    "cp": _cp,
    "dd": _dd,
    "df": _df,
    "find": _find,
    "mkdir": _mkdir,
    "mv": _mv,
    "od": _od,
    "rm": _rm,
    "stat": _stat,
    "sync": _sync,
    "test": _test,
}
