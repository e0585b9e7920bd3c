"""Cards that something left half way between container and VM, as one line of the doctor."""

from __future__ import annotations

from console.model.finding import Verdict
from console.model.rebind.inventory import Inventory
from console.model.rebind.stranded import reconcile


def stranded_outcome(inventory: Inventory, container: int | None) -> tuple[Verdict, str, str | None]:
    """Verdict, evidence and remedy; ``container`` is the site's, None when the service runs on the host."""
    found = reconcile(inventory, container=container)
    if not inventory.slots:
        return "skipped", "no card on the PCI bus", None
    if not found:
        return "pass", "none was left half way", None
    told = "; ".join(f"{one.card} {one.words}" for one in found[:3])
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    worst: Verdict = "warn" if all(one.harmless for one in found) else "fail"
    first = next((one for one in found if not one.harmless), found[0])
    return worst, f"{told}{more}", first.remedy
