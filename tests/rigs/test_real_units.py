"""Units that gpuops writes, and units of others that it reads, held against a real systemd."""

from __future__ import annotations

import json
import time
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from console.model.managed_unit import UnitText, launch_argv, parse, render
from console.model.profile import FlagValue, Load, Profile
from console.sources.source import Unavailable
from console.sources.unit_file import read_unit_files
from console.transport.files import replace
from tests.model.unit_words import NASTY, PYTHON, WRITTEN, foreign, words
from tests.rigs.systemd.machine import UNITS, Machine

pytestmark = pytest.mark.rig

#: Stands in for the engine: says what it was given, in the file that its unit sends its words to.
LISTENER = """
import json, os, sys
with open("/proc/self/cmdline", "rb") as file:
    argv = [word.decode("utf-8", "surrogateescape") for word in file.read().split(b"\\0")[:-1]]
sys.stdout.write(json.dumps({"argv": argv, "environment": dict(os.environ)}))
"""

#: What systemd and Python put into the environment of every service.
OF_SYSTEMD = frozenset(
    {
        "HOME",
        "LANG",
        "LOGNAME",
        "PATH",
        "SHELL",
        "USER",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "SYSTEMD_EXEC_PID",
    }
    | {"LC_CTYPE", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"}
)

_numbers = count()
_seconds = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


@pytest.fixture(scope="module", autouse=True)
def listener(machine: Machine) -> None:
    for name in ("__init__", "launch_server"):
        body = LISTENER if name == "launch_server" else ""
        machine.write(f"/usr/lib/python3/dist-packages/sglang/{name}.py", body)


class Ran:
    """A unit that was started in the machine, and what its process was given."""

    def __init__(self, machine: Machine, text: str, drop_in: str | None = None) -> None:
        self.machine = machine
        self.name = f"given{next(_numbers)}.service"
        said = f"/run/{self.name}.json"
        machine.write(f"{UNITS}/{self.name}.d/words.conf", f"[Service]\nStandardOutput=truncate:{said}\n")
        if drop_in is not None:
            machine.write(f"{UNITS}/{self.name}.d/drop-in.conf", drop_in)
        machine.write_unit(self.name, text)
        machine.run("systemctl", "start", self.name, check=False)
        self.process = self._heard(said)

    def _heard(self, said: str) -> dict[str, Any]:
        ends = time.monotonic() + 15
        while time.monotonic() < ends:
            path = self.machine.root / said.lstrip("/")
            if path.exists() and (text := path.read_text()):
                return dict(json.loads(text))
            time.sleep(0.02)
        raise AssertionError(self.machine.run("systemctl", "status", self.name, check=False))

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(self.process["argv"])

    @property
    def environment(self) -> dict[str, str]:
        found: dict[str, str] = self.process["environment"]
        return {name: value for name, value in found.items() if name not in OF_SYSTEMD}

    def property(self, name: str) -> Any:
        """A property as the bus has it: lists of words, not text that would have to be split again."""
        path = f"/org/freedesktop/systemd1/unit/{self.name.replace('.', '_2e')}"
        got = self.machine.run(
            *("busctl", "--json=short", "get-property", "org.freedesktop.systemd1", path),
            *("org.freedesktop.systemd1.Service", name),
        )
        return json.loads(got)["data"]

    def verified(self) -> str:
        return self.machine.run("systemd-analyze", "verify", f"/{UNITS}/{self.name}", check=False)


def profile_of(values: list[str], variables: list[str], title: str = "Any") -> Profile:
    args: dict[str, FlagValue] = {f"flag-{number}": value for number, value in enumerate(values)}
    args["list"] = tuple(values) or True
    args["bare"] = True
    env = {f"VARIABLE_{number}": value for number, value in enumerate(variables)}
    return Profile(name="nasty", title=title, args=args, env=env, load=Load(stop_s=12.5))


def test_the_process_gets_every_nasty_word_as_it_was_meant(machine: Machine) -> None:
    profile = profile_of(list(NASTY), list(NASTY), title="%n ${HOME} \\")
    ran = Ran(machine, render(profile, python=PYTHON))
    assert ran.argv == launch_argv(profile, PYTHON)
    assert ran.environment == profile.env
    assert ran.verified() == ""
    ((program, argv, *_),) = ran.property("ExecStart")
    assert program == PYTHON
    # systemd fills variables in only when it starts the process, so there "$" is still doubled.
    assert [word.replace("$$", "$") for word in argv] == list(ran.argv)
    assert ran.property("Environment") == [f"{name}={value}" for name, value in profile.env.items()]


@_seconds
@given(st.lists(words, max_size=40), st.lists(words, max_size=40))
def test_the_process_gets_any_word_as_it_was_meant(
    machine: Machine, values: list[str], variables: list[str]
) -> None:
    profile = profile_of(values, variables)
    ran = Ran(machine, render(profile, python=PYTHON))
    assert ran.argv == launch_argv(profile, PYTHON)
    assert ran.environment == profile.env


def test_settings_that_are_kept_still_hold(machine: Machine) -> None:
    before = parse(
        "[Service]\nUser=nobody\nWorkingDirectory=/var\nLimitNOFILE=4242\nEnvironmentFile=/etc/secret.env\n"
        "Environment=GONE=1\nType=notify\nKillSignal=SIGKILL\n[Install]\nWantedBy=basic.target\n"
    )
    machine.write("/etc/secret.env", "FROM_FILE='a b'\n")
    ran = Ran(machine, render(profile_of(["x"], ["y"]), python=PYTHON, keep=before))
    assert ran.environment == {"FROM_FILE": "a b", "VARIABLE_0": "y"}
    assert ran.property("WorkingDirectory") == "/var"
    assert ran.process["environment"]["USER"] == "nobody"
    assert ran.property("LimitNOFILE") == 4242
    assert ran.property("TimeoutStopUSec") == 13_000_000
    assert ran.property("KillMode") == "mixed"
    machine.run("systemctl", "enable", ran.name)
    assert (machine.root / UNITS / "basic.target.wants" / ran.name).is_symlink()


# Units of others -------------------------------------------------------------------------------


def check_foreign(machine: Machine, text: str) -> UnitText:
    unit = parse(text)
    ran = Ran(machine, text)
    assert unit.argv == ran.argv
    assert unit.environment == ran.environment
    return unit


@pytest.mark.parametrize("piece", WRITTEN)
def test_a_foreign_command_is_read_as_systemd_reads_it(machine: Machine, piece: str) -> None:
    check_foreign(machine, foreign([piece, "end"]))


@_seconds
@given(st.lists(st.sampled_from(WRITTEN), max_size=30))
def test_any_foreign_command_is_read_as_systemd_reads_it(machine: Machine, pieces: list[str]) -> None:
    check_foreign(machine, foreign(pieces))


RUN = f"ExecStart={PYTHON} -m sglang.launch_server"


@pytest.mark.parametrize(
    "text",
    [
        # An empty assignment takes back what stood before it.
        f"Environment=A=1 B=2\nEnvironment=\nEnvironment=C=3\nExecStart=/bin/x\nExecStart=\n{RUN} again\n",
        # A later variable wins; a comment has no continuation; a section may come back.
        f"Environment=A=1\n# comment \\\nEnvironment=A=2\n[Unit]\nAfter=x.target\n[Service]\n{RUN}\n",
        # An empty line ends what is continued.
        f"{RUN} \\\n\n  --not-any-more=1\n",
        # What stands before an escape or a quote that is not right is kept.
        f'Environment=A=1 "B=2\nEnvironment=C=3 D=\\q E=5\n{RUN}\n',
        # Carriage returns end lines.
        f"Environment=A=1\r\n{RUN} a\\\r\n b\r\n",
        # After ":" a "$" is itself.
        f"Environment=A=1\nExecStart=-:{PYTHON} -m sglang.launch_server $A ${{A}} $$A %%\n",
        f"ExecStart = \t {PYTHON} -m sglang.launch_server   spaced\\\n  out   \n",
        # Names are in the case that systemd has them in; sections of others are theirs.
        f"environment=A=1\n[X-Ours]\nEnvironment=B=2\n[Service]\n{RUN}\n",
        # An even number of backslashes at the end does not go on in the next line.
        f"Environment=A=b\\\\\nEnvironment=B=2\n{RUN} c\\\\\n",
        f"{RUN} x\\\\\\\ny\n",
    ],
)
def test_a_foreign_unit_is_read_as_systemd_reads_it(machine: Machine, text: str) -> None:
    check_foreign(machine, f"\ufeff[Service]\n{text}")


def test_a_unit_that_systemd_refuses_as_a_whole_is_known(machine: Machine) -> None:
    text = f"[Service]\n# \ufffe\nEnvironment=A=\ufffe\nExecStart={PYTHON} -m sglang.launch_server\n"
    machine.write_unit("refused.service", text)
    assert machine.run("systemctl", "show", "-p", "LoadState", "refused.service") == "LoadState=error\n"
    assert parse(text).ignored == ("systemd refuses the whole file for its character U+FFFE",)


def test_drop_ins_come_after_the_unit(machine: Machine) -> None:
    text = f"[Service]\nEnvironment=A=1 B=1\nExecStart={PYTHON} -m sglang.launch_server first\n"
    drop_in = f"[Service]\nEnvironment=B=2\nExecStart=\nExecStart={PYTHON} -m sglang.launch_server second\n"
    ran = Ran(machine, text, drop_in)
    unit = parse(text, [drop_in])
    assert unit.argv == ran.argv == (PYTHON, "-m", "sglang.launch_server", "second")
    assert unit.environment == ran.environment == {"A": "1", "B": "2"}


# The life of a managed unit ----------------------------------------------------------------------

#: Says "worker" when its worker gets SIGTERM; ends half a second after its own, and leaves the worker.
TERMINATED = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, b"worker ")
worker = os.fork()
if worker == 0:
    signal.signal(signal.SIGTERM, told)
    while True:
        time.sleep(60)
def end(number, frame):
    time.sleep(0.5)
    os.write(1, b"main ")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"up ")
while True:
    time.sleep(60)
"""


def managed(machine: Machine, package: str, program: str, drop_in: str = "") -> str:
    """The name of a managed unit that runs ``program`` with what it says in /run/NAME."""
    name = f"{package}.service"
    for file, body in (("__init__", ""), ("launch_server", program)):
        machine.write(f"/opt/{package}/sglang/{file}.py", body)
    profile = Profile(
        name=package,
        title=package,
        args={"model-path": "/m"},
        env={"PYTHONPATH": f"/opt/{package}"},
        load=Load(stop_s=5),
    )
    said = f"[Service]\nStandardOutput=append:/run/{name}\n{drop_in}"
    machine.write(f"{UNITS}/{name}.d/test.conf", said)
    machine.write_unit(name, render(profile, python=PYTHON))
    return name


def said_by(machine: Machine, name: str, words: str, within: float = 10) -> str:
    """What the unit has said, once ``words`` are in it."""
    path = machine.root / "run" / name
    ends = time.monotonic() + within
    while not (path.exists() and words in path.read_text()):
        assert time.monotonic() < ends, machine.run("systemctl", "status", name, check=False)
        time.sleep(0.05)
    return path.read_text()


def test_a_stop_asks_the_main_process_alone_and_leaves_none_behind(machine: Machine) -> None:
    name = managed(machine, "terminated", TERMINATED)
    machine.run("systemctl", "start", name)
    said_by(machine, name, "up")
    machine.run("systemctl", "stop", name)
    assert said_by(machine, name, "main") == "up main "
    # The worker, which did not end by itself, is gone with the unit.
    assert "/opt/terminated" not in machine.run("sh", "-c", "cat /proc/[0-9]*/environ | tr '\\0' ' '")
    shown = machine.run("systemctl", "show", "-p", "ActiveState,Result", name).split()
    assert shown == ["Result=success", "ActiveState=inactive"]


def test_a_crash_is_tried_again_twice_and_then_left(machine: Machine) -> None:
    program = 'import sys\nprint("try", end=" ", flush=True)\nsys.exit(1)\n'
    name = managed(machine, "crashes", program, drop_in="RestartSec=100ms\n")
    machine.run("systemctl", "start", name)
    ends = time.monotonic() + 15
    while machine.run("systemctl", "is-active", name, check=False).strip() != "failed":
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert said_by(machine, name, "try").split() == ["try"] * 3


async def test_the_files_of_a_unit_are_found_wherever_they_are(machine: Machine) -> None:
    runner = machine.runner()
    vendor = f"[Service]\nExecStart={PYTHON} -m x\n"
    machine.write("/usr/lib/systemd/system/vendor.service", vendor)
    machine.write("/usr/lib/systemd/system/vendor.service.d/10.conf", "[Service]\nEnvironment=A=1\n")
    machine.write(f"{UNITS}/vendor.service.d/20.conf", "[Service]\nEnvironment=A=2\n")
    machine.run("systemctl", "daemon-reload")
    files = await read_unit_files(runner, "vendor.service")
    assert (files.fragment, files.text) == ("/lib/systemd/system/vendor.service", vendor)
    assert (files.path, files.before) == (f"/{UNITS}/vendor.service", None)
    assert [text.split()[-1] for _, text in files.drop_ins] == ["Environment=A=1", "Environment=A=2"]
    assert files.effective.environment == {"A": "2"}
    assert files.python == PYTHON
    assert files.stop_timeout_s == 90

    # One in /etc comes over it. What does not run systemd reads afresh each time.
    await replace(runner, files.path, "[Service]\nExecStart=/bin/true\nTimeoutStopSec=7\n")
    files = await read_unit_files(runner, "vendor.service")
    assert files.before == files.text == "[Service]\nExecStart=/bin/true\nTimeoutStopSec=7\n"
    assert (files.stop_timeout_s, files.need_daemon_reload) == (7, False)

    absent = await read_unit_files(runner, "absent.service")
    assert (absent.text, absent.fragment, absent.load_state) == (None, None, "not-found")
    machine.write(f"{UNITS}/latin.service", "[Service]\n")
    (machine.root / UNITS / "latin.service").write_bytes(b"[Service]\n# \xe9\nExecStart=/bin/true\n")
    machine.run("systemctl", "daemon-reload")
    with pytest.raises(Unavailable, match=r"latin\.service: not UTF-8 text at byte 12"):
        await read_unit_files(runner, "latin.service")
