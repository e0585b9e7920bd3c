"""``gpuops audit`` as an operator types it, against the simulated box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.cli import run
from console.transport.demo import running_box


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    """The site file of a box that serves."""
    with running_box(None, ["--speed=200"]) as running:
        yield running.site


def test_the_answer_comes_first_and_0_is_good(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "--site", str(box)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("production runs the benchmark's 13 flags and 7 variables; it adds 7")
    assert any(line.startswith("= --tp-size") for line in lines)


def test_as_json(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "kimi-k2.5-int4", "--json", "--site", str(box)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document)[:3] == ["schema", "answer", "verdict"]
    assert document["verdict"] == "pass"
    assert {"id", "title", "verdict", "evidence", "remedy"} == set(document["findings"][0])
    assert {item["verdict"] for item in document["items"]} <= {"same", "added", "different"}


def test_another_profile_than_runs_ends_with_1(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "qwen3.5-397b-nvfp4", "--json", "--site", str(box)]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["answer"].startswith("production differs from the profile qwen3.5-397b-nvfp4")
    assert document["findings"][0]["verdict"] == "fail"


def test_a_profile_that_there_is_not_ends_with_2(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "kimi-k2.5-int8", "--site", str(box)]) == 2
    assert "did you mean kimi-k2.5-int4?" in capsys.readouterr().err
