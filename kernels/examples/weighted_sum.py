"""A first Triton kernel, forward and backward: y = x w, a weighted sum over the last dimension.

The introductory example of the CS336 systems text (section 1.3.1), with gradients by its
equations 2 and 3. Each program owns a tile of rows and walks along them, tile by tile:

    forward    y_i            = sum_j x_ij w_j
    backward   (grad x)_ij    = w_j (grad y)_i
               (grad w)_j     = sum_i x_ij (grad y)_i

The last sum runs over the rows of all programs. Adding to one place in memory from many
programs needs atomics, whose order, and so whose rounding, differs from run to run. Instead
every program writes the sum of its own rows into a line of a buffer, and the lines are summed
when all are there.

**Block pointers.** ``tl.make_block_ptr`` describes a tile of a tensor in memory: where the
tensor begins, its shape and strides, where the tile begins (``offsets``), the tile's shape, and
``order``, the dimensions from the fastest varying one to the slowest. ``tl.advance`` moves it.
``boundary_check`` names the dimensions along which a tile may stick out over the end: there,
loads give zeros and stores write nothing. All address arithmetic is Triton's, and so one kernel
serves any strides.

**Tensor descriptors.** ``tl.make_tensor_descriptor(x_ptr, shape, strides, block_shape)`` says
the same of the whole tensor once; a tile is then ``descriptor.load([row, column])``, with bounds
always checked. From sm_90 on (H100) it compiles to TMA, the tensor memory accelerator: one
thread asks for a tile, a copy engine computes the addresses and fills shared memory while
others compute. Prefer it there where tiles are large and reused, as the keys of attention are,
and the last dimension is contiguous and every other stride a multiple of 16 bytes, as TMA
demands. A vector that is read once, as here, gains nothing, and rows of any length and stride,
which this kernel takes, cannot be described. Triton 3.7 deprecates block pointers in favour of
descriptors, with a warning; the text, and most kernels in the field, are still written in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autograd import first_order_only

ROWS_TILE = 16
"""Rows that one program owns."""


@triton.jit
def weighted_sum_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    y_ptr,
    stride_x_row,
    stride_x_column,
    stride_weight,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program gives ROWS entries of y, from tiles of ROWS x COLUMNS of x."""
    first_row = tl.program_id(0) * ROWS
    x_block = tl.make_block_ptr(
        x_ptr,
        shape=(num_rows, num_columns),
        strides=(stride_x_row, stride_x_column),
        offsets=(first_row, 0),
        block_shape=(ROWS, COLUMNS),
        order=(1, 0),
    )
    weight_block = tl.make_block_ptr(
        weight_ptr,
        shape=(num_columns,),
        strides=(stride_weight,),
        offsets=(0,),
        block_shape=(COLUMNS,),
        order=(0,),
    )
    y_block = tl.make_block_ptr(
        y_ptr,
        shape=(num_rows,),
        strides=(1,),
        offsets=(first_row,),
        block_shape=(ROWS,),
        order=(0,),
    )
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for _ in range(tl.cdiv(num_columns, COLUMNS)):
        x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        weight = tl.load(weight_block, boundary_check=(0,), padding_option="zero").to(tl.float32)
        total += tl.sum(x * weight[None, :], axis=1)
        x_block = tl.advance(x_block, (0, COLUMNS))
        weight_block = tl.advance(weight_block, (COLUMNS,))
    tl.store(y_block, total.to(y_ptr.type.element_ty), boundary_check=(0,))


@triton.jit
def weighted_sum_backward_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    grad_y_ptr,
    grad_x_ptr,
    partial_grad_weight_ptr,
    stride_x_row,
    stride_x_column,
    stride_weight,
    stride_grad_y,
    num_rows,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program gives ROWS rows of grad x, and one line of the buffer for grad w.

    grad x and the buffer are contiguous: this function's caller made them.
    """
    first_row = tl.program_id(0) * ROWS
    x_block = tl.make_block_ptr(
        x_ptr,
        shape=(num_rows, num_columns),
        strides=(stride_x_row, stride_x_column),
        offsets=(first_row, 0),
        block_shape=(ROWS, COLUMNS),
        order=(1, 0),
    )
    weight_block = tl.make_block_ptr(
        weight_ptr,
        shape=(num_columns,),
        strides=(stride_weight,),
        offsets=(0,),
        block_shape=(COLUMNS,),
        order=(0,),
    )
    grad_y_block = tl.make_block_ptr(
        grad_y_ptr,
        shape=(num_rows,),
        strides=(stride_grad_y,),
        offsets=(first_row,),
        block_shape=(ROWS,),
        order=(0,),
    )
    grad_x_block = tl.make_block_ptr(
        grad_x_ptr,
        shape=(num_rows, num_columns),
        strides=(num_columns, 1),
        offsets=(first_row, 0),
        block_shape=(ROWS, COLUMNS),
        order=(1, 0),
    )
    partial_block = tl.make_block_ptr(
        partial_grad_weight_ptr,
        shape=(tl.num_programs(0), num_columns),
        strides=(num_columns, 1),
        offsets=(tl.program_id(0), 0),
        block_shape=(1, COLUMNS),
        order=(1, 0),
    )
    # Rows beyond the end are zero here, and so add nothing to grad w.
    grad_y = tl.load(grad_y_block, boundary_check=(0,), padding_option="zero").to(tl.float32)
    for _ in range(tl.cdiv(num_columns, COLUMNS)):
        weight = tl.load(weight_block, boundary_check=(0,), padding_option="zero").to(tl.float32)
        grad_x = grad_y[:, None] * weight[None, :]
        tl.store(grad_x_block, grad_x.to(grad_x_ptr.type.element_ty), boundary_check=(0, 1))
        x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero").to(tl.float32)
        partial = tl.sum(x * grad_y[:, None], axis=0)
        tl.store(partial_block, partial[None, :], boundary_check=(1,))
        x_block = tl.advance(x_block, (0, COLUMNS))
        weight_block = tl.advance(weight_block, (COLUMNS,))
        grad_x_block = tl.advance(grad_x_block, (0, COLUMNS))
        partial_block = tl.advance(partial_block, (0, COLUMNS))


class WeightedSum(torch.autograd.Function):
    """y [...] = sum over j of x [..., j] weight [j]; sums in float32, gives x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        num_columns = x.shape[-1]
        if weight.shape != (num_columns,):
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}, and x {tuple(x.shape)} needs "
                f"({num_columns},)"
            )
        # A view where the leading dimensions can be merged without one, as most can.
        rows = x.reshape(-1, num_columns)
        y = torch.empty(rows.shape[0], device=x.device, dtype=x.dtype)
        ctx.save_for_backward(x, weight)
        if y.numel():
            weighted_sum_forward_kernel[(triton.cdiv(rows.shape[0], ROWS_TILE),)](
                rows,
                weight,
                y,
                *rows.stride(),
                *weight.stride(),
                *rows.shape,
                ROWS=ROWS_TILE,
                COLUMNS=_columns_tile(num_columns),
            )
        return y.view(x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Sequence[Tensor]:
        x, weight = ctx.saved_tensors
        rows = x.detach().reshape(-1, x.shape[-1])
        num_rows, num_columns = rows.shape
        num_programs = triton.cdiv(num_rows, ROWS_TILE)
        line = grad_y.detach().reshape(-1)
        grad_x = torch.empty(rows.shape, device=rows.device, dtype=rows.dtype)
        partial = torch.empty(num_programs, num_columns, device=rows.device, dtype=torch.float32)
        if num_rows:
            weighted_sum_backward_kernel[(num_programs,)](
                rows,
                weight,
                line,
                grad_x,
                partial,
                *rows.stride(),
                *weight.stride(),
                *line.stride(),
                num_rows,
                num_columns,
                ROWS=ROWS_TILE,
                COLUMNS=_columns_tile(num_columns),
            )
        gradients = grad_x.view(x.shape), partial.sum(dim=0).to(weight.dtype)
        sources = (grad_y, x, weight)
        return first_order_only("weighted_sum", gradients, sources, "(x * weight).sum(-1) has them")


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., D] and weight [D] -> [...]; differentiable in both."""
    return WeightedSum.apply(x, weight)


def _columns_tile(num_columns: int) -> int:
    """Columns that one step reads: about 16 steps along a long row, 16 to 1024 in each."""
    return min(1024, max(16, triton.next_power_of_2(max(1, num_columns)) // 16))
