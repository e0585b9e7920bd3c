"""``python -m console.simulator --dir DIR``: the simulated box alone, without a screen."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from console.simulator.faults import FAULTS


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line. A wrong one exits with 2 and says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m console.simulator", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where the box lives; made when missing")
    parser.add_argument("--speed", type=_speed, default=1.0, help="how many times as fast a load runs (1)")
    parser.add_argument(
        "--fault", action="append", default=[], choices=sorted(FAULTS), help="may be repeated"
    )
    parser.add_argument("--nvml", choices=("simulated", "library"), default="simulated")
    parser.add_argument("--port", type=int, default=0, help="of the engine; 0: one that is free")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def _speed(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 100_000:
        raise argparse.ArgumentTypeError("a speed from 0.01 to 100000")
    return value


def main(argv: list[str] | None = None) -> int:
    """Run the box; its exit status."""
    options = arguments(argv)
    from console.simulator import box

    return box.main(
        options.dir, options.speed, tuple(options.fault), options.nvml, options.seed, options.port
    )


if __name__ == "__main__":
    sys.exit(main())
