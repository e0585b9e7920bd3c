"""The engine's unit file and drop-ins in the container, and what systemd makes of them."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from console.simulator import models

UNIT = "sglang.service"
PYTHON = "/opt/sglang/bin/python"

_FOLDERS = ("etc/systemd/system", "run/systemd/system")

ARGUMENTS = (
    "--model-path /shared/kimi-k2.5-int4",
    "--served-model-name kimi-k2.5",
    "--host 0.0.0.0 --port {port}",
    "--tp-size 8",
    "--trust-remote-code",
    "--cuda-graph-max-bs 128",
    "--disable-custom-all-reduce",
    "--attention-backend flashinfer",
    "--enable-flashinfer-allreduce-fusion",
    "--speculative-algorithm EAGLE3",
    "--speculative-draft-model-path /data/eagle3/output_100k_sglang/4",
    "--speculative-num-steps 2",
    "--speculative-eagle-topk 1",
    "--mem-fraction-static 0.88",
    "--tool-call-parser kimi_k2",
    "--reasoning-parser kimi_k2",
    "--enable-hierarchical-cache",
    "--hicache-ratio 4.0",
    "--enable-metrics",
)

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


def unit_file(port: int) -> str:
    """The unit as the operator wrote it."""
    arguments = " \\\n    ".join(argument.format(port=port) for argument in ARGUMENTS)
    return (
        "[Unit]\nDescription=SGLang inference server\nAfter=network-online.target\n"
        "Wants=network-online.target\n"
        "StartLimitIntervalSec=3600\nStartLimitBurst=3\n\n"
        "[Service]\nType=exec\nEnvironment=SGLANG_ENABLE_SPEC_V2=True\n"
        f"ExecStart={PYTHON} -m sglang.launch_server \\\n    {arguments}\n"
        "Restart=on-failure\nRestartSec=15\nTimeoutStopSec=90\nLimitNOFILE=1048576\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def install(rootfs: Path, port: int) -> None:
    """Put the container's files in place."""
    folder = rootfs / _FOLDERS[0]
    folder.mkdir(parents=True)
    (rootfs / _FOLDERS[1]).mkdir(parents=True)
    (folder / UNIT).write_text(unit_file(port))
    packages = rootfs / "opt/sglang/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (rootfs / "etc/hostname").write_text("sglang\n")
    models.install(rootfs)


def read(rootfs: Path) -> Definition:
    """The unit with its drop-ins, later files over earlier ones. FileNotFoundError without a unit file."""
    fragment = rootfs / _FOLDERS[0] / UNIT
    drop_ins = _drop_ins(rootfs)
    settings: dict[str, list[str]] = {}
    for path in (fragment, *drop_ins):
        for key, value in _settings(path.read_text(encoding="utf-8")):
            if value:
                settings.setdefault(key, []).append(value)
            else:
                settings[key] = []  # an empty assignment clears what was set before
    command = (settings.get("ExecStart") or [""])[-1]
    environment = [word for value in settings.get("Environment", []) for word in _split(value)]
    for name in settings.get("EnvironmentFile", []):
        environment += _environment_file(rootfs, name)
    single = {key: values[-1] for key, values in settings.items() if values}
    return Definition(
        description=single.get("Description", UNIT),
        argv=tuple(_split(command)),
        environment=tuple(environment),
        fragment=f"/{_FOLDERS[0]}/{UNIT}",
        drop_ins=tuple(f"/{path.relative_to(rootfs)}" for path in drop_ins),
        stamp=stamp(rootfs),
        options=single,
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


def _settings(text: str) -> list[tuple[str, str]]:
    joined = text.replace("\\\n", " ")
    pairs = []
    for line in joined.splitlines():
        stripped = line.strip()
        if stripped and stripped[0] not in "#;[":
            key, equals, value = stripped.partition("=")
            if equals:
                pairs.append((key.strip(), value.strip()))
    return pairs


def _environment_file(rootfs: Path, name: str) -> list[str]:
    path = rootfs / name.lstrip("-").lstrip("/")
    if not path.is_file():
        return []
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [word for line in lines if line and line[0] not in "#;" for word in _split(line)[:1]]


def _split(text: str) -> list[str]:
    """systemd's quoting, near enough; a line that cannot be read is one word."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]
