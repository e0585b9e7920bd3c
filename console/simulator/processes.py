"""The engine's processes as the host's /proc shows them, and the sockets they own."""

from __future__ import annotations

import msgspec

from console.simulator.machine import CONTAINER
from console.simulator.tree import Tree

CONTAINER_INIT = 31_042
_FIRST_PID = 48_213
_FIRST_INNER = 1_412


class Engine(msgspec.Struct, frozen=True):
    """Process ids of one run, as the host and as the container counts."""

    main: int
    inner_main: int
    schedulers: tuple[int, ...]
    inner_schedulers: tuple[int, ...]
    detokenizer: int
    inner_detokenizer: int

    @property
    def all(self) -> tuple[int, ...]:
        return (self.main, *self.schedulers, self.detokenizer)


class Processes:
    """Gives out process ids and keeps /proc in step."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._pid = _FIRST_PID
        self._inner = _FIRST_INNER

    def container_init(self, booted_at: float) -> None:
        self._tree.add_process(
            CONTAINER_INIT,
            name="systemd",
            argv=("/sbin/init",),
            cgroup=f"/lxc/{CONTAINER}/ns/init.scope",
            inner=1,
            parent=31_020,
            started_at=booted_at + 94,
            files={},
        )
        self._tree.set_members(f"lxc/{CONTAINER}/ns/init.scope", (CONTAINER_INIT,))

    def numbers(self, ranks: int) -> Engine:
        """Process ids for another run."""
        self._pid += 61
        self._inner += 37
        pid, inner = self._pid, self._inner
        engine = Engine(
            main=pid,
            inner_main=inner,
            schedulers=tuple(pid + 140 + rank for rank in range(ranks)),
            inner_schedulers=tuple(inner + 71 + rank for rank in range(ranks)),
            detokenizer=pid + 141 + ranks,
            inner_detokenizer=inner + 72 + ranks,
        )
        self._pid, self._inner = engine.detokenizer, engine.inner_detokenizer
        return engine

    def start(
        self, engine: Engine, unit: str, argv: tuple[str, ...], environ: tuple[str, ...], at: float
    ) -> None:
        """Main process, one scheduler per card, detokenizer. ``environ`` is what the unit gives them."""
        cgroup = f"/lxc/{CONTAINER}/ns/system.slice/{unit}"
        add = self._tree.add_process
        add(
            engine.main,
            name="python",
            argv=argv,
            cgroup=cgroup,
            inner=engine.inner_main,
            parent=CONTAINER_INIT,
            started_at=at,
            files={0: "/dev/null", 1: f"socket:[{inode(engine, 1)}]", 7: f"socket:[{inode(engine, 0)}]"},
            tcp=tcp_table(None, 0),
            environ=environ,
        )
        nodes = self._tree.nodes()
        for rank, (pid, inner) in enumerate(zip(engine.schedulers, engine.inner_schedulers, strict=True)):
            title = f"sglang::scheduler_TP{rank}" if len(engine.schedulers) > 1 else "sglang::scheduler"
            add(
                pid,
                name=title,
                argv=(title,),
                cgroup=cgroup,
                inner=inner,
                parent=engine.main,
                started_at=at + 17,
                files={0: "/dev/null", 33: "/dev/nvidiactl", 34: "/dev/nvidia-uvm"}
                | dict(enumerate(nodes[rank : rank + 1], 37)),
            )
        add(
            engine.detokenizer,
            name="sglang::detokenizer",
            argv=("sglang::detokenizer",),
            cgroup=cgroup,
            inner=engine.inner_detokenizer,
            parent=engine.main,
            started_at=at + 17,
            files={0: "/dev/null"},
        )

    def listen(self, engine: Engine, host: str, port: int | None) -> None:
        """The main process listens on ``port``, or no more."""
        table = tcp_table(host if port else None, port or 0, inode(engine, 0))
        self._tree.set_tcp(engine.main, table)

    def stop(self, engine: Engine) -> None:
        for pid in engine.all:
            self._tree.remove_process(pid)


def inode(engine: Engine, number: int) -> int:
    """Of the main process's socket ``number``; 0 is the one it listens on."""
    return 7_340_000 + 16 * engine.main + number


def tcp_table(host: str | None, port: int, listener: int = 0) -> str:
    """``/proc/PID/net/tcp`` with one listening socket, or none."""
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )
    if host is None:
        return head
    address = "00000000" if host == "0.0.0.0" else "0100007F"
    return head + (
        f"   0: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 "
        f"{listener} 1 0000000000000000 100 0 0 10 0\n"
    )
