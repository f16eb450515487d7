"""Checks that the quickstart's tables and figures exist and that their numbers are finite."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

folder = Path(sys.argv[1])
rows = 0
for name in ("summary", "attention_summary"):
    table = pd.read_csv(folder / "tables" / f"{name}.csv")
    for suffix in ("md", "tex"):
        assert (folder / "tables" / f"{name}.{suffix}").stat().st_size > 100, (name, suffix)
    if "status" in table.columns:
        bad = table[table["status"] != "ok"]
        assert bad.empty, f"{name}: not every row is ok:\n{bad}"
    times = table.filter(regex=r"_ms$|\(ms\)$")
    assert not times.empty, f"{name}: no column of times among {list(table.columns)}"
    assert np.isfinite(times.to_numpy(dtype=float)).all(), f"{name}: a time is not finite"
    assert (times.to_numpy(dtype=float) > 0).all(), f"{name}: a time is not positive"
    rows += len(table)
for name in ("step_time", "attention_scaling"):
    for suffix in ("png", "svg"):
        assert (folder / "figures" / f"{name}.{suffix}").stat().st_size > 1000, (name, suffix)
assert (folder / "report.md").is_file()
print(f"quickstart: {rows} table rows, all finite")
