"""The engine's unit file and drop-ins in the container, and what systemd makes of them."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from console.model.managed_unit import parse, render
from console.model.profile import Profile
from console.model.unit_file import environment_file
from console.simulator import models

UNIT = "sglang.service"
PYTHON = "/opt/sglang/bin/python"

_FOLDERS = ("etc/systemd/system", "run/systemd/system")

SITECUSTOMIZE = """\
import os

os.environ.setdefault("NCCL_PROTO", "LL")
os.environ.setdefault("NCCL_ALGO", "Ring")
os.environ.setdefault("NCCL_P2P_LEVEL", "SYS")
os.environ.setdefault("NCCL_MAX_NCHANNELS", "16")
os.environ.setdefault("NCCL_BUFFSIZE", "16777216")
os.environ.setdefault("NCCL_NTHREADS", "512")
"""


class Definition(msgspec.Struct, frozen=True):
    """One unit as loaded. ``stamp`` changes whenever a file of it does."""

    description: str
    argv: tuple[str, ...]
    environment: tuple[str, ...]
    fragment: str
    drop_ins: tuple[str, ...]
    stamp: tuple[tuple[str, int, int], ...]
    options: dict[str, str]


@functools.cache
def first_profile() -> Profile:
    """What the box serves when it starts, as it is shipped."""
    from console.sources.files import load_profile, shipped_profiles_directory

    return load_profile(shipped_profiles_directory() / "kimi-k2.5-int4.yaml")


def install(rootfs: Path) -> None:
    """Put the container's files in place."""
    folder = rootfs / _FOLDERS[0]
    folder.mkdir(parents=True)
    (rootfs / _FOLDERS[1]).mkdir(parents=True)
    (folder / UNIT).write_text(render(first_profile(), python=PYTHON))
    packages = rootfs / "opt/sglang/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (rootfs / "etc/hostname").write_text("sglang\n")
    models.install(rootfs)


def read(rootfs: Path) -> Definition:
    """The unit with its drop-ins, later files over earlier ones. FileNotFoundError without a unit file."""
    fragment = rootfs / _FOLDERS[0] / UNIT
    drop_ins = _drop_ins(rootfs)
    texts = [path.read_text(encoding="utf-8") for path in (fragment, *drop_ins)]
    unit = parse(texts[0], texts[1:])
    environment = dict(unit.environment)
    for name in unit.environment_files:
        environment.update(_environment_file(rootfs, name))
    return Definition(
        description=unit.value("Unit", "Description") or UNIT,
        argv=unit.argv,
        environment=tuple(f"{name}={value}" for name, value in environment.items()),
        fragment=f"/{_FOLDERS[0]}/{UNIT}",
        drop_ins=tuple(f"/{path.relative_to(rootfs)}" for path in drop_ins),
        stamp=stamp(rootfs),
        options={one.key: one.value for one in unit.settings if one.value},
    )


def stamp(rootfs: Path) -> tuple[tuple[str, int, int], ...]:
    """Which files make the unit, when each was written and how long it is."""
    found = []
    for path in (rootfs / _FOLDERS[0] / UNIT, *_drop_ins(rootfs)):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)


def _drop_ins(rootfs: Path) -> list[Path]:
    """By file name; one in /etc hides one of the same name in /run."""
    found: dict[str, Path] = {}
    for folder in reversed(_FOLDERS):
        for path in (rootfs / folder / f"{UNIT}.d").glob("*.conf"):
            found[path.name] = path
    return [found[name] for name in sorted(found)]


def _environment_file(rootfs: Path, name: str) -> tuple[tuple[str, str], ...]:
    path = rootfs / name.lstrip("-").lstrip("/")
    return environment_file(path.read_text(encoding="utf-8")) if path.is_file() else ()
