"""Cards between the host with its container and the VM: move them, repair what was left half way, recover.

``plan_rebind`` and its like make the plan that is shown, with the pre-flight's findings in it; ``steps``
builds the steps from a plan alone, in any process.
"""

from __future__ import annotations

from console.operations.rebind.mending import plan_recover, plan_repair
from console.operations.rebind.plan import plan_rebind
from console.operations.rebind.route import steps

__all__ = ["plan_rebind", "plan_recover", "plan_repair", "steps"]
