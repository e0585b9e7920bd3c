"""``?``: what the focused panel shows, and every key."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from console.model.actions import Action

_GROUPS = {"look": "Look", "change": "Change", "console": "Console"}


class Help(ModalScreen[None]):
    """Closed by any of escape, ``?`` and ``q``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,f1", "dismiss", "close", id="help.close")
    ]

    def __init__(self, title: str, words: str, actions: tuple[Action, ...]) -> None:
        super().__init__()
        self._title = title
        self._words = words
        self._actions = actions

    def compose(self) -> ComposeResult:
        text = Text()
        if self._words:
            text.append(f"{self._title}\n", "bold")
            text.append(f"{self._words}\n\n")
        for group, name in _GROUPS.items():
            members = [action for action in self._actions if action.group == group and action.listed]
            if members:
                text.append(f"{name}\n", "bold")
            for action in members:
                text.append(f"  {action.shown:<4}", "bold")
                text.append(f"{action.help}\n")
        with VerticalScroll(id="help-box"):
            yield Static(
                "tab moves the focus; ? explains the panel that has it; escape closes.", id="help-keys"
            )
            yield Static(text)
