"""``gpuops smoke`` as an operator types it, against the simulated box."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.checks.smoke import CHECKS
from console.cli import run
from console.transport.demo import running_box

TREE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    """The site file of a box whose tool calls come back unparsed."""
    with running_box(None, ["--speed=200", "--fault=leak"]) as running:
        yield running.site


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No site file of whoever runs the tests is in the way."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing-here"))
    monkeypatch.setenv("PYTHONPATH", str(TREE))


def test_the_document_has_the_shared_shape(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["smoke", "--json", "--only", "sanity", "--only", "tools-result", "--site", str(box)])
    document = json.loads(capsys.readouterr().out)
    assert code == 1
    assert list(document) == ["schema", "verdict", "findings"]
    assert (document["schema"], document["verdict"]) == (1, "fail")
    told = {one["id"]: one for one in document["findings"]}
    assert {name: one["verdict"] for name, one in told.items()} == {"sanity": "pass", "tools-result": "fail"}
    assert set(told["sanity"]) == {"id", "title", "verdict", "evidence", "remedy"}
    assert "<|tool_calls_section_begin|>" in told["tools-result"]["evidence"]


def test_a_person_reads_a_line_a_check_with_its_time_and_one_sentence(
    box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["smoke", "--only", "sanity,tools-result", "--site", str(box)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "profile kimi-k2.5-int4" in lines[0]
    assert re.fullmatch(
        r"ok   Known answers +[\d.]+m?s  17 \* 23 and the capital of France are right", lines[1]
    )
    assert lines[2].startswith("FAIL Tool round trip")
    assert "--tool-call-parser" in "".join(lines)
    assert lines[-1] == "1 failed: Tool round trip."


def test_all_is_well_ends_with_0(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["smoke", "sanity", "served-name", "--site", str(box)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "All 2 checks passed."


def test_another_profile_is_another_expectation(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--profile", "qwen3.5-397b-nvfp4", "--json", "--site", str(box)]
    assert run(["smoke", "served-name", *options]) == 1
    assert "serves kimi-k2.5, not qwen3.5-397b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "sanyt"], "there is no smoke test 'sanyt'; did you mean sanity?"),
        (["--profile", "nope"], "there is no profile nope; there are kimi-k2.5-int4"),
    ],
)
def test_a_name_that_does_not_exist_is_bad_usage(
    box: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["smoke", *arguments, "--site", str(box)]) == 2
    assert words in capsys.readouterr().err


def test_an_engine_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("schema: 1\nservice: {url: 'http://127.0.0.1:9'}\n")
    assert run(["smoke", "--json", "--site", str(site)]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [one["id"] for one in found] == [check.id for check in CHECKS]
    refused = [one for one in found if one["evidence"].startswith("refused the connection")]
    assert len(refused) >= 6


def test_a_key_file_that_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(
        f"schema: 1\nservice: {{url: 'http://127.0.0.1:9', api_key_file: {tmp_path / 'missing'}}}\n"
    )
    assert run(["smoke", "served-name", "--site", str(site)]) == 1
    assert "API key file" in capsys.readouterr().err


def test_ctrl_c_aborts_what_is_under_way(tmp_path: Path) -> None:
    with running_box(tmp_path / "box", ["--fault=hang"]) as running:
        command = [sys.executable, "-m", "console", "smoke", "sanity", "--site", str(running.site)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            assert "profile" in process.stdout.readline()  # from here on it is asking
            os.kill(process.pid, signal.SIGINT)
            told = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted by signal 2; the requests that were under way have been aborted" in told
    assert "Traceback" not in told


def test_the_command_imports_nothing_of_the_screen(box: Path) -> None:
    code = (
        "import sys; from console.cli import run; run(sys.argv[1:]);"
        "print([m for m in sys.modules if m.split('.')[0] in ('textual', 'rich', 'jsonschema')])"
    )
    command = [sys.executable, "-c", code, "smoke", "served-name", "--site", str(box)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
