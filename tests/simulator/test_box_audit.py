"""The audit of the simulated box: as it comes, and after an operator has changed its files."""

from __future__ import annotations

from pathlib import Path

import msgspec
from box_lab import Lab

from console.checks.audit import audit
from console.model.audit_report import Audit, audit_document
from console.model.finding import Finding
from console.simulator.definition import SITECUSTOMIZE, UNIT
from console.simulator.python_program import SITECUSTOMIZE as START_UP
from console.sources.files import load_profiles, load_site, shipped_profiles_directory

PROFILES = load_profiles((shipped_profiles_directory(),)).profiles


async def audited(lab: Lab) -> Audit:
    return await audit(load_site(lab.box.directory / "site.yaml"), PROFILES)


def finding(found: Audit, id: str) -> Finding:
    (one,) = [one for one in found.findings if one.id == id]
    return one


def unit_file(lab: Lab) -> Path:
    return lab.box.rootfs / "etc/systemd/system" / UNIT


def drop_in(lab: Lab, text: str) -> None:
    path = unit_file(lab).with_name(f"{UNIT}.d") / "10-tuning.conf"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


async def without_nccl(lab: Lab) -> None:
    """The unit leaves the NCCL variables to sitecustomize.py."""
    lines = unit_file(lab).read_text().splitlines(keepends=True)
    unit_file(lab).write_text("".join(line for line in lines if "NCCL_" not in line))
    await restart(lab)


async def restart(lab: Lab) -> None:
    await lab.inside("systemctl", "daemon-reload")
    assert (await lab.inside("systemctl", "restart", "sglang")).ok
    await lab.until_ready()


async def test_production_runs_the_benchmark(lab: Lab) -> None:
    found = await audited(lab)
    assert found.answer.startswith("production runs the benchmark's 13 flags and 7 variables; it adds 7")
    assert (found.verdict, found.profile) == ("pass", "kimi-k2.5-int4")
    assert {one.verdict for one in found.findings} == {"pass"}
    rows = {row["name"]: row for row in audit_document(found)["items"]}
    assert rows["NCCL_ALGO"]["where"] == f"/etc/systemd/system/{UNIT}"
    assert rows["SGLANG_ENABLE_SPEC_V2"]["where"] == f"/etc/systemd/system/{UNIT}"
    assert rows["tp-size"] == {
        "kind": "flag",
        "name": "tp-size",
        "profile": "8",
        "reference": "8",
        "effective": "8",
        "verdict": "same",
        "allowed": None,
        "where": "command line of the process",
    }


async def test_variables_that_only_sitecustomize_sets(lab: Lab) -> None:
    """They are not in /proc/PID/environ, and in force all the same."""
    await without_nccl(lab)
    run = lab.box.service.processes()
    assert run is not None
    assert b"NCCL" not in (lab.host.root / "proc" / str(run.main) / "environ").read_bytes()
    found = await audited(lab)
    assert found.answer.startswith("production runs the benchmark's 13 flags and 7 variables; it adds 7")
    rows = {row["name"]: row for row in audit_document(found)["items"]}
    assert rows["NCCL_ALGO"]["where"] == START_UP


async def test_what_was_changed_is_named_before_and_after_the_restart(lab: Lab) -> None:
    text = unit_file(lab).read_text()
    text = text.replace("--mem-fraction-static 0.88", "--mem-fraction-static 0.85")
    unit_file(lab).write_text(text.replace("    --disable-custom-all-reduce \\\n", ""))
    before = await audited(lab)
    assert before.answer.startswith("production runs the benchmark's 13 flags")
    assert finding(before, "daemon-reload").verdict == "warn"
    edited = finding(before, "edited").evidence
    assert "--mem-fraction-static 0.85 instead of 0.88" in edited
    assert "no --disable-custom-all-reduce" in edited
    await restart(lab)
    after = await audited(lab)
    assert after.answer.startswith(
        "production differs from the benchmark: 1 of 13 flags missing, 1 of 13 flags different"
    )
    assert after.verdict == "fail"
    assert finding(after, "daemon-reload").verdict == "pass"


async def test_a_variable_in_the_unit_and_in_sitecustomize(lab: Lab) -> None:
    drop_in(lab, "[Service]\nEnvironment=NCCL_ALGO=Tree NCCL_PROTO=Simple\n")
    await without_nccl(lab)
    path = lab.box.rootfs / START_UP.lstrip("/")
    path.write_text(SITECUSTOMIZE + 'os.environ["NCCL_PROTO"] = "LL128"\n')
    await restart(lab)
    found = await audited(lab)
    evidence = finding(found, "twice").evidence
    where = f"/etc/systemd/system/{UNIT}.d/10-tuning.conf"
    assert f"NCCL_ALGO is Ring in {START_UP}, and Tree in {where}, which counts" in evidence
    assert f"NCCL_PROTO is Simple in {where}, and LL128 in {START_UP}, which counts" in evidence
    assert "2 of 7 variables different" in found.answer


async def test_a_broken_sitecustomize_sets_nothing(lab: Lab) -> None:
    await without_nccl(lab)
    (lab.box.rootfs / START_UP.lstrip("/")).write_text("import os\nos.environ[\n")
    found = await audited(lab)
    assert "6 of 7 variables missing" in found.answer


async def test_a_stopped_service(lab: Lab) -> None:
    await lab.inside("systemctl", "stop", "sglang")
    await lab.until("inactive/dead")
    found = await audited(lab)
    assert found.answer.endswith("it does not run")
    assert found.verdict == "unknown"
    assert finding(found, "service").evidence == f"{UNIT} is inactive: no process of it runs"


async def test_keys_in_flags_and_environment_stay_hidden(lab: Lab) -> None:
    text = (
        unit_file(lab)
        .read_text()
        .replace("    --enable-metrics", "    --enable-metrics --api-key sk-verysecret")
    )
    unit_file(lab).write_text(text)
    (lab.box.rootfs / "etc/default").mkdir(parents=True, exist_ok=True)
    (lab.box.rootfs / "etc/default/sglang").write_text("HF_TOKEN=hf_verysecret\n")
    drop_in(lab, "[Service]\nEnvironmentFile=/etc/default/sglang\n")
    await restart(lab)
    found = await audited(lab)
    told = msgspec.json.encode(audit_document(found)).decode()
    assert "verysecret" not in told
    rows = {row["name"]: row for row in audit_document(found)["items"]}
    assert rows["HF_TOKEN"]["effective"] == rows["api-key"]["effective"] == "(hidden)"
    assert rows["HF_TOKEN"]["where"] == "/etc/default/sglang"


async def test_a_process_that_cannot_be_asked(lab: Lab) -> None:
    """Its Python is not there any more: what it would have told is unknown, not missing."""
    await without_nccl(lab)
    run = lab.box.service.processes()
    assert run is not None
    folder = lab.host.root / "proc" / str(run.main)
    (folder / "cmdline").write_bytes(
        (folder / "cmdline").read_bytes().replace(b"/opt/sglang/bin/python", b"/opt/gone/python9")
    )
    found = await audited(lab)
    assert found.verdict == "unknown"
    assert "1 of its 7 variables could be seen" in found.answer
    assert "command not found" in finding(found, "python").evidence
