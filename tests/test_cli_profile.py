"""``gpuops profile render`` and ``adopt`` as an operator types them, against the simulated box."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from console.cli import run
from console.model.managed_unit import launch_argv, parse
from console.sources.files import load_profile, load_site, shipped_profiles_directory
from console.store.adopted import ownership
from console.store.state import state_of
from console.transport.box import BoxRunner
from console.transport.container import lxc
from console.transport.demo import running_box

BY_HAND = """\
[Unit]
Description=Kimi by hand

[Service]
User=sglang
EnvironmentFile=-/etc/sglang.env
Environment=NCCL_PROTO=LL
ExecStart=/opt/sglang/bin/python -m sglang.launch_server --model-path /shared/kimi --tp 8 --port 30000
"""
QWEN = "qwen3.5-397b-nvfp4"


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The site file of a box that serves."""
    with running_box(None, ["--speed=200"]) as running:
        yield running.site


@pytest.fixture
def unit(site: Path) -> Iterator[Path]:
    """The box's unit file, as it was again after the test."""
    path = directory(site) / "root/var/lib/lxc/129/rootfs/etc/systemd/system/sglang.service"
    before = path.read_bytes()
    yield path
    path.write_bytes(before)
    reload(site)


def reload(site: Path) -> None:
    inside = lxc(BoxRunner(directory(site)), 129)
    assert asyncio.run(inside.run(["systemctl", "daemon-reload"], deadline=10.0)).ok


def write(site: Path, unit: Path, text: str) -> None:
    """Write it, and have systemd read it."""
    unit.write_text(text)
    reload(site)


def directory(site: Path) -> Path:
    simulated = load_site(site).simulated
    assert simulated is not None
    return Path(simulated.directory)


def owner(site: Path, unit: Path) -> str:
    return ownership(unit.read_text(), state_of(load_site(site), {}, 0), "sglang.service")


def test_the_rendered_unit_keeps_what_surrounds_the_present_one(
    site: Path, unit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, unit, BY_HAND)
    assert run(["--site", str(site), "profile", "render", QWEN]) == 0
    written = parse(capsys.readouterr().out)
    profile = load_profile(shipped_profiles_directory() / f"{QWEN}.yaml")
    assert written.argv == launch_argv(profile, "/opt/sglang/bin/python")  # the interpreter of the unit
    assert written.environment == profile.env
    assert (written.profile, written.edited) == (QWEN, False)
    assert written.value("Service", "User") == "sglang"
    assert written.environment_files == ("-/etc/sglang.env",)


def test_the_difference_names_what_a_switch_would_change(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--site", str(site), "profile", "render", QWEN, "--diff"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "--- /etc/systemd/system/sglang.service now",
        "+++ /etc/systemd/system/sglang.service after",
    ]
    assert "-    --model-path /shared/kimi-k2.5-int4 \\" in lines
    assert "+    --model-path nvidia/Qwen3.5-397B-A17B-NVFP4 \\" in lines
    assert run(["--site", str(site), "profile", "render", "kimi-k2.5-int4", "--diff"]) == 0
    assert capsys.readouterr().out == "nothing changes\n"


def test_without_a_host_to_ask_the_interpreter_must_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("schema: 1\ncontainer: {kind: lxc, id: 987}\n")
    arguments = ["--site", str(site), "profile", "render", QWEN]
    assert run(arguments) == 2
    assert "give --python" in capsys.readouterr().err
    assert run([*arguments, "--python", "/opt/p/bin/python"]) == 0
    said = capsys.readouterr()
    assert parse(said.out).python == "/opt/p/bin/python"
    assert "cannot be read, so nothing of it is kept" in said.err
    assert run([*arguments, "--diff", "--python", "/opt/p/bin/python"]) == 2


def test_a_difference_never_shows_a_secret(
    site: Path, unit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, unit, BY_HAND + "Environment=HF_TOKEN=hf_123\n")
    assert run(["--site", str(site), "profile", "render", QWEN, "--diff"]) == 2
    said = capsys.readouterr()
    assert "HF_TOKEN" in said.err
    assert "EnvironmentFile=" in said.err
    assert "hf_123" not in said.out + said.err


def test_a_value_that_no_unit_can_hold_is_named(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.yaml").write_text(
        "schema: 1\nname: odd\nargs: {model-path: /m}\npython: /opt/$A/python\n"
    )
    arguments = ["--site", str(site), "--profiles", str(tmp_path), "profile", "render", "odd"]
    assert run(arguments) == 2
    assert "odd: python: expected an absolute path without" in capsys.readouterr().err


def test_an_adopted_unit_is_a_profile_and_may_be_overwritten(
    site: Path, unit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, unit, BY_HAND)
    assert owner(site, unit) == "foreign"
    own = tmp_path / "own"
    arguments = ["--site", str(site), "--profiles", str(own), "profile"]
    assert run([*arguments, "adopt", "sglang", "--key", "7"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{own}/kimi.yaml\n"
    assert "--tp is written --tp-size" in said.err
    profile = load_profile(own / "kimi.yaml")
    assert (profile.key, profile.title, profile.env) == (7, "Kimi by hand", {"NCCL_PROTO": "LL"})
    assert profile.args == {"model-path": "/shared/kimi", "tp-size": "8", "port": "30000"}
    assert owner(site, unit) == "adopted"
    unit.write_text(BY_HAND + "Nice=1\n")
    assert owner(site, unit) == "foreign"
    assert run([*arguments, "adopt", "sglang", "--name", "kimi-2"]) == 2
    assert "changed since systemd read them; run systemctl daemon-reload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["sglang", "--name", QWEN], f"is a profile named {QWEN} already"),
        (["sglang", "--key", "2"], f"2 is the key of {QWEN} already"),
        (["sglang", "--name", "a/b"], "expected a name of lower-case letters"),
        (["nothing-here"], "there is no nothing-here.service"),
        (["sglang", "--read-only"], "this is read-only"),
    ],
)
def test_an_adoption_that_is_refused_changes_nothing(
    site: Path,
    unit: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    write(site, unit, BY_HAND + "# another one\n")
    output = tmp_path / "adopted.yaml"
    assert run(["--site", str(site), "profile", "adopt", "--output", str(output), *options]) == 2
    assert words in capsys.readouterr().err
    assert not output.exists()
    assert owner(site, unit) == "foreign"


def test_an_adoption_overwrites_no_file(
    site: Path, unit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, unit, BY_HAND + "# a third one\n")
    output = tmp_path / "mine.yaml"
    output.write_text("mine\n")
    assert run(["--site", str(site), "profile", "adopt", "sglang", "--output", str(output)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert output.read_text() == "mine\n"
    assert owner(site, unit) == "foreign"


def test_a_unit_of_gpuops_needs_no_adoption(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--site", str(site), "profile", "adopt", "sglang"]) == 2
    assert "managed by gpuops already, from the profile kimi-k2.5-int4" in capsys.readouterr().err


def test_drop_ins_that_win_over_a_switch_are_named(
    site: Path, unit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(site, unit, BY_HAND + "# a fourth one\n")
    folder = unit.with_name("sglang.service.d")
    folder.mkdir()
    drop_in = folder / "10-model.conf"
    drop_in.write_text(
        "[Service]\nEnvironment=NCCL_ALGO=Ring\nExecStart=\n"
        "ExecStart=/opt/sglang/bin/python -m sglang.launch_server --model-path /shared/other\n"
    )
    reload(site)
    output = str(tmp_path / "x.yaml")
    try:
        assert run(["--site", str(site), "profile", "adopt", "sglang", "--output", output]) == 0
        said = capsys.readouterr().err
    finally:
        drop_in.unlink()
        folder.rmdir()
    assert load_profile(tmp_path / "x.yaml").args == {"model-path": "/shared/other"}
    assert "10-model.conf sets ExecStart=, which would win over every switch" in said
    assert "10-model.conf sets NCCL_ALGO, which wins over a profile's env" in said
