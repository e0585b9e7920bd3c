"""Takes the README's picture, from a frozen moment: ``python -m tests.pictures.take``."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

from console.model.state import ServiceState
from console.ui.app import Console
from tests.ui.scenes import SITE, Frozen, ready

PICTURE = Path(__file__).parent / "console.svg"
SIZE = (120, 36)


async def take() -> str:
    """The console as SVG; the same every time."""
    console = Console(Frozen(ready(state=ServiceState(name="ready"))), SITE, encoding="utf-8", theme="dark")
    async with console.run_test(size=SIZE) as pilot:
        await pilot.pause()
        console.draw()
        await pilot.pause()
        svg = console.export_screenshot(title="gpuops")
    # Rich numbers its classes by a checksum that is not the picture's.
    return re.sub(r"\bterminal-\d+-", "terminal-", svg)


def main() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    PICTURE.write_text(asyncio.run(take()))


if __name__ == "__main__":
    main()
