"""``gpuops rebind``: cards to the VM or back, what was left half way repaired, a dead card recovered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import click

from console.cli.change import How, change, changing

if TYPE_CHECKING:
    from console.cli.change import Maker
    from console.cli.shared import Given

Side = Literal["vm", "container"]
Rung = Literal["reset", "rescan", "bus-reset"]


@click.command()
@changing
@click.option("--to", "target", type=click.Choice(["vm", "container"]), help="Where the cards go.")
@click.option("--gpu", "gpus", multiple=True, metavar="BDF", help="Only this card; again for more.")
@click.option("--force-stop", is_flag=True, help="Stop the VM hard when it does not shut down.")
@click.option("--repair", is_flag=True, help="Bring back what was left half way.")
@click.option("--recover", metavar="BDF", help="Try to bring back a card that does not answer.")
@click.option(
    "--rung",
    type=click.Choice(["reset", "rescan", "bus-reset"]),
    help="What is tried with --recover, the mildest first.",
)
@click.pass_obj
def rebind(
    given: Given,
    target: Side | None,
    gpus: tuple[str, ...],
    force_stop: bool,
    repair: bool,
    recover: str | None,
    rung: Rung | None,
    dry_run: bool,
    yes: bool,
    no_wait: bool,
    as_json: bool,
    note: str | None,
) -> int:
    """Move cards between the container and the VM, all of them or those named by --gpu.

    Without --yes it is confirmed by typing where they go, such as vm 100. Exit as for switch;
    5 also when a card is pending in the kernel.
    """
    asked = [
        name for name, given_ in (("--to", target), ("--repair", repair), ("--recover", recover)) if given_
    ]
    if len(asked) != 1:
        found = " and ".join(asked) or "none of them"
        raise click.UsageError(f"expected one of --to vm|container, --repair, --recover BDF; found {found}")
    if rung is not None and recover is None:
        raise click.UsageError("--rung goes with --recover")
    if force_stop and target != "container":
        raise click.UsageError("--force-stop goes with --to container: it is about the VM's shutdown")
    if recover is not None and gpus:
        raise click.UsageError("--recover names its card itself: leave --gpu out")
    how = How(dry_run, yes, no_wait, as_json, note)
    return change(given, how, lambda profiles: _maker(target, gpus, force_stop, recover, rung))


def _maker(
    target: Side | None, gpus: tuple[str, ...], force_stop: bool, recover: str | None, rung: Rung | None
) -> Maker:
    from console.operations.rebind import plan_rebind, plan_recover, plan_repair

    if recover is not None:
        return partial(plan_recover, card=recover, rung=rung or "reset")
    if target is None:
        return partial(plan_repair, asked=gpus)
    return partial(plan_rebind, target=target, asked=gpus, force_stop=force_stop)
