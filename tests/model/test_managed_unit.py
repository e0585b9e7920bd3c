"""What is written into a unit is read back as it was meant, and the units of others as systemd reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.managed_unit import MARKER, UnitText, dropped, launch_argv, parse, render
from console.model.profile import FlagValue, Load, Profile
from console.model.unit_syntax import UnitProblem
from console.sources.files import load_profiles, shipped_profiles_directory
from tests.model.unit_words import NASTY, WRITTEN, foreign, words

PYTHON = "/opt/sglang/bin/python"
RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures/units/read-by-systemd.json").read_text(encoding="utf-8")
)

flags = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,8}){0,3}", fullmatch=True)
values = st.one_of(st.just(True), words, st.lists(words, min_size=1, max_size=4).map(tuple))
variables = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
profiles = st.builds(
    Profile,
    name=st.just("any"),
    title=words,
    args=st.dictionaries(flags, values, max_size=8),
    env=st.dictionaries(variables, words, max_size=6),
)


def profile(**changes: object) -> Profile:
    plain = Profile(name="kimi", title="Kimi", args={"model-path": "/models/kimi"}, env={"NCCL_PROTO": "LL"})
    return msgspec.structs.replace(plain, **changes)


def written(text: str) -> list[str]:
    return text.splitlines()


# Written and read back -------------------------------------------------------------------------


@given(profiles)
def test_any_profile_is_read_back_as_it_was_written(one: Profile) -> None:
    text = render(one, python=PYTHON)
    unit = parse(text)
    assert unit.argv == launch_argv(one, PYTHON)
    assert unit.environment == one.env
    assert (unit.commands, unit.prefix, unit.unknown, unit.ignored) == (1, "", (), ())
    assert (unit.managed, unit.edited, unit.profile) == (True, False, "any")
    assert render(one, python=PYTHON, keep=unit) == text  # nothing gathers from one switch to the next


@pytest.mark.parametrize("word", NASTY)
def test_a_nasty_word_is_read_back(word: str) -> None:
    one = profile(args={"model-path": word, "list": (word, word)}, env={"A": word})
    unit = parse(render(one, python=PYTHON))
    assert unit.argv == launch_argv(one, PYTHON)
    assert unit.environment == {"A": word}


@pytest.mark.parametrize(
    "one", load_profiles([shipped_profiles_directory()]).profiles, ids=lambda one: str(one.name)
)
def test_a_shipped_profile_is_written_one_flag_a_line(one: Profile) -> None:
    lines = written(render(one, python=PYTHON))
    begin = lines.index(f"ExecStart={PYTHON} -m sglang.launch_server \\")
    following = lines[begin + 1 : begin + 1 + len(one.args)]
    assert [line.split()[0] for line in following] == [f"--{flag}" for flag in one.args]
    assert all(line.endswith(" \\") for line in following[:-1])
    for expected in (
        "Type=exec",
        "Restart=on-failure",
        "KillMode=mixed",
        "TimeoutStopSec=90",
        "WantedBy=multi-user.target",
    ):
        assert expected in lines


def test_a_percent_in_a_profile_is_never_a_specifier() -> None:
    lines = written(render(profile(title="100% %n", args={"x": "%n"}, env={"A": "%h"}), python=PYTHON))
    assert "Description=SGLang: 100%% %%n" in lines
    assert 'Environment="A=%%h"' in lines
    assert '    --x "%%n"' in lines


def test_a_dollar_is_doubled_in_the_command_alone() -> None:
    lines = written(render(profile(args={"x": "$HOME"}, env={"A": "$HOME"}), python=PYTHON))
    assert 'Environment="A=$HOME"' in lines
    assert '    --x "$$HOME"' in lines


def test_characters_that_cannot_be_seen_are_written_so_that_they_can() -> None:
    text = render(profile(args={"x": "a\u202eb\u200b\U000e0041"}), python=PYTHON)
    assert text.isascii()
    assert '--x "a\\u202eb\\u200b\\U000e0041"' in text
    assert parse(text).argv[-1] == "a\u202eb\u200b\U000e0041"


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\t", "\x1b", "\x7f", "\x85", "\ud800", "\ufffe"])
def test_what_no_unit_can_hold_is_refused_and_named(character: str) -> None:
    value = f"a{character}b"
    for bad, named in (
        (profile(args={"tp-size": value}), "tp-size"),
        (profile(args={"list": ("x", value)}), "list"),
        (profile(env={"NCCL_ALGO": value}), "env NCCL_ALGO"),
    ):
        with pytest.raises(UnitProblem, match=f"^{named}: contains .*remove it"):
            render(bad, python=PYTHON)


@pytest.mark.parametrize(
    "python",
    ["python", "", "/opt/a'b/python", '/opt/"/python', "/opt/\\/python", "/opt/$A/python", "/opt/\n/p"],
)
def test_a_python_that_systemd_would_not_start_is_refused(python: str) -> None:
    with pytest.raises(UnitProblem, match=r"^python: "):
        render(profile(), python=python)


def test_a_flag_that_is_false_is_refused() -> None:
    with pytest.raises(UnitProblem, match=r"^x: false"):
        render(profile(args={"x": False}), python=PYTHON)


def test_loads_that_crash_at_their_end_still_come_to_a_stop() -> None:
    """systemd gives up only when the starts lie within the interval (systemd.unit(5))."""
    for timeout in (60.0, 900.0, 7200.0):
        text = render(profile(load=Load(timeout_s=timeout)), python=PYTHON)
        interval = int(re.findall(r"^StartLimitIntervalSec=(\d+)$", text, re.MULTILINE)[0])
        assert interval > 3 * (timeout + 15)
        assert "StartLimitBurst=3" in written(text)


def test_the_time_to_stop_is_the_profiles() -> None:
    assert "TimeoutStopSec=13" in written(render(profile(load=Load(stop_s=12.5)), python=PYTHON))


# The marker ------------------------------------------------------------------------------------


@given(st.integers(min_value=0), words.filter(lambda word: word.strip() != ""))
def test_a_change_by_hand_is_seen_wherever_it_is(place: int, added: str) -> None:
    text = render(profile(), python=PYTHON)
    at = len(MARKER) + place % (len(text) - len(MARKER) + 1)
    unit = parse(text[:at] + added + text[at:])
    assert (unit.managed, unit.edited) == (True, True)


def test_a_marker_for_another_profile_is_a_change_by_hand() -> None:
    text = render(profile(), python=PYTHON)
    assert parse(text).profile == "kimi"
    assert parse(text.replace("profile kimi,", "profile qwen,")).edited


def test_a_unit_of_somebody_else_is_not_managed() -> None:
    unit = parse("[Unit]\n# Managed by gpuops: profile kimi\n[Service]\nExecStart=/bin/true\n")
    assert (unit.managed, unit.profile, unit.edited) == (False, None, False)


# What is kept ----------------------------------------------------------------------------------

BEFORE = """\
[Unit]
Description=Old
After=network.target shared.mount
RequiresMountsFor=/shared
StartLimitBurst=99

[Service]
Type=notify
User=sglang
WorkingDirectory=/srv
EnvironmentFile=-/etc/sglang.env
Environment=NCCL_PROTO=Simple OLD=1
ExecStartPre=/usr/bin/test -d \\
  "/shared/%i"
ExecStart=/old/python -m sglang.launch_server --old
Restart=always
WatchdogSec=30
LimitMEMLOCK=infinity

[Install]
WantedBy=sglang.target

[X-Site]
Owner=me
"""


def test_what_the_unit_before_said_of_its_surroundings_stays() -> None:
    before = parse(BEFORE)
    lines = written(render(profile(), python=PYTHON, keep=before, environment_files=["/etc/100%.env"]))
    for kept in (
        "After=network-online.target network.target shared.mount",
        "RequiresMountsFor=/shared",
        "User=sglang",
        "WorkingDirectory=/srv",
        "EnvironmentFile=-/etc/sglang.env",
        "EnvironmentFile=/etc/100%%.env",
        "LimitMEMLOCK=infinity",
        "WantedBy=sglang.target",
        "Owner=me",
    ):
        assert kept in lines
    assert [line.split() for line in lines if line.startswith("ExecStartPre=")] == [
        ["ExecStartPre=/usr/bin/test", "-d", '"/shared/%i"']
    ]
    gone = ("old", "OLD", "Simple", "notify", "always", "99", "Watchdog", "multi-user")
    assert [word for word in gone if any(word in line for line in lines)] == []
    assert dropped(before) == ("WatchdogSec=30",)
    for key in ("After", "Wants", "Environment", "ExecStart", "Type", "Restart"):
        assert sum(line.startswith(f"{key}=") for line in lines) == 1, key
    assert sum(line.endswith("/etc/sglang.env") for line in lines) == 1


def test_a_setting_that_ends_in_a_backslash_swallows_no_other_line() -> None:
    before = UnitText(settings=parse("[Service]\nSyslogIdentifier=a\\ \nUser=me\n").settings)
    unit = parse(render(profile(title="ends in \\"), python=PYTHON, keep=before))
    assert unit.value("Service", "SyslogIdentifier") == "a\\"
    assert unit.value("Service", "User") == "me"
    assert unit.value("Unit", "Description") == "SGLang: ends in \\"
    assert unit.argv == launch_argv(profile(), PYTHON)


# Units of others, as a real systemd read them ----------------------------------------------------


@pytest.mark.parametrize("piece", WRITTEN)
def test_a_foreign_command_is_read_as_systemd_read_it(piece: str) -> None:
    unit = parse(foreign([piece, "end"]))
    assert list(unit.argv[3:-1]) == RECORDED["arguments"][piece]
    assert unit.environment == RECORDED["environment"]


@given(st.lists(st.sampled_from(WRITTEN), max_size=12))
def test_words_do_not_run_into_each_other(pieces: list[str]) -> None:
    expected = [word for piece in pieces for word in RECORDED["arguments"][piece]]
    assert list(parse(foreign(pieces)).argv[3:]) == expected


@given(st.text(), st.lists(st.text(), max_size=2))
def test_no_text_is_too_strange_to_be_read(text: str, drop_ins: list[str]) -> None:
    parse(text, drop_ins)
    parse(f"[Service]\nExecStart={text}\nEnvironment={text}", drop_ins)


def test_what_only_systemd_can_fill_in_is_named() -> None:
    unit = parse("[Service]\nEnvironment=A=%h B=1\nExecStart=/bin/x %i $A ${B} $NONE ${NEITHER} %%n\n")
    assert unit.unknown == ("%h", "%i", "$NONE", "$NEITHER")
    assert unit.argv == ("/bin/x", "%i", "%h", "1", "", "%n")


def test_what_systemd_leaves_out_is_told() -> None:
    unit = parse('[Service]\nEnvironment=A=1 nonsense "B=2\nExecStart=/bin/x "open\nExecStart=/bin/y\n')
    assert unit.environment == {"A": "1"}
    assert unit.argv == ("/bin/y",)
    assert len(unit.ignored) == 3


def test_several_commands_are_counted() -> None:
    assert parse("[Service]\nExecStart=/bin/a ; /bin/b\n").commands == 2
    assert parse("[Service]\nExecStart=/bin/a\nExecStart=/bin/b\n").commands == 2
    assert parse("[Service]\nExecStart=/bin/a\nExecStart=\n").commands == 0


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("/opt/x/bin/python3.11 -m sglang.launch_server", "/opt/x/bin/python3.11"),
        ("-/opt/x/bin/python -m x", "/opt/x/bin/python"),
        ("/opt/x/bin/sglang serve", None),
        ("python -m x", None),
        ("/usr/bin/bash -c x", None),
    ],
)
def test_the_interpreter_of_a_command(command: str, python: str | None) -> None:
    assert parse(f"[Service]\nExecStart={command}\n").python == python


def test_values_of_flags_are_of_every_kind() -> None:
    """Guards the strategies above: they must really build bare flags, texts and lists."""
    kinds: set[type] = set()

    @given(values)
    def note(value: FlagValue) -> None:
        kinds.add(type(value))

    note()
    assert kinds == {bool, str, tuple}
