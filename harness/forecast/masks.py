"""Attention calls as laws see them: sizes, what of the keys a mask keeps, and what scores cost.

A shape is (batch, query heads, key heads, length, head_dim, reach, score passes). The reach says
what a causal mask keeps besides: 1 is all of it, below 1 a window's share of the length, above 1,
with a prefix, the kept pairs over those of a causal mask. A cap makes two passes over the scores of
one: its tanh is one more function of each score, as the softmax's exponential is. Ones at the end
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.forecast.law import Shape
from kernels import BACKENDS, Attention, AttentionProblem

TILE = 128
"""Queries and keys of a tile: FlashAttention's on current GPUs (arXiv:2407.08608, section 3.1).
Tiles at the ragged edges of a mask are computed whole."""

CAPPED = 2.0
"""Functions of each score with a cap: exp, and tanh."""

SINK_BYTES = {"forward": 12.0, "backward": 28.0}
"""Bytes for each element of o of the pass over it that adds sinks (kernels/sinks.py): o is read,
scaled in float32 and cast; do and o are cast, multiplied and summed."""

SINK_LAUNCHES = {"forward": 6.0, "backward": 8.0}
"""Kernels of that, with those on a number for each row."""

_SIZES = 5


@dataclass(kw_only=True, slots=True, frozen=True)
class Keys:
    """Keys that queries see, in the mean over a call's queries where nothing else is said."""

    longest: float
    """The longest walk of a query along the keys."""
    computed: float
    """Kept by the mask, with what tiles at its second ragged edge have besides."""
    hidden: float
    """That a causal mask alone would keep besides, which a kernel may compute all the same."""


def keys_of(length: float, reach: float) -> Keys:
    """The keys of a mask with a reach; half of them for a causal one."""
    causal = length / 2
    if reach == 1:
        return Keys(longest=length, computed=causal, hidden=0.0)
    if reach > 1:
        return Keys(longest=length, computed=reach * causal, hidden=0.0)
    window = reach * length
    kept = window - window * window / (2 * length)
    return Keys(
        longest=min(length, window + TILE),
        computed=min(causal, kept + TILE / 2 * (1 - reach)),
        hidden=causal - kept,
    )


def attention_shape(problem: AttentionProblem, *, whole: bool = False) -> Shape:
    """The shape of a call that has as many queries as keys, all of its rank's length.

    Keys and values of different widths count by their mean, which gives the forward FLOPs; of 192
    beside 128 columns the backward FLOPs are 4% more.

    Args:
        whole: whether the backend computes every pair, whatever the mask.
    """
    length = problem.kv_len
    width = (problem.head_dim + problem.v_dim) / 2
    sizes = (problem.batch_size, problem.num_heads, problem.num_kv_heads, length, width)
    reach = 1.0
    if problem.window is not None and not whole:
        reach = min(1.0, problem.window / length)
    if problem.prefix_len and not whole:
        causal = length * (length + 1) / 2
        reach = problem.mask.pairs(length, length) / causal
    shape = (*map(float, sizes), reach, CAPPED if problem.softcap is not None else 1.0)
    while len(shape) > _SIZES and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def options_of(shape: Shape) -> set[str]:
    """The options of ``kernels.problem.MASKS`` that a shape has."""
    reach, passes = (*shape[_SIZES:], 1.0, 1.0)[:2]
    found = {"window"} if reach < 1 else {"prefix_len"} if reach > 1 else set()
    return found | ({"softcap"} if passes > 1 else set())


def computes_all(name: str) -> bool:
    """Whether a backend computes whole matrices of scores, of which a mask saves nothing."""
    backend = backend_named(name)
    return backend is not None and backend.keeps_scores(_SMALL)


def backend_named(name: str) -> Attention | None:
    """A backend that attends to whole sequences, with its preset options."""
    if name not in BACKENDS:
        return None
    entry = BACKENDS[name]
    backend = entry.target(name=name, **entry.preset)
    return backend if isinstance(backend, Attention) else None


def why_not(backend: Attention, problem: AttentionProblem) -> str | None:
    """Why a backend has no kernel for a mask on any device, in a few words; else None."""
    taken = backend.takes_here(problem)
    for name in problem.asks_for():
        if name not in taken:
            return f"{backend.name} takes no attention.{name}={getattr(problem, name)}".lower()
    return None


_SMALL = AttentionProblem(
    batch_size=1,
    num_heads=1,
    num_kv_heads=1,
    q_len=128,
    kv_len=128,
    head_dim=64,
    dtype="bfloat16",
    device="cuda",
    causal=True,
    needs_grad=True,
)
