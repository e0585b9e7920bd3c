"""The console under an operator's hands: keys, mouse, pages, sizes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unicodedata import category

import msgspec
import pytest
from rich.cells import cell_len
from rich.style import Style
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Input, Static

from console.model.actions import ACTIONS, Action, allowed, key_clashes, with_keys
from console.model.log import LogLine
from console.model.reading import Reading
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.model.state import ServiceState
from console.sources.files import ProfileSet
from console.ui import app as app_module
from console.ui import themes
from console.ui.app import Console, ReadOnlyConsole, run
from console.ui.footer import Footer
from console.ui.keys import unknown
from console.ui.panel import Panel
from console.ui.screens.help import Help
from console.ui.screens.log import LogPage, LogView
from console.ui.screens.page import Page
from tests.ui import scenes
from tests.ui.scenes import Frozen, line


class Hands:
    """A console, what it watches, and what stands on its screen."""

    def __init__(self, app: Console, watch: Frozen, pilot: Pilot[int]) -> None:
        self.app, self.watch, self.pilot = app, watch, pilot

    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in line) for line in strips)

    def styles(self) -> list[list[Style]]:
        strips = self.app.screen._compositor.render_strips()
        return [[segment.style for segment in line if segment.style is not None] for line in strips]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)  # waits until they are dealt with

    async def show(self, snapshot: Snapshot) -> None:
        self.watch.now = snapshot
        self.app.draw()
        await self.pilot.pause()

    async def resize(self, width: int, height: int) -> None:
        await self.pilot.resize_terminal(width, height)
        await self.pilot.pause()


@asynccontextmanager
async def console(
    snapshot: Snapshot | None = None,
    size: tuple[int, int] = (120, 40),
    site: Site = scenes.SITE,
    kind: type[Console] = Console,
) -> AsyncIterator[Hands]:
    watch = Frozen(snapshot or scenes.ready())
    app = kind(watch, site, encoding="utf-8", theme="dark")
    async with app.run_test(size=size) as pilot:
        hands = Hands(app, watch, pilot)
        await hands.show(watch.now)
        yield hands
    assert watch.closed


# -- at the start ---------------------------------------------------------------------------------


async def test_nothing_has_the_focus_at_the_start_and_tab_goes_round_the_panels() -> None:
    async with console() as hands:
        assert hands.app.screen.focused is None
        seen = []
        for _ in range(5):
            await hands.press("tab")
            focused = hands.app.screen.focused
            assert isinstance(focused, Panel)
            seen.append(focused.TITLE)
        assert seen == ["CARDS", "SERVICE", "TOKENS/S", "LOG", "CARDS"]


async def test_at_80x24_state_cards_tokens_and_acceptance_need_no_key() -> None:
    async with console(size=(80, 24)) as hands:
        text = hands.text()
        assert "READY" in text
        assert all(f"\n{index} {bus}:00" in text for index, bus in enumerate(scenes.BUSES))
        assert "352 tok/s" in text
        assert "2.52 tok/step" in text


async def test_at_20_columns_state_and_cards_are_there() -> None:
    async with console(size=(20, 24)) as hands:
        text = hands.text()
        assert "READY" in text
        assert all(f"\n{index} CT 129" in text for index in range(8))


# -- sizes ----------------------------------------------------------------------------------------


async def test_any_size_on_any_page_and_back_is_survived() -> None:
    async with console(scenes.mixed()) as hands:
        for key in ("", "l", "question_mark", "colon"):
            if key:
                await hands.press(key)
            for size in ((0, 0), (20, 3), (200, 60)):
                await hands.pilot.resize_terminal(*size)  # waits until it is dealt with
                hands.app.draw()
            assert hands.text()
            while len(hands.app.screen_stack) > 1:
                await hands.press("escape")
        assert "DEGRADED" in hands.text()
        assert "CARDS" in hands.text()


async def test_a_page_that_is_open_follows_the_window() -> None:
    async with console(size=(80, 24)) as hands:
        await hands.press("l")
        await hands.resize(132, 50)
        rows = hands.text().split("\n")
        assert len(rows) == 50
        assert {len(row) for row in rows} == {132}
        assert rows[-1].startswith("11:59:5") or rows[45].strip()


async def test_the_service_grows_for_a_crash_and_shrinks_after_it() -> None:
    async with console(size=(80, 24)) as hands:
        assert "TOKENS/S" in hands.text()
        await hands.show(scenes.crashed())
        assert "TOKENS/S" not in hands.text()
        assert "left on the cards." in hands.text()
        await hands.show(scenes.ready())
        assert "TOKENS/S" in hands.text()


# -- keys, mouse, palette -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "title"), [("l", "LOG following"), ("p", "PROCESSES ON THE CARDS"), ("d", "SOURCES")]
)
async def test_a_key_opens_its_page_and_escape_closes_it(key: str, title: str) -> None:
    async with console() as hands:
        await hands.press(key)
        assert isinstance(hands.app.screen, Page)
        assert title in hands.text()
        assert "READY" in hands.text()
        await hands.press("escape")
        assert "CARDS" in hands.text()


async def test_a_page_longer_than_the_window_scrolls() -> None:
    many = tuple(
        msgspec.structs.replace(scenes.HOLDERS[0], pid=9000 + number, name=f"worker{number}")
        for number in range(40)
    )
    async with console(scenes.ready(holders=many), size=(100, 20)) as hands:
        await hands.press("p")
        assert "worker0" in hands.text() and "worker39" not in hands.text()
        assert "25 more rows" in hands.text()
        await hands.press("end")
        assert "worker39" in hands.text() and "more rows" not in hands.text()
        await hands.press("home", "down")
        assert "24 more rows" in hands.text()


async def test_from_page_to_page_without_going_back() -> None:
    async with console() as hands:
        await hands.press("l", "p", "d", "l")
        assert isinstance(hands.app.screen, LogPage)
        assert len(hands.app.screen_stack) == 2


async def test_q_leaves_with_0() -> None:
    watch = Frozen(scenes.ready())
    app = Console(watch, scenes.SITE, encoding="utf-8")
    async with app.run_test() as pilot:
        await pilot.press("q")
    assert app.return_value == 0
    assert watch.closed


async def test_a_click_on_a_key_in_the_footer_does_what_the_key_does() -> None:
    async with console() as hands:
        row = hands.text().split("\n")[-1]
        for word, title in (("processes", "PROCESSES"), ("sources", "SOURCES"), ("log", "LOG following")):
            await hands.pilot.click(Footer, offset=(row.index(word) + 1, 0))
            await hands.pilot.pause()
            assert title in hands.text()
            await hands.press("escape")
        await hands.pilot.click(Footer, offset=(115, 0))
        await hands.pilot.pause()
        assert len(hands.app.screen_stack) == 1


async def test_a_click_on_the_log_opens_it() -> None:
    async with console() as hands:
        await hands.pilot.click("#log", offset=(10, 3))
        await hands.pilot.pause()
        assert isinstance(hands.app.screen, LogPage)


async def test_help_explains_the_panel_that_has_the_focus_and_names_every_key() -> None:
    async with console() as hands:
        await hands.press("question_mark")
        assert isinstance(hands.app.screen, Help)
        nothing = str(hands.app.screen.query(Static).last().render())
        assert all(action.help in nothing for action in ACTIONS if action.listed)
        assert "1-9" in nothing and "key 2" not in nothing
        assert "PCI" not in nothing
        await hands.press("escape", "tab", "question_mark")
        assert "vfio-pci" in str(hands.app.screen.query(Static).last().render())
        await hands.press("q")
        assert not isinstance(hands.app.screen, Help)
        assert hands.app.return_value is None


async def test_help_on_the_log_page_is_that_of_the_log_page() -> None:
    async with console() as hands:
        await hands.press("l", "question_mark")
        assert "/ filters" in str(hands.app.screen.query(Static).last().render())
        await hands.press("escape")
        assert isinstance(hands.app.screen, LogPage)


async def test_the_palette_lists_every_action_and_theme() -> None:
    async with console() as hands:
        offered = [command.title for command in hands.app.get_system_commands(hands.app.screen)]
        assert set(offered) >= {action.label.capitalize() for action in ACTIONS if action.id != "palette"}
        assert set(offered) >= {f"Theme: {theme.name}" for theme in themes.THEMES}
        for key in ("colon", "ctrl+p"):
            await hands.press(key)
            assert isinstance(hands.app.screen, CommandPalette)
            await hands.press("escape")
            assert not isinstance(hands.app.screen, CommandPalette)


async def test_the_palette_does_what_it_offers() -> None:
    async with console() as hands:
        await hands.press("colon", *"proc")
        await hands.pilot.pause(0.3)
        await hands.press("down", "enter")
        await hands.pilot.pause(0.1)
        assert "PROCESSES ON THE CARDS" in hands.text()


async def test_the_next_theme_goes_round() -> None:
    async with console() as hands:
        names = [theme.name for theme in themes.THEMES]
        seen = []
        for _ in names:
            await hands.press("T")
            seen.append(hands.app.theme)
        assert seen == [*names[1:], names[0]]


async def test_what_is_below_a_dialog_goes_on() -> None:
    async with console() as hands:
        await hands.press("p", "question_mark")
        await hands.show(scenes.mixed())
        await hands.press("escape")
        assert "train.py" in hands.text()


HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;owned\x07[red]x[/red] \u202eabc\u00ad 漢字🔥"


async def test_text_from_outside_is_shown_as_text_on_every_page() -> None:
    unit = msgspec.structs.replace(scenes.UNIT, id=HOSTILE)
    snapshot = scenes.ready(
        served_names=(HOSTILE,),
        holders=(msgspec.structs.replace(scenes.HOLDERS[2], name=HOSTILE, unit=HOSTILE),),
        state=ServiceState(name="degraded", reasons=(HOSTILE,)),
        unit=Reading("unit", 2.0, unit, scenes.NOW),
        log=(line(1, HOSTILE, "error"),),
        log_total=1,
        sources=(scenes.SourceWord("pci", 1.0, True, HOSTILE),),
        notices=(HOSTILE,),
    )
    async with console(snapshot) as hands:
        for key in ("", "l", "p", "d"):
            if key:
                await hands.press(key)
                await hands.show(snapshot)
            rows = hands.text().split("\n")
            assert {cell_len(row) for row in rows} == {120}
            kinds = {category(one) for row in rows for one in row}
            assert kinds.isdisjoint({"Cc", "Cf", "Zl", "Zp"})
            assert "red [red]x[/red] abc 漢字🔥" in hands.text()
            colours = {style.color for row in hands.styles() for style in row if style.color is not None}
            assert "red" not in {colour.name for colour in colours}


# -- keys of the site file ------------------------------------------------------------------------


async def test_a_remapped_key_works_and_the_footer_and_help_name_it() -> None:
    site = msgspec.structs.replace(scenes.SITE, keys={"processes": "w", "log": "f5,j"})
    async with console(site=site) as hands:
        assert "w processes" in hands.text()
        assert "f5 log" in hands.text()
        await hands.press("p")
        assert len(hands.app.screen_stack) == 1
        await hands.press("w")
        assert "PROCESSES ON THE CARDS" in hands.text()
        await hands.press("escape", "j")
        assert isinstance(hands.app.screen, LogPage)
        await hands.press("escape", "question_mark")
        told = str(hands.app.screen.query(Static).last().render())
        assert "  w   Who is on the cards" in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"log": "p"}, "keys: p would be both log and processes"),
        ({"log": "x,q"}, "keys: q would be both log and quit"),
        ({"lgo": "x"}, "keys: there is no action 'lgo'; there are switch-1,"),
        ({"log": "?"}, "keys: question_mark would be both log and help"),
        ({"log": "ctrl-r"}, "keys: log: there is no key ctrl-r; write it as ctrl+r,"),
    ],
)
def test_a_clash_or_an_unknown_action_ends_at_the_start(
    keys: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = msgspec.structs.replace(scenes.SITE, keys=keys)
    began = time.monotonic()
    assert run(site, ProfileSet((), ()), False, Path("/etc/gpuops/site.yaml"), ()) == 2
    assert time.monotonic() - began < 1
    assert f"gpuops: /etc/gpuops/site.yaml: {told}" in capsys.readouterr().err


def test_a_theme_that_there_is_not_ends_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    site = msgspec.structs.replace(scenes.SITE, theme="drak")
    assert run(site, ProfileSet((), ()), False, None, ()) == 2
    assert "there is no theme drak; there are dark, light," in capsys.readouterr().err


@pytest.mark.parametrize(
    "key",
    ["x", "X", "?", "ctrl+r", "f5", "space", "question_mark", "slash", "minus", "shift+tab", "pageup", "@"],
)
def test_these_are_keys(key: str) -> None:
    assert unknown({"log": key}) == []


@pytest.mark.parametrize("key", ["ctrl-r", "control+r", "F55", "ctl+r", "questionmark", "++"])
def test_these_are_none(key: str) -> None:
    assert len(unknown({"log": key})) == 1


async def test_a_character_may_be_written_as_itself() -> None:
    site = msgspec.structs.replace(scenes.SITE, keys={"processes": "%"})
    async with console(site=site) as hands:
        assert "% processes" in hands.text()
        await hands.press("%")
        assert "PROCESSES ON THE CARDS" in hands.text()


def test_two_keys_may_be_swapped() -> None:
    assert key_clashes(ACTIONS, {"log": "p", "processes": "l"}) == []
    assert key_clashes(ACTIONS, {}) == []


def test_the_actions_are_well_formed() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    assert all(action.help.endswith((".", "?")) and action.label for action in ACTIONS)
    shown = with_keys(ACTIONS, {"log": "f5,x"})
    assert next(action.shown for action in shown if action.id == "log") == "f5"


# -- read-only ------------------------------------------------------------------------------------


def test_a_dangerous_action_does_not_exist_in_read_only_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    danger = Action(
        id="stop", keys="x", shown="x", label="stop", help="Stop it.", group="change", dangerous=True
    )
    monkeypatch.setattr("console.model.actions.ACTIONS", (*ACTIONS, danger))
    assert danger in allowed(read_only=False)
    assert danger not in allowed(read_only=True)
    changing = [action for action in ACTIONS if action.group == "change"]
    assert changing and all(action.dangerous for action in changing)
    assert set(allowed(read_only=True)) == {action for action in ACTIONS if not action.dangerous}


async def test_read_only_is_told_and_looking_still_works() -> None:
    site = msgspec.structs.replace(scenes.SITE, read_only=True)
    snapshot = msgspec.structs.replace(scenes.ready(), site=site)
    async with console(snapshot, site=site, kind=ReadOnlyConsole) as hands:
        assert "read-only" in hands.text()
        bound = {
            binding.id for bindings in hands.app._bindings.key_to_bindings.values() for binding in bindings
        }
        assert {action.id for action in allowed(read_only=True)} <= bound
        await hands.press("l")
        assert isinstance(hands.app.screen, LogPage)


@pytest.mark.parametrize("by_flag", [True, False])
def test_read_only_comes_from_the_flag_or_the_file(monkeypatch: pytest.MonkeyPatch, by_flag: bool) -> None:
    opened: list[str] = []

    class Opened:
        def __init__(self, monitor: object, site: Site, **others: object) -> None:
            opened.append("read-only")

        async def run_async(self) -> int:
            return 0

        READ_ONLY = True

    monkeypatch.setattr(app_module, "ReadOnlyConsole", Opened)
    site = msgspec.structs.replace(scenes.SITE, read_only=not by_flag)
    assert run(site, ProfileSet((), ()), by_flag, None, ()) == 0
    assert opened == ["read-only"]


# -- the log page ---------------------------------------------------------------------------------


def numbered(first: int, last: int, total: int | None = None) -> Snapshot:
    """A journal of which the lines ``first`` to ``last`` are held, every fifth a health probe."""
    lines: list[LogLine] = []
    for number in range(first, last):
        probe = number % 5 == 0
        lines.append(
            line(1, f"GET /health {number}" if probe else f"line {number} end", "noise" if probe else "plain")
        )
    return scenes.ready(log=tuple(lines), log_total=last if total is None else total)


async def test_the_log_follows_until_the_operator_looks_back() -> None:
    async with console(numbered(0, 200), size=(80, 24)) as hands:
        await hands.press("l")
        assert "following" in hands.text()
        assert "line 199 end" in hands.text()
        await hands.show(numbered(0, 205))
        assert "line 204 end" in hands.text()
        await hands.press("up")
        assert "held" in hands.text()
        assert "line 204 end" not in hands.text()
        await hands.press("f")
        assert "following" in hands.text()
        assert "line 204 end" in hands.text()


async def test_a_held_place_stays_while_lines_come_and_old_ones_go() -> None:
    async with console(numbered(0, 400), size=(80, 24)) as hands:
        await hands.press("l", "pageup", "pageup")
        held = hands.text().split("\n")[2:]
        assert "line 399 end" not in hands.text()
        await hands.show(numbered(0, 430))
        assert hands.text().split("\n")[2:] == held
        await hands.show(numbered(200, 600))
        assert hands.text().split("\n")[2:] == held


async def test_a_held_place_that_was_dropped_shows_the_oldest_lines() -> None:
    async with console(numbered(0, 400), size=(80, 24)) as hands:
        await hands.press("l", "home")
        assert hands.text().split("\n")[2].endswith("line 1 end".ljust(71))
        await hands.show(numbered(1000, 1400))
        rows = hands.text().split("\n")[2:]
        assert "line 1001 end" in rows[0]
        assert all("line" in row for row in rows)
        assert "held" in hands.text()


async def test_the_log_moves_by_keys_and_wheel_and_ends_at_its_ends() -> None:
    async with console(numbered(0, 400), size=(80, 24)) as hands:
        await hands.press("l", "home")
        top = hands.text()
        await hands.press("up", "pageup")
        assert hands.text() == top
        await hands.press("down")
        assert "line 1 end" not in hands.text()
        await hands.press("end")
        assert "following" in hands.text()
        view = hands.app.screen.query_one(LogView)
        await hands.pilot._post_mouse_events([_scroll_up()], LogView)
        await hands.pilot.pause()
        assert not view.following
        await hands.press("down", "down", "down")
        assert view.following


def _scroll_up() -> type:
    from textual import events

    return events.MouseScrollUp


async def test_the_filter_shows_what_fits_and_escape_gives_all_back() -> None:
    async with console(numbered(0, 200), size=(80, 24)) as hands:
        await hands.press("l", "slash", *"LINE 17", "enter")
        rows = [row for row in hands.text().split("\n")[2:] if "line" in row]
        assert [row.split()[2] for row in rows] == ["17", *(str(n) for n in range(171, 180) if n % 5)]
        assert "“LINE 17”" in hands.text()
        assert isinstance(hands.app.screen.focused, LogView)
        await hands.press("slash", "escape")
        assert "line 199 end" in hands.text()
        assert not hands.app.screen.query_one(Input).has_class("shown")
        await hands.press("escape")
        assert not isinstance(hands.app.screen, LogPage)


async def test_keys_typed_into_the_filter_are_text() -> None:
    async with console(numbered(0, 50)) as hands:
        await hands.press("l", "slash", "q", "p", "f")
        assert hands.app.screen.query_one(Input).value == "qpf"
        assert isinstance(hands.app.screen, LogPage)


async def test_probes_are_shown_when_asked_for() -> None:
    async with console(numbered(0, 200), size=(80, 24)) as hands:
        await hands.press("l")
        assert "GET /health" not in hands.text()
        await hands.press("n")
        assert "GET /health 195" in hands.text()
        await hands.press("n")
        assert "GET /health" not in hands.text()


async def test_a_log_without_lines_moves_nowhere() -> None:
    async with console(numbered(0, 0)) as hands:
        await hands.press("l", "up", "home", "pageup", "end", "n")
        assert "following" in hands.text()
