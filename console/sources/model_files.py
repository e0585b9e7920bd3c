"""A model's files where the engine will read them: config.json and the size of its weights."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

import msgspec

from console.model.kv import ConfigProblem, KvGeometry, read_geometry
from console.model.text import clean
from console.sources.engine.fields import parse_json
from console.transport.runner import Runner

#: Seconds for one command; a model may lie on a network file system.
DEADLINE = 5.0

#: A config.json is a few kB; past this, in bytes, it is something else.
CONFIG_LIMIT = 1024 * 1024

INDEX = "model.safetensors.index.json"

#: In the index the sum comes before the map of tensors, which for a large model is longer than is read.
_TOTAL = re.compile(rb'"metadata"\s*:\s*\{[^{}]{0,4000}?"total_size"\s*:\s*(\d{1,18})(?:\.0)?\s*[,}]')
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{6,64}")


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one model. ``problem`` says why there is no geometry, where it is and what to do."""

    path: str
    folder: str | None = None  # where the files are
    geometry: KvGeometry | None = None
    problem: str | None = None
    weights: int | None = None  # bytes of all ranks together
    weights_source: str = ""


async def read_model(runner: Runner, path: str, environment: Mapping[str, str]) -> ModelFiles:
    """Read the model at ``path``, a folder or a name on the hub. Never raises for what is there.

    ``environment`` is the service's: it tells where the hub's files are kept.
    """
    folder, problem = await _folder(runner, path, environment)
    if folder is None:
        return ModelFiles(path=path, problem=problem)
    where = posixpath.join(folder, "config.json")
    result = await runner.run(("cat", "--", where), deadline=DEADLINE)
    if not result.ok:
        return ModelFiles(path=path, folder=folder, problem=f"{where}: {clean(result.reason)}")
    geometry, problem = parse_config(result.stdout, where)
    weights, source = await _weights(runner, folder)
    return ModelFiles(
        path=path,
        folder=folder,
        geometry=geometry,
        problem=problem,
        weights=weights,
        weights_source=source,
    )


def parse_config(body: bytes, where: str) -> tuple[KvGeometry | None, str | None]:
    """The geometry of a config.json, or what is wrong with the file ``where``, in words."""
    if len(body) > CONFIG_LIMIT:
        return None, f"{where}: expected a file of at most {CONFIG_LIMIT // 1024} KiB, found a larger one"
    config = parse_json(body)
    if config is None:
        return None, f"{where}: expected JSON, found {'nothing' if not body.strip() else 'something else'}"
    try:
        return read_geometry(config), None
    except ConfigProblem as problem:
        return None, f"{where}: {clean(str(problem))}"


async def _folder(runner: Runner, path: str, environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Where the files are: the path itself, or the snapshot of a hub name in the service's cache."""
    if path.startswith("/"):
        return path, None
    if _HUB_NAME.fullmatch(path) is None or ".." in path:
        return None, f"model-path {path}: expected an absolute path or a name such as owner/model"
    hub = posixpath.join(_hub(environment), "models--" + path.replace("/", "--"))
    result = await runner.run(("cat", "--", f"{hub}/refs/main"), deadline=DEADLINE)
    commit = result.stdout[:100].decode("ascii", "replace").strip()
    if not result.ok or _COMMIT.fullmatch(commit) is None:
        return None, (
            f"model-path {path}: it is a name on the hub, and is not in the service's cache ({hub}); "
            "download it there, or name a folder"
        )
    return f"{hub}/snapshots/{commit}", None


def _hub(environment: Mapping[str, str]) -> str:
    """The hub's cache, as huggingface_hub finds it; the service runs as root where its unit names no user."""
    if "HF_HUB_CACHE" in environment:
        return environment["HF_HUB_CACHE"]
    home = environment.get("HF_HOME")
    if home is None:
        cache = environment.get("XDG_CACHE_HOME") or posixpath.join(
            environment.get("HOME", "/root"), ".cache"
        )
        home = posixpath.join(cache, "huggingface")
    return posixpath.join(home, "hub")


async def _weights(runner: Runner, folder: str) -> tuple[int | None, str]:
    """Bytes of all weights, and where that is from: the index, else the sizes of the files."""
    result = await runner.run(("cat", "--", posixpath.join(folder, INDEX)), deadline=DEADLINE)
    total = _TOTAL.search(result.stdout[:65536]) if result.stdout else None
    if total is not None and int(total[1]) > 0:
        return int(total[1]), INDEX
    argv = ("find", "-L", folder, "-maxdepth", "1", "-name", "*.safetensors", "-printf", "%s\\n")
    result = await runner.run(argv, deadline=DEADLINE)
    sizes = [int(word) for word in result.stdout.split() if word.isdigit()] if result.ok else []
    if sizes:
        return sum(sizes), f"the sizes of {len(sizes)} safetensors files"
    return None, f"there is neither {INDEX} with a total_size nor a safetensors file in {folder}"
