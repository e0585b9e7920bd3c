"""The last row: keys, as many as fit."""

from __future__ import annotations

from textual import events

from console.model.actions import Action
from console.model.snapshot import Snapshot
from console.ui.glyphs import Glyphs
from console.ui.panel import Panel
from console.ui.rows import Row, Span


class Footer(Panel, can_focus=False):
    """Drawn from the registry; a click on a key does what the key does."""

    def __init__(self, actions: tuple[Action, ...], glyphs: Glyphs, *, id: str | None = None) -> None:
        super().__init__(glyphs, id=id)
        self._actions = tuple(action for action in actions if action.footer)

    def _laid_out(self, width: int) -> list[tuple[int, Action]]:
        """Each action with the column it starts in. Narrow rows keep help and quit."""
        order = {"help": 0, "quit": 1}
        by_worth = sorted(self._actions, key=lambda action: order.get(action.id, 2))
        kept, room = set(), width - 1
        for action in by_worth:
            cells = _cells(action)
            if cells <= room:
                kept.add(action.id)
                room -= cells
        found, column = [], 1
        for action in self._actions:
            if action.id in kept:
                found.append((column, action))
                column += _cells(action)
        return found

    def rows(self, snapshot: Snapshot, width: int, height: int) -> list[Row]:
        row: Row = [Span(" ")]
        for _, action in self._laid_out(width):
            row += [Span(action.shown, "key"), Span(f" {action.label}  ", "dim")]
        return [row]

    async def on_click(self, event: events.Click) -> None:
        for column, action in self._laid_out(self.size.width):
            if column <= event.x < column + _cells(action) - 2:
                await self.app.run_action(f"app.do('{action.id}')")


def _cells(action: Action) -> int:
    return len(action.shown) + len(action.label) + 3
