"""A model's files and the host's RAM, as a container and its host show them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.sources.host_memory import groups_of, read_held, read_host_memory
from console.sources.model_files import CONFIG_LIMIT, parse_config, read_model
from console.sources.source import Unavailable
from console.transport.local import LocalRunner

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


async def test_geometry_and_size_come_from_the_folder(model: Path) -> None:
    index = {"metadata": {"total_size": 547_042_177_536}, "weight_map": {"a": "b" * 100_000}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = await read_model(LocalRunner(), str(model), {})
    assert found.geometry is not None
    assert (found.geometry.layers, found.geometry.head_dim) == (2, 16)
    assert (found.weights, found.weights_source) == (547_042_177_536, "model.safetensors.index.json")
    assert found.problem is None


async def test_without_an_index_the_files_are_measured(model: Path) -> None:
    for number in (1, 2):
        (model / f"model-{number}.safetensors").write_bytes(b"x" * 1000 * number)
    found = await read_model(LocalRunner(), str(model), {})
    assert (found.weights, found.weights_source) == (3000, "the sizes of 2 safetensors files")


async def test_without_weights_the_size_is_unknown_not_zero(model: Path) -> None:
    found = await read_model(LocalRunner(), str(model), {})
    assert found.weights is None
    assert "neither model.safetensors.index.json" in found.weights_source


async def test_a_name_on_the_hub_is_looked_up_in_the_services_cache(tmp_path: Path) -> None:
    hub = tmp_path / "hf/hub/models--nvidia--Some-Model"
    snapshot = hub / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("0123abcd\n")
    for environment in ({"HF_HOME": str(tmp_path / "hf")}, {"HF_HUB_CACHE": str(tmp_path / "hf/hub")}):
        found = await read_model(LocalRunner(), "nvidia/Some-Model", environment)
        assert found.folder == str(snapshot)
        assert found.geometry is not None
    elsewhere = await read_model(LocalRunner(), "nvidia/Some-Model", {"HF_HOME": "/nowhere"})
    assert elsewhere.problem is not None
    assert "not in the service's cache (/nowhere/hub/models--nvidia--Some-Model)" in elsewhere.problem
    assert "download it" in elsewhere.problem


@pytest.mark.parametrize("path", ["relative", "../../etc", "a/b/c", "--help"])
async def test_any_other_path_is_refused(path: str) -> None:
    found = await read_model(LocalRunner(), path, {})
    assert found.problem is not None
    assert found.problem.startswith(f"model-path {path}: expected an absolute path")


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    found = await read_model(LocalRunner(), str(tmp_path / "gone"), {})
    assert found.problem is not None
    assert str(tmp_path / "gone/config.json") in found.problem
    assert "No such file" in found.problem


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "expected JSON, found nothing"),
        (b"<html>", "expected JSON, found something else"),
        (b"[" * 100_000, "expected JSON, found something else"),
        (b'{"num_hidden_layers": "2"}', "num_hidden_layers: expected a whole number"),
        (b'{"a": "' + b"x" * CONFIG_LIMIT + b'"}', "expected a file of at most 1024 KiB"),
        (b'{"num_hidden_layers": 2, "layer_types": "\\u001b[31mred"}', "layer_types: expected a list"),
    ],
)
def test_a_bad_config_is_told_with_its_place(body: bytes, words: str) -> None:
    geometry, problem = parse_config(body, "/m/config.json")
    assert geometry is None
    assert problem is not None
    assert problem.startswith("/m/config.json: ")
    assert words in problem
    assert "\x1b" not in problem


@settings(deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_geometry_or_a_problem(body: bytes) -> None:
    geometry, problem = parse_config(body, "/m/config.json")
    assert (geometry is None) != (problem is None)


# The host's RAM --------------------------------------------------------------------------------

GIB = 1024**3


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "proc").mkdir()
    kib = GIB // 1024
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal:  {768 * kib} kB\nMemFree: 1 kB\nMemAvailable:  {300 * kib} kB\n"
    )
    return tmp_path


def group(root: Path, name: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("_", ".", 1)).write_text(text)


def test_limits_are_those_that_are_set_and_page_cache_is_not_used(host: Path) -> None:
    group(host, "lxc/129", memory_max=f"{700 * GIB}\n", memory_high="max\n", memory_current=f"{650 * GIB}\n")
    group(host, "lxc/129", memory_stat=f"anon 5\nactive_file {100 * GIB}\ninactive_file {50 * GIB}\n")
    group(host, "lxc/129/ns", memory_max="max\n", memory_high="max\n", memory_current="1\n")
    unit = "lxc/129/ns/system.slice/sglang.service"
    group(
        host, unit, memory_max=f"{600 * GIB}\n", memory_high=f"{550 * GIB}\n", memory_current=f"{9 * GIB}\n"
    )
    found = read_host_memory(host, groups_of(129, "/system.slice/sglang.service"), returned=7)
    assert (found.total, found.available, found.returned) == (768 * GIB, 300 * GIB, 7)
    assert [(limit.where, limit.limit // GIB, (limit.used or 0) // GIB) for limit in found.limits] == [
        ("lxc/129", 700, 500),
        (unit, 550, 9),
    ]


def test_a_limit_whose_use_cannot_be_read_stays_a_limit(host: Path) -> None:
    group(host, "lxc/129", memory_max=f"{700 * GIB}\n")
    (limit,) = read_host_memory(host, groups_of(129, None)).limits
    assert limit.used is None


def test_what_a_group_gives_back_is_not_its_page_cache(host: Path) -> None:
    group(host, "a", memory_stat=f"anon {600 * GIB}\nfile {90 * GIB}\nshmem {2 * GIB}\ninactive_file 1\n")
    assert read_held(host, "a") == 602 * GIB
    assert read_held(host, "b") is None


@pytest.mark.parametrize(
    ("container", "control_group", "expected"),
    [
        (None, "/system.slice/x.service", ("system.slice", "system.slice/x.service")),
        (129, None, ("lxc/129", "lxc/129/ns")),
        (129, "/a/../../b", ("lxc/129", "lxc/129/ns")),
        (None, None, ()),
    ],
)
def test_the_groups_a_service_lives_in(
    container: int | None, control_group: str | None, expected: tuple[str, ...]
) -> None:
    assert groups_of(container, control_group) == expected


def test_a_host_that_does_not_tell_has_no_value(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="meminfo: No such file"):
        read_host_memory(tmp_path, ())
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: lots\n")
    with pytest.raises(Unavailable, match="expected MemTotal and MemAvailable"):
        read_host_memory(tmp_path, ())
