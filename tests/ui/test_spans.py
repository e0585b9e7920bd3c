"""Only changed cells are sent, and the terminal then shows what a full repaint would have shown."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.segment import Segment
from rich.style import Style
from textual.drivers.headless_driver import HeadlessDriver
from textual.strip import Strip

from console.ui.app import Console
from console.ui.panel import differences
from console.ui.rows import Row, Span, fit
from console.ui.spans import PLAIN, Look, SpanUpdate, change, look_of
from tests.ui import scenes

WIDTH = 24
TRUE_COLOUR = RichConsole(file=io.StringIO(), force_terminal=True, color_system="truecolor")

#: pyte knows these; it has neither dim nor conceal nor overline.
_SEEN = ("bold", "italic", "underline", "reverse", "strike")

numbers = st.integers(0, 255)
colours = st.one_of(
    st.none(),
    st.just("default"),
    st.sampled_from(
        ["red", "green", "bright_blue", "white", "color(0)", "color(8)", "color(200)", "color(244)"]
    ),
    st.tuples(numbers, numbers, numbers).map(lambda rgb: "rgb({},{},{})".format(*rgb)),
    st.sampled_from(["#87afff", "#121212", "#d7875f", "#080808", "#eeeeee", "#000000"]),
)
styles = st.builds(
    lambda color, bgcolor, attributes: Style(color=color, bgcolor=bgcolor, **attributes),
    colours,
    colours,
    st.dictionaries(st.sampled_from(_SEEN), st.booleans()),
)


def screen(*told: str, columns: int = WIDTH, lines: int = 1) -> pyte.Screen:
    shown = pyte.Screen(columns, lines)
    stream = pyte.Stream(shown)
    for text in told:
        stream.feed(text)
    return shown


def cells(shown: pyte.Screen) -> list[list[pyte.screens.Char]]:
    return [[shown.buffer[y][x] for x in range(shown.columns)] for y in range(shown.lines)]


def sgr(look: Look) -> str:
    return change(PLAIN, look)


@given(styles)
def test_a_look_is_what_rich_would_have_sent(style: Style) -> None:
    ours = screen(sgr(look_of(style, ColorSystem.TRUECOLOR)) + "x")
    rich = screen(style.render("x", color_system=ColorSystem.TRUECOLOR))
    assert ours.buffer[0][0] == rich.buffer[0][0]


@given(st.lists(styles, min_size=2, max_size=6))
def test_from_any_look_to_any_other(wanted: list[Style]) -> None:
    looks = [look_of(style, ColorSystem.TRUECOLOR) for style in wanted]
    told = "".join(change(old, new) + "x" for old, new in zip([PLAIN, *looks], looks, strict=False))
    row = screen(told).buffer[0]
    for x, style in enumerate(wanted):
        assert row[x] == screen(style.render("x", color_system=ColorSystem.TRUECOLOR)).buffer[0][0]


def test_no_style_and_no_colours_say_nothing() -> None:
    assert look_of(None, ColorSystem.TRUECOLOR) == PLAIN
    assert look_of(Style(color="red"), None) == PLAIN
    assert change(PLAIN, PLAIN) == ""


def test_a_colour_of_the_palette_travels_by_its_number() -> None:
    assert look_of(Style(color="#87afff"), ColorSystem.TRUECOLOR).foreground == "38;5;111"
    assert look_of(Style(bgcolor="#121212"), ColorSystem.TRUECOLOR).background == "48;5;233"
    assert look_of(Style(color="#87afee"), ColorSystem.TRUECOLOR).foreground == "38;2;135;175;238"


# -- rows ---------------------------------------------------------------------------------------

ROLES = {
    "text": Style(color="#d0d0d0", bgcolor="#121212"),
    "dim": Style(color="#8a8a8a", bgcolor="#121212"),
    "bad": Style(color="#ff5f87", bgcolor="#121212", bold=True),
    "block": Style(color="#121212", bgcolor="#87d787", bold=True),
    "plain": Style(),
}
texts = st.text(st.sampled_from("ab0 ━⠋–…漢字ｗ한"), max_size=9)
rows = st.lists(st.builds(Span, texts, st.sampled_from(list(ROLES))), max_size=6).map(
    lambda row: fit(row, WIDTH)
)


def strip_of(row: Row) -> Strip:
    return Strip([Segment(span.text, ROLES[span.role]) for span in row], WIDTH)


def whole(row: Row) -> str:
    return "\x1b[H" + "".join(
        ROLES[span.role].render(span.text, color_system=ColorSystem.TRUECOLOR) for span in row
    )


def chopped(row: Row, at: int) -> tuple[dict[int, Strip | None], list[int]]:
    """As the compositor has a line on which two widgets meet."""
    strip = strip_of(row)
    if not 0 < at < WIDTH:
        return {0: strip}, [WIDTH]
    return {0: strip.crop(0, at), at: strip.crop(at, WIDTH)}, [at, WIDTH]


@settings(max_examples=300)
@given(rows, rows, st.integers(0, WIDTH))
def test_what_is_sent_turns_the_old_row_into_the_new(old: Row, new: Row, at: int) -> None:
    if any(len(span.text) != cell_len(span.text) for span in new):
        at = 0  # a wide character does not lie across two widgets
    chops, ends = chopped(new, at)
    spans = [(0, start, stop) for start, stop in differences(old, new, WIDTH)]
    sent = SpanUpdate([chops], spans, [ends]).render_segments(TRUE_COLOUR)
    after, wanted = screen(whole(old), sent), screen(whole(new))
    assert after.display == wanted.display
    assert cells(after) == cells(wanted)
    assert after.cursor.attrs == screen().cursor.attrs


@given(rows)
def test_the_same_row_sends_nothing(row: Row) -> None:
    assert differences(row, row, WIDTH) == [] or any(len(one.text) != cell_len(one.text) for one in row)


def test_one_digit_costs_one_digit() -> None:
    old, new = fit([Span("card 0  93%  238W")], WIDTH), fit([Span("card 0  94%  238W")], WIDTH)
    spans = [(0, start, stop) for start, stop in differences(old, new, WIDTH)]
    sent = SpanUpdate([{0: strip_of(new)}], spans, [[WIDTH]]).render_segments(TRUE_COLOUR)
    assert sent == "\x1b[1;10H\x1b[38;5;252;48;5;233m4\x1b[0m"


# -- the whole console --------------------------------------------------------------------------


class Recorded:
    """What the console writes to its terminal, and a terminal that shows it."""

    def __init__(self, columns: int, lines: int) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.Stream(self.screen)
        self.sent = 0

    def write(self, data: str) -> None:
        self.sent += len(data.encode())
        self._stream.feed(data)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    terminal = Recorded(160, 48)
    monkeypatch.setattr(HeadlessDriver, "is_headless", False)
    monkeypatch.setattr(HeadlessDriver, "write", lambda _, data: terminal.write(data))
    return terminal


def moments(count: int) -> Iterable[scenes.Snapshot]:
    """A second each, in which all cards, the rates and now and then the log move."""
    chance = random.Random(7)
    for second in range(count):
        seen = tuple(
            scenes.telemetry(
                address,
                utilization_percent=88 + chance.randrange(9),
                power_w=230.0 + chance.randrange(20),
                temperature_c=53 + chance.randrange(3),
            )
            for address in scenes.ADDRESSES
        )
        yield scenes.ready(
            wall=scenes.WALL + second, now=scenes.NOW + second / 100, **scenes.cards(seen=seen)
        )


async def test_after_many_frames_the_terminal_shows_what_a_fresh_one_would(recorded: Recorded) -> None:
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, scenes.SITE, encoding="utf-8", theme="dark")
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        for moment in [*moments(5), scenes.mixed(), scenes.crashed(), scenes.starting(), *moments(3)]:
            watch.now = moment
            app.draw()
            await pilot.pause()
        shown = [line.rstrip() for line in recorded.screen.display]
        marked = cells(recorded.screen)
        app.screen.refresh()
        await pilot.pause()
        assert [line.rstrip() for line in recorded.screen.display] == shown
        assert cells(recorded.screen) == marked
    assert "READY" in shown[0]


async def test_eight_moving_cards_cost_little(recorded: Recorded) -> None:
    watch = scenes.Frozen(scenes.ready())
    app = Console(watch, scenes.SITE, encoding="utf-8", theme="dark")
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause(0.1)
        frames = list(moments(10))
        before = recorded.sent
        for moment in frames:
            watch.now = moment
            app.draw()
            await pilot.pause()
        assert 0 < (recorded.sent - before) / len(frames) <= 2500
