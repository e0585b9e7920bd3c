"""One look at everything, for a command that answers and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from console.model.card import NvmlSample
from console.model.reading import Reading
from console.model.snapshot import Snapshot
from console.sources.engine.sources import Models, read_once
from console.sources.monitor import ENDED, Monitor, defect_words
from console.sources.source import Source

#: Seconds without a line after which the journal's past counts as read.
QUIET_S = 0.4

#: ``/health`` says 503 at once while the engine warms up, and takes a second when it is well:
#: for so long it is waited for once everything else has been answered.
HEALTH_GLANCE_S = 0.03


async def observe_once(monitor: Monitor, budget: float = 2.0, *, processes: bool = False) -> Snapshot:
    """One look at everything, as fast as the slowest source that is worth waiting for.

    The journal is read only when the engine does not answer: then it tells which
    phase the load is in, or why the engine died. With ``processes`` those on the cards,
    which NVML names after the cards, are waited for. All within ``budget`` seconds.
    """
    watched = monitor.sources
    ends = asyncio.get_running_loop().time() + budget
    await asyncio.gather(
        _look_at_cards(monitor, ends, processes),
        _first(watched.pci, monitor.pci, monitor.take_pci, ends),
        _first(watched.unit, monitor.unit, monitor.take_unit, ends),
        _look_at_engine(monitor, ends),
    )
    return monitor.snapshot()


async def _look_at_cards(monitor: Monitor, ends: float, processes: bool) -> None:
    def named(sample: NvmlSample) -> bool:
        return sample.processes_at is not None or not processes

    await _first(monitor.sources.nvml, monitor.nvml, monitor.take_nvml, ends, named)
    with contextlib.suppress(TimeoutError):  # then nobody is named, and the time of the list says so
        async with asyncio.timeout_at(ends):
            await monitor.read_holders()


async def _look_at_engine(monitor: Monitor, ends: float) -> None:
    watched = monitor.sources
    await asyncio.sleep(0)  # the NVML process starts while the HTTP client is imported
    patience = (ends - asyncio.get_running_loop().time()) / 2
    # Asked with the rest, so that what it says at once is there by the time the others have answered.
    glance = asyncio.create_task(watched.client.get("/health", patience))
    try:
        rates, identity, (ready, models, metrics) = await read_once(watched.client, patience)
        if ready.status == 404:  # before 0.5.20 only /health tells that the engine still warms up
            done, _ = await asyncio.wait({glance}, timeout=HEALTH_GLANCE_S)
            if done and glance.result().probe.status is not None:
                monitor.take_health(monitor.health.fresh(glance.result().probe, monitor.clock()))
    finally:
        glance.cancel()
        await asyncio.wait({glance})
    now = monitor.clock()
    monitor.take_ready(monitor.ready.fresh(ready, now))
    monitor.take_models(monitor.models.fresh(Models(models, identity.served_names), now))
    if models.ok:
        monitor.take_identity(monitor.identity.fresh(identity, now))
    if metrics.status is not None:
        monitor.take_rates(monitor.rates.fresh(rates, now))
    if not models.ok:
        await _read_past(watched.journal, monitor.take_journal, ends)
        with contextlib.suppress(TimeoutError):  # then the time to ready is not told
            async with asyncio.timeout_at(ends):
                await monitor.read_expected()


async def _read_past(source: Source[Any], fold: Callable[[Reading[Any]], None], ends: float) -> None:
    """Readings until one is empty, fails, or no more come: the past comes in batches."""
    loop = asyncio.get_running_loop()
    last: Reading[Any] = Reading(source.name, source.period)
    readings = source.watch()
    until = ends
    try:
        while True:
            async with asyncio.timeout_at(until):
                last = await anext(readings)
            fold(last)
            if last.error is not None or not last.value:
                return
            until = min(ends, loop.time() + QUIET_S)
    except TimeoutError:
        if last.taken_at is None:
            fold(last.failed("no answer within the time of one look"))
    except StopAsyncIteration:
        fold(last.failed(ENDED))
    except Exception as defect:  # noqa: BLE001  it is shown beside the source
        fold(last.failed(defect_words(source, defect)))
    finally:
        await readings.aclose()  # type: ignore[attr-defined]


async def _first(
    source: Source[Any],
    known: Reading[Any],
    fold: Callable[[Reading[Any]], None],
    ends: float,
    enough: Callable[[Any], bool] = lambda value: True,
) -> None:
    """The first reading with a value that is ``enough``, or with a reason that will not pass.

    What keeps silent says so; what had less than enough to say is taken as it is.
    """
    began = asyncio.get_running_loop().time()
    last = known
    readings = source.watch()
    try:
        async with asyncio.timeout_at(ends):
            async for last in readings:
                if last.value is None and not (last.error or "").startswith("NVML is starting"):
                    break
                if last.value is not None and enough(last.value):
                    break
            else:
                last = last.failed(ENDED)
    except TimeoutError:
        if last is known:
            last = last.failed(f"no answer within {ends - began:.1f} s")
    except Exception as defect:  # noqa: BLE001  it is shown beside the source
        last = last.failed(defect_words(source, defect))
    finally:
        await readings.aclose()  # type: ignore[attr-defined]
    fold(last)
