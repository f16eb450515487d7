"""Worked answers that the CS336 text prints for its strategies, by their names here."""

from __future__ import annotations

STEP_MS: dict[tuple[str, float | None], float] = {
    ("ddp_naive", None): 935.12,
    ("ddp_flat", None): 940.38,
    ("ddp_overlapped", None): 402.65,
    ("ddp_bucketed", 1.0): 304.76,
    ("ddp_bucketed", 10.0): 299.01,
    ("ddp_bucketed", 100.0): 291.40,
    ("ddp_bucketed", 1000.0): 303.23,
}
"""Milliseconds of a step by strategy and bucket size in MiB; xl, 2 GPUs."""

STEP_SHARE: dict[tuple[str, float | None], float] = {
    ("ddp_naive", None): 0.3076,
    ("ddp_flat", None): 0.3126,
}
"""The part of the step that is communication."""

TEXT_NOTE = (
    "Text: worked answers printed in CS336 assignment 2 for its xl on two GPUs, on other hardware "
    "and with one sequence a GPU."
)

SHARDING_BYTES = {
    "ddp_bucketed": {
        "after_initialisation": 4.05e9,
        "before_optimizer": 8.18e9,
        "after_optimizer": 16.28e9,
    },
    "sharded_optimizer": {
        "after_initialisation": 4.05e9,
        "before_optimizer": 8.18e9,
        "after_optimizer": 12.53e9,
    },
}
"""optimizer_state_sharding_accounting: memory at three moments, without and with sharding."""

SHARDING_STEP_MS = {"ddp_bucketed": 385.96, "sharded_optimizer": 507.20}
