"""What a change of the service costs: the time of a load, the requests in flight, the tokens not made."""

from __future__ import annotations

from console.model.profile import Profile
from console.model.snapshot import Snapshot
from console.model.words import rate, span
from console.operations.step import Context
from console.store import loads
from console.store.state import StateProblem


def load_cost(context: Context, profile: Profile | None) -> str:
    """How long the service is away while this profile loads, and where that figure is from."""
    if profile is None:
        return "how long it loads is not known: its command fits no profile"
    try:
        known = loads.expected(context.state, profile.name)
    except StateProblem as problem:
        return f"how long it loads is not known: {problem}"
    if known is not None:
        count = f"{known.loads} load{'' if known.loads == 1 else 's'} here"
        spread = f", {span(known.fastest_s)} to {span(known.slowest_s)}" if known.loads > 1 else ""
        return f"a load takes about {span(known.median_s)} (median of {count}{spread})"
    if profile.load.expect_s is not None:
        return f"a load takes about {span(profile.load.expect_s)} (by the profile; none was seen here yet)"
    return f"how long it loads is not known yet; after {span(profile.load.timeout_s)} it counts as failed"


def traffic_costs(snapshot: Snapshot) -> tuple[str, ...]:
    """Who is served at this moment, and would have to wait or ask again."""
    rates = snapshot.rates.current(snapshot.now)
    unit = snapshot.unit.value
    if unit is None or unit.active_state != "active":
        return ()
    if rates is None or rates.requests_running is None:
        return ("how many requests are in flight is not known",)
    running, queued = rates.requests_running, rates.requests_queued or 0
    if not running and not queued:
        return ("no request is in flight just now",)
    waiting = f" and {queued} in the queue" if queued else ""
    speed = rates.decode_tokens_per_s
    making = f", {rate(speed)} tokens/s" if speed else ""
    return (
        f"{running} requests in flight{waiting}{making}: they get their time to end, new ones are refused",
    )
