"""The one registry of what an operator can do: keys, footer, help and palette are all drawn from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Group = Literal["look", "change", "console"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an operator can do.

    ``id`` is stable: it is what a site file's ``keys`` remaps and what the audit
    trail records. A ``dangerous`` action is not bound at all in read-only mode.
    """

    id: str
    keys: str  # as Textual names them, several with commas between
    shown: str  # the key as the footer and the help write it
    label: str  # one word for the footer
    help: str
    group: Group
    dangerous: bool = False
    needs_root: bool = False
    footer: bool = True
    listed: bool = True  # in the help; another action's line tells of those that are not


def _switches() -> tuple[Action, ...]:
    """A key for each profile that may have one. The footer and the help name all nine at once."""
    first = Action(
        id="switch-1",
        keys="1",
        shown="1-9",
        label="switch",
        help="Show the plan that switches to the profile of this key; y goes. It rolls back when it fails.",
        group="change",
        dangerous=True,
        needs_root=True,
    )
    others = (
        Action(
            id=f"switch-{key}",
            keys=str(key),
            shown=str(key),
            label=f"switch to {key}",
            help=f"The same for the profile of key {key}.",
            group="change",
            dangerous=True,
            needs_root=True,
            footer=False,
            listed=False,
        )
        for key in range(2, 10)
    )
    return (first, *others)


ACTIONS: tuple[Action, ...] = (
    *_switches(),
    Action(
        id="restart",
        keys="r",
        shown="r",
        label="restart",
        help="Show the plan that restarts the service, with what it costs; y goes.",
        group="change",
        dangerous=True,
        needs_root=True,
    ),
    Action(
        id="start-stop",
        keys="s",
        shown="s",
        label="start/stop",
        help="Show the plan that starts the service, or stops it when it runs; y goes.",
        group="change",
        dangerous=True,
        needs_root=True,
    ),
    Action(
        id="rebind",
        keys="b",
        shown="b",
        label="rebind",
        help="Where the cards are: move them between container and VM, repair what was left half way.",
        group="look",
    ),
    Action(
        id="jobs",
        keys="j",
        shown="j",
        label="jobs",
        help="What was changed on this host, by whom, how it ended; resume or roll back what was cut short.",
        group="look",
    ),
    Action(
        id="log",
        keys="l",
        shown="l",
        label="log",
        help="The journal full screen: filter with /, follow with f, back with escape.",
        group="look",
    ),
    Action(
        id="processes",
        keys="p",
        shown="p",
        label="processes",
        help="Who is on the cards: container, unit, the pid inside, and what belongs to nobody.",
        group="look",
    ),
    Action(
        id="sources",
        keys="d",
        shown="d",
        label="sources",
        help="Every source with the age of its last word, and why it has no newer one.",
        group="look",
    ),
    Action(
        id="smoke",
        keys="t",
        shown="t",
        label="smoke",
        help="Fire prompts that show whether the engine answers sense, with calls and reasoning parsed.",
        group="look",
    ),
    Action(
        id="audit",
        keys="a",
        shown="a",
        label="audit",
        help="Does production run the flags and variables that won the benchmark, and what does it add?",
        group="look",
    ),
    Action(
        id="budget",
        keys="k",
        shown="k",
        label="budget",
        help="Where the memory went, how many tokens fit, and what another profile would need.",
        group="look",
    ),
    Action(
        id="theme",
        keys="T",
        shown="T",
        label="theme",
        help="The next theme: dark, light, high contrast, and the terminal's own sixteen colours.",
        group="console",
        footer=False,
    ),
    Action(
        id="palette",
        keys="colon,ctrl+p",
        shown=":",
        label="palette",
        help="Find an action by typing part of its name.",
        group="console",
    ),
    Action(
        id="help",
        keys="question_mark,f1",
        shown="?",
        label="help",
        help="What the focused panel shows, and every key.",
        group="console",
    ),
    Action(
        id="quit",
        keys="q,ctrl+q",
        shown="q",
        label="quit",
        help="Leave the console. Nothing on the host changes.",
        group="console",
    ),
)


def allowed(read_only: bool) -> tuple[Action, ...]:
    """The actions that may be bound at all."""
    return tuple(action for action in ACTIONS if not (read_only and action.dangerous))


def with_keys(actions: tuple[Action, ...], remapped: Mapping[str, str]) -> tuple[Action, ...]:
    """The actions as the site file's ``keys`` have them: footer and help name the keys that work."""
    return tuple(
        msgspec.structs.replace(action, keys=keys, shown=keys.split(",")[0])
        if (keys := remapped.get(action.id))
        else action
        for action in actions
    )


def key_clashes(actions: tuple[Action, ...], remapped: Mapping[str, str]) -> list[str]:
    """Keys that two actions would share once the site file's ``keys`` are applied, and unknown ids."""
    found = [
        f"keys: there is no action {name!r}; there are {', '.join(action.id for action in ACTIONS)}"
        for name in remapped
        if name not in {action.id for action in ACTIONS}
    ]
    bound: dict[str, str] = {}
    for action in actions:
        for key in remapped.get(action.id, action.keys).split(","):
            other = bound.setdefault(key, action.id)
            if other != action.id:
                found.append(f"keys: {key} would be both {other} and {action.id}")
    return found
