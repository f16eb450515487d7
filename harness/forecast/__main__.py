"""Writes a machine's calibration: python -m harness.forecast RESULTS CALIBRATION.json."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.forecast import build, calibration


def main() -> None:
    try:
        results, target = map(Path, sys.argv[1:])
    except ValueError:
        sys.exit("usage: python -m harness.forecast RESULTS CALIBRATION.json")
    try:
        calibration.write(build.build(target.stem, results), target)
    except ValueError as error:
        sys.exit(f"harness.forecast: {error}")


if __name__ == "__main__":
    main()
