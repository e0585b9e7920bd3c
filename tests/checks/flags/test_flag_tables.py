"""The shipped tables: what each version has, and how a name is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console.checks.flags.ask import MARKER
from console.checks.flags.keep import keep
from console.checks.flags.table import (
    canonical,
    nearest_version,
    past,
    shipped,
    shipped_versions,
)

#: Another recording of the same parsers: by version, by flag, "bare", "value" or the choices.
RECORDED = json.loads((Path(__file__).parents[2] / "fixtures/profiles/sglang-flags.json").read_text())

VERSIONS = shipped_versions()


def test_ten_versions_are_shipped_in_their_order() -> None:
    assert VERSIONS == (
        "0.5.8", "0.5.9", "0.5.10", "0.5.11", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.22", "0.5.23",
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_table_is_of_its_version_and_complete(version: str) -> None:
    table = shipped(version)
    counts = {"0.5.8": 329, "0.5.9": 332, "0.5.10": 355, "0.5.18": 489, "0.5.20": 495, "0.5.23": 532}
    assert table.version == version
    assert len(table.flags) == counts.get(version, len(table.flags)) > 300
    assert len(table.by_name) >= len(table.flags) - 1  # no name stands twice; --help has no other
    assert {"model-path", "tp-size", "port"} <= table.by_name.keys()
    assert "EAGLE3" in table.algorithms
    assert "SGLANG_NUMA_BIND_V2" in table.variables or version in ("0.5.8", "0.5.9")


@pytest.mark.parametrize("version", RECORDED)
def test_a_table_agrees_with_another_recording(version: str) -> None:
    table = shipped(version)
    for name, kind in RECORDED[version].items():
        flag = table.by_name[name]
        if kind == "bare":
            assert flag.arity == "0", name
        elif kind == "value":
            assert flag.arity != "0", name
        else:
            assert sorted(flag.choices or ()) == sorted(kind), name


@pytest.mark.parametrize(
    ("written", "version", "meant"),
    [
        ("tp", "0.5.23", "tp-size"),
        ("--tensor-parallel-size", "0.5.9", "tp-size"),
        ("model", "0.5.18", "model-path"),
        ("speculative-algo", "0.5.23", "speculative-algorithm"),
        ("enable-hicache", "0.5.23", "enable-hierarchical-cache"),
        ("cuda-graph-max-bs", "0.5.18", "cuda-graph-max-bs"),
        ("cuda-graph-max-bs", "0.5.23", "cuda-graph-max-bs"),  # ambiguous there: it stays as it is
        ("no-such-flag", "0.5.23", "no-such-flag"),
    ],
)
def test_the_one_name_of_a_flag(written: str, version: str, meant: str) -> None:
    assert canonical(written, shipped(version)) == meant


def test_the_nearest_table_is_never_newer_than_what_is_installed() -> None:
    assert nearest_version("0.5.19", None) == "0.5.18"
    assert nearest_version("0.5.18.post1", None) == "0.5.18"
    assert nearest_version("0.9.0", "<0.5.11") == "0.5.23"
    assert nearest_version("0.4.0", None) == "0.5.8"


def test_without_a_version_the_nearest_table_fits_the_profiles_range() -> None:
    assert nearest_version(None, ">=0.5.9,<0.5.20") == "0.5.18"
    assert nearest_version(None, None) == "0.5.23"
    assert nearest_version("not a version", "<0.5.11") == "0.5.10"
    assert nearest_version(None, "<0.1") == "0.5.23"  # nothing fits


def test_the_past_of_a_flag() -> None:
    known = past("cuda-graph-max-bs")
    assert known is not None
    assert (known.first, known.last, known.flag.instead) == ("0.5.8", "0.5.18", "--cuda-graph-max-bs-decode")
    assert past("no-such-flag") is None


def test_a_version_that_is_not_shipped_is_said() -> None:
    with pytest.raises(KeyError):
        shipped("0.5.12")


def test_what_an_interpreter_prints_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"version": "9.9", "flags": [{"names": ["--a-b"], "dest": "a_b", "default": "None"}]}
    answer = f"a library says hello\n{MARKER}{json.dumps(said)}\n"
    path = keep(answer, tmp_path)
    assert path == tmp_path / "9.9.json.gz"
    once = path.read_bytes()
    assert keep(answer, tmp_path).read_bytes() == once  # the same answer makes the same file
    monkeypatch.setattr("console.checks.flags.table.TABLES", tmp_path)
    assert canonical("a", shipped("9.9")) == "a-b"
    shipped.cache_clear()
