"""The facts of a call, which decide on its implementation, and the checks of its arguments.

The facts follow from shapes, dtypes and devices alone, so that the checks run once for each
combination and later calls only look the answer up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from kernels.problem import Mask, Packing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SPLIT_HEAD_DIM = 128
"""Beyond, three parts of every operand find no room in registers, whatever the tile."""
PRECISIONS = ("auto", "ieee", "bf16x6", "tf32")
MAX_SHIFT = 2**29
"""Positions of queries and keys are compared in 32 bits."""


# Compared by identity: equal calls share one object, and hashing thirteen fields is slower.
@dataclass(kw_only=True, slots=True, frozen=True, eq=False)
class Problem:
    """A valid call, on tensors seen as [batch, heads, seq, head_dim]."""

    device: torch.device
    dtype: torch.dtype
    """The dtype of q, k, v and do."""
    batch_size: int
    """Number of sequences; the tensors of a packed batch are [1, H, T, D] all the same."""
    num_heads: int
    num_kv_heads: int
    q_len: int
    """Queries of a sequence, of the longest one of a packed batch."""
    kv_len: int
    head_dim: int
    causal: bool
    packed: bool
    accumulates: bool
    """Whether the forward pass continues from a float32 (o, lse) and writes there."""
    precision: str
    """Precision of float32 matmuls, ``ieee``, ``bf16x6`` or ``tf32``; ``ieee`` for other dtypes."""
    autotune: bool = False
    """Whether tile sizes may be searched for when none are known."""
    window: int | None = None
    """Of :class:`kernels.problem.Mask`, like ``prefix_len`` and ``shift``. :func:`describe` leaves
    out what changes no key that a query sees, so that no number exceeds the lengths by far."""
    prefix_len: int = 0
    shift: int = 0
    softcap: float | None = None
    """Of :class:`kernels.problem.AttentionSpec`."""
    value_dim: int | None = None
    """Columns of v and o where they are fewer than head_dim, as latent attention has them."""

    @property
    def v_dim(self) -> int:
        """Columns of v and o."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def mask(self) -> Mask:
        """The keys that each query sees."""
        return Mask(
            causal=self.causal,
            window=self.window,
            prefix_len=self.prefix_len,
            shift=self.shift,
        )

    def asks_for(self) -> frozenset[str]:
        """What it needs besides a causal mask, by the names of the fields."""
        names = ("window", "prefix_len", "shift", "softcap")
        return frozenset(name for name in names if getattr(self, name) not in (None, 0))

    @property
    def block_d(self) -> int:
        """head_dim as the kernels pad it: a power of two, at least 16."""
        return padded(self.head_dim)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


def padded(columns: int) -> int:
    """The columns that a tile of so many has: a power of two, at least 16."""
    return max(16, 1 << (columns - 1).bit_length())


def validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    packing: Packing | None = None,
    accumulator: tuple[Tensor, Tensor] | None = None,
    precision: str = "ieee",
) -> None:
    """Raise a one-line ValueError that says what is wrong with a call and what would be right."""
    describe(
        q, k, v, causal=False, packing=packing, accumulator=accumulator, precision=precision
    )  # fmt: skip


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    packing: Packing | None = None,
    accumulator: tuple[Tensor, Tensor] | None = None,
    precision: str = "ieee",
    autotune: bool = False,
    window: int | None = None,
    prefix_len: int = 0,
    shift: int = 0,
    softcap: float | None = None,
) -> Problem:
    """The facts of a call; ValueError if it makes no sense."""
    if q.dtype != torch.float32:
        # The same for all that make no difference.
        precision = "ieee" if precision in PRECISIONS else precision
    elif precision == "auto":
        precision = automatic_precision(q)
    return _checked(
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
        causal,
        None if packing is None else _packing_facts(packing),
        None if accumulator is None else tuple(_tensor_facts(x) for x in accumulator),
        precision,
        autotune,
        (window, prefix_len, shift),
        softcap,
    )


def automatic_precision(q: Tensor) -> str:
    """How ``precision=auto`` multiplies float32, as PyTorch is set now."""
    # torch.backends.cuda.matmul.allow_tf32 sets this too.
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return full_precision(q.device, q.shape[-1] if q.dim() else 0)


def full_precision(device: torch.device, head_dim: int) -> str:
    """``bf16x6`` if the device and Triton can, and head_dim is not too wide for it; else ``ieee``.

    bf16x6 writes each operand as a sum of three bfloat16 numbers, which tensor cores multiply.
    """
    can = device.type == "cuda" and why_not_split(device) is None
    return "bf16x6" if can and head_dim <= MAX_SPLIT_HEAD_DIM else "ieee"


@cache
def why_not_split(device: torch.device) -> str | None:
    """None if ``bf16x6`` runs on ``device``, a CPU or a GPU, else the reason why not."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return "bf16x6 needs a GPU of compute capability 8.0 or higher"
    if major in (10, 11):
        # Triton 3.6 and 3.7 give each of the six products of a dot tensor memory of its own.
        return (
            f"the tiles of bf16x6 overfill the tensor memory of compute capability {major}.{minor}"
        )
    if "bf16x6" not in _triton_precisions():
        return "bf16x6 needs Triton 3.6 or newer"
    return None


def _triton_precisions() -> tuple[str, ...]:
    """The input precisions of a dot that the installed Triton can compile for CUDA."""
    # Imported here since describing a call must not need Triton.
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return ()
    return tuple(CUDAOptions.allowed_dot_input_precisions)


def check_gradient(
    do: Tensor,
    q: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    v_dim: int,
    packed: bool,
) -> None:
    """Raise ValueError unless the backward pass's arguments fit the forward pass's."""
    lse_shape = (q.shape[1], q.shape[0]) if packed else q.shape[:-1]
    o_shape = (*q.shape[:-1], v_dim)
    for name, x, shape in (("do", do, o_shape), ("o", o, o_shape), ("lse", lse, lse_shape)):
        if x.shape != shape:
            raise ValueError(f"{name} is {_show(x.shape)}: must be {_show(shape)}")
    if do.dtype != q.dtype:
        raise ValueError(f"do is {_name(do.dtype)}: must be {_name(q.dtype)}, like q")
    if lse.dtype != torch.float32:
        raise ValueError(f"lse is {_name(lse.dtype)}: must be float32")
    if dlse is not None and dlse.shape != lse_shape:
        raise ValueError(f"dlse is {_show(dlse.shape)}: must be {_show(lse_shape)}")


def check_room(x: Tensor, into: Tensor, name: str) -> None:
    """Raise ValueError unless ``into`` is as large as x, and of its kind."""
    if _tensor_facts(into) != _tensor_facts(x):
        shape, dtype, device = _tensor_facts(into)
        raise ValueError(
            f"{name} is {_show(shape)} {_name(dtype)} on {device}: "
            f"must be {_show(x.shape)} {_name(x.dtype)} on {x.device}"
        )


def _packing_facts(packing: Packing) -> tuple[object, ...]:
    return (
        _tensor_facts(packing.cu_seqlens_q),
        _tensor_facts(packing.cu_seqlens_k),
        packing.max_q_len,
        packing.max_kv_len,
    )


def _tensor_facts(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device


@lru_cache(maxsize=4096)
def _checked(
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    causal: bool,
    packing: tuple | None,
    accumulator: tuple | None,
    precision: str,
    autotune: bool,
    mask_numbers: tuple[int | None, int, int],
    softcap: float | None,
) -> Problem:
    q_shape, k_shape, v_shape = shapes
    dtype, device = dtypes[0], devices[0]
    layout = "[batch, heads, seq, head_dim]" if packing is None else "[tokens, heads, head_dim]"
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != (4 if packing is None else 3):
            raise ValueError(f"{name} is {_show(shape)}: must be {layout}")
    v_dim = v_shape[-1]
    if k_shape[:-1] != v_shape[:-1]:
        raise ValueError(f"v is {_show(v_shape)}: must be {_show((*k_shape[:-1], v_dim))}, like k")
    head_dim = q_shape[-1]
    if k_shape[-1] != head_dim:
        raise ValueError(f"k has head_dim {k_shape[-1]}: must be {head_dim}, like q")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}: must be 1 to {MAX_HEAD_DIM}")
    if not 1 <= v_dim <= head_dim:
        raise ValueError(f"v has {v_dim} columns: must have 1 to {head_dim}, no more than k")
    if packing is None and q_shape[0] != k_shape[0]:
        raise ValueError(f"k has batch size {k_shape[0]}: must be {q_shape[0]}, like q")
    num_heads, num_kv_heads = q_shape[1], k_shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k has {num_kv_heads} heads: must divide the {num_heads} heads of q")
    if dtype not in DTYPES:
        choices = ", ".join(map(_name, DTYPES))
        raise ValueError(f"q is {_name(dtype)}: must be one of {choices}")
    for name, other in zip("kv", dtypes[1:], strict=True):
        if other != dtype:
            raise ValueError(f"{name} is {_name(other)}: must be {_name(dtype)}, like q")
    for name, where in zip("kv", devices[1:], strict=True):
        if where != device:
            raise ValueError(f"{name} is on {where}: must be on {device}, like q")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision}: must be one of {', '.join(PRECISIONS)}")
    if packing is None:
        batch_size, q_len, kv_len = q_shape[0], q_shape[2], k_shape[2]
        lse_shape = q_shape[:-1]
    else:
        batch_size, q_len, kv_len = _check_packing(packing, device)
        lse_shape = torch.Size((num_heads, q_shape[0]))
    if accumulator is not None:
        o_shape = torch.Size((*q_shape[:-1], v_dim))
        for name, facts, shape in zip(("o", "lse"), accumulator, (o_shape, lse_shape), strict=True):
            if facts != (shape, torch.float32, device):
                raise ValueError(
                    f"the accumulator's {name} is {_show(facts[0])} {_name(facts[1])} on "
                    f"{facts[2]}: must be {_show(shape)} float32 on {device}"
                )
    if softcap is not None and not (
        isinstance(softcap, int | float) and 0 < softcap < float("inf")
    ):
        raise ValueError(f"softcap={softcap}: must be a positive number")
    window, prefix_len, shift = mask_numbers
    mask = reduced_mask(
        Mask(causal=causal, window=window, prefix_len=prefix_len, shift=shift), q_len, kv_len
    )
    return Problem(
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        causal=causal,
        packed=packing is not None,
        accumulates=accumulator is not None,
        precision=precision if dtype == torch.float32 else "ieee",
        autotune=autotune,
        window=mask.window,
        prefix_len=mask.prefix_len,
        shift=mask.shift,
        softcap=softcap,
        value_dim=None if v_dim == head_dim else v_dim,
    )


def reduced_mask(mask: Mask, q_len: int, kv_len: int) -> Mask:
    """An equal mask without what changes nothing, for lengths up to these."""
    window, shift = mask.window, mask.shift
    if abs(shift) >= MAX_SHIFT:
        raise ValueError(f"shift={shift}: must lie within {MAX_SHIFT} positions")
    # The last query decides whether any has lost its first key, the first one its last key.
    if window is not None and kv_len + shift <= window and (mask.causal or q_len - shift <= window):
        window = None
    if window is None and not mask.causal:
        shift = 0
    prefix_len = min(mask.prefix_len, kv_len)
    return Mask(causal=mask.causal, window=window, prefix_len=prefix_len, shift=shift)


def _check_packing(packing: tuple, device: torch.device) -> tuple[int, int, int]:
    """Number of sequences, queries of the longest, and keys of the longest."""
    q_facts, k_facts, max_q_len, max_kv_len = packing
    for name, (shape, dtype, where) in (("cu_seqlens_q", q_facts), ("cu_seqlens_k", k_facts)):
        if dtype != torch.int32 or where != device or len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"{name} is {_show(shape)} {_name(dtype)} on {where}: "
                f"must be [sequences + 1] int32 on {device}"
            )
    if q_facts[0] != k_facts[0]:
        raise ValueError(
            f"cu_seqlens_k has {k_facts[0][0]} entries: must be {q_facts[0][0]}, like cu_seqlens_q"
        )
    return q_facts[0][0] - 1, max_q_len, max_kv_len


def _show(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
