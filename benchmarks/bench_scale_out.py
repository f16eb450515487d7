"""Forecasts beside published training on several hosts, and of one model on 8 to 4,096 GPUs.

python -m benchmarks.bench_scale_out
"""

from __future__ import annotations

from statistics import median

from harness import forecast
from harness.forecast.published import comparisons, scaled_case

SHARDED = {
    "attention": {"name": "sdpa"},
    "parallel": {"name": "fsdp", "compute_dtype": "bfloat16"},
}


def main() -> None:
    rows = comparisons(SHARDED)
    print(f"{'':16}{'GPUs':>6}{'published':>11}{'unaided':>9}{'predicted':>11}", end="")
    print(f"{'ratio':>7}  90% interval")
    for row in sorted(rows, key=lambda row: -abs(row.ratio - 1)):
        mark = "" if row.covered else "  outside"
        print(
            f"{row.name:16}{row.gpus:6}{row.published:11,.0f}{row.unaided:9,.0f}"
            f"{row.predicted:11,.0f}"
            f"{row.ratio:7.2f}  [{row.low:,.0f}, {row.high:,.0f}]{mark}  {row.source}"
        )
    plain = [abs(row.unaided / row.published - 1) for row in rows]
    print(
        f"without their figures on one host: {sum(error <= 0.15 for error in plain)} of {len(rows)}"
        f" within 15%, median {median(plain):.1%}, worst {max(plain):.0%}"
    )
    errors = [abs(row.ratio - 1) for row in rows]
    print(
        f"tokens a second on each GPU: {sum(error <= 0.15 for error in errors)} of {len(rows)} "
        f"within 15%, median {median(errors):.1%}, worst {max(errors):.0%}; "
        f"{sum(row.covered for row in rows)} in their interval"
    )
    print("\nLlama 3 8B, 1 x 8,192 tokens a GPU, on H200s")
    machine = forecast.machine("h200")
    for gpus in (8, 64, 512, 4096):
        found = machine.step(scaled_case(SHARDED, gpus))
        print(
            f"{gpus:6} GPUs {found.median_ms:8.0f} ms [{found.low_ms:.0f}, {found.high_ms:.0f}]"
            f" {found.tokens_per_s / gpus:8,.0f} tokens/s a GPU"
        )


if __name__ == "__main__":
    main()
