"""Predicted over measured peak memory of committed records, by task, and the cases that are off.

python benchmarks/bench_predictions.py [results/h200 ...]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from harness.analysis.predictions import predicted_over_measured
from harness.paths import ROOT
from harness.store.record import RecordStore

OFF = 0.1


def kind(case: dict) -> str:
    """The task, and of attention whether its sequences are split over ranks, and how."""
    name = str(case["task"]["name"])
    if name != "attention" or case["parallel"].get("cp", 1) == 1:
        return name
    return "attention, gathered" if "llama3" in case["attention"]["name"] else "attention, rings"


def main(folders: list[Path]) -> None:
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    unpredicted: dict[str, int] = defaultdict(int)
    for folder in folders:
        records, problems = RecordStore(folder).load()
        for problem in problems:
            print(problem, file=sys.stderr)
        for record in records.values():
            ratio = predicted_over_measured(record)
            if ratio is not None:
                found[kind(record.case)].append((ratio, record.case_id))
            elif record.status == "ok" and any("peak_allocated_bytes" in x for x in record.memory):
                unpredicted[kind(record.case)] += 1
    print(f"{'':24}{'cases':>6}{'not predicted':>15}{'least':>8}{'median':>8}{'most':>8}", end="")
    print(f"{'within 10%':>12}{'within 3%':>11}")
    for name, rows in sorted(found.items()):
        ratios = [ratio for ratio, _ in rows]
        within = [sum(abs(r - 1) <= limit for r in ratios) / len(ratios) for limit in (0.1, 0.03)]
        print(f"{name:24}{len(rows):6}{unpredicted[name]:15}{min(ratios):8.3f}", end="")
        print(f"{median(ratios):8.3f}{max(ratios):8.3f}{within[0]:12.1%}{within[1]:11.1%}")
    print(f"\nOff by more than {OFF:.0%}, predicted over measured:")
    for name, rows in sorted(found.items()):
        for ratio, case_id in sorted(rows):
            if abs(ratio - 1) > OFF:
                print(f"{ratio:8.3f}  {name}: {case_id}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [ROOT / "results" / "h200"])
