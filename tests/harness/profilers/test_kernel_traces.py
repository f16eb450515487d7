"""Traces and Nsight databases written by hand, read into rows of kernels."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_traces import BY_HAND, PHASES, write_trace
from profiles import TINY, case_of
from ranks import on_ranks
from torch import distributed as dist

from harness.bench.bench import Bench
from harness.bench.outcome import PeerFailed
from harness.profilers.kernels import nsight
from harness.profilers.kernels.chrome_trace import read_chrome_trace, trace_events
from harness.profilers.kernels.nsight_export import read_nsight_export
from harness.profilers.kernels.summary import summarise
from harness.profilers.module_ranges import RANGES
from harness.run.workers.worker import why_unsupported

RUN_ON_A_CPU = """
from contextlib import nullcontext
import torch
from harness.profilers.kernels import nsight_child

job = json.load(open(sys.argv[-1]))
entered = []
def note(name):
    entered.append(name)
    return nullcontext()
def stop():
    steps = entered.count('step') + entered.count('warm-up')
    open(HERE + '/steps', 'a').write(json.dumps([job['rank'], 'captured', steps]) + '\\n')
torch.cuda.nvtx.range = note
torch.autograd.profiler.emit_nvtx = nullcontext
torch.cuda.profiler.start = lambda: None
torch.cuda.profiler.stop = stop
nsight_child.main(sys.argv[-1:])
"""
"""What the stand-in for nsys does instead of watching a process: it runs the program itself."""


def stand_in(folder: Path, ready: Path, profile: str) -> None:
    """Write a program ``nsys`` that notes its arguments.

    Args:
        ready: the file that ``nsys export`` copies to its output.
        profile: Python code that ``nsys profile`` runs.
    """
    program = folder / "nsys"
    program.write_text(
        f"#!{sys.executable}\nimport json, shutil, sys, time\nHERE = {str(folder)!r}\n"
        "open(HERE + '/calls', 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if sys.argv[1] == 'export':\n"
        "    out = [a for a in sys.argv if a.startswith('--output=')][0][9:]\n"
        f"    shutil.copy({str(ready)!r}, out)\n"
        f"else:\n    exec({profile!r})\n"
    )
    program.chmod(0o755)


def profile_under_nsys(group: dist.ProcessGroup, folder: str) -> Any:
    """A rank's notes of the kernels, or its error, with a stand-in for nsys from the folder."""
    case = case_of(*TINY, "profile=nsys", "parallel=ddp_bucketed")
    bench = Bench(
        device=torch.device("cpu"),
        rank=dist.get_rank(group),
        world_size=group.size(),
        vote_group=group,
        artifacts=Path(folder) / "kept",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        try:
            case.profile.after(case, bench)  # type: ignore[union-attr]
        except PeerFailed as error:
            return f"PeerFailed: {error}"
        except RuntimeError as error:
            with contextlib.suppress(PeerFailed):
                bench.vote("failed")
            return f"RuntimeError: {error}"
    return bench.outcome.notes["kernel_profile"]


def by_place(summary: dict[str, Any]) -> dict[tuple[Any, ...], tuple[float, float]]:
    return {
        (row["phase"], row["range"], row["category"], row["recomputed"]): (
            row["calls"],
            row["total_ms"],
        )
        for row in summary["rows"]
    }


EXPECTED = {
    ("forward", "block/attention", "matmul", False): (2, 0.07),
    ("forward", "block/attention/softmax", "softmax", False): (1, 0.01),
    ("backward", "block/attention", "matmul", False): (1, 0.08),
    ("backward", "block/attention", "matmul", True): (1, 0.02),
    ("backward", "", "communication", False): (1, 0.04),
    ("optimizer", "", "optimizer", False): (1, 0.05),
}


class TestTrace:
    @pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
    def test_phases_and_ranges_by_hand(self, tmp_path: Path, name: str) -> None:
        summary = summarise(read_chrome_trace(write_trace(tmp_path / name), PHASES), "torch")
        found = by_place(summary)
        assert found.keys() == EXPECTED.keys()
        for key, (calls, total) in EXPECTED.items():
            assert found[key] == (calls, pytest.approx(total)), key
        assert (summary["unit"], summary["steps"]) == ("kernel", 1)
        step = summary["phases"]["step"]
        # From 230 to 420 and 450 to 500 something runs; the two streams overlap from 380 to 410.
        assert step == {
            "kernel_ms": pytest.approx(0.27),
            "launches": 7,
            "busy_ms": pytest.approx(0.24),
            "wall_ms": pytest.approx(0.5),
        }
        # The device is at the forward pass until 310, a hundred longer than the host.
        walls = {name: phase["wall_ms"] for name, phase in summary["phases"].items()}
        assert walls == {
            "forward": pytest.approx(0.2),
            "backward": pytest.approx(0.11),
            "optimizer": pytest.approx(0.07),
            "step": pytest.approx(0.5),
        }
        assert summary["phases"]["forward"]["launches"] == 3

    def test_flops_and_bytes_are_the_operators(self, tmp_path: Path) -> None:
        summary = summarise(read_chrome_trace(write_trace(tmp_path / "t.json"), PHASES), "torch")
        (row,) = [row for row in summary["rows"] if row["recomputed"]]
        assert row["flops"] == 2 * 8 * 16 * 4
        assert row["bytes"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)

    def test_without_a_step(self, tmp_path: Path) -> None:
        events = [event for event in BY_HAND if event["name"] != "step"]
        with pytest.raises(ValueError, match="no range called step"):
            summarise(read_chrome_trace(write_trace(tmp_path / "t.json", events), PHASES), "torch")

    @pytest.mark.parametrize("end", ["", ',\n{"ph": "X", "cat": "kern'])
    def test_a_trace_that_ends_early(self, tmp_path: Path, end: str) -> None:
        path = write_trace(tmp_path / "cut.json", end=end)
        with pytest.raises(ValueError, match=r"cut\.json: not a whole Chrome trace"):
            list(trace_events(path))

    def test_memory_is_a_part_of_the_file(self, tmp_path: Path) -> None:
        """Bytes per event, of which torch.profiler writes 300 to 500, hold for any size."""
        peaks = []
        for repeats in (200, 600):
            shifted = (
                {**event, "ts": event["ts"] + 2000 * index} | _renumbered(event, index)
                for index in range(repeats)
                for event in BY_HAND
            )
            path = write_trace(tmp_path / f"{repeats}.json", list(shifted))
            tracemalloc.start()
            summary = summarise(read_chrome_trace(path, PHASES), "torch")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert summary["steps"] == repeats
            assert summary["phases"]["step"]["launches"] == 7
        assert (peaks[1] - peaks[0]) / (400 * len(BY_HAND)) < 100
        # It is decoded a chunk at a time.
        assert peaks[1] < 8 * 2**20


def _renumbered(event: dict[str, Any], index: int) -> dict[str, Any]:
    if event["cat"] == "fwdbwd":
        return {"id": event["id"] + 100 * index}
    if "correlation" in event.get("args", {}):
        number = event["args"]["correlation"] + 100 * index
        return {"args": {**event["args"], "correlation": number}}
    return {}


class TestNsys:
    def export(self, path: Path) -> Path:
        """The same program as Nsight Systems exports it, in nanoseconds."""
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start INTEGER, end INTEGER, correlationId INTEGER, demangledName INTEGER)"
        )
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
            "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)"
        )
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, "
            "text TEXT, textId INTEGER, globalTid INTEGER)"
        )
        strings: dict[str, int] = {}
        sequences = {115.0: 5, 230.0: 5, 232.0: 5}
        for event in BY_HAND:
            times = (int(1e3 * event["ts"]), int(1e3 * (event["ts"] + event.get("dur", 0))))
            name, kind = event["name"], event["cat"]
            number = event.get("args", {}).get("correlation")
            if kind in ("kernel", "cuda_runtime"):
                strings.setdefault(name, len(strings))
                table = "KERNEL" if kind == "kernel" else "RUNTIME"
                last = (number, strings[name]) if kind == "kernel" else (event["tid"], number)
                database.execute(
                    f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES (?, ?, ?, ?)", (*times, *last)
                )
            elif kind in ("cpu_op", "user_annotation") and not name.startswith("ProfilerStep"):
                if kind == "cpu_op":
                    name += f", seq = {sequences.get(float(event['ts']), 99)}, op_id = 3"
                    name = name.replace(", seq = 99", "")
                # Registered strings are known by number, others are spelled out.
                text, place = (name, None) if len(name) % 2 else (None, 1000 + len(strings))
                if place is not None:
                    strings[f"#{len(strings)}"] = place
                    database.execute("INSERT INTO StringIds VALUES (?, ?)", (place, name))
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)",
                    (*times, text, place, event["tid"]),
                )
        known = [(n, name) for name, n in strings.items() if not name.startswith("#")]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", known)
        database.commit()
        database.close()
        return path

    def test_the_same_table_as_from_torch(self, tmp_path: Path) -> None:
        trace = read_nsight_export(self.export(tmp_path / "x.sqlite"), PHASES, RANGES)
        found = by_place(summarise(trace, "nsys"))
        assert found.keys() == EXPECTED.keys()
        for key, (calls, total) in EXPECTED.items():
            assert found[key] == (calls, pytest.approx(total)), key

    def test_what_is_no_export(self, tmp_path: Path) -> None:
        path = tmp_path / "x.sqlite"
        path.write_text("no database at all, and long enough to see that")
        with pytest.raises(ValueError, match=r"x\.sqlite: not an export of Nsight Systems"):
            read_nsight_export(path, PHASES, RANGES)
        sqlite3.connect(tmp_path / "empty.sqlite").close()
        with pytest.raises(ValueError, match="no kernel was captured"):
            read_nsight_export(tmp_path / "empty.sqlite", PHASES, RANGES)

    def test_it_runs_the_case_under_nsys_and_reads_what_that_wrote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a program in place of nsys that notes how it was called."""
        stand_in(tmp_path, self.export(tmp_path / "ready.sqlite"), "pass")
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        case = case_of(*TINY, "profile=nsys")
        bench = Bench(device=torch.device("cpu"), artifacts=tmp_path / "kept")
        case.profile.after(case, bench)  # type: ignore[union-attr]
        assert bench.outcome.notes["kernel_profile"]["tool"] == "nsys"
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        assert [call[0] for call in calls] == ["profile", "export"]
        assert "--capture-range=cudaProfilerApi" in calls[0]
        assert calls[0][-2] == "harness.profilers.kernels.nsight_child"
        stand_in(tmp_path, tmp_path / "ready.sqlite", "sys.exit('no permission')")
        with pytest.raises(RuntimeError, match="nsys profile ended with code 1: no permission"):
            case.profile.after(case, bench)  # type: ignore[union-attr]

    def test_every_rank_runs_its_part_of_the_case_under_an_nsys_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The program that nsys watches runs, on gloo, without a CUDA device to capture."""
        stand_in(tmp_path, self.export(tmp_path / "ready.sqlite"), RUN_ON_A_CPU)
        first, second = on_ranks(2, profile_under_nsys, str(tmp_path))
        assert first == second
        assert (first["tool"], first["ranks"], len(first["kernel_ms_by_rank"])) == ("nsys", 2, 2)
        once = summarise(read_nsight_export(tmp_path / "ready.sqlite", PHASES, RANGES), "nsys")
        assert [row["calls"] for row in first["rows"]] == [2 * row["calls"] for row in once["rows"]]
        steps = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
        # One more to warm up, and both ranks end with the mean of their gradients.
        assert sorted(steps) == [[rank, "captured", 3] for rank in range(2)]
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        outputs = {
            Path(word.split("=")[1]).name for call in calls for word in call if "output=" in word
        }
        assert outputs == {
            f"kernels-rank{r}.{end}" for r in range(2) for end in ("nsys-rep", "sqlite")
        }
        assert not list((tmp_path / "kept").iterdir())

    def test_a_rank_that_fails_does_not_leave_the_others_waiting(self, tmp_path: Path) -> None:
        action = "'rank1.nsys' in ' '.join(sys.argv) and sys.exit('no space'); time.sleep(300)"
        stand_in(tmp_path, tmp_path / "none", action)
        began = time.monotonic()
        first, second = on_ranks(2, profile_under_nsys, str(tmp_path))
        assert first == "PeerFailed: another rank voted failed"
        assert second == "RuntimeError: nsys profile ended with code 1: no space"
        assert time.monotonic() - began < 60

    def test_the_reason_where_it_cannot_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = case_of(*TINY, "profile=nsys")
        assert "profile=torch works on a CPU" in str(why_unsupported(case))
        monkeypatch.setattr(nsight.shutil, "which", lambda name: None)
        case.device = "cuda"
        assert "nsys is not on the PATH" in str(why_unsupported(case))
