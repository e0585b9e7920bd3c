"""Asking the service's Python: real interpreters that have an SGLang, have none, hang or print rubbish."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.checks.flags import (
    OFFLINE,
    Asked,
    Hardware,
    ask,
    judge,
    read_hardware,
    service_python,
    shipped,
    validate_profile,
)
from console.model.profile import Expect, FlagValue, Profile, argv_of
from console.sources.files import load_profile, shipped_profiles_directory
from console.store.state import State
from console.transport.local import LocalRunner
from console.transport.runner import Result, Stream
from tests.checks.flags.flag_lab import EIGHT, installed, profile

#: An SGLang as small as can be, noisy as the real one is.
SERVER_ARGS = """
import json, logging, os, sys
print("INFO: a library says hello", flush=True)
assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "a card is visible"


def human_readable_int(value):
    return int(value)


class DeprecatedStoreTrueAction:
    pass


class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", type=str, required=True)
        parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
        parser.add_argument("--context-length", type=human_readable_int)
        parser.add_argument("--sampling-backend", choices={"b", "a"})
        parser.add_argument("--old", action="store_true", help="Deprecated: use --new.")
        parser.add_argument("--extra", type=json.loads, nargs="*")
        os.environ.get("SGLANG_SMALL_THING")
"""
SPEC_INFO = "import enum\nclass SpeculativeAlgorithm(enum.Enum):\n    EAGLE = 1\n    NONE = 2\n"


def interpreter(folder: Path, body: str) -> str:
    """A program that stands in for a Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def with_sglang(folder: Path, version: str = "0.6.1", after: str = "") -> str:
    """A Python in whose path a small SGLang is."""
    packages = folder / "packages"
    for name, text in (
        ("sglang/__init__.py", after),
        ("sglang/srt/server_args.py", SERVER_ARGS),
        ("sglang/srt/speculative/spec_info.py", SPEC_INFO),
        (
            f"sglang-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        ),
    ):
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    start = (
        f"import sys; sys.path.append({str(packages)!r}); sys.argv[:] = sys.argv[-2:]; "
        "exec(compile(sys.stdin.read(), 'ask', 'exec'))"
    )
    # Its last two words are "-" and the question; what is before is the interpreter's.
    return interpreter(
        folder, f'echo "$@" >> {folder}/asked\nexec {sys.executable} -I -c {shlex.quote(start)} "$@"'
    )


def questions(folder: Path) -> list[str]:
    """The last words of each question that the interpreter was asked."""
    return [line.split()[-1] for line in (folder / "asked").read_text().splitlines()]


async def test_a_real_answer_becomes_a_table(tmp_path: Path) -> None:
    asked = await ask(LocalRunner(), None, with_sglang(tmp_path))
    assert asked.reason is None and asked.version == "0.6.1"
    assert asked.table is not None
    flags = asked.table.by_name
    assert set(flags) == {
        "help", "model-path", "model", "tp-size", "tensor-parallel-size", "context-length",
        "sampling-backend", "old", "extra",
    }  # fmt: skip
    assert (flags["tp-size"].type, flags["tp-size"].arity, flags["tp-size"].default) == ("int", "1", "1")
    assert flags["context-length"].type == "count"
    assert flags["sampling-backend"].choices == ("a", "b")
    assert flags["old"].deprecated and not flags["tp-size"].deprecated
    assert (flags["extra"].type, flags["extra"].arity) == ("json", "*")
    assert asked.table.algorithms == ("EAGLE", "NEXTN")
    assert asked.table.variables == ("SGLANG_SMALL_THING",)


async def test_an_answer_is_kept_until_the_installation_changes(tmp_path: Path) -> None:
    state, python = State(tmp_path / "state"), with_sglang(tmp_path)
    first = await ask(LocalRunner(), state, python)
    second = await ask(LocalRunner(), state, python)
    assert (first.remembered, second.remembered) == (False, True)
    assert second.table == first.table
    assert questions(tmp_path) == ["version", "flags", "version"]
    assert [path.name.partition("-")[0] for path in (state.directory / "flags").iterdir()] == ["0.6.1"]
    source = tmp_path / "packages/sglang/srt/server_args.py"
    source.write_text(SERVER_ARGS.replace("--old", "--older"))
    os.utime(source, ns=(1, 1))
    third = await ask(LocalRunner(), state, python)
    assert not third.remembered
    assert third.table is not None and "older" in third.table.by_name


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"schema": 99}', b"\xff\xfe", b"[" * 100_000],
    ids=["empty", "bare", "future", "binary", "deep"],
)
async def test_a_kept_answer_that_is_broken_is_asked_anew(tmp_path: Path, content: bytes) -> None:
    state, python = State(tmp_path / "state"), with_sglang(tmp_path)
    await ask(LocalRunner(), state, python)
    (kept,) = (state.directory / "flags").iterdir()
    kept.write_bytes(content)
    again = await ask(LocalRunner(), state, python)
    assert again.table is not None and not again.remembered
    assert (await ask(LocalRunner(), state, python)).remembered


async def test_a_state_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file is in the way")
    asked = await ask(LocalRunner(), State(tmp_path / "state"), with_sglang(tmp_path))
    assert asked.table is not None
    assert asked.note is not None and asked.note.startswith("not remembered: ")
    (source, *_) = judge(profile({}), asked)
    assert "not remembered" in source.evidence


async def test_a_version_that_would_lead_out_of_the_state_is_not_kept(tmp_path: Path) -> None:
    said = (
        '{"version": "../../etc/x", "python": "p", "stamp": "", "flags": [{"names": ["--a"], "dest": "a"}]}'
    )
    python = interpreter(tmp_path, f"cat > /dev/null; echo 'gpuops-flags:{said}'")
    asked = await ask(LocalRunner(), State(tmp_path / "state"), python)
    assert asked.table is not None
    assert not (tmp_path / "state").exists()
    findings = {one.id: one for one in judge(profile({}, sglang=">=0.5"), asked)}
    assert findings["flags.range"].verdict == "unknown"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f'exec {sys.executable} "$@"', "No package metadata was found for sglang"),
        ("cat > /dev/null; echo 'hello, i am no python'", "it printed something else than an answer"),
        ("cat > /dev/null; echo 'gpuops-flags:{\"version\": 7'", "its answer cannot be read"),
        ('cat > /dev/null; echo \'gpuops-flags:{"version": "1.0"}\'', "its answer cannot be read"),
        ("cat > /dev/null; head -c 9000000 /dev/zero", "it printed something else than an answer"),
        ("cat > /dev/null; printf '\\033[31mboom\\033[0m\\n' >&2; exit 3", "boom"),
        ("kill -SEGV $$", "exit status"),
        ("exit 0", "it printed something else than an answer"),
    ],
)
async def test_without_an_answer_a_shipped_table_stands_in_and_says_so(
    tmp_path: Path, body: str, reason: str
) -> None:
    python = interpreter(tmp_path, body)
    chosen = profile({"tp-size": "8"}, sglang=">=0.5.9,<0.5.20")
    findings = await validate_profile(chosen, LocalRunner(), None, python=python, deadline=10)
    source = findings[0]
    assert (source.id, source.verdict) == ("flags.source", "warn")
    assert source.evidence.startswith(f"could not ask: {python}: ")
    assert reason in source.evidence
    assert source.evidence.endswith("used the shipped table of 0.5.18")
    assert "\x1b" not in source.evidence
    assert {one.verdict for one in findings[1:]} <= {"pass", "skipped"}


async def test_an_import_that_fails_leaves_the_version_known(tmp_path: Path) -> None:
    broken = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    python = with_sglang(tmp_path, "0.5.21", after=broken)
    asked = await ask(LocalRunner(), None, python)
    assert asked.table is None and asked.version == "0.5.21"
    findings = {one.id: one for one in judge(profile({}, sglang="<0.5.20"), asked)}
    source = findings["flags.source"]
    assert "libcudart.so.13" in source.evidence
    assert source.evidence.endswith("SGLang 0.5.21 is installed; used the shipped table of 0.5.20")
    assert findings["flags.range"].verdict == "fail"


async def test_a_python_that_hangs_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "exec sleep 600")
    began = time.monotonic()
    asked = await ask(LocalRunner(), None, python, deadline=0.3)
    assert time.monotonic() - began < 5
    assert asked.table is None
    assert asked.reason is not None and "no answer within" in asked.reason


async def test_a_python_that_is_not_there_or_not_known(tmp_path: Path) -> None:
    gone = await ask(LocalRunner(), None, str(tmp_path / "nowhere/python"))
    assert gone.reason is not None and "nowhere/python" in gone.reason
    unknown = await ask(LocalRunner(), None, None)
    assert unknown.reason is not None and "python: /path/bin/python" in unknown.reason


class Told:
    """A runner that answers every command alike and keeps what it was asked."""

    name = "told"
    root = Path("/nonexistent")

    def __init__(self, stdout: bytes, returncode: int = 0, stderr: bytes = b"") -> None:
        self.asked: list[tuple[str, ...]] = []
        self._answer = (returncode, stdout, stderr)

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        self.asked.append(tuple(argv))
        return Result(tuple(argv), *self._answer)

    @asynccontextmanager
    async def stream(self, argv: Sequence[str]) -> AsyncIterator[Stream]:
        raise AssertionError("nothing is streamed")
        yield


async def test_no_card_is_visible_and_nothing_of_ours_is_imported() -> None:
    runner = Told(b"")
    await ask(runner, None, "/opt/sglang/bin/python")
    (argv,) = runner.asked
    assert argv[0] == "env" and "CUDA_VISIBLE_DEVICES=" in argv
    assert argv[argv.index("/opt/sglang/bin/python") :] == (
        "/opt/sglang/bin/python",
        "-I",
        "-B",
        "-",
        "version",
    )


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("/opt/sglang/bin/python -m sglang.launch_server", "/opt/sglang/bin/python"),
        ("/usr/bin/python3.12 -m sglang.launch_server", "/usr/bin/python3.12"),
        ("/opt/sglang/bin/sglang serve --model-path /m", "/opt/sglang/bin/python"),
        ("/usr/bin/docker run sglang", None),
        ("", None),
    ],
)
async def test_the_python_of_a_unit(command: str, python: str | None) -> None:
    program = command.partition(" ")[0]
    shown = f"{{ path={program} ; argv[]={command} ; ignore_errors=no ; start_time=[n/a] }}\n"
    found, reason = await service_python(Told(shown.encode() if command else b"\n"), "sglang.service")
    assert found == python
    assert (reason is None) == (python is not None)


async def test_a_unit_that_cannot_be_asked_says_why() -> None:
    found, reason = await service_python(Told(b"", 1, b"Failed to connect to bus\n"), "sglang.service")
    assert (found, reason) == (None, "sglang.service: Failed to connect to bus")


# Judging ---------------------------------------------------------------------------------------

SHIPPED = {path.stem: load_profile(path) for path in sorted(shipped_profiles_directory().glob("*.yaml"))}


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10", "0.5.11", "0.5.14", "0.5.16", "0.5.18"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_taken_by_the_versions_of_their_range(name: str, version: str) -> None:
    findings = judge(SHIPPED[name], installed(version), EIGHT)
    assert [one for one in findings if one.verdict in ("fail", "unknown")] == []
    assert findings[0].evidence.startswith(f"asked the installed SGLang {version}: ")


def test_kimi_is_not_for_0_5_23_and_the_words_say_what_to_write() -> None:
    path = shipped_profiles_directory() / "kimi-k2.5-int4.yaml"
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "cuda-graph-max-bs: " in text)
    findings = {one.id: one for one in judge(SHIPPED[path.stem], installed("0.5.23"), EIGHT, path)}
    assert {id for id, one in findings.items() if one.verdict == "fail"} == {
        "flags.range", "flag.cuda-graph-max-bs",
    }  # fmt: skip
    assert findings["flag.cuda-graph-max-bs"].remedy == "replace it with: cuda-graph-max-bs-decode: 128"
    assert findings["flag.cuda-graph-max-bs"].evidence.startswith(
        f"{path}:{line}:3: unknown to SGLang 0.5.23"
    )
    assert ">=0.5.9,<0.5.20; installed is 0.5.23" in findings["flags.range"].evidence
    assert findings["flags.range"].evidence.startswith(f"{path}:")


def test_qwen_is_well_in_every_version_from_0_5_9() -> None:
    for version in ("0.5.20", "0.5.22", "0.5.23"):
        findings = judge(SHIPPED["qwen3.5-397b-nvfp4"], installed(version), EIGHT)
        assert [one.id for one in findings if one.verdict != "pass"] == []


def test_offline_says_that_nobody_was_asked() -> None:
    source, range_, *rest = judge(SHIPPED["kimi-k2.5-int4"], OFFLINE)
    assert source.verdict == "skipped"
    assert source.evidence == "nobody was asked; used the shipped table of 0.5.18"
    assert range_.verdict == "skipped"
    assert "fail" not in {one.verdict for one in rest}


async def test_a_machine_without_cards_has_no_hardware(tmp_path: Path) -> None:
    assert await read_hardware(tmp_path) is None


_TEXT = st.text(max_size=12)
_FLAG = st.one_of(_TEXT, st.sampled_from(sorted(shipped("0.5.23").by_name)), st.just("tp"))
_VALUE: st.SearchStrategy[FlagValue] = st.one_of(
    st.booleans(), _TEXT, st.integers().map(str), st.lists(_TEXT, max_size=3).map(tuple)
)
_PROFILES = st.builds(
    Profile,
    name=st.just("p"),
    title=_TEXT,
    sglang=st.sampled_from([None, ">=0.5.9", "<0.1", "==0.5.18"]),
    args=st.dictionaries(_FLAG, _VALUE, max_size=6),
    env=st.dictionaries(
        st.one_of(_TEXT, _TEXT.map("SGLANG_{}".format), st.just("SGLANG_ENABLE_SPEC_V2")), _TEXT, max_size=3
    ),
    expect=st.just(Expect()),
)
_ASKED = st.sampled_from(
    [
        OFFLINE,
        installed("0.5.23"),
        installed("0.5.9"),
        Asked(version="nonsense\x1b[31m", reason="no\x07thing"),
        Asked(version="99!1.2.3", table=msgspec.structs.replace(shipped("0.5.18"), version="\u202e?")),
    ]
)


@given(_PROFILES, _ASKED, st.sampled_from([None, EIGHT]))
@settings(max_examples=200, deadline=None)
def test_any_profile_gets_findings_that_are_safe_to_print(
    profile: Profile, asked: Asked, hardware: Hardware | None
) -> None:
    findings = judge(profile, asked, hardware)
    assert findings[0].id == "flags.source"
    for one in findings:
        text = one.id + one.title + one.evidence + (one.remedy or "")
        assert not any(character in text for character in "\x1b\x07\u202e\n")
        assert one.verdict in ("pass", "skipped") or one.evidence
        text.encode()


def test_what_is_proposed_is_taken() -> None:
    """Each line that a remedy gives mends the flag it is given for."""
    wrong: dict[str, FlagValue] = {
        "port": "x", "host": True, "tool-call-parser": "kimi", "kv-cache-dtype": "fp8", "tp": "8",
        "cuda-graph-max-bs": "128", "enable-metrics": "yes", "chunked-prefill-size": "8k",
    }  # fmt: skip
    mended: dict[str, FlagValue] = {}
    for finding in judge(profile(wrong), installed("0.5.23"), None):
        if finding.id.startswith("flag."):
            flag, _, value = (finding.remedy or "").split(": ", 1)[1].partition(": ")
            mended[flag] = True if value == "true" else value
    assert len(mended) == len(wrong)
    assert argv_of(mended)
    assert {one.verdict for one in judge(profile(mended), installed("0.5.23"), None)} == {"pass", "skipped"}
