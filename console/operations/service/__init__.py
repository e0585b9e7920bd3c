"""The service's life: switch to another profile, restart, stop, start.

``plan_switch`` and its like make the plan that is shown, with the pre-flight's findings in it; ``steps``
builds the steps from a plan alone, in any process.
"""

from __future__ import annotations

from console.operations.service.plans import (
    plan_restart,
    plan_start,
    plan_stop,
    plan_switch,
    service_as_it_is,
)
from console.operations.service.route import steps

__all__ = ["plan_restart", "plan_start", "plan_stop", "plan_switch", "service_as_it_is", "steps"]
