"""``python -m tests.bench``: the console beside nvitop; with ``--soak``, the console in a flood of lines."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tests.bench import compare, soak

MB = 1e6


def main() -> int:
    """Exit 1 when a budget is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--window", type=float, default=25.0, metavar="S", help="seconds of a window (25)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="windows of each program (2)")
    parser.add_argument(
        "--soak", type=float, nargs="?", const=10.0, metavar="MINUTES", help="instead, the flood (10)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if options.soak is not None and options.soak < 2:
        parser.error("a soak takes at least 2 minutes: the first does not count")
    return _soak(options.soak, options.json) if options.soak is not None else _compare(options)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compare(options: argparse.Namespace) -> int:
    _say(f"load of this machine: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores; it should be quiet")
    rows = compare.compare(options.window, options.rounds, _say)
    print(json.dumps(compare.document(rows), indent=1) if options.json else compare.table(rows))
    return int(any(row.over is not None and row.over > 1 for row in rows))


def _soak(minutes: float, as_json: bool) -> int:
    def say(sample: soak.Sample) -> None:
        resident, proportional = (size / MB for size in sample.memory)
        cpu = sample.cpu_percent
        _say(f"{sample.at:5.0f} s  {resident:6.1f} MB, PSS {proportional:6.1f} MB  {cpu:5.1f} % CPU")

    found = soak.soak(minutes, say)
    if as_json:
        samples = [(round(one.at, 1), *one.memory, round(one.cpu_percent, 2)) for one in found.samples]
        names = ("at_s", "resident_bytes", "proportional_bytes", "cpu_percent")
        print(
            json.dumps(
                {
                    "mb_per_min": round(found.slope, 3),
                    "flat": found.flat,
                    "lines_per_s": round(found.lines_per_s),
                    "cpu_percent": round(found.cpu_percent, 2),
                    "samples": [dict(zip(names, sample, strict=True)) for sample in samples],
                }
            )
        )
    else:
        verdict = "flat" if found.flat else "GROWS"
        print(
            f"{found.lines_per_s:.0f} lines/s for {minutes:g} min: {found.slope:+.3f} MB/min after the first "
            f"(flat is at most {soak.FLAT_MB_PER_MIN:g}): {verdict}; {found.cpu_percent:.1f} % CPU"
        )
    return int(not found.flat)


if __name__ == "__main__":
    sys.exit(main())
