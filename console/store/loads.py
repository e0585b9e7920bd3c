"""How long this host's earlier loads of a profile took, whole and phase by phase."""

from __future__ import annotations

from statistics import median

from console.model.load_times import Expected, PhaseExpected, phase_seconds
from console.model.log import LoadProgress
from console.store.database import looked_into, opened
from console.store.state import State

#: Only so many loads count, the newest: disks and models change.
KEPT = 20


def record(state: State, profile: str, load: LoadProgress) -> bool:
    """Remember a load that was seen from its start until the engine was up, once.

    False when there is nothing to remember: it was not seen whole, or is known already, be it
    from somebody who took the same run for another profile with the same model.
    StateProblem when the database cannot be written.
    """
    if load.fired_up_at is None or not load.phases or load.phases[0].phase != "starting":
        return False
    began = load.phases[0].began
    run = load.invocation or f"{began:.3f}"
    with opened(state) as database:
        if load.invocation and database.execute("select 1 from loads where run = ?", (run,)).fetchone():
            return False
        added = database.execute(
            "insert or ignore into loads (profile, run, began_at, seconds) values (?, ?, ?, ?)",
            (profile, run, began, max(0.0, load.fired_up_at - began)),
        )
        if added.rowcount != 1:
            return False
        database.executemany(
            "insert into phases (load, phase, seconds) values (?, ?, ?)",
            [(added.lastrowid, phase, seconds) for phase, seconds in phase_seconds(load).items()],
        )
        database.execute(
            "delete from loads where profile = ? and id not in"
            " (select id from loads where profile = ? order by began_at desc limit ?)",
            (profile, profile, KEPT),
        )
    return True


def expected(state: State, profile: str) -> Expected | None:
    """What is known of this profile's loads; None when none was seen. StateProblem when it cannot be read."""
    with looked_into(state) as database:
        if database is None:
            return None
        rows = database.execute("select seconds from loads where profile = ?", (profile,)).fetchall()
        phases = database.execute(
            "select phase, phases.seconds from phases join loads on loads.id = load where profile = ?",
            (profile,),
        ).fetchall()
    if not rows:
        return None
    whole = [seconds for (seconds,) in rows]
    by_phase: dict[str, list[float]] = {}
    for phase, seconds in phases:
        by_phase.setdefault(phase, []).append(seconds)
    return Expected(
        loads=len(whole),
        median_s=median(whole),
        fastest_s=min(whole),
        slowest_s=max(whole),
        phases={phase: PhaseExpected(median(each), max(each)) for phase, each in by_phase.items()},
    )
