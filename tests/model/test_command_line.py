"""A process's arguments as SGLang reads them, held to argparse itself."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.command_line import (
    HIDDEN,
    canonical,
    hidden,
    interpreter_options,
    is_secret,
    parse_command_line,
    same_value,
    shown,
    starts_engine,
)
from console.model.engine_facts import DEFAULT_CHANGES, allowance, read_by_engine
from console.model.text import clean

FLAGS = ("model-path", "tp-size", "host", "trust-remote-code", "cuda-graph-bs")

word = st.text(st.characters(exclude_characters="\0"), max_size=12).filter(
    lambda text: not text.startswith("-")
)
flag = st.sampled_from(FLAGS)


@given(st.lists(st.tuples(flag, st.lists(word, max_size=3), st.booleans()), max_size=8))
def test_flags_and_values_are_those_that_argparse_finds(
    given_flags: list[tuple[str, list[str], bool]],
) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in FLAGS:
        parser.add_argument(f"--{name}", nargs="*", default=None)
    argv: list[str] = []
    for name, values, joined in given_flags:
        if joined and len(values) == 1:
            argv.append(f"--{name}={values[0]}")
        else:
            argv += [f"--{name}", *values]
    expected = vars(parser.parse_args(argv))
    found = parse_command_line(("python", "-m", "sglang.launch_server", *argv)).flags
    for name in FLAGS:
        values = expected[name.replace("-", "_")]
        wanted = (
            None
            if values is None
            else True
            if not values
            else values[0]
            if len(values) == 1
            else tuple(values)
        )
        assert found.get(name) == wanted


@given(st.lists(st.text(max_size=20), max_size=12))
def test_any_words_are_survived_and_shown_safely(argv: list[str]) -> None:
    for value in parse_command_line(argv).flags.values():
        text = shown(value)
        assert text is not None
        assert clean(text) == text


def test_a_flag_has_one_name() -> None:
    found = parse_command_line(("python", "--tp", "8", "--model", "/m", "--tensor-parallel-size=4"))
    assert found.flags == {"tp-size": "4", "model-path": "/m"}
    assert found.repeated == {"tp-size": ("8", "4")}
    assert found.written == {"tp-size": "tensor-parallel-size", "model-path": "model"}
    assert canonical("unheard-of") == "unheard-of"


def test_the_options_that_decide_how_python_starts() -> None:
    argv = ("python", "-E", "-X", "utf8", "-Wignore", "-sB", "-m", "sglang.launch_server", "-x")
    assert interpreter_options(argv) == ("-E", "-X", "utf8", "-Wignore", "-sB")
    assert interpreter_options(("python", "script.py", "-S")) == ()


def test_which_commands_start_the_engine() -> None:
    assert starts_engine(("/opt/sglang/bin/python", "-u", "-m", "sglang.launch_server", "--model", "/m"))
    assert starts_engine(("/opt/sglang/bin/python", "/opt/sglang/bin/sglang", "serve", "--model", "/m"))
    assert not starts_engine(("/bin/bash", "/opt/start.sh"))
    assert not starts_engine(())


@pytest.mark.parametrize(
    ("kind", "name", "one", "other", "same"),
    [
        ("flag", "mem-fraction-static", "0.880", "0.88", True),
        ("flag", "mem-fraction-static", "0.88", "0.89", False),
        ("flag", "model-path", "/m/A", "/m/a", False),
        ("flag", "trust-remote-code", True, True, True),
        ("flag", "cuda-graph-bs", ("1", "2"), ("1", "2.0"), True),
        ("flag", "cuda-graph-bs", ("1", "2"), ("1",), False),
        ("flag", "json-model-override-args", '{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ("flag", "json-model-override-args", "[" * 100_000, "[" * 99_999, False),
        ("variable", "SGLANG_ENABLE_SPEC_V2", "True", "1", True),
        ("variable", "SGLANG_ENABLE_SPEC_V2", "True", "0", False),
        ("variable", "NCCL_ALGO", "ring", "Ring", True),
        ("variable", "NCCL_ALGO", "Tree", "Ring", False),
        ("variable", "HF_HOME", "/A", "/a", False),
    ],
)
def test_what_means_the_same(kind: str, name: str, one: str, other: str, same: bool) -> None:
    assert same_value(kind, name, one, other) is same
    assert same_value(kind, name, other, one) is same


@pytest.mark.parametrize(
    "name", ["api-key", "admin-api-key", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ssl-keyfile-password"]
)
def test_keys_are_hidden(name: str) -> None:
    assert is_secret(name)
    assert hidden(name, "abc") == HIDDEN
    assert hidden(name, ("a", "b")) == HIDDEN


def test_what_is_no_key_is_not_hidden() -> None:
    for name in ("max-total-tokens", "TOKENIZERS_PARALLELISM", "NCCL_ALGO", "tokenizer-path"):
        assert not is_secret(name)
    assert hidden("HF_ENDPOINT", "https://me:pw@mirror/x") == f"https://{HIDDEN}@mirror/x"


def test_the_data_is_in_order() -> None:
    from packaging.version import Version

    for change in DEFAULT_CHANGES:
        versions = [Version(since) for since, _ in change.since]
        assert versions == sorted(versions)
        assert change.at("99") == change.since[-1][1]
        with pytest.raises(KeyError):
            change.at("0.0.1")
        if change.kind == "variable":
            assert read_by_engine(change.name)
    spoken = allowance("flag", "tool-call-parser")
    assert spoken is not None and spoken.allowed
    grave = allowance("variable", "NCCL_ALGO")
    assert grave is not None and not grave.allowed
    assert allowance("flag", "unheard-of") is None
