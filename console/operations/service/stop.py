"""``stop``, as the registry of operations finds it."""

from __future__ import annotations

from console.operations.service.route import ServiceOperation

OPERATION = ServiceOperation("stop")
