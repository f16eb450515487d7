"""Small measurements of the device's limits, which workers take once and tests over and over."""

from __future__ import annotations

import pytest

from harness.bench.copy_bandwidth import COPY_BYTES, measured_gb_s
from harness.bench.matmul_rate import MATMUL_SIZE, measured_tflops


def shrink_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a small copy and a small product; of 1,024 rows one in fp16 takes a CPU seconds."""
    monkeypatch.setitem(COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(MATMUL_SIZE, "cpu", 64)
    measured_gb_s.cache_clear()
    measured_tflops.cache_clear()
