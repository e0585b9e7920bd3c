"""Runs in the guest: every case, one after the other, each on cards that are where they belong.

``python -m tests.rigs.kernel.in_guest RESULTS PART-OF-NAMES``

Each case is a process of its own: one that the kernel keeps for ever ends the run with its
stack, and not the machine's time.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import msgspec

from tests.rigs.kernel import cards_lab, cases
from tests.rigs.kernel.rig import Case

#: Seconds for one case, several times what the longest takes on a busy machine.
CASE_S = 240.0


def main(results: Path, wanted: str) -> None:
    cards_lab.set_up()
    with (results / "cases.jsonl").open("ab", buffering=0) as file:
        for name in cases.names():
            # The first one loads vfio-pci, which the others need.
            if wanted in name or name == cases.names()[0]:
                began = time.monotonic()
                process = os.fork()
                if process == 0:
                    file.write(msgspec.json.encode(_run(name)) + b"\n")
                    os._exit(0)
                if not _ended(process):
                    seconds = time.monotonic() - began
                    file.write(msgspec.json.encode(Case(name, False, seconds, _stacks(process))) + b"\n")
                    return


def _run(name: str) -> Case:
    began = time.monotonic()
    try:
        cards_lab.put_home()
        cases.carry_out(name)
        cards_lab.Holder.end_all()
    except BaseException:  # noqa: BLE001  whatever a case raises is its outcome; the next ones are run
        cards_lab.Holder.end_all()
        return Case(name, False, time.monotonic() - began, traceback.format_exc())
    return Case(name, True, time.monotonic() - began)


def _ended(process: int) -> bool:
    ends = time.monotonic() + CASE_S
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def _stacks(process: int) -> str:
    """Where each thread of the process stands in the kernel."""
    stacks = [path.read_text() for path in sorted(Path(f"/proc/{process}/task").glob("*/stack"))]
    return f"it did not end within {CASE_S:g} s; its threads stand in\n" + "\n".join(stacks)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
