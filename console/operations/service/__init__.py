"""The service's life: switch to another profile, restart, stop, start.

``plan_switch`` and its like make the plan that is shown, with the pre-flight's findings in it. The modules
named after the actions build the steps from a plan alone, in any process.
"""

from __future__ import annotations

from console.operations.service.plans import plan_restart, plan_start, plan_stop, plan_switch

__all__ = ["plan_restart", "plan_start", "plan_stop", "plan_switch"]
