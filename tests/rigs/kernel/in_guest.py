"""Runs in the guest: every case, one after the other, each on cards that are where they belong.

``python -m tests.rigs.kernel.in_guest RESULTS PART-OF-NAMES``
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import msgspec

from tests.rigs.kernel import cards_lab, cases
from tests.rigs.kernel.rig import Case


def main(results: Path, wanted: str) -> None:
    cards_lab.set_up()
    with (results / "cases.jsonl").open("wb", buffering=0) as file:
        for name in cases.names():
            # The first one loads vfio-pci, which the others need.
            if wanted in name or name == cases.names()[0]:
                file.write(msgspec.json.encode(_run(name)) + b"\n")


def _run(name: str) -> Case:
    began = time.monotonic()
    try:
        cards_lab.put_home()
        cases.carry_out(name)
    except BaseException:  # noqa: BLE001  whatever a case raises is its outcome; the next ones are run
        return Case(name, False, time.monotonic() - began, traceback.format_exc())
    return Case(name, True, time.monotonic() - began)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
