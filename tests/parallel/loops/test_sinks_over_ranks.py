"""Sinks, one small parameter a layer, under strategies that share gradients or parameters."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from strategy_training import case_of, train_case, train_case_on_rank

MASKS = ("attention.sinks=true", "attention.window=5", "model.full_attention_every=2")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp_bucketed", ()),
        ("ddp_overlapped", ()),
        ("zero_2", ()),
        ("fsdp", ("parallel.replicate_below=0",)),
        ("fsdp_torch", ()),
    ],
)
def test_trained_as_in_one_process(name: str, options: tuple[str, ...]) -> None:
    """Steps of AdamW on the batches of four ranks; every rank ends with the same sinks."""
    case = case_of(f"parallel={name}", "parallel.dp=4", *options, *MASKS)
    wanted = train_case(case_of(*MASKS), 0, 4)
    assert [tuple(x.shape) for x in wanted].count((4,)) == 2
    for found in on_ranks(4, train_case_on_rank, case):
        for got, want in zip(found, wanted, strict=True):
            assert want.abs().max() > 1e-3
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
