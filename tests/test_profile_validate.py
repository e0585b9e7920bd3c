"""``gpuops profile validate`` as an operator types it, against the simulated box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.cli import run
from console.sources.files import load_site, shipped_profiles_directory
from console.transport.demo import running_box


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    """The site file of a box that serves."""
    with running_box(None, ["--speed=200"]) as running:
        yield running.site


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with one profile of an operator, made from the shipped one for Qwen."""
    text = (shipped_profiles_directory() / "qwen3.5-397b-nvfp4.yaml").read_text()
    text = text.replace("name: qwen3.5-397b-nvfp4", "name: mine").replace("key: 2\n", "")
    (tmp_path / "mine.yaml").write_text(text)
    return tmp_path


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def cache(site: Path) -> list[str]:
    simulated = load_site(site).simulated
    assert simulated is not None
    return sorted(path.name for path in (Path(simulated.directory) / "state/flags").glob("*"))


def test_the_shipped_profiles_are_taken_by_the_box(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "validate", "--site", str(box)]) == 0
    text = capsys.readouterr().out
    assert text.count("asked the installed SGLang 0.5.18: 489 flags") == 2
    assert "kimi-k2.5-int4" in text and "qwen3.5-397b-nvfp4" in text
    assert "FAIL" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert [name.partition("-")[0] for name in cache(box)] == ["0.5.18"]


def test_the_second_time_the_answer_is_remembered(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["profile", "validate", "--site", str(box)])
    capsys.readouterr()
    assert run(["profile", "validate", "--site", str(box), "kimi-k2.5-int4"]) == 0
    assert "the installed SGLang 0.5.18, asked earlier: 489 flags" in " ".join(
        capsys.readouterr().out.split()
    )


def test_as_json_it_has_a_verdict_and_findings_for_each(
    box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "validate", "--json", "--site", str(box)]) == 0
    found = document(capsys)
    assert list(found) == ["schema", "verdict", "profiles"]
    assert (found["schema"], found["verdict"]) == (1, "warn")
    kimi, qwen = found["profiles"]
    assert (kimi["name"], kimi["verdict"]) == ("kimi-k2.5-int4", "warn")
    assert (qwen["name"], qwen["verdict"]) == ("qwen3.5-397b-nvfp4", "pass")
    assert kimi["path"].endswith("kimi-k2.5-int4.yaml")
    assert kimi["findings"][0].keys() == {"id", "title", "verdict", "evidence", "remedy"}
    deprecated = next(one for one in kimi["findings"] if one["id"] == "flag.cuda-graph-max-bs")
    assert deprecated["evidence"].startswith(f"{kimi['path']}:")
    assert deprecated["remedy"] == "replace it with: cuda-graph-max-bs-decode: 128"


def test_what_the_engine_would_refuse_ends_with_1_and_its_place(
    box: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own / "mine.yaml"
    text = path.read_text().replace("reasoning-parser: qwen3", "reasoning-parser: glm47")
    path.write_text(text)
    line = text.splitlines().index("  reasoning-parser: glm47") + 1
    common = ["profile", "validate", "--json", "--site", str(box), "--profiles", str(own)]
    assert run([*common, "mine"]) == 1
    (mine,) = document(capsys)["profiles"]
    (failed,) = [one for one in mine["findings"] if one["verdict"] == "fail"]
    assert failed["evidence"].startswith(f"{path}:{line}:3: glm47 is none of its choices")
    assert failed["remedy"] == "write: reasoning-parser: glm45"


def test_more_ranks_than_the_box_has_cards_are_refused(
    box: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own / "mine.yaml"
    path.write_text(path.read_text().replace("tp-size: 8", "tp-size: 16"))
    assert run(["profile", "validate", "--site", str(box), "--profiles", str(own), "mine"]) == 1
    assert "16 ranks want a card each, this host has 8" in " ".join(capsys.readouterr().out.split())


def test_cards_of_sm120_want_their_backends_named(
    box: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own / "mine.yaml"
    path.write_text(path.read_text().replace("  fp4-gemm-backend: flashinfer_cudnn\n", ""))
    assert run(["profile", "validate", "--json", "--site", str(box), "--profiles", str(own), "mine"]) == 0
    (mine,) = document(capsys)["profiles"]
    assert mine["verdict"] == "warn"
    assert [one["id"] for one in mine["findings"] if one["verdict"] == "warn"] == [
        "together.nvfp4.fp4-gemm-backend"
    ]


def test_offline_nobody_is_asked(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own))

    async def never(*_: object, **__: object) -> None:
        raise AssertionError("something was run")

    monkeypatch.setattr("console.transport.local.LocalRunner.run", never)
    assert run(["profile", "validate", "--offline", "kimi-k2.5-int4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "nobody was asked; used the shipped table of 0.5.18" in text


def test_where_nobody_answers_a_table_stands_in_and_says_so(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = own / "site.yaml"
    site.write_text(f"schema: 1\nservice: {{unit: no-such-unit.service}}\nstate: {own}/state\n")
    assert run(["profile", "validate", "--json", "--site", str(site), "qwen3.5-397b-nvfp4"]) == 0
    (qwen,) = document(capsys)["profiles"]
    source = qwen["findings"][0]
    assert source["verdict"] == "warn"
    assert source["evidence"].startswith("could not ask: ")
    assert source["evidence"].endswith("used the shipped table of 0.5.23")


def test_read_only_leaves_nothing_behind(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_box(None, ["--speed=200"]) as running:
        assert run(["--read-only", "profile", "validate", "--site", str(running.site)]) == 0
        assert cache(running.site) == []


def test_a_name_that_is_none_and_a_file_that_cannot_be_used(
    box: Path, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "validate", "--site", str(box), "kimi"]) == 2
    assert "no profile is named kimi" in capsys.readouterr().err
    (own / "broken.yaml").write_text("schema: 1\nname: broken\nargs:\n  model-path: /m\n  tp-size: no\n")
    assert run(["profile", "validate", "--site", str(box), "--profiles", str(own), "mine"]) == 2
    said = capsys.readouterr()
    assert "broken.yaml:5:12: " in said.err
    assert "asked" in said.out  # the others are judged all the same
