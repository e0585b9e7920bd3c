"""The journal of a job: whole lines, what was cut short, what is of others, what cannot be written."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from console.model.operation import Event, JobEnd, JobStart, KernelLine, Notice, Progress, StepEvent
from console.store.journal import Journal, JournalProblem, Tail, read

START = JobStart(at=1.0, direction="forward", pid=7, start_ticks=70, boot_id="b")
DOING = StepEvent(at=2.0, step="write", state="doing")
DONE = StepEvent(at=3.0, step="write", state="done", words="it is written")
END = JobEnd(at=4.0, outcome="done")

TEXT = some.text(max_size=40)
MOMENTS = some.floats(0, 4e9)
EVENTS = some.one_of(
    some.builds(
        StepEvent, at=MOMENTS, step=TEXT, state=some.sampled_from(["doing", "done", "failed"]), words=TEXT
    ),
    some.builds(KernelLine, at=MOMENTS, words=TEXT),
    some.builds(Notice, at=MOMENTS, words=TEXT),
    some.builds(JobEnd, at=MOMENTS, outcome=some.sampled_from(["done", "failed"]), reasons=some.tuples(TEXT)),
)


def made(path: Path, *events: Event) -> Path:
    Journal.create(path, "a-job", (START,))
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()
    return path


@given(events=some.lists(EVENTS, max_size=8))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    path = made(tmp_path_factory.mktemp("j") / "journal", *events)
    assert read(path) == [START, *events]


@given(cut=some.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_a_crash_in_the_middle_of_a_line_loses_that_line_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = made(tmp_path_factory.mktemp("j") / "journal", DOING, DONE, END)
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    kept = content[: max(header, len(content) - cut)]
    path.write_bytes(kept)
    whole = [START, DOING, DONE, END][: kept.count(b"\n") - 1]
    assert read(path) == whole
    journal = Journal(path)
    journal.append(END)
    journal.close()
    assert read(path) == [*whole, END]
    assert path.read_bytes().count(b"\n") == len(whole) + 2


@given(rubbish=some.binary(min_size=1, max_size=200), place=some.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_rubbish_among_the_lines_is_refused_in_words_or_is_no_whole_line(
    tmp_path_factory: pytest.TempPathFactory, rubbish: bytes, place: int
) -> None:
    path = made(tmp_path_factory.mktemp("j") / "journal", DOING, DONE, END)
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(place, rubbish + b"\n")
    path.write_bytes(b"".join(lines))
    before = path.read_bytes()
    for reader in (read, Journal):
        try:
            reader(path)
        except JournalProblem as problem:
            assert str(path) in str(problem)
            assert "\n" not in str(problem)
        else:
            pytest.fail("rubbish was taken for an event")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", 'expected a JSON object with "schema": 1'),
        (b"\x00\x00\x00\n", 'expected a JSON object with "schema": 1'),
        (b'{"event":"end","at":1.0,"outcome":"done"}\n', 'expected a JSON object with "schema": 1'),
        (b'{"schema":2,"journal_of":"x"}\n{"new":1}\n', "schema 2 is of a newer gpuops; this one knows 1"),
        (b'{"schema":0}\n', "expected schema 1, found 0"),
        (b"[" * 100_000 + b"\n", 'expected a JSON object with "schema": 1'),
        (b'{"schema":1}\n{"event":"explode","at":1.0}\n', ":2: expected an event of a job: Invalid value"),
        (b'{"schema":1}\n{"event":"end","at":"soon","outcome":"done"}\n', ":2: expected an event of a job"),
        (b'{"schema":1}\n' + b"[" * 100_000 + b"\n", ":2: expected an event of a job"),
    ],
)
def test_what_is_not_a_journal_of_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    for reader in (read, Journal):
        with pytest.raises(JournalProblem) as problem:
            reader(path)
        assert words in str(problem.value)
        assert str(path) in str(problem.value)
    assert path.read_bytes() == content


def test_a_journal_that_is_not_there_or_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(JournalProblem, match=r"journal: No such file"):
        read(tmp_path / "journal")
    with pytest.raises(JournalProblem, match="Is a directory"):
        Journal(tmp_path)


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    path = made(tmp_path / "journal", DOING)
    journal = Journal(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        with pytest.raises(JournalProblem, match="File too large; nothing is changed"):
            journal.append(DONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    journal.append(END)  # room again
    assert read(path) == [START, DOING, END]


def test_progress_that_is_past_is_not_kept(tmp_path: Path) -> None:
    words = [Progress(at=float(number), step="write", words=str(number)) for number in range(5)]
    path = made(tmp_path / "journal", DOING, *words, DONE, words[0])
    assert read(path) == [START, DOING, words[-1], DONE, words[0]]


def test_who_follows_sees_each_line_once_it_is_whole(tmp_path: Path) -> None:
    path = made(tmp_path / "journal")
    tail = Tail(path)
    assert tail.update()
    assert not tail.update()
    line = msgspec.json.encode(DOING) + b"\n"
    with path.open("ab", buffering=0) as journal:
        journal.write(line[:20])
        assert not tail.update()
        journal.write(line[20:])
    assert tail.update()
    assert tail.events == [START, DOING]
