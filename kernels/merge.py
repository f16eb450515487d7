"""Merges attention over two sets of keys by their log-sum-exp, in float32."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """o, new_o [..., S, D] and lse, new_lse [..., S] -> float32 (o, lse) over both.

    Each part is normalised by its own lse; its share of the whole is exp(its lse - the whole's).
    Rows without any key in a part (lse minus infinity) take the other part as it is. A float32
    ``o`` is overwritten with the result, since a ring merges as often as it has ranks.
    """
    if o.is_cuda and find_spec("triton") is not None and not torch.compiler.is_compiling():
        # Triton is optional.
        from kernels import merge_kernel

        if merge_kernel.takes(o, new_o):
            with torch.cuda.device(o.device):
                return merge_kernel.merge(o, lse, new_o, new_lse)
    merged_lse = torch.logaddexp(lse, new_lse)
    # logaddexp(-inf, -inf) is -inf, and -inf - -inf is not a number.
    reference = merged_lse.masked_fill(merged_lse == -torch.inf, 0.0)
    share = (lse - reference).exp().unsqueeze(-1)
    new_share = (new_lse - reference).exp().unsqueeze(-1)
    return o.float().mul_(share).addcmul_(new_o, new_share), merged_lse
