"""Building blocks of the Triton kernels: addresses of a tile, load, store, dot product.

A tile is a block of consecutive rows (queries or keys of one head) times all of its columns,
padded to a power of two. Offsets to a tile's first row are 64-bit, since a tensor may have
more than 2^31 elements; offsets inside a tile are 32-bit.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def power(x, NATURAL: tl.constexpr):
    """e^x if NATURAL, else 2^x."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def rounded_away(a, b, total):
    """a + b - total without error, for ``total`` = a + b in float32 (Knuth's two-sum)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


@triton.jit
def sequence_span(cu_seqlens_ptr, index, length, PACKED: tl.constexpr):
    """First token and number of tokens of a sequence; of a dense batch 0 and ``length``."""
    if PACKED:
        first = tl.load(cu_seqlens_ptr + index)
        count = tl.load(cu_seqlens_ptr + index + 1) - first
    else:
        first = index * 0
        count = length
    return first, count


@triton.jit
def head_offset(batch, head, row, batch_stride, head_stride, row_stride):
    """Elements from a tensor's start to one row of one head, in 64 bits."""
    return (
        tl.cast(batch, tl.int64) * batch_stride
        + tl.cast(head, tl.int64) * head_stride
        + tl.cast(row, tl.int64) * row_stride
    )


@triton.jit
def visible_keys(
    q_start,
    q_len,
    kv_len,
    window,
    prefix_len,
    shift,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The keys that the queries of one tile see (:class:`kernels.problem.Mask`).

    Returns:
        first_seen, end_seen: [BLOCK_Q], a query sees the keys from one to before the other, which
            may be none or fewer; first_seen need not be compared without a window.
        start, full_start, full_end: multiples of BLOCK_K. No query sees a key before ``start``, and
            every query sees all from ``full_start`` to before ``full_end``, if there are any.
        stop: no query sees a key from there on.
    """
    rows = tl.arange(0, BLOCK_Q)
    if CAUSAL or window is not None:
        first_hidden = q_start + (1 if CAUSAL else window) + kv_len - q_len
        if shift is not None:
            first_hidden += shift
        last_row = tl.minimum(BLOCK_Q, q_len - q_start) - 1
        end_seen = tl.minimum(first_hidden + rows, kv_len)
        end_of_first = tl.maximum(tl.minimum(first_hidden, kv_len), 0)
        stop = tl.maximum(tl.minimum(first_hidden + last_row, kv_len), 0)
        if prefix_len is not None:
            prefix_end = tl.minimum(prefix_len, kv_len)
            end_seen = tl.maximum(end_seen, prefix_end)
            end_of_first = tl.maximum(end_of_first, prefix_end)
            stop = tl.maximum(stop, prefix_end)
    else:
        end_seen = rows * 0 + kv_len
        end_of_first = kv_len
        stop = kv_len
    full_end = end_of_first // BLOCK_K * BLOCK_K
    if window is not None:
        first = first_hidden - window
        if not CAUSAL:
            first -= window - 1
        first_seen = first + rows
        start = tl.maximum(first, 0) // BLOCK_K * BLOCK_K
        full_start = tl.cdiv(tl.maximum(first + last_row, 0), BLOCK_K) * BLOCK_K
        full_end = tl.maximum(full_end, full_start)
    else:
        first_seen = rows * 0
        start = 0
        full_start = 0
    return first_seen, end_seen, start, full_start, full_end, stop


@triton.jit
def within_chunk(row, chunk, chunk_rows):
    """The row of the chunk, or its end, that is next to ``row``."""
    first = chunk * chunk_rows
    return tl.minimum(tl.maximum(row, first), first + chunk_rows)


@triton.jit
def capped(scores, unit_scale, softcap):
    """tanh(scores * unit_scale / softcap), exact to float32; times ``softcap`` it is the score.

    ``unit_scale`` and ``softcap`` are in the same units, those that exponents are taken in.
    """
    x = scores * (unit_scale / softcap)
    # For large x e^2x is infinite, and 1 what is left. For small x, where the difference loses
    # digits, the Taylor series; what follows x^9 is below float32's rounding up to 0.3.
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    y = x * x
    series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.3, x * series, far)


@triton.jit
def load_tile(
    first_row_ptr,
    row_stride,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUND_ROWS: tl.constexpr,
):
    """[ROWS, BLOCK_D] from memory, zero past ``num_rows`` (if BOUND_ROWS) and past HEAD_DIM."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = first_row_ptr + rows[:, None] * row_stride + columns[None, :]
    if BOUND_ROWS:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
        else:
            inside = (rows[:, None] < num_rows) & (columns[None, :] < HEAD_DIM)
            tile = tl.load(pointers, mask=inside, other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def store_tile(
    tile,
    first_row_ptr,
    row_stride,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The rows below ``num_rows`` and columns below HEAD_DIM, in the pointer's dtype."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    pointers = first_row_ptr + rows[:, None] * row_stride + columns[None, :]
    inside = rows[:, None] < num_rows
    if HEAD_DIM != BLOCK_D:
        inside = inside & (columns[None, :] < HEAD_DIM)
    tl.store(pointers, tile.to(first_row_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """accumulator + a @ b in float32.

    Triton's interpreter multiplies the bit patterns of bfloat16 and knows no bf16x6, so there
    UPCAST widens the (already rounded) operands first, or adds up the six products as the
    compiler does; the products are the same.
    """
    if UPCAST:
        if PRECISION == "bf16x6":
            product = _product_of_parts(a, b)
            if accumulator is not None:
                product = accumulator + product
        else:
            a, b = a.to(tl.float32), b.to(tl.float32)
            product = tl.dot(a, b, acc=accumulator, input_precision=PRECISION)
    else:
        product = tl.dot(a, b, acc=accumulator, input_precision=PRECISION)
    return product


@triton.jit
def _product_of_parts(a, b):
    """a @ b by bf16x6, the smallest of six products first, as Triton's F32DotTC pass orders them.

    The three that are left out are below 2^-26 of the largest. Parts of an infinity are not
    numbers, and so are sums of small products with them: the largest product alone decides then.
    """
    a_high, a_middle, a_low = _three_parts(a)
    b_high, b_middle, b_low = _three_parts(b)
    small = tl.dot(a_middle, b_middle, input_precision="ieee")
    small = tl.dot(a_low, b_high, acc=small, input_precision="ieee")
    small = tl.dot(a_high, b_low, acc=small, input_precision="ieee")
    small = tl.dot(a_middle, b_high, acc=small, input_precision="ieee")
    small = tl.dot(a_high, b_middle, acc=small, input_precision="ieee")
    small = tl.where(small == small, small, 0.0)
    return tl.dot(a_high, b_high, acc=small, input_precision="ieee")


@triton.jit
def _three_parts(x):
    """float32 as a sum of three numbers that bfloat16 has, each rounded to the nearest."""
    high = _rounded_to_bfloat16(x)
    middle = _rounded_to_bfloat16(x - high)
    low = _rounded_to_bfloat16(x - high - middle)
    return high, middle, low


@triton.jit
def _rounded_to_bfloat16(x):
    """float32 to the nearest value of bfloat16; the interpreter's own cast cuts digits off."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x == x, (rounded & 0xFFFF0000).to(tl.float32, bitcast=True), x)
