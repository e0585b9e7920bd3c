"""The console: composes the panels, hands them a snapshot once a second, and routes actions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.filter import LineFilter
from textual.geometry import Size
from textual.screen import Screen

from console.model.actions import Action, allowed, key_clashes, with_keys
from console.model.profile import Profile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.sources.files import ProfileSet
from console.sources.monitor import Monitor
from console.store.load_memory import LoadMemory
from console.store.state import state_of
from console.transport import loop
from console.ui import glyphs as glyph_sets
from console.ui import terminal, themes
from console.ui.ascii import AsciiOnly
from console.ui.cards import Cards
from console.ui.changes import Changes
from console.ui.charts import Charts
from console.ui.desk import Desk
from console.ui.footer import Footer
from console.ui.header import Header
from console.ui.keys import normal, unknown
from console.ui.layout import USUAL, WIDE, heights
from console.ui.log import Log
from console.ui.panel import Panel
from console.ui.screens.page import Page
from console.ui.service import Service
from console.ui.spans import SpanScreen

#: Exit status for a file that cannot be used.
BAD_FILE = 2

#: Seconds between two frames. NVML averages over up to a second: faster costs more and tells no more.
TICK = 1.0

#: Extra frames at the start, in seconds, so that the first readings show as they come.
FIRST_TICKS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)


class Watch(Protocol):
    """What the screen needs of the monitor."""

    async def run(self) -> None: ...
    async def close(self) -> None: ...
    def snapshot(self) -> Snapshot: ...


class Dashboard(SpanScreen):
    """The one screen: header, cards, service, charts, log, footer."""

    AUTO_FOCUS = ""  # None would take the app's, which is the first panel

    def __init__(self, actions: tuple[Action, ...], glyphs: glyph_sets.Glyphs) -> None:
        super().__init__()
        self.header = Header(glyphs, id="header")
        self.cards = Cards(glyphs, id="cards")
        self.service = Service(glyphs, id="service")
        self.charts = Charts(glyphs, id="charts")
        self.log_panel = Log(glyphs, id="log")
        self.footer = Footer(actions, glyphs, id="footer")
        self._middle = Container(self.service, self.charts, id="middle")
        self._shared: object = None

    def compose(self) -> ComposeResult:
        yield self.header
        yield self.cards
        yield self._middle
        yield self.log_panel
        yield self.footer

    @property
    def panels(self) -> tuple[Panel, ...]:
        return (self.header, self.cards, self.service, self.charts, self.log_panel, self.footer)

    def share(self, snapshot: Snapshot) -> None:
        """Give each panel its rows; nothing happens while neither the terminal nor the need changes."""
        width, height = self.app.size
        beside = width // 2 if width >= WIDE else width
        news = self.service.wanted(snapshot, beside)
        past = news <= USUAL or any(point.decode_tokens_per_s is not None for point in snapshot.history)
        wanted = heights(width, height - 2, len(snapshot.cards), news, past)
        if wanted == self._shared:
            return
        self._shared = wanted
        for panel, rows in (
            (self.cards, wanted.cards),
            (self.service, wanted.service),
            (self.charts, wanted.charts),
            (self.log_panel, wanted.log),
        ):
            panel.display = rows > 0
            panel.styles.height = rows
        self._middle.set_class(wanted.side_by_side, "side-by-side")

    def draw(self, snapshot: Snapshot) -> None:
        self.share(snapshot)
        for panel in self.panels:
            if panel.display:
                panel.draw(snapshot)


def _bindings(actions: tuple[Action, ...]) -> list[BindingType]:
    """The registry as Textual's bindings; the ids let ``set_keymap`` move them."""
    return [Binding(action.keys, f"app.do('{action.id}')", action.label, id=action.id) for action in actions]


class Console(App[int]):
    """Owns the clock of the screen and nothing else; nothing here waits for anything."""

    TITLE = "gpuops"
    READ_ONLY: ClassVar[bool] = False
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "f12"  # the registry binds the palette
    BINDINGS: ClassVar[list[BindingType]] = _bindings(allowed(read_only=False))

    def __init__(
        self,
        watch: Watch,
        site: Site,
        *,
        desk: Desk | None = None,
        memory: LoadMemory | None = None,
        profiles: tuple[Profile, ...] = (),
        encoding: str | None = None,
        theme: str | None = None,
    ) -> None:
        # Without colour Textual must not turn the terminal's own colours into shades of grey.
        plain = True if os.environ.get("NO_COLOR") else None
        super().__init__(css_path=styles_directory() / "console.tcss", ansi_color=plain)
        self.animation_level = "none"
        self._watch_site = watch
        self._site = site
        self._profiles = profiles
        self._actions = with_keys(allowed(self.READ_ONLY), site.keys)
        self._glyphs = glyph_sets.choose(encoding if encoding is not None else terminal.encoding())
        self._line_filters = [AsciiOnly()] if self._glyphs is glyph_sets.ASCII else []
        for known in themes.THEMES:
            self.register_theme(known)
        self.theme = theme or themes.choose(site.theme, os.environ)
        self._dashboard = Dashboard(self._actions, self._glyphs)
        self._job: str | None = None
        self._changes = Changes(self, desk, self._glyphs, memory)

    def get_default_screen(self) -> Dashboard:
        return self._dashboard

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), *self._line_filters]

    def on_mount(self) -> None:
        self.set_keymap(normal(self._site.keys))
        terminal.leave_on_hangup(self._leave_now)
        self._terminal = terminal.watched_descriptor()
        self.draw()
        self.run_worker(self._watch_site.run(), name="monitor", exit_on_error=True)
        for delay in FIRST_TICKS:
            self.set_timer(delay, self.draw)
        self.set_interval(TICK, self.draw)
        self._changes.watch()
        self.call_after_refresh(self._second_frame)

    def _second_frame(self) -> None:
        """What is too heavy to import before something is on the screen."""
        self._dashboard.charts.ready = True
        self._dashboard.charts.redraw()

    def draw(self) -> None:
        """One frame: one snapshot, one batch."""
        if self._terminal is not None and terminal.gone(self._terminal):
            self._leave_now()
            return
        snapshot = self._watch_site.snapshot()
        self._mend_size()
        self._changes.look(snapshot)
        with self.batch_update():
            # The palette and the help let what is below them show through.
            seen = (screen for screen in reversed(self.screen_stack) if isinstance(screen, Dashboard | Page))
            shown = next(seen, self._dashboard)
            for header in shown.query(Header):
                header.job = self._job
            shown.draw(snapshot)

    def snapshot(self) -> Snapshot:
        """What is known now."""
        return self._watch_site.snapshot()

    @property
    def site(self) -> Site:
        return self._site

    def show_job(self, told: str | None, moving: frozenset[str] = frozenset()) -> None:
        """Name the job that runs, or was interrupted, in every header; None: there is none.

        ``moving`` are the slots of the cards that it moves at this moment.
        """
        self._job = told
        self._dashboard.cards.moving = moving
        self.draw()

    def tell_terminal(self, sequence: str) -> None:
        """Send the terminal something that is not drawn."""
        if self._driver is not None:
            self._driver.write(sequence)

    def _mend_size(self) -> None:
        """Notice a change of the terminal's size that was not told.

        Of several changes in quick succession the last can get lost on its way to the
        screen, which would then stay in a corner of the terminal until the next.
        """
        real = None if self._terminal is None else terminal.size(self._terminal)
        for screen in self.screen_stack[-1:]:  # none while the app ends
            if real is not None and screen.size != real:
                size = Size(*real)
                self.post_message(events.Resize(size, size))

    def on_resize(self) -> None:
        self._dashboard.share(self._watch_site.snapshot())

    async def on_unmount(self) -> None:
        await self._watch_site.close()

    def _leave_now(self) -> None:
        terminal.end_for_certain()
        self.exit(terminal.HUNG_UP)

    # -- actions -------------------------------------------------------------

    async def action_do(self, name: str) -> None:
        """Every key, footer click and palette entry comes through here."""
        handlers: dict[str, Callable[[], object]] = {
            **self._changes.handlers,
            "log": self._open_log,
            "processes": self._open_processes,
            "sources": self._open_sources,
            "smoke": self._open_smoke,
            "audit": self._open_audit,
            "budget": self._open_budget,
            "theme": self._next_theme,
            "palette": self.action_command_palette,
            "help": self._open_help,
            "quit": lambda: self.exit(0),
        }
        handlers[name]()

    def get_system_commands(self, screen: Screen[object]) -> Iterator[SystemCommand]:
        for action in self._actions:
            if action.id != "palette":
                yield SystemCommand(action.label.capitalize(), action.help, _Do(self, action.id))
        for theme in themes.THEMES:
            yield SystemCommand(f"Theme: {theme.name}", "Change the colours now", _Wear(self, theme.name))

    def open_page(self, page: Page) -> None:
        """Put a page over the dashboard, in place of the one that is there."""
        if isinstance(self.screen, Page):
            self.pop_screen()
        self.push_screen(page)
        self.call_after_refresh(self.draw)

    def _open_log(self) -> None:
        from console.ui.screens.log import LogPage, LogView

        self.open_page(LogPage(LogView(self._glyphs, id="log-view"), Header(self._glyphs)))

    def _open_processes(self) -> None:
        from console.ui.screens.processes import Processes

        self.open_page(Page(Processes(self._glyphs), Header(self._glyphs)))

    def _open_sources(self) -> None:
        from console.ui.screens.sources import SourcesPanel

        self.open_page(Page(SourcesPanel(self._glyphs), Header(self._glyphs)))

    def _open_smoke(self) -> None:
        from console.ui.screens.smoke import SmokePage

        self.open_page(SmokePage(self._site, self._glyphs, Header(self._glyphs)))

    def _open_audit(self) -> None:
        from console.checks.audit import audit
        from console.ui.screens.audit import AuditPanel

        read = partial(audit, self._site, self._profiles)
        self.open_page(Page(AuditPanel(read, self._glyphs), Header(self._glyphs)))

    def _open_budget(self) -> None:
        from console.checks.budget import read_budget
        from console.ui.screens.budget import BudgetPanel

        panel = BudgetPanel(partial(read_budget, self._site), self._profiles, self._glyphs)
        self.open_page(Page(panel, Header(self._glyphs)))

    def _open_help(self) -> None:
        from console.ui.screens.help import Help

        focused = self.screen.focused
        title, words = "", ""
        if isinstance(focused, Panel):
            title, words = focused.TITLE, focused.HELP
        self.push_screen(Help(title, words, self._actions))

    def _next_theme(self) -> None:
        names = [theme.name for theme in themes.THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0]


class ReadOnlyConsole(Console, inherit_bindings=False):
    """The console in which a dangerous action has no key, no palette entry and no name in the footer."""

    READ_ONLY = True
    BINDINGS: ClassVar[list[BindingType]] = _bindings(allowed(read_only=True))


def run(
    site: Site, profiles: ProfileSet, read_only: bool, site_path: Path | None, notices: tuple[str, ...]
) -> int:
    """Open the console on a site; returns the exit status.

    ``site_path`` is named in the error when its ``keys`` clash or name nothing that exists.
    """
    kind = ReadOnlyConsole if read_only or site.read_only else Console
    problems = [
        *unknown(site.keys),
        *key_clashes(allowed(kind.READ_ONLY), normal(site.keys)),
        *themes.problems(site.theme),
    ]
    if problems:
        for problem in problems:
            print(f"gpuops: {site_path or 'site'}: {problem}", file=sys.stderr)
        return BAD_FILE
    state = state_of(site, os.environ, os.geteuid())
    memory = LoadMemory(state, keep=kind is Console)
    monitor = Monitor(site, profiles=profiles.profiles, notices=notices, expected=memory.expected)
    # Not App.run: its loop would wait at the end for a thread that a card keeps in the kernel.
    desk = Desk(site, profiles.profiles, monitor)
    status = loop.run(kind(monitor, site, desk=desk, memory=memory, profiles=profiles.profiles).run_async())
    return status if status is not None else 0


class _Do:
    """Runs an action from the palette."""

    def __init__(self, app: Console, name: str) -> None:
        self._app, self._name = app, name

    async def __call__(self) -> None:
        await self._app.action_do(self._name)


class _Wear:
    """Puts a theme on from the palette."""

    def __init__(self, app: Console, theme: str) -> None:
        self._app, self._theme = app, theme

    def __call__(self) -> None:
        self._app.theme = self._theme


def styles_directory() -> Path:
    """The stylesheets: beside the package in the source tree, inside it when installed."""
    package = Path(__file__).parent.parent
    installed = package / "_data" / "styles"
    return installed if installed.is_dir() else package.parent / "styles"
