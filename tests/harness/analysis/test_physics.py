"""Numbers that cannot be: each planted once, and none in sound records."""

from __future__ import annotations

import numpy as np
import pytest
from records import make_record
from status_examples import status_examples

from harness.analysis.frame import build_frame
from harness.analysis.physics import MEANINGS
from harness.analysis.stats import latest_rank
from harness.cases import format as fmt
from harness.render.files import to_csv, to_markdown
from harness.render.latex import to_latex
from harness.render.table import build_table
from harness.store.record import Phase, Record

ATTENTION = {"task": "attention", "mode": "forward_backward"}


def reasons(*records: Record, roofs: tuple[Record, ...] = ()) -> dict[str, list[str]]:
    frame = build_frame(records, roofs)
    return dict(zip(frame["phase"], frame["impossible"], strict=True))


def roof_of(tflops: float) -> Record:
    """A record of a matmul at this rate."""
    record = make_record(samples_ms={"copy": [[1.0]], "matmul": [[2.0, 1.0]]}, seed=9)
    record.work["matmul"]["flops"] = tflops * 1e9
    record.work["copy"]["flops"] = None
    return record


class TestRates:
    @pytest.mark.parametrize(("ms", "expected"), [(1.0, []), (0.1, ["peak"])])
    def test_above_the_datasheet(self, ms: float, expected: list[str]) -> None:
        """0.1 TFLOP in 1 and in 0.1 ms, on a device of 989 TFLOP/s."""
        assert reasons(make_record(samples_ms={"forward": [[ms]]})) == {"forward": expected}

    @pytest.mark.parametrize(("tflops", "expected"), [(99.5, []), (98.0, ["roof"]), (101.0, [])])
    def test_above_a_measured_roof(self, tflops: float, expected: list[str]) -> None:
        """100 TFLOP/s; the roof is the fastest pass of a matmul in the same folder."""
        record = make_record(samples_ms={"forward": [[1.0]]})
        assert reasons(record, roofs=(roof_of(tflops), record))["forward"] == expected

    @pytest.mark.parametrize(("tflops", "expected"), [(98.0, []), (95.0, ["roof"])])
    def test_a_roof_of_another_device_is_as_far_off_as_devices_are(
        self, tflops: float, expected: list[str]
    ) -> None:
        record, roof, own = (
            make_record(samples_ms={"forward": [[1.0]]}),
            roof_of(tflops),
            roof_of(98.0),
        )
        for one, host in ((record, "a"), (roof, "b"), (own, "a")):
            one.environment["host"] = host
        assert reasons(record, roofs=(roof,))["forward"] == expected
        # One of its own says more.
        assert reasons(record, roofs=(roof, own))["forward"] == ["roof"]

    @pytest.mark.parametrize("named", ["record", "roof"])
    def test_a_roof_that_names_no_gpu_may_be_of_another(self, named: str) -> None:
        record, roof = make_record(samples_ms={"forward": [[1.0]]}), roof_of(98.0)
        assert reasons(record, roofs=(roof,))["forward"] == ["roof"]
        {"record": record, "roof": roof}[named].environment["gpu_uuids"] = ["GPU-1"]
        assert reasons(record, roofs=(roof,))["forward"] == []
        # Of one boot they are of one host.
        record.environment["boot_id"] = roof.environment["boot_id"] = "b"
        assert reasons(record, roofs=(roof,))["forward"] == ["roof"]
        del record.environment["boot_id"], roof.environment["boot_id"]
        # Both of them do.
        record.environment["gpu_uuids"] = roof.environment["gpu_uuids"] = ["GPU-1"]
        assert reasons(record, roofs=(roof,))["forward"] == ["roof"]

    @pytest.mark.parametrize(
        ("noted", "ms", "expected"),
        [
            # A sixth of the matmul in bfloat16 is 125, of its datasheet 165.
            ("bf16x6", 1.0, []),
            ("bf16x6", 0.7, ["roof"]),
            ("bf16x6", 0.5, ["peak", "roof"]),
            ("tf32", 1.0, ["peak", "roof"]),
            ("ieee", 1.0, ["peak", "roof"]),
            (None, 1.0, ["peak", "roof"]),
        ],
    )
    def test_products_of_parts_run_on_other_units(
        self, noted: str | None, ms: float, expected: list[str]
    ) -> None:
        """0.1 TFLOP, where the datasheet has 67 TFLOP/s for float32."""
        record = make_record(samples_ms={"forward": [[ms]]}, precision="fp32")
        if noted is not None:
            record.notes["float32_precision"] = noted
        full = make_record(
            samples_ms={"copy": [[1.0]], "matmul": [[1.0]]}, seed=9, precision="fp32"
        )
        full.work["matmul"]["flops"], full.work["copy"]["flops"] = 50e9, None
        assert reasons(record, roofs=(full, roof_of(750.0)))["forward"] == expected

    def test_a_roof_of_another_precision_says_nothing(self) -> None:
        record = make_record(samples_ms={"forward": [[1.0]]}, precision="fp16")
        assert reasons(record, roofs=(roof_of(10.0),)) == {"forward": []}

    def test_are_withheld_and_marked(self) -> None:
        table = build_table(
            "attention_summary",
            build_frame([make_record(samples_ms={"forward": [[0.1, 0.1]]}, **ATTENTION)]),
        )
        assert table is not None
        row = dict(zip([column.header for column in table.columns], table.cells()[0], strict=True))
        assert row["forward (ms)"] == f"0.100{fmt.CIRCLED_SLASH}"
        assert "forward (TFLOP/s)" not in row
        assert MEANINGS["peak"] in to_markdown(table)
        assert "peak" in to_csv(table)
        assert r"$\oslash$" in to_latex(table)


class TestParts:
    @pytest.mark.parametrize(("both", "expected"), [(3.0, []), (2.9, []), (2.8, ["parts"])])
    def test_parts_and_whole(self, both: float, expected: list[str]) -> None:
        samples = {"forward": [[1.0]], "backward": [[2.0]], "forward_backward": [[both]]}
        found = reasons(make_record(samples_ms=samples, **ATTENTION))
        assert set(map(tuple, found.values())) == {tuple(expected)}

    def test_scatter_is_not_impossible(self) -> None:
        """In each pass the parts add up to the whole; their medians, 1 + 2 over 2.2, do not.

        Either part is long in a few passes of its own, as on a busy host.
        """
        forward, backward = [1.0, 1.0, 1.0, 0.2, 0.2], [0.3, 2.0, 2.0, 0.3, 2.0]
        both = [one + other for one, other in zip(forward, backward, strict=True)]
        samples = {"forward": [forward], "backward": [backward], "forward_backward": [both]}
        record = make_record(samples_ms=samples, **ATTENTION)
        medians = build_frame([record]).set_index("phase")["median_ms"]
        over = (medians["forward"] + medians["backward"]) / medians["forward_backward"]
        assert over > 1.3
        assert not any(reasons(record).values())

    def test_equal_medians_hide_no_excess(self) -> None:
        """Medians add up, 1 + 2 = 3, but a third of the forward passes take far too long."""
        samples = {
            "forward": [[1.0, 1.0, 4.0]],
            "backward": [[2.0, 2.0, 2.0]],
            "forward_backward": [[3.0, 3.0, 3.0]],
        }
        found = reasons(make_record(samples_ms=samples, **ATTENTION))
        assert found == {phase: ["parts"] for phase in samples}

    def test_noise_of_many_sizes_raises_no_alarm(self) -> None:
        """Two hundred true rows: log-normal parts of 1 to 40%, each the sum of its own pass."""
        random = np.random.default_rng(0)
        records = []
        for seed in range(200):
            noise = random.lognormal(sigma=random.uniform(0.01, 0.4), size=(2, 20))
            forward, backward = noise * [[1.0], [2.5]]
            samples = {
                "forward": [forward.tolist()],
                "backward": [backward.tolist()],
                "forward_backward": [(forward + backward).tolist()],
            }
            records.append(make_record(samples_ms=samples, seed=seed, **ATTENTION))
        assert not build_frame(records)["impossible"].map(bool).any()

    def test_ranks_wait_for_each_other(self) -> None:
        """Rank 1 is late in the forward pass, and rank 0 waits for it in the backward pass."""
        record = make_record(dp=2)
        record.phases = {
            "forward": Phase(clock="cuda_event", samples_ms=[[4.0, 4.0], [27.0, 27.5]]),
            "backward": Phase(clock="cuda_event", samples_ms=[[98.0, 98.0], [75.0, 74.5]]),
            "optimizer": Phase(clock="cuda_event", samples_ms=[[3.0, 3.0], [3.0, 3.0]]),
            "step": Phase(clock="host", samples_ms=[[105.0, 105.0], [105.0, 105.5]]),
        }
        frame = build_frame([record]).set_index("phase")
        assert frame["median_ms"].to_dict() == {
            "forward": 27.25,
            "backward": 74.75,
            "optimizer": 3.0,
            "step": 105.25,
        }
        assert not frame["impossible"].map(bool).any()

    def test_the_latest_rank_is_late_all_along(self) -> None:
        """Of two ranks that end together, the one that computes longer before the wait."""
        assert latest_rank([[[30.0], [31.0]], [[60.0], [50.0]], [[10.0], [19.0]]]) == 0
        assert latest_rank([[[4.0], [27.0]], [[98.0], [75.0]]]) == 1


def test_times_above_zero() -> None:
    assert reasons(make_record(samples_ms={"forward": [[0.0]]}))["forward"][0] == "time"


def test_sound_records_raise_no_alarm() -> None:
    frame = build_frame([record for record in status_examples() if record.status != "wrong"])
    alarms = frame[frame["impossible"].map(bool)]
    assert alarms.empty, alarms[["case_id", "phase", "median_ms", "impossible"]]
