"""Rows of the page of the cards: who is on either side, what was left, the job, and the kernel's words."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from console.model.operation import JobView, StepView
from console.model.rebind.inventory import Inventory
from console.model.rebind.kernel_log import CardEvent
from console.model.rebind.stranded import Stranded
from console.model.site import Site
from console.ui.glyphs import Glyphs
from console.ui.rows import Row, Span, clip, heading, width_of
from console.ui.screens.job import step_mark
from console.ui.screens.plan import paragraph

#: Of the kernel's words never fewer are shown, when there are as many.
_LEAST = 3

#: Cells of the track between the sides, by the width from which it fits.
_TRACKS = ((0, 13), (110, 25), (160, 41))

#: Cells before the track: cursor, choice, number, slot, node.
START = 2 + 2 + 2 + 9 + 9


def side_rows(inventory: Inventory, site: Site, width: int, glyphs: Glyphs) -> Iterator[Row]:
    """Who is on either side, over the ends of the track."""
    start, track = START, track_of(width)
    container = site.container.id
    guest = inventory.container(container) if container is not None else None
    left = f"CT {container}" if container is not None else "host"
    if guest is not None:
        status = guest.status or "state unknown"
        named = f"{left} {guest.name} {status}"
        fits = guest.name is not None and width_of([Span(named)]) <= start + 1
        left = named if fits else f"{left} {status}"
    vm = inventory.vm(site.vm.id) if site.vm is not None else None
    right = "no VM in the site file" if site.vm is None else f"VM {site.vm.id} is not there"
    if vm is not None:
        right = f"VM {vm.id} {vm.name or ''} {vm.status or 'state unknown'}".replace("  ", " ")
        right += f", locked: {vm.lock}" if vm.lock is not None else ""
    yield []
    yield [
        Span(f"{left:>{start + 1}}", "part"),
        Span(" " * (track - 2)),
        Span(clip(right, max(0, width - start - track), glyphs), "part"),
    ]
    yield [Span(f"{'nvidia':>{start + 1}}", "dim"), Span(" " * (track - 2)), Span("vfio-pci", "dim")]


def left_rows(stranded: tuple[Stranded, ...], width: int, glyphs: Glyphs) -> Iterator[Row]:
    """What was left half way, and what repairs it."""
    broken = [one for one in stranded if not one.harmless]
    if not broken:
        return
    yield []
    yield heading("LEFT HALF WAY", [Span(f"{len(broken)}", "bad")], width, glyphs, "part")
    for one in broken:
        yield from paragraph(f"{glyphs.bad} {one.card} {one.words}", "bad", width, " ")
        yield from paragraph(f"{glyphs.remedy} {one.remedy}", "accent", width, "   ")


def job_rows(job: JobView | None, width: int, glyphs: Glyphs) -> Iterator[Row]:
    """How the job goes, or why it failed."""
    if job is None:
        return
    yield []
    role = "bad" if job.state in ("interrupted", "failed") else "warn"
    told: Row = [Span(job.state.replace("-", " "), role)]
    yield heading(f"JOB {job.plan.title}", told, width, glyphs, "part")
    for reason in job.reasons:
        yield from paragraph(f"{glyphs.bad} {reason}", "bad", width, " ")
    for step in job.steps:
        if step.state in ("doing", "undoing", "failed", "undo-failed"):
            back = step.planned.undo if step.state in ("undoing", "undo-failed") else None
            said = back or step.planned.words
            yield [Span(" "), step_mark(step.state, glyphs), Span(f" {said}", "text")]
            if step.words and step.state in ("failed", "undo-failed"):
                yield from paragraph(step.words, "bad", width, "   ")
    if job.progress is not None and job.state == "running":
        yield from paragraph(job.progress.words, "dim", width, "   ")


def kernel_rows(events: Collection[CardEvent], width: int, free: int, glyphs: Glyphs) -> Iterator[Row]:
    """The newest of the kernel's words, as many as there are ``free`` rows for."""
    if not events:
        return
    yield []
    yield heading("KERNEL", [Span("since this page is open", "dim")], width, glyphs, "part")
    for event in list(events)[-max(_LEAST, free - 2) :]:
        clock = time.strftime("%H:%M:%S", time.localtime(event.at))
        role = "bad" if event.grave else "text"
        # Its words may name the card's port alone, or its minor.
        card = (event.card or "").rpartition(".")[0].removeprefix("0000:")
        row: Row = [Span(f" {clock}  ", "dim"), Span(f"{card:<7}", "text")]
        yield [*row, Span(clip(event.words, max(0, width - width_of(row) - 1), glyphs), role)]


def step_words(step: StepView) -> tuple[str, str]:
    """How far one card is, with a role."""
    told = {
        "waiting": ("waits for its turn", "dim"),
        "doing": ("moving", "warn"),
        "done": ("moved", "good"),
        "skipped": ("there already", "good"),
        "failed": (f"failed: {step.words}", "bad"),
        "undoing": ("going back", "warn"),
        "undone": ("went back", "warn"),
        "undo-failed": (f"did not go back: {step.words}", "bad"),
    }
    return told.get(step.state, (step.state, "dim"))


def track_of(width: int) -> int:
    return next(cells for least, cells in reversed(_TRACKS) if width >= least)
