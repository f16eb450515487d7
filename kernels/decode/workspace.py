"""Memory for partial results, and the counters that tell who finishes a line last.

Counters are zero between launches, and launches on one stream follow each other, so that each
stream needs them once. A captured CUDA graph may be replayed on any stream, beside others: each
call that is captured gets counters of its own, from a reserve that is zeroed beforehand. With
the reserve used up, or never made since nothing ran before the capture, the graph zeroes its
counters itself, which costs it one more node.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RESERVE = 2**18
_SMALLEST = 2**10

_by_stream: dict[tuple[int, int], Tensor] = {}
_reserves: dict[int, Tensor] = {}


def counters(count: int, device: torch.device) -> Tensor:
    """int32 zeros, at least ``count``, that no launch beside this one uses."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _reserved(count, device)
    key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    found = _by_stream.get(key)
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, _SMALLEST), dtype=torch.int32, device=device)
        _by_stream[key] = found
    if device.index not in _reserves:
        _reserves[device.index] = torch.zeros(_RESERVE, dtype=torch.int32, device=device)
    return found


def _reserved(count: int, device: torch.device) -> Tensor:
    reserve = _reserves.get(device.index)
    if reserve is None or reserve.numel() < count:
        return torch.zeros(count, dtype=torch.int32, device=device)
    _reserves[device.index] = reserve[count:]
    return reserve[:count]


def pieces(num_programs: int, block_m: int, block_d: int, device: torch.device) -> Tensor:
    """Two slots for each program: [block_m, block_d] float32, and two numbers for each row."""
    values = 2 * num_programs * block_m * (block_d + 2)
    return torch.empty(values, dtype=torch.float32, device=device)
