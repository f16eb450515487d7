"""Peak memory of a case: without what was there before, with what CUDA graphs reserve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.analysis.memory import own_peak_bytes
from harness.bench import peaks
from harness.bench.bench import Bench
from kernels.launching.graphs import GraphedStep

MIB = 2**20


def segment(device: int, pool: tuple[int, int], total: int, allocated: int) -> dict[str, Any]:
    return {
        "device": device,
        "segment_pool_id": pool,
        "total_size": total,
        "allocated_size": allocated,
    }


def test_idle_bytes_are_those_of_graphs_on_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        segment(0, (0, 0), 100, 10),
        segment(0, (0, 1), 40, 15),
        segment(0, (7, 0), 3, 3),
        segment(1, (0, 2), 1000, 0),
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert peaks.idle_graph_bytes(torch.device("cuda", 0)) == 25
    assert peaks.idle_graph_bytes(torch.device("cuda", 1)) == 1000


class TestOwnPeak:
    def test_before_the_case_and_in_graphs(self) -> None:
        rank = {"peak_allocated_bytes": 10, "baseline_allocated_bytes": 3, "idle_graph_bytes": 5}
        assert own_peak_bytes(rank) == 10 - 3 + 5

    def test_records_without_a_baseline(self) -> None:
        assert own_peak_bytes({"peak_allocated_bytes": 10}) == 10
        assert own_peak_bytes({"peak_rss_bytes": 4, "baseline_rss_bytes": 3}) == 4
        assert own_peak_bytes({}) is None


def peak_of(step: Any, *, check: Any = lambda: None) -> dict[str, Any]:
    """Memory of a bench's passes of ``step``, after ``check``."""
    bench = Bench(device=torch.device("cuda"))
    check()
    bench.release_memory()
    bench.measure(lambda timer: step(), warmup=2, passes=2, flush_cache=True)
    return bench.outcome.memory


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_only_what_the_case_allocates(self) -> None:
        """A first matmul, which makes cuBLAS's workspace, a check, and other cases before it."""

        def step() -> None:
            x = torch.ones(4 * MIB, device="cuda", requires_grad=True)
            y = x.view(2048, 2048)
            (y @ y).sum().backward()

        def check() -> None:
            held = torch.ones(64 * MIB, device="cuda", dtype=torch.float64).view(-1, 8192)
            held @ held.mT

        alone = own_peak_bytes(peak_of(step))
        assert alone is not None
        # x, the product, and their gradients; all of 16 MiB.
        assert 3 * 16 * MIB <= alone <= 6 * 16 * MIB
        kept = torch.ones(32 * MIB, device="cuda")
        assert own_peak_bytes(peak_of(step, check=check)) == pytest.approx(alone, abs=MIB)
        del kept

    def test_workspaces_are_made_once(self) -> None:
        device = torch.device("cuda")
        first = peaks.start_afresh(device)
        x = torch.ones(64, 64, device=device, requires_grad=True)
        (x @ x).sum().backward()
        del x
        # Workspaces have 32 MiB on Hopper. Autograd's thread may free the gradient of the sum late.
        assert peaks.start_afresh(device) == pytest.approx(first, abs=MIB)

    def test_a_graphs_pool_counts(self) -> None:
        bench = Bench(device=torch.device("cuda"))
        bench.release_memory()
        x = torch.ones(16 * MIB, device="cuda")

        def work(x: torch.Tensor) -> torch.Tensor:
            return (x * 2 + x).sum()

        steps = [GraphedStep(work, x)]
        bench.measure(lambda timer: steps[0](x), warmup=1, passes=2)
        own = own_peak_bytes(bench.outcome.memory)
        assert own is not None
        # x, the graph's copy of it, and two temporaries.
        assert own == pytest.approx(4 * 64 * MIB, abs=4 * MIB)
        assert bench.outcome.memory["idle_graph_bytes"] >= 2 * 64 * MIB
        steps.clear()
        again = Bench(device=torch.device("cuda"))
        again.release_memory()
        again.note_memory()
        assert "idle_graph_bytes" not in again.outcome.memory
