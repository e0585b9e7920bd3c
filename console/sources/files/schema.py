"""The first key of every file: which edition of its format it is written in."""

from __future__ import annotations

from console.sources.files.nodes import Scalar, describe
from console.sources.files.table import Table


def check_schema(root: Table, current: int) -> None:
    """The file must say ``schema`` and the edition we read.

    Raises FileError at once for another edition: its other keys are not ours to judge.
    """
    entry = root.mapping.entries.get("schema")
    if entry is None:
        root.add(None, f"schema is missing; add a first line schema: {current}")
        return
    node = entry.value
    if isinstance(node, Scalar) and node.plain and node.text.isascii() and node.text.isdigit():
        written = node.text.lstrip("0")
        if written == str(current) == node.text:
            return
        if len(written) > 1 or written > str(current):
            message = f"written for a newer gpuops: found {describe(node)}, and this one reads {current}"
            root.tell("schema", node, message)
            raise root.problems.error()
    root.expected("schema", node, str(current))
    raise root.problems.error()
