"""Which operation carries out which plan. Each is imported only when it is needed."""

from __future__ import annotations

from importlib import import_module

from console.model.operation import Plan
from console.operations.step import Refused, Step

#: The module of each action. Its ``steps(plan)`` builds the steps from the plan alone, in any process.
_MODULES = {
    **dict.fromkeys(("switch", "restart", "stop", "start"), "console.operations.service"),
    **dict.fromkeys(("rebind", "repair", "recover"), "console.operations.rebind"),
}


def steps_of(plan: Plan) -> tuple[Step, ...]:
    """The steps of a plan, the same in every process. Refused when this gpuops has other ones."""
    module = _MODULES.get(plan.action)
    if module is None:
        raise Refused(f"this gpuops knows no operation {plan.action!r}; use the one that made the plan")
    steps: tuple[Step, ...] = import_module(module).steps(plan)
    if tuple(step.id for step in steps) != tuple(planned.id for planned in plan.steps):
        raise Refused("the plan was made by another version of gpuops; make it anew")
    return steps
