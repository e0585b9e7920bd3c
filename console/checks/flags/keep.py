"""Makes a shipped table: ``PYTHON -I - flags < ask.py | python -m console.checks.flags.keep``."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import msgspec

from console.checks.flags.ask import MARKER
from console.checks.flags.table import TABLES, FlagTable


def keep(answer: str, folder: Path = TABLES) -> Path:
    """Write the table in what ``ask.py flags`` printed to where shipped tables are; its path."""
    line = next(line for line in answer.splitlines() if line.startswith(MARKER))
    table = msgspec.json.decode(line.removeprefix(MARKER), type=FlagTable)
    path = folder / f"{table.version}.json.gz"
    path.write_bytes(gzip.compress(msgspec.json.encode(table), mtime=0))
    return path


if __name__ == "__main__":
    print(keep(sys.stdin.read()))
