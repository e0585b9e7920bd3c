"""What surrounds the console and the service: what is here, what is missing, what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from console.checks.stranded import stranded_outcome
from console.model.card import NvmlSample, PciCard
from console.model.finding import Finding, Verdict
from console.model.site import Site
from console.model.text import clean
from console.sources.connect import Sources, connect
from console.sources.engine.client import METRICS_LIMIT, Answer
from console.sources.engine.sources import describe
from console.sources.files import ProfileSet
from console.sources.inventory import read_inventory
from console.sources.source import Unavailable

#: Seconds for each check; all run side by side.
DEADLINE = 3.0

#: Seconds for a command or request within a check: it ends with a reason of its own.
_COMMAND_DEADLINE = 2.0

#: The console is laid out for at least this many columns and rows.
_COLUMNS, _ROWS = 80, 24

#: Device ids from here on are Blackwell and later, which only the open kernel modules drive:
#: nvidia-smi else finds no device (NVIDIA/open-gpu-kernel-modules#862, #872).
_OPEN_ONLY_FROM = 0x2900

#: A wall clock before 2025 was never set.
_CLOCK_FLOOR = 1_735_689_600


@dataclass(frozen=True)
class Terminal:
    """What the terminal is, as far as it can be known: None where there is none."""

    size: tuple[int, int] | None  # columns, rows
    colours: int | None
    encoding: str


@dataclass(frozen=True)
class Surroundings:
    """Everything that the checks look at."""

    site: Site
    site_path: Path | None
    site_problems: tuple[str, ...]
    notices: tuple[str, ...]
    profiles: ProfileSet
    environ: Mapping[str, str]
    root: bool
    terminal: Terminal
    wall: float  # Unix seconds


def look_around(
    site: Site,
    site_path: Path | None,
    profiles: ProfileSet,
    *,
    site_problems: tuple[str, ...] = (),
    notices: tuple[str, ...] = (),
) -> Surroundings:
    """The surroundings of this process."""
    return Surroundings(
        site=site,
        site_path=site_path,
        site_problems=site_problems,
        notices=notices,
        profiles=profiles,
        environ=os.environ,
        root=os.geteuid() == 0,
        terminal=_this_terminal(),
        wall=time.time(),
    )


def _this_terminal() -> Terminal:
    encoding = sys.stdout.encoding or "unknown"
    if not sys.stdout.isatty():
        return Terminal(None, None, encoding)
    import curses

    colours: int | None = None
    with contextlib.suppress(curses.error):  # no terminfo for this TERM: the number stays unknown
        curses.setupterm(fd=sys.stdout.fileno())
        colours = curses.tigetnum("colors")
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return Terminal((columns, rows), colours, encoding)


async def examine(here: Surroundings, sources: Sources | None = None) -> tuple[Finding, ...]:
    """All findings, in a fixed order. Never raises; takes DEADLINE and the end of a command at most."""
    watched = connect(here.site) if sources is None else sources
    examination = _Examination(here, watched)
    try:
        return tuple(await asyncio.gather(*(_answer(*check) for check in examination.checks())))
    finally:
        await watched.nvml.close()
        await watched.client.close()


Outcome = tuple[Verdict, str] | tuple[Verdict, str, str | None]
Check = tuple[str, str, Callable[[], Awaitable[Outcome]]]


async def _answer(id: str, title: str, check: Callable[[], Awaitable[Outcome]]) -> Finding:
    remedy: str | None = None
    verdict: Verdict
    try:
        async with asyncio.timeout(DEADLINE):
            verdict, evidence, *rest = await check()
        remedy = rest[0] if rest else None
    except TimeoutError:
        verdict, evidence = "unknown", f"no answer within {DEADLINE:g} s"
    except Exception as defect:  # noqa: BLE001  a defect in a check is told, and costs that check only
        verdict, evidence = "unknown", f"defect in check {id}: {type(defect).__name__}: {defect}"
    return Finding(id, title, verdict, clean(evidence), remedy)


class _Examination:
    """One run of all checks. What several of them need is read once and shared."""

    def __init__(self, here: Surroundings, watched: Sources) -> None:
        self._here = here
        self._site = here.site
        self._watched = watched
        self._root = watched.host.root
        self._cards = _once(self._read_cards)
        self._sample = _once(self._read_sample)
        self._models = _once(lambda: watched.client.get("/v1/models", _COMMAND_DEADLINE))
        self._unit_state = _once(watched.unit.read)

    def checks(self) -> tuple[Check, ...]:
        return (
            ("site", "Site file", self._site_file),
            ("profiles", "Profiles", self._profiles),
            ("root", "Permissions", self._permissions),
            ("pci", "Cards on the PCI bus", self._pci),
            ("iommu", "IOMMU", self._iommu),
            ("stranded", "Cards between sides", self._stranded),
            ("driver", "NVIDIA kernel driver", self._driver),
            ("nvml", "NVML", self._nvml),
            ("driver-match", "Driver and library", self._versions),
            ("container", "Container", self._container),
            ("unit", "Service unit", self._unit),
            ("journal", "Journal", self._journal),
            ("engine", "Engine", self._engine),
            ("metrics", "Engine metrics", self._metrics),
            ("api-key", "API key file", self._api_key),
            ("terminal", "Terminal", self._terminal),
            ("tmux", "Terminal multiplexer", self._multiplexer),
            ("clock", "Clock", self._clock),
        )

    # Files -------------------------------------------------------------------------------------

    async def _site_file(self) -> Outcome:
        here = self._here
        if here.site_problems:
            return "fail", "; ".join(here.site_problems), "correct the file; gpuops config validate checks it"
        if here.site_path is None:
            return "warn", "; ".join(here.notices) or "there is none", "write one: gpuops config init"
        return "pass", str(here.site_path)

    async def _profiles(self) -> Outcome:
        profiles = self._here.profiles
        if profiles.problems:
            problems = "; ".join(map(str, profiles.problems))
            return "fail", problems, "correct the files; gpuops profile list checks them"
        names = ", ".join(one.name for one in profiles.profiles)
        return (
            ("pass", names) if names else ("warn", "there is none", "see --profiles and the site's profiles")
        )

    async def _permissions(self) -> Outcome:
        if self._site.simulated is not None:
            return "skipped", "the simulated box asks for none"
        if self._here.root:
            return "pass", "running as root"
        costs = ["the system journal and what other users' processes hold may stay hidden"]
        if self._site.container.kind == "lxc":
            costs.insert(0, "lxc-attach needs root, so unit and journal of the container are out of reach")
        return "warn", "not running as root: " + "; ".join(costs), "run gpuops as root"

    # Cards -------------------------------------------------------------------------------------

    async def _read_cards(self) -> tuple[PciCard, ...]:
        return await self._watched.pci.read()

    async def _pci(self) -> Outcome:
        try:
            cards = await self._cards()
        except Unavailable as problem:
            return "fail", str(problem), "check lspci -d 10de: and the site's gpus"
        drivers = Counter(card.driver or "no driver" for card in cards if card.present)
        told = f"{len(cards)} found: " + ", ".join(f"{count} on {name}" for name, count in drivers.items())
        gone = [card.address for card in cards if not card.present]
        if gone:
            return "fail", f"{told}; off the bus: {', '.join(gone)}", "reset the card, or restart the host"
        unbound = [card.address for card in cards if card.driver is None]
        if unbound:
            return "warn", f"{told}: {', '.join(unbound)}", "give the card to the container or the VM"
        return "pass", told

    async def _iommu(self) -> Outcome:
        groups = self._root / "sys/kernel/iommu_groups"
        count = await asyncio.to_thread(_entries, groups)
        try:
            grouped = {card.iommu_group for card in await self._cards()} - {None}
        except Unavailable:
            grouped = set()
        if grouped or count:
            return "pass", f"on; the cards are in {len(grouped)} groups"
        if self._site.vm is None:
            return "skipped", "off; only giving cards to a VM needs it"
        return (
            "fail",
            "off: no card can be given to the VM",
            "add intel_iommu=on or amd_iommu=on to the kernel",
        )

    async def _stranded(self) -> Outcome:
        try:
            inventory = await asyncio.to_thread(read_inventory, self._root)
        except Unavailable as problem:
            return "unknown", str(problem)
        return stranded_outcome(inventory, self._site.container.id)

    async def _driver(self) -> Outcome:
        words = await asyncio.to_thread(_driver_words, self._root)
        try:
            cards = await self._cards()
        except Unavailable:
            cards = ()
        if words is None and await self._given_away():
            return "skipped", "not loaded: every card is on vfio-pci"
        if words is None:
            return "fail", "the nvidia kernel module is not loaded", "install the driver; modprobe nvidia"
        version = _version(words) or "of unknown version"
        if "Open Kernel Module" in words:
            return "pass", f"{version}, open kernel modules"
        devices = {
            function.device
            for card in cards
            for function in card.functions
            if function.address == card.address
        }
        remedy = "install the open kernel modules (nvidia-open)"
        if any(device >= _OPEN_ONLY_FROM for device in devices):
            return "fail", f"{version}, proprietary modules: they do not drive these cards", remedy
        return "warn", f"{version}, proprietary modules; Blackwell cards need the open ones", remedy

    async def _given_away(self) -> bool:
        """Whether every card is on vfio-pci, so that the NVIDIA driver has nothing to say."""
        try:
            cards = await self._cards()
        except Unavailable:
            return False
        return all((card.driver or "").startswith("vfio") for card in cards)

    async def _read_sample(self) -> tuple[NvmlSample | None, str | None]:
        """The first sample, or why there is none."""
        try:
            async with asyncio.timeout(DEADLINE - 0.25):
                async for reading in self._watched.nvml.watch():
                    if reading.value is not None or not _starting(reading.error):
                        return reading.value, reading.error
        except TimeoutError:
            return None, "no answer; without persistence mode the driver takes seconds a card"
        return None, "it ended"

    async def _nvml(self) -> Outcome:
        sample, error = await self._sample()
        if sample is None and await self._given_away():
            return "skipped", "no card is on the nvidia driver"
        if sample is None:
            return "fail", error or "no answer", "run nvidia-smi: it tells what the library does not like"
        lost = [card.address for card in sample.cards if card.lost]
        told = f"{len(sample.cards)} cards, library of driver {sample.driver_version or 'unknown'}"
        if lost:
            return "fail", f"{told}; lost: {', '.join(lost)}", "reset the card, or restart the host"
        return ("pass", told) if error is None else ("warn", f"{told}; {error}")

    async def _versions(self) -> Outcome:
        words = await asyncio.to_thread(_driver_words, self._root)
        sample, error = await self._sample()
        remedy = "install one driver version on the host and in the container; restart after an upgrade"
        if error is not None and "mismatch" in error.lower():
            return "fail", error, remedy
        kernel = None if words is None else _version(words)
        library = None if sample is None else sample.driver_version
        if kernel is None or library is None:
            return "skipped", "one of the two versions is not known"
        if kernel != library:
            return "fail", f"kernel module {kernel}, library {library}", remedy
        return "pass", f"both {kernel}"

    # The service -------------------------------------------------------------------------------

    async def _container(self) -> Outcome:
        container = self._site.container
        if container.kind != "lxc":
            return "skipped", "the service runs on this host itself"
        result = await self._watched.service.run(["true"], deadline=_COMMAND_DEADLINE)
        if result.ok:
            return "pass", f"CT {container.id} runs and can be entered"
        remedy = f"pct start {container.id}; as root"
        return "fail", f"CT {container.id}: {result.reason}", remedy

    async def _unit(self) -> Outcome:
        name = self._site.service.unit
        try:
            unit = await self._unit_state()
        except Unavailable as problem:
            remedy = "systemctl has to answer there; check container and service.unit in the site file"
            return "fail", f"{name}: {problem}", remedy
        if unit.load_state != "loaded":
            return "fail", f"{name} is {unit.load_state}", "check service.unit in the site file"
        told = f"{name} is {unit.active_state} ({unit.sub_state}), {unit.unit_file_state or 'not installed'}"
        if unit.need_daemon_reload:
            return "warn", f"{told}; its file changed since it was loaded", "systemctl daemon-reload"
        return "pass", told

    async def _journal(self) -> Outcome:
        ask = ["journalctl", "-u", self._site.service.unit, "-n", "1", "-o", "json", "--no-pager"]
        result = await self._watched.service.run(ask, deadline=_COMMAND_DEADLINE)
        if not result.ok:
            return "fail", result.reason, "the load's phases and crash causes come from the journal"
        if result.stdout.strip():
            return "pass", "readable"
        hidden = b"not seeing messages" in result.stderr or b"permission" in result.stderr.lower()
        if hidden:
            return "fail", result.reason, "run as root, or join the group systemd-journal"
        return "warn", f"no line of {self._site.service.unit} yet", None

    async def _engine(self) -> Outcome:
        answer = await self._models()
        url = self._site.service.url
        if answer.probe.ok:
            return "pass", f"answers at {url}"
        told = f"{url}{describe(answer.probe)}"
        if answer.probe.status in (401, 403):
            return "fail", told, "put the key in a file and name it in service.api_key_file"
        if answer.probe.error == "refused":
            return await self._refused(told)
        return "fail", told, "check service.url in the site file"

    async def _refused(self, told: str) -> Outcome:
        """Nothing listens: no news while the service is stopped or loads."""
        try:
            unit = await self._unit_state()
        except Unavailable:
            return "fail", told, "check service.url in the site file"
        if unit.active_state in ("active", "activating"):
            return (
                "warn",
                f"{told}; {unit.id} runs, so it may still load",
                "gpuops status tells how far it is",
            )
        return "warn", f"{told}; {unit.id} is {unit.active_state}", None

    async def _metrics(self) -> Outcome:
        if (await self._models()).probe.status is None:
            return "skipped", "the engine does not answer"
        answer: Answer = await self._watched.client.get("/metrics", _COMMAND_DEADLINE, limit=METRICS_LIMIT)
        remedy = "start SGLang with --enable-metrics: rates, cache and speculation come from there"
        if answer.probe.status == 404:
            return "fail", "not there: the engine runs without --enable-metrics", remedy
        if not answer.probe.ok:
            return "fail", describe(answer.probe), remedy
        if b"sglang:" not in answer.body:
            return "warn", "/metrics holds nothing of SGLang's", remedy
        return "pass", f"{len(answer.body) // 1024} KiB"

    async def _api_key(self) -> Outcome:
        name = self._site.service.api_key_file
        if name is None:
            return "skipped", "none is named in the site file"
        warning = self._watched.client.key_warning()
        try:
            mode = stat.S_IMODE((await asyncio.to_thread(os.stat, name)).st_mode)
        except OSError as problem:
            return "fail", f"{name}: {problem.strerror}", "write the key there, for root alone"
        if warning is not None and "readable by everyone" not in warning:
            return "fail", warning, "write the key there: one line, nothing else"
        if mode & 0o077:
            return "warn", f"{name} has mode {mode:04o}", f"chmod 600 {name}"
        return "pass", f"{name}, mode {mode:04o}"

    # The operator's side -----------------------------------------------------------------------

    async def _terminal(self) -> Outcome:
        here, terminal = self._here, self._here.terminal
        if terminal.size is None:
            return "skipped", "the output is not a terminal"
        term = here.environ.get("TERM", "")
        columns, rows = terminal.size
        encoding = terminal.encoding.lower().replace("-", "")
        told = f"{term or 'no TERM'}, {columns}x{rows}, {terminal.encoding}"
        if here.environ.get("COLORTERM") in ("truecolor", "24bit"):
            told += ", 16 million colours"
        elif terminal.colours is not None and terminal.colours > 0:
            told += f", {terminal.colours} colours"
        if term in ("", "dumb"):
            return "fail", told, "use a terminal that can place the cursor; TERM says which"
        if encoding != "utf8":
            return "warn", told, "choose a UTF-8 locale: export LC_ALL=C.UTF-8"
        if columns < _COLUMNS or rows < _ROWS:
            return "warn", told, f"enlarge it to {_COLUMNS}x{_ROWS} or more"
        return "pass", told

    async def _multiplexer(self) -> Outcome:
        environ = self._here.environ
        term = environ.get("TERM", "")
        if "TMUX" not in environ and "STY" not in environ:
            return "skipped", "none; operations outlive a lost connection without it"
        if not term.startswith(("tmux", "screen")):
            return "warn", f"inside one, but TERM is {term}", "export TERM=tmux-256color"
        if "256color" not in term:
            remedy = 'in tmux.conf: set -g default-terminal "tmux-256color"'
            return "warn", f"TERM is {term}: eight colours", remedy
        return "pass", f"TERM is {term}"

    async def _clock(self) -> Outcome:
        remedy = "set the clock: timedatectl set-ntp true"
        if self._here.wall < _CLOCK_FLOOR:
            return "fail", "the clock stands before 2025", remedy
        ask = ["timedatectl", "show", "-p", "NTPSynchronized", "--value"]
        result = await self._watched.host.run(ask, deadline=_COMMAND_DEADLINE)
        said = result.stdout.decode("ascii", "replace").strip()
        if not result.ok or said not in ("yes", "no"):
            return "pass", "plausible; whether it is kept in step is not known"
        return ("pass", "kept in step") if said == "yes" else ("warn", "not kept in step by NTP", remedy)


def _once(read: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """``read``, shared: whoever asks first has it read, and its failure is everybody's."""
    task: asyncio.Future[Any] | None = None

    async def shared() -> Any:
        nonlocal task
        if task is None:
            task = asyncio.ensure_future(read())
        # Shielded: the deadline of one check must not take the answer from another.
        return await asyncio.shield(task)

    return shared


def _starting(error: str | None) -> bool:
    return error is not None and error.startswith("NVML is starting")


def _entries(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


def _driver_words(root: Path) -> str | None:
    """``NVRM version: …`` of /proc/driver/nvidia/version; None when the driver is not loaded."""
    try:
        with (root / "proc/driver/nvidia/version").open("rb") as file:
            return clean(file.read(4096).decode("utf-8", "replace").partition("\n")[0])
    except OSError:
        return None


def _version(words: str) -> str | None:
    found = re.search(r"\s(\d{3,4}\.\d+(?:\.\d+)?)\s", words)
    return found[1] if found else None
