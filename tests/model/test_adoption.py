"""A unit that somebody wrote becomes a profile that serves the same, or is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given as holds_for
from hypothesis import strategies as st

from console.model.adoption import Adoption, profile_of
from console.model.managed_unit import launch_argv, parse, render
from console.model.profile import Profile
from console.model.unit_syntax import UnitProblem

PYTHON = "/opt/sglang/bin/python3.11"
LAUNCH = f"{PYTHON} -m sglang.launch_server"


def adopted(command: str, *lines: str, **given: Any) -> Adoption:
    text = "\n".join(["[Unit]", "Description=Kimi by hand", "[Service]", *lines, f"ExecStart={command}", ""])
    return profile_of(parse(text), **given)


def refusal(command: str, *lines: str, **given: Any) -> str:
    with pytest.raises(UnitProblem) as caught:
        adopted(command, *lines, **given)
    return str(caught.value)


def test_a_plain_unit_becomes_its_profile() -> None:
    adoption = adopted(
        f"{LAUNCH} --model-path /shared/kimi --served-model-name Kimi-K2.5 --trust-remote-code "
        "--cuda-graph-bs 1 2 4 --tool-call-parser=kimi_k2 --random-seed -1 "
        """--json-model-override-args '{"a b": "5%%"}'""",
        'Environment=NCCL_PROTO=LL "HF_HOME=/data/h f"',
        "EnvironmentFile=/etc/secret.env",
        key=3,
        stop_s=120.0,
    )
    profile = adoption.profile
    assert (profile.name, profile.title, profile.key) == ("kimi-k2.5", "Kimi by hand", 3)
    assert profile.python == adoption.python == PYTHON
    assert profile.args == {
        "model-path": "/shared/kimi",
        "served-model-name": "Kimi-K2.5",
        "trust-remote-code": True,
        "cuda-graph-bs": ("1", "2", "4"),
        "tool-call-parser": "kimi_k2",
        "random-seed": "-1",
        "json-model-override-args": '{"a b": "5%"}',
    }
    assert profile.env == {"NCCL_PROTO": "LL", "HF_HOME": "/data/h f"}
    assert profile.load.stop_s == 120.0
    assert (profile.expect.served_name, profile.expect.tool_calls, profile.expect.reasoning) == (
        "Kimi-K2.5",
        True,
        False,
    )
    assert adoption.notes == ("kept: EnvironmentFile=/etc/secret.env; what it sets wins over env",)


def test_the_unit_written_of_it_starts_the_same_process() -> None:
    text = f'[Service]\nEnvironment="A=x y"\nExecStart={LAUNCH} --model-path /m --list a "b c" --bare\n'
    unit = parse(text)
    profile = profile_of(unit).profile
    again = parse(render(profile, python=PYTHON, keep=unit))
    assert again.argv == unit.argv == launch_argv(profile, PYTHON)
    assert again.environment == unit.environment


def test_other_names_of_flags_are_written_as_their_own() -> None:
    adoption = adopted(f"{LAUNCH} --model /m --tp 4 --tp-size=8")
    assert adoption.profile.args == {"model-path": "/m", "tp-size": "8"}
    assert adoption.notes == (
        "--model is written --model-path",
        "--tp is written --tp-size",
        "--tp-size is given twice; the last one counts",
    )


@pytest.mark.parametrize("model", ["--model-path /m", "/m"])
def test_sglang_serve_is_started_by_the_python_beside_it(model: str) -> None:
    adoption = adopted(f"/opt/sglang/bin/sglang serve {model} --tp-size 8")
    assert (adoption.python, adoption.python_assumed) == ("/opt/sglang/bin/python", True)
    assert adoption.profile.args == {"model-path": "/m", "tp-size": "8"}
    assert "sglang serve becomes python -m sglang.launch_server" in adoption.notes[0]


def test_a_variable_of_the_unit_itself_is_filled_in() -> None:
    adoption = adopted(f"{LAUNCH} --model-path ${{BASE}}/kimi", "Environment=BASE=/shared")
    assert adoption.profile.args == {"model-path": "/shared/kimi"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ('/bin/bash -c "exec python -m sglang.launch_server --model-path /m"', "starts another program"),
        ("/usr/bin/env A=1 python -m sglang.launch_server --model-path /m", "starts another program"),
        (f"/usr/bin/numactl --all {LAUNCH} --model-path /m", "starts another program"),
        ("/opt/start-kimi.sh", "is not a Python with an absolute path"),
        (f"{PYTHON} /opt/serve.py --model-path /m", "its command runs /opt/serve.py --model-path, not -m"),
        (f"{PYTHON} -m vllm.entrypoints.openai.api_server --model /m", "runs -m vllm"),
        (f"{LAUNCH} --tp-size 8", "names no --model-path"),
        (f"{LAUNCH} stray --model-path /m", "expected a flag such as --tp-size, found 'stray'"),
        (f"{LAUNCH} --model-path /m -x", "expected a flag such as --tp-size, found '-x'"),
        (f"{LAUNCH} --model-path /m --Bad_Flag 1", "--Bad_Flag: expected a flag"),
        (f"{LAUNCH} --model-path /m --api-key sk-123", "--api-key is a secret"),
        (f"{LAUNCH} --model-path /m --api-key=sk-123", "--api-key is a secret"),
        (f"{LAUNCH} --model-path /m --api-key ${{KEY}}", "$KEY in it gets its value only when"),
        (f"{LAUNCH} --model-path /models/%i", "%i in it gets its value only when"),
        (f"@{PYTHON} name -m sglang.launch_server --model-path /m", "begins with @"),
        (f"{LAUNCH} --model-path /m ; /bin/true", "has 2 commands"),
        ("", "has 0 commands"),
    ],
)
def test_what_a_profile_cannot_say_is_refused(command: str, words: str) -> None:
    assert words in refusal(command)


@pytest.mark.parametrize("variable", ["HF_TOKEN=hf_123", "OPENAI_API_KEY=x", "PROXY=http://me:pass@proxy"])
def test_a_secret_in_the_environment_is_refused_and_not_repeated(variable: str) -> None:
    words = refusal(f"{LAUNCH} --model-path /m", f"Environment={variable}")
    name, _, value = variable.partition("=")
    assert words.startswith(f"its variable {name} is a secret")
    assert "EnvironmentFile=" in words
    assert value not in words


def test_a_secret_flag_is_not_repeated() -> None:
    assert "sk-123" not in refusal(f"{LAUNCH} --model-path /m --api-key sk-123")


def test_a_unit_of_gpuops_is_adopted_only_when_a_hand_has_changed_it() -> None:
    text = render(Profile(name="kimi", title="Kimi", args={"model-path": "/m"}), python=PYTHON)
    with pytest.raises(UnitProblem, match="from the profile kimi"):
        profile_of(parse(text))
    changed = profile_of(parse(text.replace("/m", "/n")))
    assert changed.profile.args == {"model-path": "/n"}
    assert changed.profile.title == "Kimi"


@pytest.mark.parametrize(
    ("served", "name"), [("Qwen/Qwen3.5-397B", "qwen3.5-397b"), ("a b..c", "a-b-c"), ("._x_-", "x")]
)
def test_a_name_is_made_of_the_served_one(served: str, name: str) -> None:
    assert adopted(f"{LAUNCH} --model-path /m --served-model-name '{served}'").profile.name == name


def test_a_name_that_cannot_be_one_is_refused() -> None:
    assert "give one with --name" in refusal(f"{LAUNCH} --model-path /")
    for bad in ("../x", "a/b", "", "A", "x\ny"):
        assert refusal(f"{LAUNCH} --model-path /m", name=bad).startswith("--name ")


def test_what_is_not_kept_is_told() -> None:
    adoption = adopted(
        f"-{PYTHON} -u -m sglang.launch_server --model-path /m", "WatchdogSec=30", "Environment=x"
    )
    notes = "\n".join(adoption.notes)
    for words in ("systemd ignores a part of it", "option -u", "WatchdogSec=30", "is not ignored any more"):
        assert words in notes


@holds_for(st.lists(st.text(max_size=8), max_size=6), st.text(max_size=30))
def test_any_unit_is_adopted_or_refused_with_words(words: list[str], environment: str) -> None:
    for line in (" ".join(words), f"{LAUNCH} --model-path /m {' '.join(words)}"):
        try:
            adoption = profile_of(parse(f"[Service]\nEnvironment={environment}\nExecStart={line}\n"))
        except UnitProblem as problem:
            assert str(problem)
        else:
            assert adoption.profile.args["model-path"]
