"""The box's Python, asked for the flags of its SGLang."""

from __future__ import annotations

from box_lab import Lab

from console.checks.flags import ask, service_python, shipped, validate_profile
from console.simulator.definition import PYTHON
from console.simulator.spec import VERSION
from console.sources.files import load_profiles, shipped_profiles_directory

PROFILES = load_profiles([shipped_profiles_directory()]).profiles


async def test_the_container_answers_as_its_version_does(lab: Lab) -> None:
    python, reason = await service_python(lab.container, "sglang.service")
    assert (python, reason) == (PYTHON, None)
    asked = await ask(lab.container, None, python)
    assert (asked.version, asked.reason) == (VERSION, None)
    assert asked.table == shipped(VERSION)


async def test_the_host_has_no_sglang(lab: Lab) -> None:
    asked = await ask(lab.host, None, "/usr/bin/python3")
    assert asked.table is None
    assert asked.reason is not None


async def test_both_shipped_profiles_are_taken(lab: Lab) -> None:
    for profile in PROFILES:
        findings = await validate_profile(profile, lab.container, None, python=PYTHON)
        assert findings[0].evidence.startswith(f"asked the installed SGLang {VERSION}")
        assert [one for one in findings if one.verdict in ("fail", "unknown")] == []
