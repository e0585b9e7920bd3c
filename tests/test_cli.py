"""The command line as an operator types it, against the simulated box."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from console import __version__
from console.cli import run
from console.sources.files import load_site, shipped_profiles_directory
from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.demo import running_box

TREE = Path(__file__).parents[1]
GPUOPS = [sys.executable, "-m", "console"]

CARD_NAMES = {
    "address",
    "index",
    "owner",
    "driver",
    "memory_used_bytes",
    "memory_total_bytes",
    "utilization_percent",
    "temperature_c",
    "power_w",
    "stale_s",
    "problems",
}
ENGINE_NAMES = {
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "accept_length",
    "requests_running",
    "requests_queued",
    "kv_usage_ratio",
    "stale_s",
}

BROKEN_SITE = "schema: 1\nread_only: yes\nsevice:\n  unit: sglang.service\n"


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    """The site file of a box that serves."""
    with running_box(None, ["--speed=200"]) as running:
        yield running.site


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No site file of whoever runs the tests is in the way."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing-here"))
    monkeypatch.setenv("PYTHONPATH", str(TREE))


def gpuops(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*GPUOPS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **options)


def systemctl(site: Path, verb: str) -> None:
    simulated = load_site(site).simulated
    assert simulated is not None
    inside = lxc(BoxRunner(Path(simulated.directory)), 129)
    asyncio.run(inside.run(["systemctl", verb, "sglang.service"], deadline=30.0))


# --- status --------------------------------------------------------------------------------------


def test_status_as_json_has_the_promised_names(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json", "--site", str(box)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert next(iter(document)) == "schema"
    assert document["schema"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", document["taken_at"])
    assert document["host"] == "pve1"
    assert document["state"].keys() >= {"name", "phase", "percent", "eta_s", "reasons"}
    assert document["state"]["name"] in ("ready", "busy")
    assert document["profile"] == "kimi-k2.5-int4"
    assert document["served_name"] == "kimi-k2.5"
    assert [card["index"] for card in document["cards"]] == list(range(8))
    for card in document["cards"]:
        assert card.keys() >= CARD_NAMES
        assert card["owner"] == "ct:129"
        assert card["driver"] == "nvidia"
        assert 0 < card["memory_used_bytes"] < card["memory_total_bytes"]
        assert card["stale_s"] is None
    assert document["engine"].keys() >= ENGINE_NAMES
    assert 0 <= document["engine"]["kv_usage_ratio"] <= 1


def test_what_one_look_cannot_know_is_null_and_not_zero(
    box: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["status", "--json", "--site", str(box)])
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert engine["prefill_tokens_per_s"] is None
    assert "second reading" in engine["missing"]["prefill_tokens_per_s"]


def test_options_may_stand_before_the_command(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--site", str(box), "--read-only", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"] == "pve1"


def test_status_for_people_fits_a_narrow_terminal(box: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--site", str(box)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"pve1  (READY|BUSY)", lines[0])
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)
    text = "\n".join(lines)
    for told in ("kimi-k2.5", "0000:e1:00.0", "CT 129", "GiB", "tok/s", "accept", "running", "queued"):
        assert told in text


def test_a_stopped_service_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    with running_box(None, ["--speed=200"]) as running:
        systemctl(running.site, "stop")
        assert run(["status", "--json", "--site", str(running.site)]) == 1
        document = json.loads(capsys.readouterr().out)
        assert run(["doctor", "--json", "--site", str(running.site)]) == 0
        findings = {one["id"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert document["state"]["name"] == "stopped"
    assert document["served_name"] is None
    assert all(document["engine"][name] is None for name in ENGINE_NAMES)
    assert len(document["cards"]) == 8
    assert findings["engine"]["verdict"] == "warn"
    assert "inactive" in findings["engine"]["evidence"]
    assert findings["metrics"]["verdict"] == "skipped"


def test_a_lost_card_is_told_and_makes_the_status_bad(capsys: pytest.CaptureFixture[str]) -> None:
    with running_box(None, ["--fault=gpu-lost"]) as running:
        assert run(["status", "--json", "--site", str(running.site)]) == 1
        document = json.loads(capsys.readouterr().out)
        assert run(["doctor", "--site", str(running.site)]) == 1
        told = capsys.readouterr().out
    assert document["state"]["name"] == "degraded"
    lost = document["cards"][3]
    assert lost["owner"] == "lost"
    assert lost["temperature_c"] is None
    assert lost["problems"]
    assert "FAIL Cards on the PCI bus" in told


def test_a_card_that_blocks_whoever_reads_it_keeps_nobody_waiting() -> None:
    with running_box(None, []) as running:
        # A pipe without a writer blocks its reader in the kernel, as a card in reset can.
        config = running.site.parent / "root/sys/bus/pci/devices/0000:41:00.0/config"
        config.unlink()
        os.mkfifo(config)
        began = time.monotonic()
        command = [*GPUOPS, "--site", str(running.site)]
        with (
            subprocess.Popen([*command, "status", "--json"], stdout=subprocess.PIPE) as status,
            subprocess.Popen([*command, "doctor", "--json"], stdout=subprocess.PIPE) as doctor,
        ):
            document = json.loads(status.communicate(timeout=15)[0])
            findings = {one["id"]: one for one in json.loads(doctor.communicate(timeout=15)[0])["findings"]}
    assert time.monotonic() - began < 8
    assert {word["name"]: word["error"] for word in document["sources"]}["pci"].startswith("no answer")
    # Which of them, a busy machine decides: that the engine was still heard is what counts.
    assert document["state"]["name"] in ("ready", "busy", "degraded")
    assert findings["pci"]["verdict"] == "unknown"
    assert findings["unit"]["verdict"] == "pass"


def test_a_bad_site_file_is_told_by_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(BROKEN_SITE)
    assert run(["status", "--json", "--site", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    lines = told.err.splitlines()
    assert lines[0].startswith(f"{path}:2:12: read_only: expected true or false")
    assert lines[1].startswith(f"{path}:3:1: unknown key sevice; did you mean service?")


def test_a_site_file_that_is_not_there_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--site", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml:1:1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["status", "--frob"], ["profile", "show"], ["status", "--site"]]
)
def test_bad_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_without_a_site_file_it_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--json"]) == 1
    told = capsys.readouterr()
    assert "no site file" in told.err
    assert "Found here:" in told.err
    assert json.loads(told.out)["notices"]


def test_version() -> None:
    assert gpuops("--version").stdout == f"gpuops {__version__}\n"


# --- status --watch ------------------------------------------------------------------------------


def test_watch_gives_one_document_a_second_until_it_is_told_to_end(box: Path) -> None:
    command = [*GPUOPS, "status", "--json", "--watch", "--site", str(box)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        documents = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.terminate()
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert errors == ""
    assert [one["schema"] for one in documents] == [1, 1, 1]
    assert documents[2]["engine"]["prefill_tokens_per_s"] is not None
    seconds = [float(one["taken_at"][17:-1]) for one in documents]
    assert all(0.8 < (after - before) % 60 < 1.3 for before, after in itertools.pairwise(seconds))


def test_watch_ends_without_a_word_when_its_reader_is_gone(box: Path) -> None:
    command = [*GPUOPS, "status", "--json", "--watch", "--site", str(box)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == ""


# --- a terminal ----------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_terminal(command: list[str], **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command with a terminal of its own, and our end of that terminal."""
    ours, theirs = pty.openpty()
    variables = {"TERM": "xterm-256color"} | environment
    try:
        with subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | variables,
            start_new_session=True,
        ) as process:
            os.close(theirs)
            yield process, ours
            if process.poll() is None:
                process.kill()
    finally:
        os.close(ours)


def read_terminal(ours: int, until: str | None = None) -> str:
    """What was written to the terminal, up to ``until`` or the end."""
    told = b""
    while select.select([ours], [], [], 15)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # EIO: the other end is closed
            break
        told += data
        if until is not None and until.encode() in told:
            break
    return told.decode()


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_is_for_terminals_that_want_it(
    box: Path, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    with on_a_terminal([*GPUOPS, "status", "--site", str(box)], **environment) as (process, ours):
        told = read_terminal(ours)
        process.wait(timeout=10)
    assert "READY" in told
    assert ("\x1b[" in told) is coloured


# --- profiles ------------------------------------------------------------------------------------


def test_profiles_are_listed_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["schema", "profiles"]
    assert document["profiles"][0] == {
        "name": "kimi-k2.5-int4",
        "title": "Kimi-K2.5 INT4 with EAGLE-3",
        "key": 1,
        "served_name": "kimi-k2.5",
    }


def test_a_broken_profile_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("schema: 1\nname: bad\n")
    assert run(["profile", "list", "--profiles", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "kimi-k2.5-int4" in told.out
    assert f"{tmp_path}/bad.yaml:1:1: " in told.err


def test_an_own_profile_wins_over_a_shipped_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kimi.yaml").write_text(
        "schema: 1\nname: kimi-k2.5-int4\ntitle: Ours\nargs:\n  model-path: /models/kimi\n"
    )
    run(["profile", "show", "kimi-k2.5-int4", "--json", "--profiles", str(tmp_path)])
    shown = json.loads(capsys.readouterr().out)
    assert shown["title"] == "Ours"
    assert shown["args"] == {"model-path": "/models/kimi"}


def test_a_profile_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", "qwen3.5-397b-nvfp4"]) == 0
    assert capsys.readouterr().out == (shipped_profiles_directory() / "qwen3.5-397b-nvfp4.yaml").read_text()


def test_an_unknown_profile_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", "kimi-k2.5-int"]) == 2
    assert "did you mean kimi-k2.5-int4?" in capsys.readouterr().err


# --- config --------------------------------------------------------------------------------------


def test_init_writes_a_file_that_validates_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "site.yaml"
    assert run(["config", "init", "--site", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert run(["config", "validate", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: valid\n"
    path.write_text("schema: 1\nhost: ours\n")
    assert run(["config", "init", "--site", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert load_site(path).host == "ours"
    assert run(["config", "init", "--site", str(path), "--force"]) == 0
    assert load_site(path).host != "ours"


def test_validate_tells_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(BROKEN_SITE)
    assert run(["config", "validate", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_path_tells_the_file_and_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own = tmp_path / "gpuops" / "site.yaml"
    own.parent.mkdir()
    own.write_text("schema: 1\n")
    assert run(["config", "path"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{own}\n"
    assert f"looked for {own}: in use" in told.err
    assert "looked for /etc/gpuops/site.yaml: " in told.err


# --- the screen ----------------------------------------------------------------------------------


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the screen was called with, instead of a screen."""
    calls: list[tuple[Any, ...]] = []
    stub = ModuleType("console.ui.app")

    def show(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    stub.run = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "console.ui.app", stub)
    monkeypatch.setattr("console.cli.need_terminal", lambda: None)
    return calls


def test_read_only_on_the_line_beats_the_file(tmp_path: Path, screen: list[tuple[Any, ...]]) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("schema: 1\nread_only: false\n")
    run(["--site", str(path), "--read-only"])
    run(["--site", str(path)])
    path.write_text("schema: 1\nread_only: true\n")
    run(["--site", str(path)])
    assert [call[2] for call in screen] == [True, False, True]
    assert screen[0][3] == path


def test_the_screen_is_told_of_bad_profiles(tmp_path: Path, screen: list[tuple[Any, ...]]) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("schema: 1\n")
    run(["--site", str(path), "--profiles", str(tmp_path / "none")])
    (_, profiles, _, _, notices) = screen[0]
    assert [one.name for one in profiles.profiles] == ["kimi-k2.5-int4", "qwen3.5-397b-nvfp4"]
    assert any("cannot read this directory of profiles" in notice for notice in notices)


def test_the_screen_needs_a_terminal() -> None:
    ended = gpuops(stdin=subprocess.DEVNULL)
    assert ended.returncode == 2
    assert "gpuops status" in ended.stderr


# --- demo ----------------------------------------------------------------------------------------


def wait_until_gone(path: Path) -> None:
    ends = time.monotonic() + 10
    while path.exists():
        assert time.monotonic() < ends, f"{path} is still there"
        time.sleep(0.02)


def test_the_box_alone_prints_its_site_file_and_nothing_else(tmp_path: Path) -> None:
    command = [*GPUOPS, "demo", "--headless", "--dir", str(tmp_path / "box"), "--speed", "50", "--seed", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        site = Path(process.stdout.readline().rstrip("\n"))
        assert site == tmp_path / "box" / "site.yaml"
        assert load_site(site).simulated is not None
        process.terminate()
        assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 0
    assert not (tmp_path / "box" / "box.sock").exists()


def test_a_box_without_a_place_takes_its_own_with_it() -> None:
    command = [*GPUOPS, "demo", "--headless"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        site = Path(process.stdout.readline().rstrip("\n"))
        assert site.exists()
        process.terminate()
        process.wait(timeout=10)
    assert not site.parent.exists()


def test_an_unknown_fault_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--headless", "--fault", "earthquake"]) == 2
    told = capsys.readouterr().err
    assert "earthquake" in told
    assert "crash-on-load" in told


#: A screen that prints the site's directory and then stays until it is ended.
STAYING = """
import sys, time, types
stub = types.ModuleType("console.ui.app")
def run(site, profiles, read_only, path, notices):
    print("BOX", site.simulated.directory, flush=True)
    while True:
        time.sleep(60)
stub.run = run
sys.modules["console.ui.app"] = stub
from console.cli import main
sys.argv = ["gpuops", "demo"]
main()
"""


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGHUP", "SIGINT", "hang-up", "SIGKILL"])
def test_the_demo_leaves_nothing_behind(ending: str) -> None:
    with on_a_terminal([sys.executable, "-c", STAYING]) as (process, ours):
        directory = Path(read_terminal(ours, "\r\n").split("BOX ")[1].split("\r\n")[0])
        assert (directory / "box.sock").exists()
        if ending == "hang-up":
            # What sshd does to the session of a connection that is lost.
            os.killpg(process.pid, signal.SIGHUP)
        else:
            process.send_signal(signal.Signals[ending])
        code = process.wait(timeout=10)
    # Killed without a word, we cannot tidy up; but the box must not go on.
    wait_until_gone(directory / "box.sock" if ending == "SIGKILL" else directory)
    if ending == "SIGKILL":
        subprocess.run(["rm", "-r", str(directory)], check=True)
    else:
        assert code == 128 + signal.Signals.__members__.get(ending, signal.SIGHUP)
