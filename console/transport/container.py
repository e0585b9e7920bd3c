"""Commands inside a container of this host, through a prefix such as ``lxc-attach -n 129 --``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from console.transport.runner import Result, Runner, Stream


class ContainerRunner:
    """Another runner with a prefix before every command.

    A container shares the host's kernel, so ``root`` is the host's: its
    processes, cards and drivers are seen there. A result's ``argv`` keeps the
    prefix, so a reason names the program that failed.
    """

    def __init__(self, host: Runner, prefix: Sequence[str], name: str) -> None:
        self._host = host
        self._prefix = tuple(prefix)
        self.name = name
        self.root = host.root

    async def run(self, argv: Sequence[str], *, deadline: float, stdin: bytes = b"") -> Result:
        return await self._host.run((*self._prefix, *argv), deadline=deadline, stdin=stdin)

    def stream(self, argv: Sequence[str]) -> AbstractAsyncContextManager[Stream]:
        return self._host.stream((*self._prefix, *argv))


def lxc(host: Runner, ct_id: int) -> ContainerRunner:
    """The LXC container ``ct_id``. Its init needs no agent: ``lxc-attach`` joins its namespaces.

    Without a terminal the command stays in lxc-attach's own process group, so ending the
    group on the host ends it in the container too.
    """
    return ContainerRunner(host, ("lxc-attach", "-n", str(ct_id), "--"), f"ct:{ct_id}")
