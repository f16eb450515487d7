"""Writes a machine's calibration: python -m harness.forecast RESULTS CALIBRATION.json [SWEEP].

Of all records of a results folder, or of one sweep's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.forecast import build, calibration


def main() -> None:
    arguments = sys.argv[1:]
    if len(arguments) not in (2, 3):
        sys.exit("usage: python -m harness.forecast RESULTS CALIBRATION.json [SWEEP]")
    results, target = map(Path, arguments[:2])
    sweep = arguments[2] if len(arguments) == 3 else None
    try:
        calibration.write(build.build(target.stem, results, sweep=sweep), target)
    except ValueError as error:
        sys.exit(f"harness.forecast: {error}")


if __name__ == "__main__":
    main()
