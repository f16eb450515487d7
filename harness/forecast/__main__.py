"""Writes a machine's calibration: python -m harness.forecast RESULTS CALIBRATION.json."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.forecast import build, calibration


def main() -> None:
    results, target = map(Path, sys.argv[1:])
    calibration.write(build.build(target.stem, results), target)


if __name__ == "__main__":
    main()
