"""The names of keys in a site file: as Textual knows them, or the character itself."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

from textual.keys import KEY_TO_UNICODE_NAME, REPLACED_KEYS, Keys, _character_to_key

_MODIFIERS = frozenset({"ctrl", "alt", "shift", "super", "meta", "hyper"})
_NAMED = frozenset(key.value.rpartition("+")[2] for key in Keys)


def normal(remapped: Mapping[str, str]) -> dict[str, str]:
    """With the name for a character: ``?`` as ``question_mark``, which is how Textual reports it."""
    return {
        action: ",".join(_character_to_key(key) if len(key) == 1 else key for key in keys.split(","))
        for action, keys in remapped.items()
    }


def unknown(remapped: Mapping[str, str]) -> list[str]:
    """What is wrong with keys that no keyboard has, in words."""
    return [
        f"keys: {action}: there is no key {key}; write it as ctrl+r, f5, space, question_mark or ?"
        for action, keys in remapped.items()
        for key in keys.split(",")
        if not _exists(key)
    ]


def _exists(key: str) -> bool:
    if len(key) == 1:
        return True
    *modifiers, name = key.split("+")
    if not _MODIFIERS.issuperset(modifiers):
        return False
    return len(name) == 1 or name in _NAMED or _is_character(name)


def _is_character(name: str) -> bool:
    """``question_mark``: a character by its Unicode name."""
    replaced = REPLACED_KEYS.get(name, name)
    words = KEY_TO_UNICODE_NAME.get(name, replaced.replace("_", " "))
    for spelled in (words, words.replace(" ", "-")):
        try:
            unicodedata.lookup(spelled)
        except KeyError:
            continue
        return True
    return False
