"""The memory profile: a snapshot written by hand, a program counted by hand, and formulas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from profiles import TINY, case_of, rows_of, run, table_of
from ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.profilers.memory import cpu_allocator
from harness.profilers.memory.page import write_page
from harness.profilers.memory.summary import summarise
from harness.profilers.memory.timeline import (
    CATEGORIES,
    ROOT,
    EventSpan,
    KnownTensor,
    Timeline,
    call_sites,
    read_timeline,
    thinned,
)
from harness.render.figure import draw
from harness.store.record import Record

KIB = 1024


def frame(file: str, line: int = 1, name: str = "forward") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


MODEL = [
    frame("/x/site-packages/torch/nn/functional.py", 3, "linear"),
    frame(f"{ROOT}/models/transformer.py", 7),
]
RING = [frame(f"{ROOT}/parallel/context/transports/send_recv.py", 9, "start"), *MODEL]


def entry(action: str, address: int, size: int, time_us: int, frames: Any = ()) -> dict[str, Any]:
    """As torch.cuda.memory._snapshot() of torch 2.11 writes one."""
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": time_us,
        "compile_context": "N/A",
        "segment_pool_id": (0, 0),
        "frames": list(frames),
        "user_metadata": "",
    }


def block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": [],
    }


def by_hand() -> dict[str, Any]:
    """One step on device 1: parameters, an activation, a temporary, a gradient, a buffer."""
    trace = [
        entry("segment_alloc", 0x9000, 2**21, 900),
        entry("alloc", 0x1000, 4 * KIB, 1000, MODEL),  # 0: activation
        entry("alloc", 0x2000, 9 * KIB, 1100, MODEL),  # 1: temporary
        entry("free_requested", 0x2000, 9 * KIB, 1200),  # 2
        # Another stream still uses it: not allocated any more, and not free yet.
        entry("free_completed", 0x2000, 9 * KIB, 1500),
        entry("alloc", 0x3000, 2 * KIB, 2000, RING),  # 3: backward begins
        entry("alloc", 0x4000, 1000, 2100),  # 4: gradient
        entry("free_requested", 0x1000, 4 * KIB, 2200),  # 5
        entry("free_completed", 0x1000, 4 * KIB, 2200),
        entry("free_requested", 0x3000, 2 * KIB, 2300),  # 6
        entry("free_completed", 0x3000, 2 * KIB, 2300),
        # There before the trace began.
        entry("free_requested", 0x5000, 300, 2400),  # 7
        entry("free_completed", 0x5000, 300, 2400),
        entry("snapshot", 0, 0, 2500),
    ]
    segment = {
        "device": 1,
        "address": 0x4000,
        "total_size": 2**21,
        "allocated_size": 1024 + 8192,
        "active_size": 1024 + 8192,
        "requested_size": 1000 + 8000,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            block(0x4000, 1024, 1000, "active_allocated"),
            block(0x4400, 8192, 8000, "active_allocated"),
            block(0x6400, 4096, 0, "inactive"),
        ],
    }
    other = {**segment, "device": 0, "blocks": [block(0x4400, 512, 512, "active_allocated")]}
    return {
        "segments": [other, segment],
        "device_traces": [[], trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


MARKS = [EventSpan(name="forward", start=0, end=3), EventSpan(name="backward", start=3, end=7)]
KNOWN = [
    KnownTensor(category="parameters", name="w", address=0x4400, at=8),
    KnownTensor(category="gradients", name="w.grad", address=0x4000, at=7),
    # At that moment something else lay there.
    KnownTensor(category="gradients", name="v.grad", address=0x1000, at=7),
]


def hand_read() -> Timeline:
    return read_timeline(by_hand(), device=1, marks=MARKS, known=KNOWN)


class TestSnapshot:
    def test_bytes_by_hand(self) -> None:
        series = dict(zip(CATEGORIES, hand_read().series().tolist(), strict=True))
        assert series["parameters"] == [8000] * 9
        assert series["activations"] == [0, *[4 * KIB] * 5, 0, 0, 0]
        assert series["temporaries"] == [0, 0, 9 * KIB, 0, 0, 0, 0, 0, 0]
        assert series["communication"] == [0, 0, 0, 0, 2 * KIB, 2 * KIB, 2 * KIB, 0, 0]
        assert series["gradients"] == [0, 0, 0, 0, 0, 1000, 1000, 1000, 1000]
        assert series["other"] == [300] * 8 + [0]
        assert not any(series["optimizer state"])

    def test_summary_by_hand(self) -> None:
        found = summarise(hand_read(), points=400, largest=10)
        assert found["events"] == 8
        assert found["start_bytes"] == 8300
        assert found["peak_bytes"] == 8300 + 13 * KIB
        assert found["peak_ms"] == 0.1
        assert found["end_bytes"] == 9000 == by_hand()["segments"][1]["requested_size"]
        assert found["saved_bytes"] == 4 * KIB
        assert found["phases"] == [["forward", 0.0, 0.2], ["backward", 1.0, 1.3]]
        assert [item["bytes"] for item in found["largest"]] == [9 * KIB, 8000, 4 * KIB, 300]
        places = ["torch/nn/functional.py:3 linear", "models/transformer.py:7 forward"]
        assert found["largest"][0]["where"] == places
        assert found["largest"][1]["where"] == ["w"]
        assert [item["count"] for item in found["largest"]] == [1] * 4

    def test_what_a_checkpointed_block_makes_again_is_activations(self) -> None:
        trace = [
            entry("alloc", 0x1000, 100, 1),  # in the forward pass of the block: given back
            entry("free_requested", 0x1000, 100, 2),
            entry("alloc", 0x2000, 100, 3),  # again, and kept for its backward pass
            entry("alloc", 0x3000, 10, 4),
            entry("free_requested", 0x2000, 100, 5),
            entry("free_requested", 0x3000, 10, 6),
        ]
        marks = [
            EventSpan(name="forward", start=0, end=2),
            EventSpan(name="checkpointed", start=0, end=2),
            EventSpan(name="backward", start=2, end=6),
            EventSpan(name="checkpointed", start=2, end=3),
        ]
        timeline = read_timeline({"device_traces": [trace]}, marks=marks)
        assert [item.category for item in timeline.allocations] == [
            "temporaries",
            "activations",
            "temporaries",
        ]

    def test_a_device_without_a_trace(self) -> None:
        with pytest.raises(ValueError, match="no trace of device 2"):
            read_timeline(by_hand(), device=2)

    def test_no_place_says_where_this_machine_keeps_its_files(self) -> None:
        frames = [frame("/somewhere/run.py", 2, "main"), frame("/a/b/site-packages/c/d.py", 4)]
        assert call_sites(frames) == ["run.py:2 main", "c/d.py:4 forward"]

    @pytest.mark.parametrize("limit", [1, 2, 7, 50, 5000])
    def test_thinning_keeps_the_peak(self, limit: int) -> None:
        generator = np.random.default_rng(limit)
        for _ in range(20):
            series = generator.integers(0, 10_000, (3, 1000))
            columns = thinned(series, limit)
            assert len(columns) <= max(limit, 5)
            assert series.sum(axis=0)[columns].max() == series.sum(axis=0).max()
            assert (np.diff(columns) > 0).all()


class TestOnACpu:
    def test_a_program_counted_by_hand(self) -> None:
        held = torch.ones(1000, dtype=torch.uint8)

        def step() -> None:
            with torch.profiler.record_function("forward"):
                x = torch.zeros(64 * KIB, dtype=torch.uint8)
                y = x.clone()
                del x
                z = torch.cat([y, y])
                del y, z

        snapshot, marks = cpu_allocator.record(step, ("forward",))
        timeline = read_timeline(snapshot, marks=marks)
        totals = timeline.series().sum(axis=0)
        expected = [0, 64, 128, 64, 192, 128, 0]
        assert (totals - totals[0]).tolist() == [KIB * size for size in expected]
        assert [(mark.name, mark.start, mark.end) for mark in marks] == [("forward", 0, 6)]
        addresses = {item.address for item in timeline.allocations if item.start < 0}
        assert held.untyped_storage().data_ptr() in addresses

    def test_tensors_without_memory_hold_none(self) -> None:
        with FakeTensorMode():
            fake = torch.ones(1000)
        empty = torch.empty(0)
        assert empty.data_ptr() == 0
        snapshot, _ = cpu_allocator.record(lambda: None, ())
        assert fake.numel() == 1000
        assert snapshot["device_traces"] == [[]]
        assert 0 not in {segment["address"] for segment in snapshot["segments"]}

    def test_what_was_there_before_and_went_is_gone_at_the_end(self) -> None:
        held = [torch.ones(5000, dtype=torch.uint8) for _ in range(2)]
        snapshot, _ = cpu_allocator.record(held.pop, ())
        totals = read_timeline(snapshot).series().sum(axis=0)
        # The first of two calls went before the recorded one.
        assert totals[0] - totals[-1] == 5000


CASES = {
    "naive": ("attention=naive",),
    "flash": ("attention=sdpa_flash",),
    "naive bf16": ("attention=naive", "precision=bf16", "model.num_kv_heads=2"),
    "naive, block": ("attention=naive", "checkpoint=block"),
    "flash, selective": ("attention=sdpa_flash", "checkpoint=selective"),
}

SIZE = ("model=tiny", "model.num_layers=2", "seq_len=128", "batch_size=2")
STEPS = ("task.warmup_steps=1", "task.measure_steps=1", "profile=memory")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    folder = tmp_path_factory.mktemp("profiles")
    found = {
        name: run(case_of(*SIZE, *STEPS, *arguments), folder / name)
        for name, arguments in CASES.items()
    }
    case = case_of(*SIZE, *STEPS, "attention=naive", "task.mode=forward")
    found["forward"] = run(case, folder / "forward")
    found["folder"] = folder  # type: ignore[assignment]
    return found


def own_peak(profile: dict[str, Any]) -> int:
    """Without what other tests of this process still hold."""
    peak: int = profile["peak_bytes"] - profile["at_peak"]["other"]
    return peak


class TestPredictions:
    @pytest.mark.parametrize("name", CASES)
    def test_parameters_gradients_and_optimizer_to_the_byte(
        self, records: dict[str, Record], name: str
    ) -> None:
        profile = records[name].notes["memory_profile"]
        predicted = profile["predicted"]
        assert profile["tensor_bytes"] == {
            "parameters": predicted["parameters"],
            "gradients": predicted["gradients"],
            "optimizer state": predicted["optimizer_state"],
        }
        for part in ("parameters", "optimizer state"):
            assert profile["at_peak"][part] == profile["tensor_bytes"][part]

    @pytest.mark.parametrize("name", CASES)
    def test_activations_and_the_peak_within_five_percent(
        self, records: dict[str, Record], name: str
    ) -> None:
        profile = records[name].notes["memory_profile"]
        assert profile["predicted"]["saved"] == pytest.approx(profile["saved_bytes"], rel=0.05)
        whole = sum(records[name].notes["predicted_memory"].values())
        assert whole == pytest.approx(own_peak(profile), rel=0.05)

    def test_the_forward_pass_alone(self, records: dict[str, Record]) -> None:
        profile = records["forward"].notes["memory_profile"]
        assert set(profile["at_peak"]) == {"parameters", "temporaries", "other"}
        whole = sum(records["forward"].notes["predicted_memory"].values())
        assert whole == pytest.approx(own_peak(profile), rel=0.1)

    @pytest.mark.parametrize("name", [*CASES, "forward"])
    def test_sums_and_ends(self, records: dict[str, Record], name: str) -> None:
        profile = records[name].notes["memory_profile"]
        totals = np.array(list(profile["series"].values())).sum(axis=0)
        assert totals.max() == profile["peak_bytes"] == sum(profile["at_peak"].values())
        # A step leaves what it found: parameters, optimizer state, the batch, and a loss.
        assert totals[0] == profile["start_bytes"]
        assert abs(totals[-1] - profile["start_bytes"]) <= 8
        kept = profile["tensor_bytes"]
        kept = kept["parameters"] + kept.get("optimizer state", 0)
        others = profile["series"]["other"][-1]
        assert kept <= totals[-1] - others < kept + 20_000
        # Tokens and targets, int64.
        assert others >= 2 * 8 * 2 * 128
        assert len(profile["times_ms"]) <= 400

    def test_the_gradient_that_is_largest_has_its_name(self, records: dict[str, Record]) -> None:
        found = [
            item["where"][0]
            for item in records["naive, block"].notes["memory_profile"]["largest"]
            if item["category"] == "gradients"
        ]
        assert all(name.endswith(".grad") for name in found)

    def test_those_of_all_layers_are_one_kind(self, records: dict[str, Record]) -> None:
        """Two layers: their scores after the softmax, and each weight's."""
        profiles = [records[name].notes["memory_profile"] for name in ("naive", "forward")]
        for profile, word in zip(profiles, ("explicit_softmax", "blocks.*."), strict=True):
            items = profile["largest"]
            counts = {
                item["count"]
                for item in items
                if any(word in place for place in item["where"])
                and item["category"] in ("activations", "parameters")
            }
            assert counts == {2}
            kinds = [
                (item["bytes"], item["category"], *item["where"]) for item in profile["largest"]
            ]
            assert len(set(kinds)) == len(kinds)


def profile_rank(group: dist.ProcessGroup, case: Case, folder: Path) -> dict[str, Any]:
    bench = Bench(
        device=torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=group.size(),
        vote_group=dist.group.WORLD,
        artifacts=folder,
    )
    case.task.run(case, bench)
    profile: dict[str, Any] = bench.outcome.notes["memory_profile"]
    return profile


class TestOnRanks:
    @pytest.mark.parametrize(
        "strategy",
        [("parallel=fsdp", "parallel.replicate_below=0"), ("parallel=fsdp_torch",)],
        ids=["fsdp", "PyTorch's"],
    )
    def test_of_sharded_weights_each_rank_holds_its_part(
        self, tmp_path: Path, strategy: tuple[str, ...]
    ) -> None:
        """PyTorch's are DTensors, whose own storage has no memory."""
        case = case_of(*SIZE, *STEPS, *strategy, "parallel.dp=4")
        for profile in on_ranks(4, profile_rank, case, tmp_path):
            predicted = profile["predicted"]
            for part, wanted in (
                ("parameters", predicted["parameters"]),
                ("gradients", predicted["gradients"]),
                ("optimizer state", predicted["optimizer_state"]),
            ):
                assert profile["tensor_bytes"][part] == pytest.approx(wanted, rel=0.01)


def test_a_task_without_a_formula_keeps_its_profile(tmp_path: Path) -> None:
    case = case_of(
        *("task=attention", "attention=naive", "task.num_heads=2", "seq_len=64", "batch_size=1"),
        *STEPS,
    )
    record = Record.from_json(run(case, tmp_path).to_json())
    profile = record.notes["memory_profile"]
    assert profile["peak_bytes"] > 0
    assert not {"predicted", "residual_stream_bytes"} & profile.keys()


class TestShown:
    def test_tables(self, records: dict[str, Record]) -> None:
        shown = [records["naive"], records["forward"]]
        peak = {row["mode"]: row for row in rows_of(table_of("peak_memory", *shown))}
        # 2 sequences of 128 tokens, 128 features of 4 bytes.
        assert {row["residual stream (MiB)"] for row in peak.values()} == {"0.125"}
        built = table_of("peak_memory", records["naive"]).rows.iloc[0]
        predicted = sum(records["naive"].notes["predicted_memory"].values())
        assert built["predicted"] == predicted / 2**30
        found = records["naive"].notes["memory_profile"]["peak_bytes"]
        assert built["ratio"] == pytest.approx(predicted / found)
        assert peak["forward"]["activations (GiB) measured"] == "–"  # noqa: RUF001
        parts = rows_of(table_of("memory_parts", *shown))
        exact = {row["part"] for row in parts if row["error (%)"] == "0"}
        assert exact == {"parameters", "gradients", "optimizer state"}
        largest = rows_of(table_of("largest_allocations", *shown))
        assert largest[0]["size (MiB)"] >= largest[-1]["size (MiB)"]
        assert any("models/transformer.py" in row["taken at"] for row in largest)

    def test_figure(self, records: dict[str, Record]) -> None:
        drawn = draw("memory_timeline", build_frame([records["naive"], records["forward"]]))
        assert drawn is not None
        svg = drawn[2].decode()
        for words in ("mode forward", "mode train_step", "activations", "backward", "MiB"):
            assert words in svg

    def test_the_snapshot_stays(self, records: dict[str, Record]) -> None:
        folder: Any = records["folder"]
        import pickle

        path = folder / "naive" / "memory-rank0.snapshot.pickle"
        snapshot = pickle.loads(path.read_bytes())
        kinds = {item["action"] for item in snapshot["device_traces"][0]}
        assert kinds == {"alloc", "free_requested", "free_completed"}
        assert {"address", "total_size", "blocks", "stream"} <= set(snapshot["segments"][0])


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

SCRIPT = """<script>
const said = id => document.getElementById(id).textContent;
const note = (name, text) => { const p = document.createElement("pre"); p.id = "test-" + name;
  p.textContent = text; document.body.appendChild(p); };
note("whole", said("view"));
document.getElementById("in").click(); note("clicked", said("view"));
canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -400, clientX: 600, clientY: 100}));
note("wheeled", said("view")); note("hash", location.hash);
document.getElementById("all").click(); note("again", said("view"));
note("top", canvas.dataset.top);
document.querySelector("#legend span").click(); note("hidden", canvas.dataset.top);
document.querySelector("#rows tr").click();
note("chosen", document.querySelectorAll("tr.chosen").length);
canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: 500, clientY: 200}));
note("tip", document.getElementById("tip").innerText);
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
note("coloured", pixels.filter((v, i) => i % 4 === 3 && v).length);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to look at a page")
class TestPage:
    def browse(self, page: Path) -> str:
        """The page's document after its scripts have run."""
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--window-size=1200,900", "--virtual-time-budget=3000"]
        command += [f"--user-data-dir={page.parent / 'browser'}", page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def test_it_shows_zooms_and_names(self, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        points = write_page(page, hand_read(), "a </script> & more", max_events=7)
        assert points == 5
        text = page.read_text()
        assert not re.search(r"(src|href)=|https?:|import |fetch\(", text)
        page.write_text(text.replace("</body>", SCRIPT + "</body>"))
        seen = self.browse(page)

        def noted(name: str) -> str:
            match = re.search(rf'<pre id="test-{name}">([^<]*)</pre>', seen)
            assert match, name
            return match[1]

        assert "a &lt;/script&gt; &amp; more" in seen
        assert noted("whole") == noted("again") == "0 to 1.4 ms"
        assert noted("clicked") == "0.35 to 1.05 ms"
        low, high = (float(word) for word in noted("wheeled").removesuffix(" ms").split(" to "))
        assert 0.35 < low < high < 1.05
        assert noted("hash").startswith("#zoom=")
        peak = 8300 + 13 * KIB
        assert int(noted("top")) == pytest.approx(peak, abs=2)
        assert int(noted("hidden")) == pytest.approx(peak - 8000, abs=2)
        assert noted("chosen") == "1"
        assert int(noted("coloured")) > 10_000
        assert "KiB" in noted("tip")
        # Thinned, and it says so; the largest allocations with where they came from.
        assert "5 of 9 points are drawn, the peak and the largest" in seen
        # One category is hidden.
        assert "5 of 6 allocations" in seen
        assert "models/transformer.py:7 forward" in seen

    def test_a_link_opens_a_zoomed_page(self, tmp_path: Path) -> None:
        page = tmp_path / "page.html"
        write_page(page, hand_read(), "title", max_events=100)
        text = page.read_text().replace("readHash();", 'location.hash = "zoom=0.2,0.7";readHash();')
        page.write_text(text)
        assert "0.2 to 0.7 ms" in self.browse(page)


@pytest.mark.parametrize("key", ["max_events", "points", "largest"])
def test_limits_are_positive(key: str) -> None:
    with pytest.raises(ValueError, match=f"profile.{key}=0: must be at least 1"):
        case_of(*TINY, "profile=memory", f"profile.{key}=0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("attention", "precision"),
    [
        ("sdpa", "bf16"),
        pytest.param("sdpa", "fp32", marks=pytest.mark.exhaustive),
        pytest.param("naive", "bf16", marks=pytest.mark.exhaustive),
        pytest.param("naive", "fp32", marks=pytest.mark.exhaustive),
    ],
)
def test_on_a_gpu_the_timeline_is_the_allocators(
    attention: str, precision: str, tmp_path: Path
) -> None:
    size = ("model=medium", "seq_len=512", "batch_size=4", f"attention={attention}")
    case = case_of(*size, *STEPS, f"precision={precision}", device="cuda")
    profile = run(case, tmp_path).notes["memory_profile"]
    allocator = profile["allocator"]
    assert profile["events"] == profile["counted_events"]
    assert profile["peak_bytes"] == allocator["peak_requested_bytes"]
    assert profile["end_bytes"] == allocator["end_requested_bytes"]
    assert profile["peak_bytes"] == pytest.approx(allocator["peak_allocated_bytes"], rel=0.01)
    predicted = profile["predicted"]
    assert profile["tensor_bytes"] == {
        "parameters": predicted["parameters"],
        "gradients": predicted["gradients"],
        "optimizer state": predicted["optimizer_state"],
    }
    assert predicted["saved"] == pytest.approx(profile["saved_bytes"], rel=0.05)
    assert json.dumps(profile)
