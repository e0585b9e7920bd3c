"""What the audit says of a service that was read: the answer, the findings, each flag and variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.checks.audit import judge, naming
from console.checks.audit_engine import lowest
from console.model.audit_report import Audit, audit_document, audit_lines
from console.model.command_line import parse_command_line
from console.model.configuration import Effective, File, Interpreter, Place
from console.model.finding import Finding
from console.model.profile import Profile, Reference
from console.model.unit import UnitStatus
from console.sources.files import load_profile, shipped_profiles_directory

PYTHON = "/opt/sglang/bin/python"
SITECUSTOMIZE = "/opt/sglang/lib/sitecustomize.py"
UNIT_FILE = "/etc/systemd/system/sglang.service"
DROP_IN = "/etc/systemd/system/sglang.service.d/10-tuning.conf"
STARTED = 1_764_460_800.0

KIMI = load_profile(shipped_profiles_directory() / "kimi-k2.5-int4.yaml")
QWEN = load_profile(shipped_profiles_directory() / "qwen3.5-397b-nvfp4.yaml")
assert KIMI.reference is not None
REFERENCE: Reference = KIMI.reference

NCCL = {name: value for name, value in KIMI.env.items() if name.startswith("NCCL_")}
SPEC = {"SGLANG_ENABLE_SPEC_V2": "True"}


def unit(**changed: Any) -> UnitStatus:
    status = UnitStatus(
        id="sglang.service",
        load_state="loaded",
        active_state="active",
        sub_state="running",
        main_pid=1449,
        started_at=STARTED,
    )
    return msgspec.structs.replace(status, **changed)


def running(argv: tuple[str, ...] | None = None, **changed: Any) -> Effective:
    """Production as the Kimi profile has it: NCCL variables in sitecustomize.py, the other in the unit."""
    words = (PYTHON, "-m", "sglang.launch_server", *(KIMI.argv() if argv is None else argv))
    command = parse_command_line(words)
    read = Effective(
        basis="process",
        unit=unit(),
        command=command,
        next_command=command,
        pid=48274,
        environment={**SPEC, "PATH": "/usr/bin"},
        set_by_unit={name: (Place(UNIT_FILE, value),) for name, value in SPEC.items()},
        python=Interpreter(
            environment={**SPEC, **NCCL, "PATH": "/usr/bin"},
            own=NCCL,
            loaded={"sitecustomize": SITECUSTOMIZE},
            version="3.11.9",
        ),
        files=(File(UNIT_FILE, STARTED - 60), File(SITECUSTOMIZE, STARTED - 60)),
        engine={"version": "0.5.10", "tp_size": 8, "mem_fraction_static": 0.88},
        engine_version="0.5.10",
    )
    return msgspec.structs.replace(read, **changed)


def python(**changed: Any) -> Interpreter:
    interpreter = running().python
    assert interpreter is not None
    return msgspec.structs.replace(interpreter, **changed)


def finding(found: Audit, id: str) -> Finding:
    (one,) = [one for one in found.findings if one.id == id]
    return one


def item(found: Audit, name: str) -> dict[str, Any]:
    (one,) = [one for one in audit_document(found)["items"] if one["name"] == name]
    return dict(one)


def without(flag: str) -> tuple[str, ...]:
    args = {name: value for name, value in KIMI.args.items() if name != flag}
    return msgspec.structs.replace(KIMI, args=args).argv()


def with_flag(flag: str, value: str) -> tuple[str, ...]:
    return msgspec.structs.replace(KIMI, args={**KIMI.args, flag: value}).argv()


# The answer --------------------------------------------------------------------------------------


def test_the_benchmark_runs_and_what_is_added_is_counted() -> None:
    found = judge(running(), KIMI)
    assert found.answer == "production runs the benchmark's 13 flags and 7 variables; it adds 7"
    assert found.verdict == "pass"
    assert {one.verdict for one in found.findings} == {"pass"}
    added = {one.name for one in found.items if one.verdict == "added"}
    assert added == {
        "served-model-name", "host", "tool-call-parser", "reasoning-parser",
        "enable-hierarchical-cache", "hicache-ratio", "enable-metrics",
    }  # fmt: skip
    assert all(one.allowed for one in found.items if one.verdict == "added")
    assert "host RAM" in item(found, "hicache-ratio")["allowed"]


def test_what_is_missing_and_what_differs_is_counted_by_kind() -> None:
    argv = tuple(word for word in with_flag("mem-fraction-static", "0.90"))
    argv = tuple(word for word in argv if word not in ("--disable-custom-all-reduce", "--trust-remote-code"))
    seen = python(environment={**SPEC, **NCCL, "NCCL_PROTO": "Simple"}, own={**NCCL, "NCCL_PROTO": "Simple"})
    found = judge(running(argv, python=seen), KIMI)
    assert found.answer.startswith(
        "production differs from the benchmark: 2 of 13 flags missing, 1 of 13 flags different, "
        "1 of 7 variables different; it adds 7"
    )
    assert found.verdict == "fail"
    told = finding(found, "benchmark")
    assert told.verdict == "fail"
    assert "--mem-fraction-static is 0.90, not 0.88" in told.evidence
    assert "--disable-custom-all-reduce is missing" in told.evidence
    assert "NCCL_PROTO is Simple, not LL" in told.evidence
    assert [one.verdict for one in found.items][:4] == ["missing", "missing", "different", "different"]
    assert found.findings[0].verdict == "fail"


def test_another_port_is_no_other_speed() -> None:
    found = judge(running(with_flag("port", "30001")), KIMI)
    assert found.answer.startswith("production runs the benchmark's 13 flags and 7 variables; it adds 7")
    assert found.answer.endswith("; --port differs (address, not speed)")
    assert finding(found, "benchmark").verdict == "pass"
    assert item(found, "port")["verdict"] == "different"


def test_without_a_benchmark_only_the_profile_is_compared_and_that_is_said() -> None:
    command = parse_command_line((PYTHON, "-m", "sglang.launch_server", *QWEN.argv()))
    found = judge(running(command=command, next_command=command), QWEN)
    assert found.answer.startswith(
        "production runs the qwen3.5-397b-nvfp4 profile's 11 flags and 6 variables; it adds 1"
    )
    assert found.answer.endswith("there is no benchmark to compare with")
    assert finding(found, "benchmark").verdict == "skipped"


def test_without_a_benchmark_a_difference_from_the_profile_fails() -> None:
    argv = tuple("qwen25" if word == "qwen3_coder" else word for word in QWEN.argv())
    command = parse_command_line((PYTHON, "-m", "sglang.launch_server", *argv))
    found = judge(running(command=command), QWEN)
    assert "differs from the profile qwen3.5-397b-nvfp4: 1 of 11 flags different" in found.answer
    told = finding(found, "profile")
    assert (told.verdict, told.evidence) == ("fail", "--tool-call-parser is qwen25, not qwen3_coder")


def test_what_the_profile_wants_beyond_the_benchmark_is_told_when_it_lacks() -> None:
    found = judge(running(without("hicache-ratio")), KIMI)
    assert found.answer.startswith("production runs the benchmark's 13 flags and 7 variables; it adds 6")
    told = finding(found, "profile")
    assert told.verdict == "warn"
    assert told.evidence == "--hicache-ratio is missing (expected 4.0)"
    assert item(found, "hicache-ratio")["verdict"] == "missing"


@pytest.mark.parametrize(
    ("flag", "value", "verdict"),
    [
        ("kv-cache-dtype", "fp8_e5m2", "fail"),
        ("some-new-flag", "3", "warn"),
        ("log-level", "warning", "pass"),
    ],
)
def test_an_added_flag_is_judged_by_what_it_does(flag: str, value: str, verdict: str) -> None:
    found = judge(running(with_flag(flag, value)), KIMI)
    told = finding(found, "added")
    assert told.verdict == verdict
    assert f"--{flag}" in told.evidence
    doubt = ", 1 of which may change the numbers" in found.answer
    assert doubt == (verdict != "pass")


def test_an_added_variable_is_listed_only_when_the_engine_reads_it() -> None:
    seen = {**SPEC, **NCCL, "NCCL_IB_DISABLE": "1", "HOME": "/root", "LANG": "C.UTF-8"}
    found = judge(running(python=python(environment=seen, own={**NCCL, "NCCL_IB_DISABLE": "1"})), KIMI)
    assert "it adds 8, 1 of which may change the numbers" in found.answer
    assert item(found, "NCCL_IB_DISABLE")["where"] == SITECUSTOMIZE
    names = {one.name for one in found.items}
    assert "HOME" not in names and "LANG" not in names


# What cannot be seen -----------------------------------------------------------------------------


def test_variables_are_unknown_not_missing_when_the_python_does_not_answer() -> None:
    problem = {"python": "it did not get past its start-up files within 10 s"}
    found = judge(running(python=None, problems=problem), KIMI)
    assert found.verdict == "unknown"
    assert found.answer.startswith("13 of the benchmark's 13 flags and 1 of its 7 variables could be seen")
    assert item(found, "NCCL_PROTO")["verdict"] == "unknown"
    assert item(found, "SGLANG_ENABLE_SPEC_V2")["verdict"] == "same"
    assert finding(found, "python").evidence == problem["python"]


def test_a_service_that_does_not_run_is_compared_by_its_unit_and_that_is_said() -> None:
    problems = {"process": "sglang.service is inactive: no process of it runs", "python": "asked only while"}
    read = running(basis="unit", python=None, unit=unit(main_pid=None), environment=SPEC, problems=problems)
    found = judge(read, KIMI)
    assert found.answer.endswith("it does not run")
    assert finding(found, "service").verdict == "unknown"
    assert item(found, "tp-size")["verdict"] == "same"
    assert item(found, "NCCL_ALGO")["verdict"] == "unknown"


def test_nothing_that_could_be_read_is_no_pass() -> None:
    read = Effective(basis="none", problems={"unit": "lxc-attach: not found"})
    for profile in (KIMI, None):
        found = judge(read, profile)
        assert (found.verdict, found.items) == ("unknown", ())
        assert "lxc-attach: not found" in found.answer


def test_a_model_without_a_profile_names_those_there_are() -> None:
    command = parse_command_line((PYTHON, "-m", "sglang.launch_server", "--model-path", "/m/other"))
    found = judge(running(command=command), None, (KIMI, QWEN))
    assert found.verdict == "unknown"
    assert "/m/other" in found.findings[0].evidence
    assert KIMI.name in found.findings[0].evidence


def test_an_engine_that_does_not_answer_costs_what_only_it_knows() -> None:
    problems = {"engine": "/server_info: refused (nothing listens there)"}
    found = judge(running(engine=None, engine_version=None, problems=problems), KIMI)
    assert [finding(found, id).verdict for id in ("version", "resolved", "defaults")] == [
        "unknown", "unknown", "skipped",
    ]  # fmt: skip
    assert found.answer.startswith("production runs the benchmark's 13 flags and 7 variables")


# Places ------------------------------------------------------------------------------------------


def test_a_variable_in_two_places_names_both_and_who_wins() -> None:
    """sitecustomize assigns: it comes last."""
    read = running(
        environment={**SPEC, "NCCL_ALGO": "Tree"},
        set_by_unit={"NCCL_ALGO": (Place(DROP_IN, "Tree"),)},
        python=python(environment={**SPEC, **NCCL}),
    )
    told = finding(judge(read, KIMI), "twice")
    assert told.verdict == "warn"
    assert told.evidence == f"NCCL_ALGO is Tree in {DROP_IN}, and Ring in {SITECUSTOMIZE}, which counts"


def test_a_setdefault_that_comes_too_late_loses() -> None:
    read = running(
        environment={**SPEC, "NCCL_ALGO": "Tree"},
        set_by_unit={"NCCL_ALGO": (Place(DROP_IN, "Tree"),)},
        python=python(environment={**SPEC, **NCCL, "NCCL_ALGO": "Tree"}),
    )
    found = judge(read, KIMI)
    evidence = finding(found, "twice").evidence
    assert evidence == f"NCCL_ALGO is Ring in {SITECUSTOMIZE}, and Tree in {DROP_IN}, which counts"
    assert item(found, "NCCL_ALGO")["where"] == DROP_IN
    assert item(found, "NCCL_ALGO")["verdict"] == "different"


def test_a_drop_in_over_the_unit_file() -> None:
    places = (Place(UNIT_FILE, "False"), Place(DROP_IN, "True"))
    found = judge(running(set_by_unit={"SGLANG_ENABLE_SPEC_V2": places}), KIMI)
    assert f"False in {UNIT_FILE}, and True in {DROP_IN}, which counts" in finding(found, "twice").evidence


def test_a_flag_that_is_given_twice_counts_last() -> None:
    found = judge(running((*KIMI.argv(), "--tp", "4")), KIMI)
    told = finding(found, "twice")
    assert told.verdict == "warn"
    assert "--tp-size is given 2 times (8, 4): the last counts" in told.evidence
    assert item(found, "tp-size")["effective"] == "4"
    assert found.verdict == "fail"


def test_a_flag_of_the_config_file_counts_unless_the_command_line_has_it() -> None:
    read = running(
        without("tp-size"),
        config_file="/etc/sglang.yaml",
        config_flags={"tp-size": "8", "mem-fraction-static": "0.5"},
    )
    found = judge(read, KIMI)
    assert item(found, "tp-size") | {"where": "/etc/sglang.yaml", "verdict": "same"} == item(found, "tp-size")
    assert item(found, "mem-fraction-static")["effective"] == "0.88"
    assert "--mem-fraction-static is in /etc/sglang.yaml" in finding(found, "twice").evidence


# Files and process -------------------------------------------------------------------------------


def test_files_that_changed_since_they_were_loaded() -> None:
    found = judge(running(unit=unit(need_daemon_reload=True)), KIMI)
    told = finding(found, "daemon-reload")
    assert (told.verdict, told.remedy) == ("warn", "systemctl daemon-reload")


def test_a_unit_file_edited_since_the_start_says_what_the_next_start_has() -> None:
    planned = parse_command_line(
        (PYTHON, "-m", "sglang.launch_server", *with_flag("mem-fraction-static", "0.9"))
    )
    files = (File(UNIT_FILE, STARTED + 3600), File(SITECUSTOMIZE, STARTED - 60))
    told = finding(judge(running(next_command=planned, files=files), KIMI), "edited")
    assert told.verdict == "warn"
    assert told.evidence == (
        f"written after the process started: {UNIT_FILE}; "
        "the next start will have --mem-fraction-static 0.9 instead of 0.88"
    )


def test_a_sitecustomize_edited_since_the_start_is_no_witness_of_the_process() -> None:
    told = finding(judge(running(files=(File(SITECUSTOMIZE, STARTED + 3600),)), KIMI), "edited")
    assert told.verdict == "warn"
    assert SITECUSTOMIZE in told.evidence
    assert "cannot be seen any more" in told.evidence


def test_when_files_were_written_may_be_unknown() -> None:
    read = running(
        files=(File(UNIT_FILE),), problems={"times": "when the files were written is not known: x"}
    )
    assert finding(judge(read, KIMI), "edited").verdict == "unknown"


# Versions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "verdict"), [("0.5.9", "pass"), ("0.5.23", "fail"), ("local", "unknown")]
)
def test_a_version_outside_the_profiles_range(version: str, verdict: str) -> None:
    assert finding(judge(running(engine_version=version), KIMI), "version").verdict == verdict


@pytest.mark.parametrize(
    ("version", "given", "verdict", "said"),
    [
        ("0.5.10", None, "pass", "none that matters here"),
        ("0.5.12", None, "warn", "its default is True in 0.5.12 and was False in 0.5.9"),
        ("0.5.14", None, "pass", "none that matters here"),
        ("0.5.14", "True", "pass", "not read by 0.5.14"),
        ("0.5.14", "False", "warn", "SGLANG_ENABLE_SPEC_V2 is False, and not read by 0.5.14"),
    ],
)
def test_spec_v2_by_version(version: str, given: str | None, verdict: str, said: str) -> None:
    spec = {} if given is None else {"SGLANG_ENABLE_SPEC_V2": given}
    read = running(engine_version=version, environment=spec, python=python(environment={**spec, **NCCL}))
    told = finding(judge(read, KIMI), "defaults")
    assert told.verdict == verdict
    assert said in told.evidence


def test_the_version_a_range_begins_with() -> None:
    assert lowest(">=0.5.9,<0.5.20") == "0.5.9"
    assert lowest("==0.5.18") == "0.5.18"
    assert lowest("<0.6") is None
    assert lowest(None) is None


# The engine's own word ---------------------------------------------------------------------------


def test_forty_eight_requests_with_speculation_are_explained() -> None:
    info = {"version": "0.5.10", "speculative_algorithm": "EAGLE3", "max_running_requests": 48}
    told = finding(judge(running(engine=info), KIMI), "resolved")
    assert told.verdict == "pass"
    assert "at most 48 requests at once: --max-running-requests is not given" in told.evidence


def test_a_value_that_was_clamped_is_told_unless_the_benchmark_had_it_too() -> None:
    info = {
        "version": "0.5.10",
        "cuda_graph_max_bs": 48,
        "hicache_ratio": 2.0,
        "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    }
    read = running((*KIMI.argv(), "--max-running-requests", "128"), engine=info)
    told = finding(judge(read, KIMI), "resolved")
    assert told.verdict == "warn"
    assert "--hicache-ratio 4.0 was asked for, 2.0 is in force" in told.evidence
    assert "--max-running-requests 128 was asked for, 64" in told.evidence
    only_benchmark = judge(running(engine={"version": "0.5.10", "cuda_graph_max_bs": 48}), KIMI)
    assert finding(only_benchmark, "resolved").verdict == "pass"
    assert "128 was asked for, 48 is in force" in finding(only_benchmark, "resolved").evidence


@pytest.mark.parametrize("name", ["server_info-0.5.23.json", "server_info-0.5.23-speculation.json"])
def test_a_real_engine_that_took_every_value_as_given(name: str) -> None:
    """Recorded answers: what their own launch command asked for is in force."""
    info = msgspec.json.decode((Path(__file__).parents[1] / "fixtures/engine" / name).read_bytes())
    command = parse_command_line((PYTHON, *str(info["launch_command"]).split()))
    told = finding(judge(running(command=command, engine=info), KIMI), "resolved")
    assert "is in force" not in told.evidence, told.evidence


# What is told ------------------------------------------------------------------------------------


def test_no_key_is_in_anything_that_is_told() -> None:
    argv = (*KIMI.argv(), "--api-key", "sk-very-secret", "--admin-api-key=sk-other-secret")
    profile = msgspec.structs.replace(KIMI, env={**KIMI.env, "HF_HOME": "https://me:pw-secret@host/x"})
    info = {"version": "0.5.10", "api_key": "sk-third-secret", "admin_api_key": "sk-fourth-secret"}
    found = judge(running(argv, engine=info), profile)
    told = msgspec.json.encode(audit_document(found)).decode()
    told += "\n".join(line.text for line in audit_lines(found))
    assert "secret" not in told
    assert item(found, "api-key")["effective"] == "(hidden)"


def test_what_only_looks_the_same_is_not_the_same() -> None:
    """A direction mark in a value: shown as an escape, never as it is."""
    odd = "LL\u202e"
    seen = python(environment={**SPEC, **NCCL, "NCCL_PROTO": odd}, own={**NCCL, "NCCL_PROTO": odd})
    found = judge(running(python=seen), KIMI)
    assert item(found, "NCCL_PROTO") | {"verdict": "different", "effective": "LL\\u202e"} == item(
        found, "NCCL_PROTO"
    )


def test_the_document_has_its_promised_shape() -> None:
    document = audit_document(judge(running(), KIMI))
    assert list(document)[:3] == ["schema", "answer", "verdict"]
    assert document["schema"] == 1
    assert set(document["items"][0]) == {
        "kind", "name", "profile", "reference", "effective", "verdict", "allowed", "where",
    }  # fmt: skip
    msgspec.json.encode(document)


def test_the_lines_fit_a_narrow_terminal_and_begin_with_the_answer() -> None:
    found = judge(running(with_flag("kv-cache-dtype", "fp8_e5m2")), KIMI)
    lines = [line.text for line in audit_lines(found)]
    assert lines[0].startswith("production runs the benchmark's 13 flags")
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("+ --kv-cache-dtype") for line in lines)
    assert any(line.startswith("= --tp-size") for line in lines)


def test_a_profile_of_the_operators_own_is_compared_the_same_way() -> None:
    own = Profile(
        name="own", title="Own", args={"model-path": "/m", "tp-size": "2"}, env={"NCCL_ALGO": "ring"}
    )
    command = parse_command_line((PYTHON, "-m", "sglang.launch_server", "--model", "/m", "--tp", "2"))
    read = running(command=command, next_command=command, engine={}, engine_version=None)
    found = judge(read, own)
    assert found.answer.startswith("production runs the own profile's 2 flags and 1 variable")


@pytest.mark.parametrize(
    ("version", "typed", "name"),
    [
        ("0.5.10", "tp", "tp-size"),
        ("0.5.10", "tensor-parallel-size", "tp-size"),
        ("0.5.10", "speculative-algo", "speculative-algorithm"),
        ("0.5.10", "mem-frac", "mem-fraction-static"),
        ("0.5.10", "cuda-graph-max-bs", "cuda-graph-max-bs"),
        ("0.5.23", "cuda-graph-max-bs", "cuda-graph-max-bs"),  # there it may mean two
        ("0.5.23", "enable-hicache", "enable-hierarchical-cache"),
        (None, "model", "model-path"),
        (None, "unheard-of", "unheard-of"),
    ],
)
def test_flags_are_named_as_argparse_of_that_version_takes_them(
    version: str | None, typed: str, name: str
) -> None:
    assert naming(version, ">=0.5.9,<0.5.20")(typed) == name


def test_names_do_not_matter_on_either_side() -> None:
    """Production and profile use different ones of argparse's names."""
    own = Profile(
        name="own",
        title="Own",
        args={"model": "/m", "tensor-parallel-size": "2"},
        reference=Reference(args={"tp": "2"}),
    )
    words = (PYTHON, "-m", "sglang.launch_server", "--model-path", "/m", "--tp-size", "2")
    command = parse_command_line(words, naming("0.5.10", None))
    found = judge(running(command=command, next_command=command), own)
    assert item(found, "tp-size")["verdict"] == "same"
    assert item(found, "model-path")["verdict"] == "added"
