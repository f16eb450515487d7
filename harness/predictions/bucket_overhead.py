"""The time that data parallelism adds to a step when gradients travel in buckets: model and fit.

CS336 assignment 2, problem ddp_bucketed_benchmarking (b): where computing a bucket's gradients
takes as long as communicating them, all but the last bucket's transfer hides, and each of the
n_b calls costs o seconds, so that s bytes at an algorithm bandwidth of w bytes a second add

    n_b o + s / (n_b w)

which is least for n_b = sqrt(s / (w o)) buckets of sqrt(s w o) bytes.

Where computing takes longer than communicating, overheads hide as transfers do. The queue says so:
a bucket leaves once its gradients are there and the one before it has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, frozen=True)
class LinkModel:
    """The time of one all-reduce: t = o + size / w."""

    overhead_s: float
    """o, of each call."""
    bytes_per_s: float
    """w, the algorithm bandwidth of large ones."""

    def seconds(self, num_bytes: float) -> float:
        """Time of one all-reduce."""
        return self.overhead_s + num_bytes / self.bytes_per_s

    def added_seconds(self, num_bytes: float, num_buckets: float) -> float:
        """Time added to a step: all calls, and the last bucket's transfer, which nothing hides."""
        return num_buckets * self.overhead_s + num_bytes / (num_buckets * self.bytes_per_s)

    def queued_seconds(self, buckets_bytes: Sequence[float], backward_s: float) -> float:
        """Time after a backward pass until the last bucket has arrived, the first's first.

        The pass is taken to make bytes of gradients at a constant rate. Without buckets it is 0.
        """
        total, made, arrived = sum(buckets_bytes), 0.0, 0.0
        for size in buckets_bytes:
            made += size
            ready = backward_s * made / total
            arrived = max(arrived, ready) + self.seconds(size)
        return max(0.0, arrived - backward_s)

    def best_bucket_bytes(self, num_bytes: float) -> float:
        """The bucket size that adds the least time, at most ``num_bytes``."""
        return min(num_bytes, math.sqrt(num_bytes * self.bytes_per_s * self.overhead_s))


def fit_link(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> LinkModel | None:
    """o and w that fit measured all-reduces best, by least squares of relative errors.

    Relative, since times span decades: by absolute ones the largest size would decide alone,
    and it says nothing of o. None where fewer than two sizes were measured, or where times do
    not grow with size. A negative o, which is noise, is 0, and w is fitted alone then.
    """
    points = [(size, t) for size, t in zip(sizes_bytes, seconds, strict=True) if t > 0]
    if len({size for size, _ in points}) < 2:
        return None
    # Minimise the sum of ((o + c size) / t - 1)^2 over o and c = 1 / w.
    aa = sum(1 / t**2 for _, t in points)
    ab = sum(size / t**2 for size, t in points)
    bb = sum(size**2 / t**2 for size, t in points)
    a = sum(1 / t for _, t in points)
    b = sum(size / t for size, t in points)
    determinant = aa * bb - ab**2
    overhead = (a * bb - b * ab) / determinant
    per_byte = (b * aa - a * ab) / determinant
    if overhead < 0:
        overhead, per_byte = 0.0, b / bb
    if per_byte <= 0:
        return None
    return LinkModel(overhead_s=overhead, bytes_per_s=1 / per_byte)
