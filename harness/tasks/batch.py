"""Random tokens for a training step: this rank's part of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.cases.case import Case
from models.transformer import NO_TARGET
from parallel.context.blocks.layouts import Layout


@dataclass(kw_only=True, slots=True, frozen=True)
class Batch:
    """Inputs of the model and targets of its loss."""

    tokens: Tensor
    """int64 [B, S]: S tokens of each sequence on this rank."""
    targets: Tensor
    """int64 [B, S]; NO_TARGET for padding."""
    positions: Tensor
    """int64 [S]: positions of the tokens in their sequence."""
    num_targets: float | None = None
    """Divisor of a part's loss, such that the mean over parts is the loss of the whole."""


def whole_batch(case: Case, device: torch.device, rank: int) -> Batch:
    """Whole sequences, different ones on each rank."""
    torch.manual_seed(case.seed + 1 + rank)
    assert case.model is not None, "train_step uses a model"
    shape = (case.batch_size, case.seq_len)
    return Batch(
        tokens=torch.randint(case.model.vocab_size, shape, device=device),
        targets=torch.randint(case.model.vocab_size, shape, device=device),
        positions=torch.arange(case.seq_len, device=device),
    )


def split_batch(case: Case, device: torch.device, rank: int, layout: Layout) -> Batch:
    """This rank's part of the sequences that ``layout.num_ranks`` consecutive ranks share."""
    dp_rank, cp_rank = divmod(rank, layout.num_ranks)
    whole = whole_batch(case, device, dp_rank)
    return Batch(
        tokens=layout.shard(whole.tokens, cp_rank, dim=1),
        targets=layout.shard(whole.targets, cp_rank, dim=1, fill=NO_TARGET),
        positions=layout.positions(cp_rank, case.seq_len, device),
        num_targets=whole.targets.numel() / layout.num_ranks,
    )
