"""Runs in the service's own Python and says what its SGLang accepts: its flags and its variables.

It is sent there on standard input (``PYTHON -I - version`` or ``PYTHON -I - flags``) and needs nothing of
ours, so it is written for Python 3.10 and its standard library. What it says stands on one line after
MARKER: importing SGLang may print as it likes. ``version`` reads the package's metadata alone (tens of
milliseconds); ``flags`` imports SGLang, and with it torch (4 to 8 s).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

MARKER = "gpuops-flags:"

#: How SGLang's own converters are called here; others keep their name and are not judged.
_TYPES = {
    "None": "text",
    "str": "text",
    "nullable_str": "text",
    "int": "int",
    "float": "float",
    "human_readable_int": "count",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "object",
}

_VARIABLE = re.compile(rb"\b(?:SGLANG|SGL)_[A-Z][A-Z0-9_]*[A-Z0-9]\b")

#: A default longer than this is cut: it is there to be read by people.
_DEFAULT_LENGTH = 200


def version() -> dict[str, Any]:
    """The installed version, and a stamp that changes when its arguments' source does."""
    found = {"version": importlib.metadata.version("sglang"), "python": sys.executable, "stamp": ""}
    package = importlib.util.find_spec("sglang")  # a top-level name: nothing is imported for it
    for folder in (package and package.submodule_search_locations) or ():
        status = Path(folder, "srt", "server_args.py").stat()
        found["stamp"] = f"{status.st_mtime_ns}-{status.st_size}"
    return found


def flags() -> dict[str, Any]:
    """``version`` and the table. The parser is built but nothing is parsed: that would resolve devices."""
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return {
        **version(),
        "flags": [_flag(action) for action in parser._actions],
        "variables": _variables(),
        "algorithms": _algorithms(),
    }


def _flag(action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {
        "names": list(action.option_strings),
        "dest": action.dest,
        "arity": "1" if action.nargs is None else str(action.nargs),
        "type": "none" if action.nargs == 0 else _type(action.type),
        "default": repr(action.default)[:_DEFAULT_LENGTH],
    }
    if action.choices is not None:
        unordered = isinstance(action.choices, (set, frozenset))
        found["choices"] = [str(choice) for choice in (sorted if unordered else list)(action.choices)]
    says_so = (action.help or "").lower().lstrip("[(").startswith("deprecated")
    if says_so or type(action).__name__.startswith("Deprecated"):
        found["deprecated"] = True
    # SGLang's own actions for flags on their way out (srt/arg_groups/argparse_actions.py).
    for key, attribute in (("instead", "new_flag"), ("refused", "error_message")):
        if getattr(action, attribute, None):
            found[key] = str(getattr(action, attribute))
    return found


def _type(converter: Any) -> str:
    name = getattr(converter, "__name__", "None" if converter is None else type(converter).__name__)
    return _TYPES.get(name, name)


def _algorithms() -> list[str]:
    """The names of --speculative-algorithm: argparse does not know them where it has no choices for it."""
    known = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    names = set(getattr(known, "__members__", ())) - {"NONE"}
    return sorted(names | {"NEXTN"}) if names else []


def _variables() -> list[str]:
    """Every SGLANG_… name that stands in the package's source: there is no complete list elsewhere."""
    found: set[bytes] = set()
    for top in importlib.import_module("sglang").__path__:
        for source in Path(top).rglob("*.py"):
            found.update(_VARIABLE.findall(source.read_bytes()))
    return sorted(name.decode("ascii") for name in found)


if __name__ == "__main__":
    question = {"version": version, "flags": flags}[sys.argv[1]]
    # What a library prints later must not run into this line.
    sys.stdout.write("\n" + MARKER + json.dumps(question()) + "\n")
    sys.stdout.flush()
