"""Commands on the box: the text that systemd, journald and Proxmox would print."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import pytest
from box_lab import Lab, eventually, message_of
from hypothesis import given
from hypothesis import strategies as st

from console.simulator.commands import _options


async def test_show_prints_chosen_properties_with_unix_times(lab: Lab) -> None:
    shown = await lab.inside(
        "systemctl", "show", "-p", "Id,ActiveState", "--property=MainPID", "--timestamp=unix",
        "-p", "ActiveEnterTimestamp", "--", "sglang.service",
    )  # fmt: skip
    lines = shown.stdout.decode().splitlines()
    assert shown.returncode == 0
    assert {line.partition("=")[0] for line in lines} == {
        "Id", "ActiveState", "MainPID", "ActiveEnterTimestamp",
    }  # fmt: skip
    assert re.search(r"(?m)^ActiveEnterTimestamp=@\d{10}$", shown.stdout.decode())


async def test_show_of_several_units_has_a_blank_line_between_and_knows_no_stranger(lab: Lab) -> None:
    shown = await lab.inside("systemctl", "show", "-p", "Id,LoadState,ActiveState", "sglang", "nope.service")
    blocks = shown.stdout.decode().split("\n\n")
    assert shown.returncode == 0
    assert "LoadState=loaded" in blocks[0] and "ActiveState=active" in blocks[0]
    assert "LoadState=not-found" in blocks[1] and "ActiveState=inactive" in blocks[1]


async def test_without_unix_times_they_are_written_out(lab: Lab) -> None:
    since = (await lab.properties())["ActiveEnterTimestamp"]
    assert re.fullmatch(r"(Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", since)


async def test_the_engine_lives_in_the_container_and_the_driver_on_the_host(lab: Lab) -> None:
    host = await lab.on_host("systemctl", "show", "-p", "LoadState", "sglang.service")
    assert host.stdout == b"LoadState=not-found\n"
    for unit, inside, outside in (
        ("sglang.service", b"active\n", b"inactive\n"),
        ("nvidia-persistenced.service", b"inactive\n", b"active\n"),
    ):
        assert (await lab.inside("systemctl", "is-active", unit)).stdout == inside
        assert (await lab.on_host("systemctl", "is-active", unit)).stdout == outside


async def test_the_service_has_been_up_for_three_hours_when_the_box_starts(lab: Lab) -> None:
    shown = await lab.inside(
        "systemctl", "show", "-p", "ExecMainStartTimestamp", "--timestamp=unix", "sglang"
    )
    started = int(shown.stdout.decode().strip().partition("@")[2])
    age = lab.box._clock.wall() - started
    assert 3.2 * 3600 + 585 - 5 < age < 3.2 * 3600 + 585 + 5


async def test_a_stop_drains_and_frees_port_memory_and_processes(lab: Lab) -> None:
    before = await lab.properties()
    stopped = await lab.inside("systemctl", "stop", "sglang.service")
    after = await lab.properties()
    assert stopped.returncode == 0
    assert (before["ActiveState"], after["ActiveState"], after["SubState"]) == ("active", "inactive", "dead")
    assert after["MainPID"] == "0" and after["Result"] == "success"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", lab.box.service.port))
    said = await lab.nvml()
    listed = next(message for message in said if message["kind"] == "processes")
    assert all(processes == [] for processes in listed["processes"].values())
    messages = await lab.messages()
    assert any("SIGTERM received" in message for message in messages)
    assert "sglang.service: Deactivated successfully." in messages


async def test_no_block_returns_at_once_and_shows_the_job(lab: Lab) -> None:
    lab.box.service._speed = 4.0  # half a second to drain
    asked = await lab.inside("systemctl", "stop", "--no-block", "sglang.service")
    properties = await lab.properties()
    assert asked.returncode == 0
    assert int(properties["Job"]) > 0
    assert properties["ActiveState"] in ("active", "deactivating")
    await lab.until("inactive/dead")
    assert "Job" not in await lab.properties()


async def test_a_job_outlives_the_systemctl_that_asked_for_it(lab: Lab) -> None:
    lab.box.service._speed = 10.0
    cut = await lab.container.run(["systemctl", "stop", "sglang.service"], deadline=0.05)
    assert cut.error == "deadline passed"
    await lab.until("inactive/dead")


async def test_stop_of_an_unknown_unit_says_so(lab: Lab) -> None:
    stopped = await lab.inside("systemctl", "stop", "nope.service")
    assert stopped.returncode == 5
    assert stopped.stderr == b"Failed to stop nope.service: Unit nope.service not found.\n"


async def test_a_restart_is_a_new_invocation_with_new_pids(lab: Lab) -> None:
    before = await lab.properties()
    await lab.inside("systemctl", "restart", "sglang.service")
    after = await lab.properties()
    assert after["ActiveState"] == "active"
    assert after["InvocationID"] != before["InvocationID"] and len(after["InvocationID"]) == 32
    assert after["MainPID"] != before["MainPID"]
    await lab.until_ready()


async def test_a_changed_drop_in_is_noticed_and_loaded(lab: Lab) -> None:
    folder = lab.box.rootfs / "etc/systemd/system/sglang.service.d"
    folder.mkdir()
    (folder / "50-switch.conf").write_text(
        "[Service]\nExecStart=\nExecStart=/opt/sglang/bin/python -m sglang.launch_server "
        "--model-path nvidia/Qwen3.5-397B-A17B-NVFP4 --served-model-name qwen3.5-397b --tp-size 8 "
        "--tool-call-parser qwen3_coder --enable-metrics\nEnvironment=ADDED=1\n"
    )
    assert (await lab.properties())["NeedDaemonReload"] == "yes"
    await lab.inside("systemctl", "daemon-reload")
    properties = await lab.properties()
    assert properties["NeedDaemonReload"] == "no"
    assert properties["DropInPaths"] == "/etc/systemd/system/sglang.service.d/50-switch.conf"
    environment = properties["Environment"].split()
    assert "SGLANG_ENABLE_SPEC_V2=True" in environment
    assert "ADDED=1" in environment
    await lab.inside("systemctl", "restart", "sglang.service")
    await lab.until_ready()
    models = (await lab.http.get("/v1/models")).json()
    assert models["data"][0]["id"] == "qwen3.5-397b"
    text = (await lab.inside("systemctl", "cat", "sglang.service")).stdout.decode()
    assert (
        text.startswith("# /etc/systemd/system/sglang.service\n")
        and "# /etc/systemd/system/sglang.service.d/" in text
    )


async def test_a_unit_file_that_cannot_be_read_is_said(lab: Lab) -> None:
    (lab.box.rootfs / "etc/systemd/system/sglang.service").unlink()
    reloaded = await lab.inside("systemctl", "daemon-reload")
    assert reloaded.returncode == 1
    assert reloaded.stderr.startswith(b"Failed to reload daemon: ")
    assert await lab.state() == "active/running"


async def test_a_flag_that_is_no_number_ends_the_process_with_two(lab: Lab) -> None:
    folder = lab.box.rootfs / "etc/systemd/system/sglang.service.d"
    folder.mkdir()
    (folder / "50-bad.conf").write_text(
        "[Service]\nExecStart=\n"
        "ExecStart=/opt/sglang/bin/python -m sglang.launch_server --model-path /m --tp-size many\n"
    )
    await lab.inside("systemctl", "daemon-reload")
    await lab.inside("systemctl", "restart", "sglang.service")
    await lab.until("failed/failed")
    properties = await lab.properties()
    assert (properties["Result"], properties["ExecMainStatus"]) == ("exit-code", "2")
    assert "launch_server.py: error: argument --tp-size: invalid int value: 'many'" in await lab.messages()


async def test_journal_entries_have_the_fields_that_were_asked_for(lab: Lab) -> None:
    shown = await lab.inside(
        "journalctl", "-o", "json", "--no-pager", "-n", "3", "-u", "sglang.service",
        "--output-fields=MESSAGE,_PID,_SYSTEMD_INVOCATION_ID",
    )  # fmt: skip
    entries = [json.loads(line) for line in shown.stdout.splitlines()]
    invocation = (await lab.properties())["InvocationID"]
    assert len(entries) == 3
    for entry in entries:
        assert set(entry) == {
            "__CURSOR", "__REALTIME_TIMESTAMP", "__MONOTONIC_TIMESTAMP", "_BOOT_ID", "MESSAGE", "_PID",
            "_SYSTEMD_INVOCATION_ID",
        }  # fmt: skip
        assert entry["_SYSTEMD_INVOCATION_ID"] == invocation
        assert entry["__REALTIME_TIMESTAMP"].isdigit()


async def test_systemds_own_lines_name_the_unit_and_progress_bars_are_bytes(lab: Lab) -> None:
    shown = await lab.inside("journalctl", "-o", "json", "-u", "sglang.service", "-n", "all")
    entries = [json.loads(line) for line in shown.stdout.splitlines()]
    started = next(entry for entry in entries if message_of(entry).startswith("Started sglang.service"))
    assert (started["UNIT"], started["SYSLOG_IDENTIFIER"], started["_PID"]) == (
        "sglang.service",
        "systemd",
        "1",
    )
    assert started["INVOCATION_ID"] == (await lab.properties())["InvocationID"]
    bars = [entry for entry in entries if isinstance(entry["MESSAGE"], list)]
    assert any("45% Completed | 29/64" in message_of(entry) for entry in bars)


async def test_follow_goes_on_from_a_cursor_without_loss_or_repetition(lab: Lab) -> None:
    first = await lab.inside("journalctl", "-o", "json", "-n", "1", "-u", "sglang.service")
    cursor = json.loads(first.stdout)["__CURSOR"]
    for number in range(5):
        lab.box.service.log(f"marker {number}", "main", 0, None)
    seen: list[str] = []
    command = [
        "journalctl",
        "-f",
        "-o",
        "json",
        "--no-tail",
        f"--after-cursor={cursor}",
        "-u",
        "sglang.service",
    ]
    async with lab.container.stream(command) as stream, asyncio.timeout(5):
        async for line in stream.lines():
            text = message_of(json.loads(line))
            if "marker" in text:
                seen.append(text[-1])
            if len(seen) == 5:
                lab.box.service.log("marker 5", "main", 0, None)
            if len(seen) == 6:
                break
    assert seen == ["0", "1", "2", "3", "4", "5"]


async def test_a_cursor_from_elsewhere_is_refused(lab: Lab) -> None:
    shown = await lab.inside("journalctl", "-o", "json", "--after-cursor=s=beef;i=1;b=2;m=3;t=4;x=5")
    assert shown.returncode == 1
    assert shown.stderr == b"Failed to seek to cursor: Invalid argument\n"


async def test_a_client_that_hangs_up_ends_its_command(lab: Lab) -> None:
    async with lab.container.stream(["journalctl", "-f", "-o", "json"]) as stream:
        await anext(aiter(stream.lines()))
        assert len(lab.box.journal._followers) == 1

    async def nobody_follows() -> bool:
        return not lab.box.journal._followers

    await eventually(nobody_follows)


async def test_since_and_invocation_select(lab: Lab) -> None:
    now = lab.box._clock.wall()
    recent = await lab.inside("journalctl", "-o", "json", f"--since=@{now - 30:.3f}")
    assert 0 < len(recent.stdout.splitlines()) < 200
    other = await lab.inside("journalctl", "-o", "json", "_SYSTEMD_INVOCATION_ID=" + "0" * 32)
    assert (other.stdout, other.stderr) == (b"", b"-- No entries --\n")


async def test_guests_and_names(lab: Lab) -> None:
    async def out(*argv: str) -> str:
        return (await lab.on_host(*argv)).stdout.decode()

    assert await out("qm", "status", "100") == "status: stopped\n"
    assert await out("pct", "status", "129") == "status: running\n"
    assert await out("hostname") == "pve1\n"
    assert await out("pct", "exec", "129", "--", "hostname") == "sglang\n"
    assert await out("uname", "-r") == "6.17.2-2-pve\n"
    assert await out("systemctl", "is-system-running") == "running\n"
    vm = await out("qm", "config", "100")
    assert re.findall(r"(?m)^hostpci\d: (\S+),pcie=1$", vm) == [card.slot.slot for card in lab.box.cards]
    assert "dev0: /dev/nvidia0,mode=0666" in await out("pct", "config", "129")


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (("nvtop",), 127, "nvtop: command not found"),
        (("qm", "status", "999"), 2, "does not exist"),
        (("lxc-attach", "-n", "130", "--", "hostname"), 1, "Failed to get init pid"),
        (("lxc-attach", "-n", "129", "--", "qm", "status", "100"), 127, "qm: command not found"),
        (("kill", "4"), 1, "No such process"),
    ],
)
async def test_what_is_not_there_is_said(lab: Lab, argv: tuple[str, ...], status: int, words: str) -> None:
    result = await lab.on_host(*argv)
    assert result.returncode == status
    assert words in result.stderr.decode()


async def test_nonsense_on_the_socket_is_answered_and_harms_nobody(lab: Lab) -> None:
    for nonsense in (b"hello\n", b"{}\n", b'{"argv": []}\n', b'{"argv": [1]}\n', b"\xff\xfe\n"):
        reader, writer = await asyncio.open_unix_connection(str(lab.box.directory / "box.sock"))
        writer.write(nonsense)
        frames = [json.loads(line) for line in (await reader.read()).splitlines()]
        writer.close()
        assert frames[-1] == {"exit": 2}
    assert (await lab.on_host("hostname")).ok


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_words_can_be_read_as_options(words: list[str]) -> None:
    options, rest = _options(words, frozenset({"-n", "--lines"}), frozenset({"-n"}))
    taken = sum(map(len, options.values()))
    assert len(rest) <= len(words) and taken <= len(words)
    assert not [word for word in rest if "--" not in words and word.startswith("-") and word != "-"]
