"""How long 10,000 records take to become all tables: load, frame, tables, and peak memory.

Run as ``python -m benchmarks.bench_tables [RECORDS]`` in the repository.
"""

from __future__ import annotations

import itertools
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from harness.analysis.frame import build_frame
from harness.render.files import to_csv, to_markdown
from harness.render.latex import to_latex
from harness.render.table import TABLES, build_table
from harness.store.record import RecordStore
from tests.support.records import audit_examples, make_record, split_examples


def simulate(folder: Path, count: int) -> None:
    """Write ``count`` records, two thirds of training steps and a third of attention alone."""
    random = np.random.default_rng(0)
    backends = ("naive", "compiled", "flex", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn")
    grid = itertools.product(
        range(count),
        ("train_step", "train_step", "attention"),
        ("small", "medium", "large"),
        ("fp32", "bf16"),
        (512, 1024, 2048),
        backends,
    )
    for seed, task, model, precision, seq_len, attention in itertools.islice(grid, count):
        names = {
            "train_step": ("forward", "backward", "optimizer", "step"),
            "attention": ("forward", "backward", "forward_backward"),
        }[task]
        num_samples = 10 if task == "train_step" else 100
        status = "oom" if random.random() < 0.05 else "ok"
        samples = {name: [random.gamma(50, 0.2, num_samples).tolist()] for name in names}
        record = make_record(
            task=task,
            mode="train_step" if task == "train_step" else "forward_backward",
            model=model,
            attention=attention,
            precision=precision,
            seq_len=seq_len,
            seed=seed,
            samples_ms=samples if status == "ok" else None,
            status=status,
            message="" if status == "ok" else "CUDA out of memory",
        )
        # The grid visits training steps twice; a random end keeps their files apart.
        record.case_id += f"{random.integers(2**32):08x}"
        (folder / f"{record.case_id}.json").write_text(record.to_json(), encoding="utf-8")


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as name:
        store = RecordStore(Path(name))
        store.create()
        simulate(store.folder, count)
        # Tables about other tasks than those simulated have a few rows of these.
        for record in (*split_examples(), *audit_examples()):
            store.write(record)
        started = time.perf_counter()
        records, problems = store.load()
        loaded = time.perf_counter()
        assert not problems, problems[:3]
        frame = build_frame(records.values())
        framed = time.perf_counter()
        print(f"load    {loaded - started:7.2f} s  {len(records)} records")
        print(f"frame   {framed - loaded:7.2f} s  {len(frame)} rows")
        for table_name in TABLES.names():
            begun = time.perf_counter()
            table = build_table(table_name, frame)
            assert table is not None
            size = sum(len(convert(table)) for convert in (to_csv, to_markdown, to_latex))
            took = time.perf_counter() - begun
            print(f"  {took:7.2f} s  {table_name}: {len(table.rows)} rows, {size / 1e6:.1f} MB")
        ended = time.perf_counter()
        print(f"tables  {ended - framed:7.2f} s")
        print(f"total   {ended - started:7.2f} s")
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak    {peak_kib / 1024:7.0f} MiB resident")


if __name__ == "__main__":
    main()
