"""Brings the outcomes of all ranks to each of them, as JSON in tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import msgspec
import torch
import torch.distributed as dist

from harness.bench.outcome import Outcome

OUTCOME_BYTES = 64 << 20
"""The longest outcome of a rank; thousands of passes take a hundredth of it."""

_FIELDS = frozenset(field.name for field in fields(Outcome))


class OutcomeError(ValueError):
    """A rank sent something that is no outcome of it."""


def gather_outcomes(outcome: Outcome, group: dist.ProcessGroup) -> list[Outcome]:
    """The outcome of every rank of a group on the CPU, in rank order; all call it together.

    Raises OutcomeError, and RuntimeError if a rank does not answer.
    """
    data = json.dumps(asdict(outcome)).encode()
    num_ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    lengths_bytes = [int(length) for length in lengths]
    for rank, length in enumerate(lengths_bytes):
        if not 0 < length <= OUTCOME_BYTES:
            raise OutcomeError(f"rank {rank} announced an outcome of {length} bytes")
    longest = max(lengths_bytes)
    padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    return [
        decode_outcome(part[:length].numpy().tobytes(), rank)
        for rank, (part, length) in enumerate(zip(parts, lengths_bytes, strict=True))
    ]


def decode_outcome(data: bytes, rank: int) -> Outcome:
    """A rank's outcome from its JSON; raises OutcomeError."""
    try:
        values = json.loads(data)
        outcome = msgspec.convert(values, Outcome)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise OutcomeError(f"rank {rank} sent no outcome: {error}") from error
    if set(values) != _FIELDS or outcome.rank != rank:
        raise OutcomeError(f"rank {rank} sent the outcome of another")
    return outcome
