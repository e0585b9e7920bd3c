"""Strict YAML: one plain document, read into a tree that knows its places.

Scalars keep the text as written, so YAML 1.1 never turns ``on`` into true,
``1e3`` into a float or ``12:30:45`` into 45045. Anchors, aliases, tags and merge
keys are refused altogether, which also ends bombs and cycles. The tree is built
from parser events without recursion, so depth cannot exhaust the stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from console.sources.files.content import TAB, checked_text
from console.sources.files.nodes import Entry, Mapping, Node, Refused, Scalar, Sequence, describe
from console.sources.files.problems import Problems, shown

if TYPE_CHECKING:
    import yaml

#: The deepest nesting read. A real file has four levels.
DEPTH_LIMIT = 8

#: pyyaml's commonest complaints, and what an operator should make of them. Those of something left
#: open are shown where it was opened, not at the end of the file.
_PLAINER = {
    "mapping values are not allowed here": 'a ":" that does not fit here; put text that holds ": " in quotes,'
    " or look at the indentation",
    "expected <block end>, but found": "this line does not belong here; look at its indentation",
    "expected the node content": "expected a value here; look for a bracket that stands alone",
    "found character '\\t'": TAB,
    "found unknown escape character": "an unknown escape after a backslash; use single quotes for text with"
    " backslashes",
}
_LEFT_OPEN = {
    "could not find expected ':'": 'expected "key: value"; look for a missing ":" or quote',
    "expected ',' or ']'": 'a list that is not closed; expected "," or "]"',
    "expected ',' or '}'": 'a mapping that is not closed; expected "," or "}"',
    "found unexpected end of stream": "a quote that is not closed",
    "found unexpected document separator": "a quote that is not closed",
}


def read_document(content: str | bytes, problems: Problems) -> Mapping:
    """The root mapping of a file's one document.

    Problems that leave the tree whole (duplicate keys, anchors) are gathered
    in ``problems``; raises FileError, with those gathered, when there is no
    tree to go on with.
    """
    root = _Builder(problems).build(checked_text(content, problems))
    if isinstance(root, Mapping):
        return root
    if root is None or (isinstance(root, Scalar) and root.null):
        problems.add(1, 1, "expected keys and values, found an empty file")
    elif not isinstance(root, Refused):
        problems.add(root.line, root.column, f"expected keys and values, found {describe(root)}")
    raise problems.error()


class _Open:
    """A collection whose end has not come yet, and the key that waits for its value."""

    def __init__(self, node: Mapping | Sequence) -> None:
        self.node = node
        self.key: Scalar | Refused | None = None


class _Builder:
    """Folds parser events into a tree."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._open: list[_Open] = []
        self._root: Node | None = None

    def build(self, text: str) -> Node | None:
        """The root, or None for an empty document. Raises FileError where the text is no YAML."""
        import yaml

        line, column, documents = 1, 1, 0
        try:
            for event in yaml.parse(text, yaml.SafeLoader):
                if mark := event.start_mark:
                    line, column = mark.line + 1, mark.column + 1
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        self._stop(line, column, "a second document; a file holds one, so remove this ---")
                self._take(event, line, column)
        except yaml.MarkedYAMLError as problem:
            message, wrong = _plainly(problem)
            if wrong:
                line, column = wrong.line + 1, wrong.column + 1
            self._stop(line, column, message)
        except (yaml.YAMLError, ValueError, OverflowError):
            # pyyaml lets chr() and int() complain of "\UFFFFFFFF" and of a version of 5000 digits:
            # the place is then that of the event before.
            self._stop(line, column, "not YAML: a number or an escape out of range, hereabouts")
        return self._root

    def _stop(self, line: int, column: int, message: str) -> NoReturn:
        self._problems.add(line, column, message)
        raise self._problems.error()

    def _take(self, event: yaml.Event, line: int, column: int) -> None:
        import yaml

        if isinstance(event, yaml.CollectionEndEvent):
            self._place(self._open.pop().node)
            return
        if not isinstance(event, yaml.NodeEvent):
            return
        refused = self._refuse_extras(event, line, column)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(self._open) >= DEPTH_LIMIT:
                self._stop(line, column, f"nested deeper than {DEPTH_LIMIT} levels")
            mapping = isinstance(event, yaml.MappingStartEvent)
            self._open.append(_Open(Mapping(line, column, {}) if mapping else Sequence(line, column, [])))
        elif isinstance(event, yaml.ScalarEvent) and not refused:
            self._place(Scalar(event.value, event.style is None, line, column))
        else:
            self._place(Refused(line, column))

    def _refuse_extras(self, event: yaml.NodeEvent, line: int, column: int) -> bool:
        """Whether the node uses what these files do not: an alias, an anchor or a tag."""
        import yaml

        if isinstance(event, yaml.AliasEvent):
            message = f"an alias, *{shown(str(event.anchor))}; write the value out again"
        elif event.anchor is not None:
            message = f"an anchor, &{shown(event.anchor)}; remove it and write the value out where it is used"
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            message = f"a tag, {shown(event.tag.replace('tag:yaml.org,2002:', '!!'))}; remove it"
        else:
            return False
        self._problems.add(line, column, message)
        return True

    def _place(self, node: Node) -> None:
        """Put a finished node where it belongs: the root, the next item, a key or the value of one."""
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        if isinstance(parent.node, Sequence):
            parent.node.items.append(node)
        elif parent.key is None:
            parent.key = self._key(node)
        else:
            key, parent.key = parent.key, None
            self._enter(parent.node, key, node)

    def _key(self, node: Node) -> Scalar | Refused:
        if isinstance(node, Refused):
            return node
        if isinstance(node, Scalar) and node.plain and node.text == "<<":
            message = "a merge key, <<; write the values out again"
        elif not isinstance(node, Scalar) or node.null:
            message = f"expected a key, found {describe(node)}"
        else:
            return node
        self._problems.add(node.line, node.column, message)
        return Refused(node.line, node.column)

    def _enter(self, mapping: Mapping, key: Scalar | Refused, value: Node) -> None:
        if isinstance(key, Refused):
            return
        earlier = mapping.entries.get(key.text)
        if earlier is None:
            mapping.entries[key.text] = Entry(key, value)
            return
        message = f"duplicate key {shown(key.text)}; it stands in line {earlier.key.line} already, keep one"
        self._problems.add(key.line, key.column, message)


def _plainly(problem: yaml.MarkedYAMLError) -> tuple[str, yaml.Mark | None]:
    """A syntax error in an operator's words, and its place."""
    said, mark = problem.problem or "", problem.problem_mark or problem.context_mark
    for complaint, plainer in _LEFT_OPEN.items():
        if said.startswith(complaint):
            return plainer, problem.context_mark or mark
    for complaint, plainer in _PLAINER.items():
        if said.startswith(complaint):
            return plainer, mark
    if said.startswith("found character") and said.endswith("that cannot start any token"):
        return f"a value cannot begin with {said.split()[2]}; put it in quotes", mark
    return f"not YAML: {shown(said, 120)}", mark
