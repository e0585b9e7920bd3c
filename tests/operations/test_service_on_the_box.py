"""Switch, restart, stop and start on the box: what comes of each when all is well, and on each bad day."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import msgspec
import pytest

from console.model.managed_unit import parse
from console.model.operation import JobView, Plan
from console.operations.service import plan_restart, plan_start, plan_stop
from console.operations.service.request import request_of
from console.store import loads
from tests.operations.service_lab import UNIT, ServiceLab, hurry, service_lab


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


@pytest.fixture
def lab() -> Iterator[ServiceLab]:
    with service_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def shared_box() -> Iterator[ServiceLab]:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        with service_lab() as lab:
            yield lab


@pytest.fixture
def still(shared_box: ServiceLab) -> Iterator[ServiceLab]:
    """A box on which plans are only made; what a test changes about its unit is put back."""
    text, profiles = shared_box.text, shared_box.profiles
    yield shared_box
    shared_box.text, shared_box.profiles = text, profiles
    shutil.rmtree(shared_box.rootfs / f"{UNIT[1:]}.d", ignore_errors=True)
    shared_box.inside("systemctl", "daemon-reload")


def evidence(plan: Plan, id: str) -> str:
    return next(f"{one.verdict}: {one.evidence}" for one in plan.findings if one.id == id)


def told(view: JobView, step: str) -> str:
    return next(f"{one.state}: {one.words}" for one in view.steps if one.planned.id == step)


def kimi_is_back(lab: ServiceLab, text: str) -> None:
    assert lab.text == text, "not byte for byte as it was"
    assert lab.served() == "kimi-k2.5"
    assert lab.property("UnitFileState") == "enabled"
    assert lab.leftovers == []


# Well ----------------------------------------------------------------------------------------------


def test_a_switch_and_back_with_what_each_leaves(lab: ServiceLab) -> None:
    before = lab.text
    code, view = lab.carried_out("qwen")
    assert (code, view.state) == (0, "done")
    assert lab.served() == "qwen3.5-397b"
    assert parse(lab.text).profile == "qwen3.5-397b-nvfp4"
    assert (lab.rootfs / f"{UNIT[1:]}.gpuops-previous").read_text() == before
    assert "the unit owns the port" in told(view, "ready")
    assert "7 smoke checks passed" in told(view, "smoke")
    assert told(view, "free") == "done: 8 cards free in two readings"

    code, view = lab.carried_out("kimi")
    assert code == 0
    kimi_is_back(lab, before)
    known = loads.expected(lab.state, "qwen3.5-397b-nvfp4")
    assert known is not None
    assert known.loads == 1
    assert "median of 1 load here" in " ".join(lab.plan("qwen").costs)


def test_the_plan_says_what_it_costs_changes_and_takes_back(still: ServiceLab) -> None:
    plan = still.plan("qwen")
    assert not plan.blocked
    (change,) = plan.changes
    assert (change.machine, change.path, change.before) == ("ct:129", UNIT, still.text)
    diff = "\n".join(change.diff())
    assert "-    --model-path /shared/kimi-k2.5-int4 \\" in diff
    assert "+    --model-path nvidia/Qwen3.5-397B-A17B-NVFP4 \\" in diff
    assert any("requests in flight" in cost or "no request is in flight" in cost for cost in plan.costs)
    back = {step.id: step.undo for step in plan.steps if step.undo}
    assert list(back) == ["stop", "disable", "write", "start", "enable"]
    assert back["stop"] == "start kimi-k2.5-int4 again and wait until it is ready"
    assert "about 9m45" in " ".join(still.plan("kimi").costs)


def test_a_restart_is_another_run_of_the_same_unit(lab: ServiceLab) -> None:
    text, run = lab.text, lab.property("InvocationID")
    plan = lab.plan(plan_restart)
    assert plan.costs[0] == "it is healthy: a restart takes it away for the time of a load"
    assert [step.id for step in plan.steps] == ["stop", "free", "start", "ready", "smoke"]
    job = lab.put(plan)
    assert lab.run(job) == 0
    assert lab.property("InvocationID") != run
    kimi_is_back(lab, text)


def test_stop_then_start(lab: ServiceLab) -> None:
    code, view = lab.carried_out(plan_stop)
    assert (code, told(view, "free")) == (0, "done: 8 cards free in two readings")
    assert lab.property("ActiveState") == "inactive"
    assert lab.property("UnitFileState") == "enabled", "a stop is not a farewell"

    plan = lab.plan(plan_stop)
    assert plan.blocked
    assert evidence(plan, "running").startswith("fail: sglang.service is inactive: nothing to stop")

    code, view = lab.carried_out(plan_start)
    assert code == 0
    assert lab.served() == "kimi-k2.5"
    assert "already: nothing to start" in evidence(lab.plan(plan_start), "running")


def test_a_switch_from_a_stopped_service_leaves_it_stopped_when_it_fails(lab: ServiceLab) -> None:
    text = lab.text
    assert lab.carried_out(plan_stop)[0] == 0
    lab.profiles = (*lab.profiles, without_parser(lab))
    code, view = lab.carried_out("broken")
    assert code == 4
    assert told(view, "stop") == "skipped: sglang.service is inactive"
    assert lab.text == text
    assert lab.property("ActiveState") == "inactive"


def test_switching_to_the_profile_that_runs_is_refused_with_what_to_do_instead(still: ServiceLab) -> None:
    plan = still.plan("kimi")
    assert plan.blocked
    assert evidence(plan, "active") == "fail: kimi-k2.5-int4 is the unit's profile already"


def test_an_operator_who_took_auto_start_away_keeps_it_so(lab: ServiceLab) -> None:
    lab.inside("systemctl", "disable", "sglang.service")
    plan = lab.plan("qwen")
    assert any("does not start with the machine now, and will not afterwards" in cost for cost in plan.costs)
    assert lab.run(lab.put(plan)) == 0
    assert lab.property("UnitFileState") == "disabled"


# Bad days ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash-on-load", "SafetensorError"),
        ("oom", "out of memory"),
        ("port-taken", "address already in use"),
    ],
)
def test_a_load_that_dies_brings_the_old_model_back_and_says_the_root_cause(fault: str, reason: str) -> None:
    with service_lab(fault) as lab:
        text = lab.text
        code, view = lab.carried_out("qwen")
        assert (code, view.state) == (4, "rolled-back")
        kimi_is_back(lab, text)
    (why,) = view.reasons
    assert why.startswith("the engine died: ")
    assert reason in why
    ready = next(step for step in view.steps if step.planned.id == "ready")
    assert any(reason.lower() in line.lower() for line in ready.lines), "the lines that show it"


@pytest.mark.parametrize("fault", ["nan", "leak"])
def test_when_both_models_fail_their_smoke_checks_it_stops_and_says_both_reasons(fault: str) -> None:
    with service_lab(fault) as lab:
        code, view = lab.carried_out("qwen")
        assert (code, view.state) == (5, "failed")
        first, second = view.reasons
        assert first.startswith("smoke checks failed: ")
        assert second.startswith(
            "start kimi-k2.5-int4 again and wait until it is ready: smoke checks failed: "
        )
        assert parse(lab.text).profile == "kimi-k2.5-int4"
        assert view.steps[0].state == "skipped"


def without_parser(lab: ServiceLab) -> object:
    """A profile that loads well, and whose tool calls come back as text."""
    qwen = lab.profile("qwen")
    args = {flag: value for flag, value in qwen.args.items() if flag != "tool-call-parser"}
    return msgspec.structs.replace(qwen, name="broken", key=None, args=args)


def test_a_model_that_loads_and_fails_its_smoke_checks_is_taken_back(lab: ServiceLab) -> None:
    text = lab.text
    lab.profiles = (*lab.profiles, without_parser(lab))
    code, view = lab.carried_out("broken")
    assert (code, view.state) == (4, "rolled-back")
    assert view.reasons[0].startswith("smoke checks failed: ")
    assert "tools-call" in view.reasons[0]
    kimi_is_back(lab, text)


def test_a_hung_engine_is_killed_after_its_time_to_stop_and_the_switch_goes_on() -> None:
    with service_lab("hang") as lab:
        code, view = lab.carried_out("qwen")
        assert code == 0, view.reasons
        assert "killed after its time to stop had passed" in told(view, "stop")
        assert lab.served() == "qwen3.5-397b"


def test_a_health_probe_that_is_slow_under_load_is_no_reason_to_go_back() -> None:
    with service_lab("slow-health") as lab:
        code, view = lab.carried_out("qwen")
        assert code == 0, view.reasons
        assert lab.served() == "qwen3.5-397b"


def test_a_stranger_on_a_card_is_named_in_the_plan_and_ended_by_it() -> None:
    with service_lab("holder") as lab:
        plan = lab.plan("qwen")
        said = evidence(plan, "holders")
        assert said.startswith("warn: python train.py --config lora.yaml (pid 77120, CT 131")
        assert "THIS PLAN ENDS IT" in said
        (step,) = [one for one in plan.steps if one.id == "orphans"]
        assert "pid 77120" in step.words
        job = lab.put(plan)
        assert lab.run(job) == 0, lab.view(job).reasons
        assert not (lab.directory / "box/root/proc/77120").exists()
        assert lab.served() == "qwen3.5-397b"


def test_a_stranger_that_the_plan_does_not_name_is_left_alone_and_the_old_model_comes_back() -> None:
    """It came after the plan was made: nobody has confirmed its end."""
    with service_lab("holder") as lab:
        plan = lab.plan("qwen")
        request = msgspec.structs.replace(request_of(plan), orphans=())
        steps = tuple(step for step in plan.steps if step.id != "orphans")
        unaware = msgspec.structs.replace(
            plan, request=msgspec.Raw(msgspec.json.encode(request)), steps=steps
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("console.operations.service.stopping.FREE_S", 1.0)
            job = lab.put(unaware)
            assert lab.run(job) == 5, "the old model cannot load beside it either"
        first, second = lab.view(job).reasons
        assert "python train.py --config lora.yaml (pid 77120)" in first
        assert (lab.directory / "box/root/proc/77120").exists()
        assert "start kimi-k2.5-int4 again" in second


def test_a_lost_card_forbids_a_profile_that_needs_all_of_them() -> None:
    with service_lab("gpu-lost") as lab:
        plan = lab.plan("qwen")
    assert plan.blocked
    assert "7 of 8 cards on the side of CT 129; 8 ranks; card 3 (0000:61:00.0): lost" in evidence(
        plan, "cards"
    )


def test_xids_of_programs_do_not_keep_a_model_from_being_ready() -> None:
    with service_lab("xid") as lab:
        assert lab.carried_out("qwen")[0] == 0


# The unit ------------------------------------------------------------------------------------------


def test_a_unit_changed_by_hand_after_the_plan_is_refused_and_left_as_it_is(still: ServiceLab) -> None:
    plan = still.plan("qwen")
    still.text += "# by hand\n"
    edited, run = still.text, still.property("InvocationID")
    job = still.put(plan)
    assert still.run(job) == 3
    view = still.view(job)
    assert view.outcome is not None
    assert view.outcome.startswith(
        "failed, nothing was changed: the unit was changed since the plan was made"
    )
    assert (still.text, still.property("InvocationID")) == (edited, run)


def test_a_unit_changed_by_hand_before_the_plan_forbids_it_and_names_the_way_out(still: ServiceLab) -> None:
    still.text += "# by hand\n"
    plan = still.plan("qwen")
    assert plan.blocked
    assert "was changed by hand since gpuops wrote it" in evidence(plan, "unit")
    (finding,) = [one for one in plan.findings if one.id == "unit"]
    assert (finding.remedy or "").startswith("gpuops profile adopt sglang.service")


def test_a_foreign_unit_is_never_overwritten(still: ServiceLab) -> None:
    still.text = still.text.partition("\n")[2]
    still.inside("systemctl", "daemon-reload")
    plan = still.plan("qwen")
    assert plan.blocked
    assert "was not written by gpuops" in evidence(plan, "unit")


def test_a_secret_in_the_unit_forbids_the_plan_and_is_not_copied_into_it(still: ServiceLab) -> None:
    still.text = still.text.replace("Type=exec\n", "Type=exec\nEnvironment=HF_TOKEN=hf_verysecret\n")
    plan = still.plan("qwen")
    assert plan.blocked
    assert "HF_TOKEN" in evidence(plan, "secret")
    assert b"verysecret" not in msgspec.json.encode(plan)


@pytest.mark.parametrize(
    ("drop_in", "verdict", "words"),
    [
        ("[Service]\nExecStart=\nExecStart=/bin/true\n", "fail", "sets ExecStart="),
        ("[Service]\nEnvironment=NCCL_ALGO=Tree\n", "fail", "sets NCCL_ALGO=Tree over the profile's env"),
        ("[Service]\nLimitNOFILE=1048576\n", "pass", "sets LimitNOFILE besides"),
    ],
)
def test_a_drop_in_that_decides_over_the_new_unit_is_named(
    still: ServiceLab, drop_in: str, verdict: str, words: str
) -> None:
    folder = still.rootfs / f"{UNIT[1:]}.d"
    folder.mkdir()
    (folder / "local.conf").write_text(drop_in)
    still.inside("systemctl", "daemon-reload")
    plan = still.plan("qwen")
    said = evidence(plan, "drop-ins")
    assert said.startswith(f"{verdict}: {UNIT}.d/local.conf ")
    assert words in said
    assert plan.blocked == (verdict == "fail")


# The profile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "id", "words"),
    [
        ({"model-path": "/shared/nothing-here"}, "model", "/shared/nothing-here is not there on ct:129"),
        ({"tp-size": "16"}, "cards", "8 of 8 cards on the side of CT 129; 16 ranks"),
        ({"mem-fracton-static": "0.9"}, None, "mem-fracton-static"),
    ],
)
def test_a_profile_that_cannot_work_is_refused_before_anything_stops(
    still: ServiceLab, args: dict[str, str], id: str | None, words: str
) -> None:
    qwen = still.profile("qwen")
    still.profiles = (msgspec.structs.replace(qwen, name="bad", args=qwen.args | args),)
    plan = still.plan("bad")
    assert plan.blocked
    failed = [one for one in plan.findings if one.verdict == "fail"]
    assert any(words in f"{one.title} {one.evidence}" and id in (None, one.id) for one in failed), failed
    assert all(one.remedy for one in failed)


def test_host_memory_that_the_hierarchical_cache_does_not_have_forbids_it(still: ServiceLab) -> None:
    kimi = still.profile("kimi")
    args = kimi.args | {"hicache-ratio": "40.0"}
    still.profiles = (msgspec.structs.replace(kimi, name="greedy", args=args),)
    plan = still.plan("greedy")
    assert plan.blocked
    assert "8 ranks" in evidence(plan, "memory-host-cache")
