"""How large an error may be: a factor on what a careful computation in the same dtype reaches.

The careful computation is that of FlashAttention: operations in float32 on inputs of the dtype, and
the probabilities, their gradients and the results rounded to it (FlashAttention-2, section 3.1). It
is carried out on rows of the very problem, and its errors against float64 are the measure of those
of a kernel. A backend that says that it rounds scores, such as an explicit softmax whose matrices
are in bfloat16, is held to a computation that rounds them as well. A tanh that caps scores has 11
bits beside narrow formats, since kernels take the device's own (``tanh.approx.f32``, of
which the PTX ISA says that its relative error is up to 2^-11). Kernels reach up to twice as
much (sums of gradients in bfloat16), and those of sums in float32 have an order of their own.

A factor of the results of a whole head shows more sharply, since roundings cancel in it: it may be
off by half of the relative error's tolerance (a sound kernel in bfloat16 reached 0.34 on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harness.gate.scoring import Arithmetic

ROUNDOFF = {
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
"""The largest relative error of rounding to each format, to nearest."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Format:
    """A number format of results, and what follows from it for the gate."""

    name: str
    """``float32``, ``tf32``, ``bfloat16`` or ``float16``."""
    dtype: torch.dtype

    @property
    def roundoff(self) -> float:
        return ROUNDOFF[self.name]

    def careful(self, *, rounds_scores: bool) -> Arithmetic:
        """Operations in float32, rounded to this dtype where kernels store their results in it."""
        narrow = self.dtype != torch.float32
        return Arithmetic(
            dtype=torch.float32,
            rounds_to=self.dtype if narrow else None,
            rounds_scores=narrow and rounds_scores,
            rounds_tanh=narrow,
        )

    @property
    def factor(self) -> float:
        """Between what is reached and what is tolerated.

        In float32 and TF32 most of the error is that of sums, whose order is a kernel's own, and
        of its exponential: sums over 32,768 queries reached up to 8.7 times on an H200.
        """
        return 16.0 if self.dtype == torch.float32 else 3.0

    @property
    def shared_factor(self) -> float:
        """The same for errors that many elements share, which sums of them do not average out.

        In float32 those of a sum's order and of an exponential are alike in all of a row (8,192
        tokens of 32 heads on an H200: sums of whole heads off by 16 times what independent errors
        of the careful computation give); roundings to narrow formats are independent.
        """
        return self.factor if self.name == "float32" else 1.0

    @property
    def least(self) -> float:
        """A relative error that every result has, where the careful computation has none.

        Rounding a result to nearest gives a root mean square of 0.42 of the roundoff, and a second
        rounding within as much; a sum in float32 over some keys a few roundoffs.
        """
        return 4 * self.roundoff if self.name == "float32" else 0.6 * self.roundoff

    def least_of_sum(self, num_terms: int) -> float:
        """The same for sums of so many terms.

        A kernel in float32 may add them one after another. Terms of either sign then err by some
        0.35 sqrt(n) roundoffs, root mean square, since each addition rounds a partial sum; 32,768
        queries on an H200 gave 0.48 sqrt(n). Times ``factor``, sqrt(n) roundoffs are tolerated.
        """
        if self.name != "float32":
            return self.least
        return max(self.least, self.roundoff * num_terms**0.5 / self.factor)


def format_of(peak: str) -> Format:
    """The format of a precision's matrix products, as :mod:`harness.cases.precision` names it."""
    return Format(name=peak, dtype=torch.float32 if peak == "tf32" else getattr(torch, peak))
