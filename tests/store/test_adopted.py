"""A unit is overwritten only when gpuops wrote it, or was given it exactly as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.model.managed_unit import render
from console.model.profile import Profile
from console.store.adopted import adopt, adopted, ownership
from console.store.state import State, StateProblem

UNIT = "sglang.service"
THEIRS = "[Service]\nExecStart=/opt/python -m sglang.launch_server\n"
OURS = render(Profile(name="kimi", title="Kimi", args={"model-path": "/m"}), python="/opt/python")


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


def test_whose_a_unit_is(state: State) -> None:
    assert ownership(None, state, UNIT) == "missing"
    assert ownership(OURS, state, UNIT) == "managed"
    assert ownership(OURS + "Nice=1\n", state, UNIT) == "managed-edited"
    assert ownership(THEIRS, state, UNIT) == "foreign"
    assert ownership("", state, UNIT) == "foreign"


def test_an_adopted_unit_is_adopted_with_this_very_text(state: State) -> None:
    adopt(state, UNIT, THEIRS, "kimi", 1_796_000_000.0)
    assert ownership(THEIRS, state, UNIT) == "adopted"
    assert ownership(THEIRS + "\n", state, UNIT) == "foreign"
    assert ownership(THEIRS, state, "other.service") == "foreign"
    adopt(state, "other.service", OURS + "x", "qwen", 1_796_000_001.0)
    assert ownership(OURS + "x", state, "other.service") == "adopted"
    assert ownership(THEIRS, state, UNIT) == "adopted"  # the first is not forgotten
    assert {unit: one.profile for unit, one in adopted(state).items()} == {
        UNIT: "kimi",
        "other.service": "qwen",
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "remove the file and adopt"),
        (b'{"schema": 1, "units": {"a": {}}}', "remove the file and adopt"),
        (b"\xff\xfe", "remove the file and adopt"),
        (b'{"schema": 2}', "another version of gpuops"),
    ],
)
def test_a_record_that_cannot_be_read_is_never_taken_for_none(
    state: State, content: bytes, words: str
) -> None:
    state.create()
    path = state.directory / "adopted.json"
    path.write_bytes(content)
    for ask in (lambda: ownership(THEIRS, state, UNIT), lambda: adopt(state, UNIT, THEIRS, "x", 1.0)):
        with pytest.raises(StateProblem, match=words) as caught:
            ask()
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_record_that_cannot_be_written_is_told(state: State) -> None:
    state.create()
    (state.directory / "adopted.json.new").mkdir()
    with pytest.raises(StateProblem, match=r"adopted\.json"):
        adopt(state, UNIT, THEIRS, "kimi", 1.0)
    assert adopted(state) == {}
