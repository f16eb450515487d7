"""Tables and figures about caches: rates by hand, statuses in words, and what is said of them."""

from __future__ import annotations

import pytest
from profiles import rows_of, table_of
from records import decode_examples, in_rounds, make_decode_record

from harness.analysis.frame import build_frame
from harness.render.figure import build_figure
from harness.render.table import build_table, finding_of
from harness.reports.decoding.step_rows import decoded
from harness.store.record import Record

EXAMPLES = decode_examples()


def test_rates_of_a_step_by_hand() -> None:
    """1 GB in half a millisecond is 2,000 GB/s, half of a copy at 4,000 GB/s."""
    record = make_decode_record("flash_decode", us=500.0, batch_size=4)
    (row,) = rows_of(table_of("decode_latency", record))
    assert (row["step (µs)"], row["GB/s"], row["of the copy (%)"]) == ("500", "2,000", "50.0")
    assert row["tokens/s"] == "8,000"
    assert row["predicted (µs)"] == "250"
    assert row["kernels a layer"] == "6"


@pytest.mark.parametrize(("flops", "share"), [(1e9, 0.5), (4e14, 400e12 / 989.4e12 / 500e-6)])
def test_the_roof_that_binds(flops: float, share: float) -> None:
    """Bytes at 4,000 GB/s take 250 of the 500 µs; many FLOPs take longer than the bytes."""
    record = make_decode_record("mla_absorbed", us=500.0, cache="latent")
    record.work["decode"]["flops"] = flops
    assert decoded(build_frame([record]))["roof_share"].tolist() == pytest.approx([share])


def test_the_roof_is_what_a_matmul_reached() -> None:
    """400 TFLOP at 800 TFLOP/s in the same process take all of the 0.5 s; a peak is a promise."""
    record = make_decode_record("mla_absorbed", us=5e5, cache="latent")
    record.work["decode"]["flops"] = 400e12
    by_datasheet = table_of("decode_latency", record)
    assert "besides, at the datasheet's peak." in by_datasheet.caption
    record.notes["decode"]["matmul_tflops"] = 800.0
    assert decoded(build_frame([record]))["roof_share"].tolist() == pytest.approx([1.0])
    measured = table_of("decode_latency", record)
    assert "at the rate of a large matmul in the same process." in measured.caption
    older = make_decode_record("mla_absorbed", us=5e5, cache="latent", seq_len=128)
    both = table_of("decode_latency", record, older)
    assert "or, of older records, the datasheet's peak." in both.caption


def test_heads_and_rank_are_told_apart() -> None:
    grouped, latent = (
        make_decode_record("auto", us=1.0, cache=cache) for cache in ("paged", "latent")
    )
    found = {row["heads"] for row in rows_of(table_of("decode_latency", grouped, latent))}
    assert found == {"32:8 of 128", "32 of 128, rank 512 + 64"}


def test_the_caption_explains_the_columns_that_are_there() -> None:
    """On a CPU no peak is known, and a small cache is read faster than a large copy."""
    record = make_decode_record("standard", us=500.0)
    assert "roof" in table_of("decode_latency", record).caption
    record.environment["device_name"] = "AMD EPYC"
    record.case["device"] = "cpu"
    built = table_of("decode_latency", record)
    headers = {column.header for column in built.columns}
    assert "of the roof (%)" not in headers
    assert "operators a layer" in headers
    assert "roof" not in built.caption
    assert "Kernels" not in built.caption
    assert "Operators are those that a layer runs." in built.caption
    assert not any("L3" in note for note in built.footnotes)
    fast = make_decode_record("standard", us=5.0)
    built = table_of("decode_latency", fast)
    assert rows_of(built)[0]["of the copy (%)"] == "5,000.0"
    assert any("L3" in note for note in built.footnotes)


def test_a_step_without_result_is_no_speed() -> None:
    records = [
        make_decode_record("standard", us=9.0, status="oom"),
        make_decode_record("sdpa", us=9.0, status="wrong"),
        make_decode_record("flash_decode", us=9.0),
        make_decode_record("flashinfer", us=9.0, status="unsupported", message="not installed"),
    ]
    built = table_of("decode_latency", *records)
    cells = {row["attention"]: row["step (µs)"] for row in rows_of(built)}
    assert cells == {"standard": "OOM", "sdpa": "wrong result", "flash_decode": "9.00"}
    assert built.footnotes[0] == "Not supported here: flashinfer (not installed)."


def test_graphs_are_compared_with_the_same_step() -> None:
    rows = rows_of(table_of("graph_effect", *EXAMPLES))
    found = {row["attention"]: row["speed-up"] for row in rows if row["CUDA graph"] == "yes"}
    assert found == {"standard": "2.00×", "flash_decode": "1.07×"}  # noqa: RUF001
    assert build_table("graph_effect", build_frame([make_decode_record("sdpa", us=1.0)])) is None


def test_breakdown_adds_up() -> None:
    record = next(item for item in EXAMPLES if item.case_id.startswith("decode-standard"))
    rows = rows_of(table_of("fusion_breakdown", record))
    assert [row["part"] for row in rows] == [
        *("rotary_q", "rotary_k", "append", "scores", "all kernels", "whole step, measured"),
    ]
    assert [row["time (µs)"] for row in rows] == ["10.0", "5.00", "15.0", "170", "200", "1,000"]
    assert [row["share (%)"] for row in rows[:4]] == ["5.0", "2.5", "7.5", "85.0"]


def test_small_kernels_of_a_part_stand_together() -> None:
    record = make_decode_record("standard", us=100.0)
    profile = next(item for item in EXAMPLES if "kernel_profile" in item.notes).notes
    rows = [dict(row) for row in profile["kernel_profile"]["rows"]]
    tiny = [rows[0] | {"kernel": f"tiny_{index}", "total_ms": 1e-6} for index in range(3)]
    record.notes["kernel_profile"] = profile["kernel_profile"] | {"rows": [*rows, *tiny]}
    others = [row for row in rows_of(table_of("fusion_breakdown", record)) if "(" in row["kernel"]]
    assert [(row["part"], row["calls"]) for row in others] == [("rotary_q", "3.00")]


def test_memory_that_does_not_fit_says_so() -> None:
    rows = rows_of(table_of("kv_memory", *EXAMPLES))
    fits = {(row["type"], row["seq_len"]): row["fits"] for row in rows}
    assert fits["MHA", "524,288"] == "OOM"
    assert fits["MLA", "524,288"] == fits["MHA", "8,192"] == "yes"
    assert {row["total (GiB)"] for row in rows} == {"16.0", "1,020", "1.12", "72.0"}


def test_packed_prompts_over_padded_ones() -> None:
    rows = rows_of(table_of("varlen_prefill", *EXAMPLES))
    found = {row["batch layout"]: row["over padded"] for row in rows}
    assert found == {"padded ragged": "1.00×", "packed ragged": "2.00×"}  # noqa: RUF001


def test_generated_tokens_by_hand() -> None:
    rows = {row["attention"]: row for row in rows_of(table_of("generate", *EXAMPLES))}
    assert rows["flash_decode"]["generated (tokens/s)"] == "800"
    # 10 GB in 5 ms are 2,000 of 4,000 GB/s.
    assert rows["flash_decode"]["of the copy (%)"] == "50.0"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("decode_latency", "flash_decode is fastest at "),
        ("graph_effect", "standard takes 0.50× of its time as a graph"),  # noqa: RUF001
        ("fusion_breakdown", "4 with standard (200 µs)"),
        ("kv_memory", "14.2× the bytes of a latent with llama3_8b"),  # noqa: RUF001
        ("varlen_prefill", "flash_triton on packed prompts is 2.00× as fast"),  # noqa: RUF001
        ("generate", "flash_decode is fastest"),
    ],
)
def test_findings(name: str, words: str) -> None:
    assert words in finding_of(table_of(name, *map(in_rounds, decode_examples())))


def test_packing_that_is_not_told_is_given_by_medians() -> None:
    assert finding_of(table_of("varlen_prefill", *EXAMPLES)) == (
        "Whether packing pays cannot be told; by medians, packed prompts are 2.00× as fast as "  # noqa: RUF001
        "the fastest padded batch of the same prompts."
    )


FIGURES = (
    *("decode_over_length", "decode_over_batch", "fusion_breakdown", "kv_memory"),
    *("graph_effect", "varlen_prefill", "generate"),
)


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name: str) -> None:
    built = build_figure(name, build_frame(EXAMPLES))
    assert built is not None
    assert built.finding.endswith(".")
    assert "nan" not in built.finding
    assert any(axis.lines or axis.patches for axis in built.figure.get_axes())
    other: list[Record] = []
    assert build_figure(name, build_frame(other)) is None


def test_the_dotted_line_is_the_copy_bandwidth() -> None:
    built = build_figure("decode_over_length", build_frame(EXAMPLES))
    assert built is not None
    lines = {line.get_linestyle(): line for line in built.figure.get_axes()[0].lines}
    assert list(lines[":"].get_xdata()) == [250.0, 250.0]
