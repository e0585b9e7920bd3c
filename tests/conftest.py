"""For all tests: where CI is set, a test that is skipped has failed. What a test needs, CI installs.

The plain tests run on a few cores side by side; rigs and measurements have the machine to themselves.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")


#: More workers than this gain nothing: each collects all tests first.
MOST_WORKERS = 4


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes ``-n auto`` means; 0 runs the tests in this one."""
    whole_suite = config.args == config.getini("testpaths")
    plain = config.option.markexpr == "not rig and not bench"
    return min(MOST_WORKERS, len(os.sched_getaffinity(0))) if whole_suite and plain else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    return _not_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return _not_skipped(report)


def _not_skipped(report: Any) -> Any:
    if IN_CI and report.outcome == "skipped":
        *_, reason = report.longrepr if isinstance(report.longrepr, tuple) else (report.longrepr,)
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped (CI is set): {reason}"
    return report
