"""While cards are in flight the program that asked for it is hung up, or killed: the job goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from console.sources.inventory import read_inventory
from console.store.jobs import list_jobs
from tests.operations.service_lab import hurry, service_lab


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_the_job_goes_on_without_whoever_asked_for_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with service_lab() as lab:
        words = ["--site", str(lab.site_path), "rebind", "--to", "vm", "--yes"]
        asking = subprocess.Popen(
            [sys.executable, "-m", "console", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ends = time.monotonic() + 60
        while not any(slot.on_vfio for slot in read_inventory(lab.runner.root).slots):
            assert time.monotonic() < ends, "no card began to move"
            assert asking.poll() is None, "it ended before a card moved"
            time.sleep(0.02)
        os.killpg(asking.pid, number)
        asking.wait(10)
        while (job := list_jobs(lab.state)[0]).state == "running":
            assert time.monotonic() < ends, job
            time.sleep(0.1)
        assert job.state == "done", job.reasons
        assert all(slot.on_vfio for slot in read_inventory(lab.runner.root).slots)
