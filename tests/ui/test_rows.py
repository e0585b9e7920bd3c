"""What each panel says in any room, for any state; no screen is needed for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args
from unicodedata import category

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from console.model import words
from console.model.actions import ACTIONS
from console.model.engine import EngineRates
from console.model.reading import Reading
from console.model.snapshot import Snapshot
from console.model.state import ServiceState, StateName
from console.ui.cards import Cards, columns_for
from console.ui.charts import Charts
from console.ui.footer import Footer
from console.ui.glyphs import ASCII, UNICODE, Glyphs, choose, plain
from console.ui.header import Header, mark_of
from console.ui.layout import heights
from console.ui.log import Log
from console.ui.panel import Panel, printable
from console.ui.rows import Row, Span, bar, clip, fit, width_of
from console.ui.screens.log import LogView
from console.ui.screens.processes import Processes
from console.ui.screens.sources import SourcesPanel
from console.ui.service import Service, facts
from tests.ui import scenes
from tests.ui.scenes import NOW, SCENES, line


def drawn_charts(glyphs: Glyphs) -> Charts:
    charts = Charts(glyphs)
    charts.ready = True
    return charts


PANELS: dict[str, Callable[[Glyphs], Panel]] = {
    "header": Header,
    "cards": Cards,
    "service": Service,
    "charts": drawn_charts,
    "log": Log,
    "footer": lambda glyphs: Footer(ACTIONS, glyphs),
    "log page": LogView,
    "processes": Processes,
    "sources": SourcesPanel,
}


def text(rows: list[Row]) -> list[str]:
    return ["".join(span.text for span in row) for row in rows]


def shown(panel: Panel, snapshot: Snapshot, width: int, height: int = 12) -> list[str]:
    """The rows as the panel puts them on the screen."""
    rows = panel.rows(snapshot, width, height)[:height]
    return text([fit(printable(row), width) for row in rows])


# -- room ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(PANELS)),
    st.sampled_from(list(SCENES)),
    st.integers(0, 250),
    st.integers(1, 60),
    st.sampled_from([UNICODE, ASCII]),
)
def test_every_panel_fits_any_room(name: str, scene: str, width: int, height: int, glyphs: Glyphs) -> None:
    rows = shown(PANELS[name](glyphs), SCENES[scene](), width, height)
    assert all(cell_len(row) == width for row in rows)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", PANELS)
def test_every_panel_fits_the_sizes_operators_have(name: str, scene: str) -> None:
    panel = PANELS[name](UNICODE)
    for width, height in ((20, 6), (40, 12), (63, 10), (64, 10), (80, 24), (150, 40), (250, 60)):
        rows = shown(panel, SCENES[scene](), width, height)
        assert [cell_len(row) for row in rows] == [width] * len(rows)
        # What a panel means to show it fits itself: nothing but a rule or a name is cut at the edge.
        assert 1 <= len(rows) <= height


@given(st.integers(0, 300), st.integers(0, 80), st.integers(0, 16), st.integers(1, 30), st.booleans())
def test_the_rows_of_the_terminal_are_shared_out_and_no_more(
    width: int, height: int, cards: int, service: int, past: bool
) -> None:
    got = heights(width, height, cards, service, past)
    beside = max(got.service, got.charts) if got.side_by_side else got.service + got.charts
    assert min(got.cards, got.service, got.charts, got.log) >= 0
    assert got.cards + beside + got.log == height


def test_at_80x24_what_matters_is_on_the_screen() -> None:
    got = heights(80, 22, 8)
    assert got.cards == 9
    assert got.service >= 2
    assert got.charts >= 4
    assert got.log >= 2


def test_a_load_and_a_death_get_the_rows_of_empty_charts() -> None:
    for scene in (scenes.starting(), scenes.crashed()):
        wanted = Service().wanted(scene, 80)
        got = heights(80, 22, 8, wanted, past=False)
        assert got.service == wanted
        assert got.charts == 0
        assert got.log >= 4


def test_more_width_shows_more_columns() -> None:
    counts = [len(columns_for(width)) for width in range(20, 251)]
    assert counts == sorted(counts)
    assert counts[0] == 4
    assert counts[-1] > counts[60] > counts[0]


@pytest.mark.parametrize("width", range(20, 251))
def test_the_columns_of_a_card_leave_room_for_its_mark(width: int) -> None:
    assert sum(column.width + 1 for column in columns_for(width)) < width


# -- header -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 60, 80, 160])
@pytest.mark.parametrize("scene", SCENES)
def test_the_state_is_in_the_header_at_any_width(scene: str, width: int) -> None:
    snapshot = SCENES[scene]()
    word = "LOOKING" if snapshot.state.looking else snapshot.state.name.upper()
    assert word in shown(Header(), snapshot, width, 1)[0]


def test_the_header_gives_up_the_clock_first_and_the_percentage_last() -> None:
    starting = scenes.starting()
    found = {width: shown(Header(), starting, width, 1)[0] for width in (20, 40, 60, 120)}
    assert "12:00:00" in found[120] and "8 CT 129" in found[120] and "ready in ~5m30" in found[120]
    assert "12:00:00" not in found[60] and "ready in ~5m30" in found[60]
    assert "weights 45 %" in found[40]
    assert "STARTING 45 %" in found[20]


def test_every_state_has_its_own_word_and_a_mark_that_tells_its_kind() -> None:
    names: tuple[StateName, ...] = get_args(StateName)
    assert len({ServiceState(name=name).words for name in names}) == len(names)
    for glyphs in (UNICODE, ASCII):
        kinds = {mark_of(name, glyphs) for name in ("ready", "starting", "stopped", "degraded", "crashed")}
        assert len(kinds) == 5


def test_a_first_look_is_no_alarm() -> None:
    for panel in (Header(), Service()):
        rows = panel.rows(scenes.nothing_read(), 80, 4)
        roles = {span.role for row in rows for span in row}
        assert roles.isdisjoint({"bad", "warn", "block-bad", "block-warn"})


def test_the_cards_are_counted_by_their_owner() -> None:
    header = shown(Header(), scenes.mixed(), 120, 1)[0]
    assert "4 CT 129 · 2 VM 100 · 1 lost · 1 nobody" in header


# -- cards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [28, 40, 64, 80, 112, 120, 150, 200])
def test_headings_end_where_their_numbers_end(width: int) -> None:
    heading, first, *_ = shown(Cards(), scenes.ready(), width, 9)
    for title, number in (
        ("temp", r"\d+°C"),
        ("power", r"\d+W"),
        ("link", r"x16 \S+"),
        ("MHz", r"\d+/\d+(?= )"),
    ):
        at = heading.find(f" {title} ")
        if at >= 0:
            ends = [found.end() for found in re.finditer(number, first)]
            assert at + 1 + len(title) in ends, (title, heading, first)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_every_card_keeps_its_row_whoever_has_it(width: int) -> None:
    rows = shown(Cards(), scenes.mixed(), width, 9)[1:]
    assert len(rows) == 8
    owners = ("CT 129", "CT 129", "CT 129", "lost", "CT 129", "nobody", "VM 100", "VM 100")
    for index, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        assert row.startswith(f"{index} ")
        assert owner in row
    assert all("▲" in rows[marked] for marked in (0, 1, 2, 3, 4))
    assert not any("▲" in rows[well] for well in (5, 6, 7))


def test_marks_say_what_is_wrong_worst_first() -> None:
    rows = shown(Cards(), scenes.mixed(), 120, 9)[1:]
    assert rows[0].rstrip().endswith("▲ throttled: power cap")
    assert rows[1].rstrip().endswith("▲ link x8 of x16")
    assert rows[2].rstrip().endswith("▲ ECC 2 uncorrected")
    assert rows[3].rstrip().endswith("▲ off the bus, Xid 79")


def test_a_stale_row_is_grey_and_says_its_age() -> None:
    rows = Cards().rows(scenes.stale(), 120, 9)
    for row in rows[1:]:
        *values, age = row
        assert age == Span("(12s old) ", "warn")
        assert {span.role for span in values} <= {"dim", "rest"}


def test_cards_that_have_no_room_are_counted() -> None:
    rows = shown(Cards(), scenes.ready(), 80, 5)
    assert len(rows) == 5
    assert rows[-1].strip() == "and 5 more"


def test_sixteen_cards_keep_both_digits_of_their_number() -> None:
    addresses = tuple(f"0000:{bus:02x}:00.0" for bus in range(1, 17))
    listed = tuple(scenes.pci_card(address) for address in addresses)
    seen = tuple(scenes.telemetry(address) for address in addresses)
    rows = shown(Cards(), scenes.ready(**scenes.cards(listed, seen)), 80, 17)[1:]
    assert [row.split()[0] for row in rows] == [str(index) for index in range(16)]
    assert len({row.index("°C") for row in rows}) == 1


def test_cards_of_more_than_100_gib_keep_their_figures() -> None:
    big = tuple(
        scenes.telemetry(one, memory_total_bytes=144 * scenes.GIB, memory_used_bytes=141 * scenes.GIB)
        for one in scenes.ADDRESSES
    )
    assert "141/144G" in shown(Cards(), scenes.ready(**scenes.cards(seen=big)), 80, 9)[1]


# -- unknown is not zero --------------------------------------------------------------------------


def test_a_card_that_says_nothing_shows_dashes_and_no_zero() -> None:
    silent = tuple(scenes.CardTelemetry(address=address) for address in scenes.ADDRESSES)
    snapshot = scenes.ready(**scenes.cards(seen=silent))
    for width in (20, 40, 80, 120, 160, 200):
        row = shown(Cards(), snapshot, width, 9)[1]
        values = row[row.index("CT 129") + 6 :]
        assert words.UNKNOWN in values
        assert not re.search(r"\b0(\.0)?[%GW°]|\b0/", values)


def test_an_engine_that_says_nothing_shows_dashes_and_no_zero() -> None:
    snapshot = scenes.ready(rates=Reading("rates", 1.0, EngineRates(), NOW), history=())
    for fact in facts(snapshot, 20)[:11]:
        assert fact.value == words.UNKNOWN, fact
    assert "ACCEPT LENGTH –" in shown(drawn_charts(UNICODE), snapshot, 80, 8)[0]
    assert "0" not in "".join(shown(drawn_charts(UNICODE), snapshot, 80, 8))


@given(
    st.sampled_from(
        [words.gib, words.size, words.count, words.rate, words.percent, words.latency, words.span]
    )
)
def test_unknown_is_a_dash_in_every_unit(say: Callable[[float | None], str]) -> None:
    assert say(None) == words.UNKNOWN
    assert say(0) != words.UNKNOWN


def test_speculation_that_is_off_is_not_available_rather_than_zero() -> None:
    snapshot = scenes.without_speculation()
    told = {fact.label: fact.value for fact in facts(snapshot, 20)}
    assert told["accept"] == told["accept %"] == "n/a"
    assert "PREFILL TOKENS/S 317" in shown(drawn_charts(UNICODE), snapshot, 100, 8)[0]


# -- service ------------------------------------------------------------------------------------


def test_a_load_shows_what_is_done_what_goes_on_and_what_comes() -> None:
    told, *rows = (row.strip() for row in shown(Service(), scenes.starting(), 100, 9)[1:])
    assert told == "· 4m10 so far, ready in ~5m30 (±30s, 6 loads)"
    assert rows[0].split() == ["●", "start", "21s"]
    assert rows[2].startswith("◐ weights    3m37 ━")
    assert rows[2].endswith("45 %  shard 29/64")
    assert rows[3:6] == ["○ KV cache", "○ graphs", "○ warm-up"]


def test_a_load_in_two_rows_still_shows_its_phase_and_percentage() -> None:
    _, past, now = shown(Service(), scenes.starting(), 80, 3)
    assert "init 12s" in past
    assert "weights" in now and "45 %" in now


def test_a_crash_says_its_cause_then_its_remedy_then_its_evidence() -> None:
    for width in (40, 80, 160):
        snapshot = scenes.crashed()
        rows = Service().rows(snapshot, width, Service().wanted(snapshot, width))[1:]
        roles = [row[0].role for row in rows]
        assert roles == sorted(roles, key=["bad", "accent", "dim"].index)
        assert set(roles) == {"bad", "accent", "dim"}
        said = " ".join(" ".join(text(rows)).split())
        assert "GPU 3 has 1.12 GiB free → Lower --mem-fraction-static" in said


def test_reasons_that_have_no_room_are_counted() -> None:
    rows = shown(Service(), scenes.degraded(), 80, 4)
    assert rows[1].startswith(" ▲ (+2 more) KV cache 97% full")
    assert "decode    352 tok/s" in rows[2]
    assert all(
        reason[:40] in "".join(shown(Service(), scenes.degraded(), 80, 9))
        for reason in (scenes.degraded().state.reasons)
    )


def test_old_rates_are_grey_and_say_their_age() -> None:
    snapshot = scenes.ready(rates=Reading("rates", 1.0, scenes.RATES, NOW - 42))
    rows = Service().rows(snapshot, 120, 5)
    assert "42s old" in text(rows)[0]
    assert {span.role for row in rows[1:] for span in row} <= {"dim", "text"}
    assert [fact.role for fact in facts(snapshot, 20)[:6]] == ["dim"] * 6


# -- charts -------------------------------------------------------------------------------------


def test_a_chart_has_its_scale_its_window_and_a_gap_where_nothing_was_read() -> None:
    rows = shown(drawn_charts(UNICODE), scenes.ready(), 120, 9)
    assert rows[0].startswith("TOKENS/S 352")
    assert rows[1].startswith(" 600┤")
    assert rows[-1].split() == ["-15m", "-7.5m", "now"] * 2
    right = [re.split("[┤│]", row[61:], maxsplit=1) for row in rows[1:-1]]
    assert [label.strip() for label, _ in right if label.strip()] == ["3", "2", "1"]
    columns = ["".join(curve[x] for _, curve in right).strip() for x in range(54)]
    assert "" in columns[4:12]  # the minute without a reading, 13 minutes ago
    assert all(columns[12:50])


def test_a_chart_without_a_reading_has_no_made_up_scale() -> None:
    assert [row.strip() for row in shown(drawn_charts(UNICODE), scenes.nothing_read(), 100, 8)[1:]] == [
        ""
    ] * 7


def test_the_past_is_drawn_as_soon_as_it_is_read() -> None:
    charts = drawn_charts(UNICODE)
    charts.rows(scenes.ready(history=scenes.history()[-1:]), 120, 9)
    late = shown(charts, scenes.ready(), 120, 9)
    assert late == shown(drawn_charts(UNICODE), scenes.ready(), 120, 9)


# -- log ----------------------------------------------------------------------------------------


def test_the_newest_lines_are_shown_and_probes_only_counted() -> None:
    rows = shown(Log(), scenes.ready(), 120, 6)
    assert "health probe" in rows[0]
    assert not any("/health" in row for row in rows[1:])
    assert rows[-1].startswith("11:59:59 INFO:")
    assert rows[-2].startswith("11:59:57 TP0 Prefill batch")


def test_routine_lines_wait_but_an_error_shows_at_once() -> None:
    log = Log()
    first = scenes.ready()
    before = shown(log, first, 120, 6)
    routine = (*first.log, line(0, "[2026-11-30 12:00:00 TP0] Decode batch, #running-req: 13", "decode"))
    later = msgspec.structs.replace(first, now=NOW + 1, log=routine, log_total=61)
    assert shown(log, later, 120, 6) == before
    trouble = (*routine, line(0, "boom", "error"))
    at_once = msgspec.structs.replace(first, now=NOW + 2, log=trouble, log_total=62)
    assert shown(log, at_once, 120, 6)[-1].rstrip() == "12:00:00 boom"
    waited = msgspec.structs.replace(later, now=NOW + 8, log=(*trouble, line(0, "plain")), log_total=63)
    assert shown(log, waited, 120, 6)[-1].rstrip() == "12:00:00 plain"


# -- text from outside ---------------------------------------------------------------------------

HOSTILE = st.text(
    st.one_of(
        st.sampled_from("\x1b\x07\x9b\n\t\r\x00[]ab漢字🔥é\u202e\u200d\u2066m;0K"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)
ESCAPES = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;owned\x07",
    "[red]x[/red]",
    "[link=http://x]y[/]",
    "漢字漢字",
    "\u202eabc",
    "🔥🔥",
)


def hostile(told: str) -> Snapshot:
    """Every text that comes from outside says this."""
    unit = msgspec.structs.replace(scenes.UNIT, id=told)
    lost = ("crashed", "degraded")[len(told) % 2]
    holder = msgspec.structs.replace(scenes.HOLDERS[2], name=told, unit=told)
    identity = msgspec.structs.replace(scenes.IDENTITY, version=told, tool_call_parser=told)
    service = msgspec.structs.replace(scenes.SITE.service, unit=told)
    return scenes.ready(
        host=told,
        site=msgspec.structs.replace(scenes.SITE, service=service),
        state=ServiceState(name=lost, reasons=(told, told)),  # type: ignore[arg-type]
        unit=Reading("unit", 2.0, unit, NOW),
        identity=identity,
        served_names=(told,),
        holders=(holder, holder),
        log=(line(3, told), line(2, told, "error"), line(1, f"[2026-11-30 11:59:59 TP0] {told}")),
        log_total=3,
        notices=(told,),
        sources=(scenes.SourceWord("pci", 1.0, True, told), scenes.SourceWord("journal", 1.0, True, told)),
    )


@settings(max_examples=100, deadline=None)
@given(HOSTILE, st.sampled_from(list(PANELS)), st.integers(20, 200))
def test_text_from_outside_neither_acts_nor_breaks_a_row(told: str, name: str, width: int) -> None:
    for row in shown(PANELS[name](UNICODE), hostile(told), width, 14):
        assert cell_len(row) == width
        assert {category(one) for one in row}.isdisjoint({"Cc", "Cf", "Zl", "Zp"})


@pytest.mark.parametrize("told", ESCAPES)
def test_markup_is_shown_as_it_was_written(told: str) -> None:
    rows = shown(Log(), hostile(told), 120, 6)
    assert "\x1b" not in "".join(rows)
    if told.startswith("["):
        assert told in rows[1]


def test_wide_names_keep_the_columns_of_the_processes() -> None:
    wide = msgspec.structs.replace(scenes.HOLDERS[0], unit="漢字漢字.service", name="漢字")
    rows = shown(Processes(), scenes.ready(holders=(scenes.HOLDERS[0], wide)), 120, 8)
    ends = [cell_len(row[: row.index("80.0")]) for row in rows if "80.0" in row]
    assert len(ends) == 2
    assert len(set(ends)) == 1


# -- the small pieces -----------------------------------------------------------------------------

any_text = st.text(st.sampled_from("ab漢🔥é…"), max_size=30)


@given(any_text, st.integers(-1, 20), st.sampled_from([UNICODE, ASCII]))
def test_a_cut_is_marked_and_fits(told: str, width: int, glyphs: Glyphs) -> None:
    cut = clip(told, width, glyphs)
    assert cell_len(cut) <= max(0, width)
    assert cut == told or not cut or cut.endswith(glyphs.ellipsis)


@given(st.lists(st.builds(Span, any_text), max_size=4), st.integers(0, 40))
def test_a_fitted_row_is_exactly_as_wide(row: Row, width: int) -> None:
    assert width_of(fit(row, width)) == width


@given(st.one_of(st.none(), st.floats(-1, 2)), st.integers(0, 40))
def test_a_bar_is_exactly_as_wide_and_shows_any_use(ratio: float | None, width: int) -> None:
    spans = bar(ratio, width, UNICODE)
    assert width_of(spans) == width
    if ratio is not None and ratio > 0 and width:
        assert spans[0].text
    if ratio is None:
        assert not "".join(text([spans])).strip()


@given(st.text(max_size=30))
def test_plain_text_is_ascii_in_as_many_cells(told: str) -> None:
    printed = "".join(one for one in told if one.isprintable())
    assert plain(printed).isascii()
    assert cell_len(plain(printed)) == sum(cell_len(one) for one in printed)


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [("utf-8", UNICODE), ("UTF8", UNICODE), ("ascii", ASCII), ("iso-8859-15", ASCII), (None, ASCII)],
)
def test_the_signs_fit_the_terminal(encoding: str | None, glyphs: Glyphs) -> None:
    assert choose(encoding) is glyphs
    assert all(sign.isascii() for sign in msgspec.structs.astuple(ASCII))
