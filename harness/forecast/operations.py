"""The kernels of a training step of :mod:`models.transformer` on one rank, with their shapes.

Bytes of kernels that are bound by memory are nominal, those that PyTorch's kernels read and write
one after the other; what caches save of them is in the measured rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from harness.cases.case import Case
from harness.cases.precision import DTYPE_BYTES
from harness.forecast.law import Shape

OPTIMIZER_BYTES = 7
"""Tensors of a parameter's size that a fused AdamW reads (4) and writes (3)."""

PARAMETERS_A_LAUNCH = 26e6
"""Parameters that one launch of the fused optimizer takes, about: 9 to 166 launches for 0.1 to
3.4 billion in the kernel profiles."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Operation:
    """Kernels of one kind: ``count`` times those of one shape."""

    part: str
    """The part of the step in breakdowns."""
    law: str
    """The law of their time, by its name in a calibration."""
    shape: Shape
    count: float
    launches: float
    """Kernel launches of one of ``count``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """What decides on the kernels of a step; equal sizes have equal kernels."""

    batch: int
    seq_len: int
    """Tokens of each sequence on this rank."""
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tp: int
    matmul: str
    """Number format of matmuls: a dtype, or tf32."""
    stream_bytes: int
    activation_bytes: int
    autocast: bool
    casts_weights: float
    """Fraction of the weights that this rank casts for autocast."""

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def kind(self) -> str:
        """Which kernels elementwise operations run, by number format."""
        if self.autocast:
            return "autocast"
        return "float32" if self.activation_bytes == 4 else "low"

    @property
    def projections(self) -> list[tuple[int, int]]:
        """Outputs and inputs of a block's linear layers on one rank."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        d, ff = self.d_model, self.d_ff // self.tp
        q, kv = q // self.tp, kv // self.tp
        return [(q, d), (kv, d), (kv, d), (d, q), (ff, d), (ff, d), (d, ff)]

    @property
    def block_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.projections)

    @property
    def parameters(self) -> int:
        vocabulary = 2 * self.vocab_size * self.d_model // self.tp
        return self.num_layers * (self.block_parameters + 2 * self.d_model) + vocabulary


def sizes_of(case: Case) -> Sizes:
    """The sizes of a case of task=train_step on one rank."""
    assert case.model is not None, "training steps have a model"
    model, precision, parallel = case.model, case.precision, case.parallel
    gathered: str = getattr(parallel, "compute_dtype", None) or precision.parameters
    casts = precision.autocast is not None and gathered == precision.parameters
    return Sizes(
        batch=case.batch_size,
        seq_len=-(-case.seq_len // parallel.cp),
        d_model=model.d_model,
        d_ff=model.d_ff,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        tp=parallel.tp,
        matmul=precision.peak,
        stream_bytes=DTYPE_BYTES[gathered],
        activation_bytes=DTYPE_BYTES[precision.compute if casts else gathered],
        autocast=casts,
        casts_weights=parallel.parameter_share if parallel.casts_shares else 1.0,
    )


@lru_cache(maxsize=100_000)
def forward(sizes: Sizes) -> tuple[Operation, ...]:
    """Kernels of the forward pass with its loss, without attention's own."""
    return tuple(_forward(sizes))


@lru_cache(maxsize=100_000)
def backward(sizes: Sizes) -> tuple[Operation, ...]:
    """Kernels of the backward pass, without attention's own."""
    return tuple(_backward(sizes))


def head(sizes: Sizes) -> Operation:
    """The product that ends a forward pass."""
    return _matmul(sizes, (sizes.tokens, sizes.vocab_size // sizes.tp, sizes.d_model), 1)


def _forward(sizes: Sizes) -> Iterator[Operation]:
    layers, tokens = sizes.num_layers, sizes.tokens
    for rows, columns in sizes.projections:
        yield _matmul(sizes, (tokens, rows, columns), layers)
    yield head(sizes)
    for name, part, launches, size, times in _elementwise_forward(sizes):
        yield _bandwidth(sizes, f"{name}_forward", part, launches, size, times)


def _backward(sizes: Sizes) -> Iterator[Operation]:
    layers, tokens = sizes.num_layers, sizes.tokens
    last = (sizes.vocab_size // sizes.tp, sizes.d_model)
    for rows, columns, count in [*((*item, layers) for item in sizes.projections), (*last, 1)]:
        # Gradients of the input, and of the weight.
        yield _matmul(sizes, (tokens, columns, rows), count)
        yield _matmul(sizes, (rows, columns, tokens), count)
    for name, part, launches, size, times in _elementwise_backward(sizes):
        yield _bandwidth(sizes, f"{name}_backward", part, launches, size, times)


_Elementwise = tuple[str, str, float, float, float]
"""Name, part, launches, bytes, and how many times."""


def _elementwise_forward(sizes: Sizes) -> Iterator[_Elementwise]:
    layers, tokens = sizes.num_layers, sizes.tokens
    stream, element = sizes.stream_bytes, sizes.activation_bytes
    width = tokens * sizes.d_model / sizes.tp
    yield "norm", "norms", 2, 2 * width * 2 * stream, layers + 0.5
    yield "rotary", "rotary embedding", 20, _rotated(sizes) * (8 * element + 32), layers
    activated = tokens * sizes.d_ff / sizes.tp
    yield "activation", "feed-forward activation", 2, 5 * activated * element, layers
    yield "residual", "residual stream", 2, 2 * width * (2 * stream + element), layers
    if sizes.autocast:
        # A product's inputs, and weights once: float32 to half of that.
        inputs = 5 * tokens * sizes.d_model
        weights = sizes.block_parameters * sizes.casts_weights
        yield "cast", "casts of autocast", 12, 6 * (inputs + weights), layers
    logits = tokens * sizes.vocab_size / sizes.tp
    size = 8 + (4 + element if element < 4 else 0)
    yield "loss", "loss", 3, logits * size, 1
    yield "embedding", "embedding", 10, 2 * width * sizes.tp * stream, 1


def _elementwise_backward(sizes: Sizes) -> Iterator[_Elementwise]:
    layers, tokens = sizes.num_layers, sizes.tokens
    stream, element = sizes.stream_bytes, sizes.activation_bytes
    width = tokens * sizes.d_model / sizes.tp
    yield "norm", "norms", 4, 2 * width * 5 * stream, layers + 0.5
    yield "rotary", "rotary embedding", 18, _rotated(sizes) * (8 * element + 32), layers
    activated = tokens * sizes.d_ff / sizes.tp
    yield "activation", "feed-forward activation", 3, 8 * activated * element, layers
    yield "residual", "residual stream", 9, 9 * width * 3 * stream, layers
    if sizes.autocast:
        inputs = 5 * tokens * sizes.d_model
        # Gradients of weights are cast whole: they are reduced in the parameters' dtype.
        yield "cast", "casts of autocast", 22, 6 * (inputs + sizes.block_parameters), layers
    logits = tokens * sizes.vocab_size / sizes.tp
    size = 16 + (4 + element if element < 4 else 0)
    yield "loss", "loss", 4, logits * size, 1
    yield "embedding", "embedding", 30, 3 * width * sizes.tp * stream, 1


def optimizer(sizes: Sizes, parameter_bytes: int, share: float, *, scaled: bool) -> Operation:
    """A fused AdamW over a share of this rank's parameters; ``scaled`` also checks gradients."""
    updated = sizes.parameters * share
    tensors = OPTIMIZER_BYTES + (2 if scaled else 0)
    launches = max(2.0, updated / PARAMETERS_A_LAUNCH)
    return Operation(
        part="optimizer",
        law="optimizer",
        shape=(launches, tensors * parameter_bytes * updated),
        count=1,
        launches=launches,
    )


def _rotated(sizes: Sizes) -> float:
    heads = sizes.num_heads + sizes.num_kv_heads
    return sizes.tokens * heads * sizes.head_dim / sizes.tp


def _matmul(sizes: Sizes, shape: Shape, count: float) -> Operation:
    return Operation(
        part="matmuls", law=f"matmul/{sizes.matmul}", shape=shape, count=count, launches=1
    )


def _bandwidth(
    sizes: Sizes, name: str, part: str, launches: float, size: float, count: float
) -> Operation:
    law = f"elementwise/{sizes.kind}/{name}"
    return Operation(part=part, law=law, shape=(launches, size), count=count, launches=launches)
