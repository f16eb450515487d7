"""A call of attention on split sequences: its arguments, and what they come to on this rank."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import BACKENDS, AttentionProblem, AttentionSpec, Packing
from kernels.problem import MASKS
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.layouts import Layout
from parallel.split import checks, packed_parts
from parallel.split.checks import Offsets
from parallel.split.offsets import LENGTHS
from parallel.split.session import Session


def scheme_names() -> list[str]:
    """The choices of ``attention=`` that split sequences, those of plugins included."""
    return [entry.name for entry in BACKENDS if issubclass(entry.target, SequenceParallelAttention)]


def scheme_of(name: str, options: tuple[tuple[str, Any], ...] = ()) -> SequenceParallelAttention:
    """A scheme with its options. Raises ValueError in one line if there is none like it."""
    entry = BACKENDS[name]
    if not issubclass(entry.target, SequenceParallelAttention):
        raise ValueError(
            f"scheme={name!r}: attends on one device; must be one of {', '.join(scheme_names())}"
        )
    # A mask is an argument of a call.
    known = set(inspect.signature(entry.target).parameters) - {"name", *MASKS}
    for key, _ in options:
        if key not in known:
            raise ValueError(
                f"{name}_attention({key}=...): its options are {', '.join(sorted(known))}"
            )
    return entry.target(name=name, **{**entry.preset, **dict(options)})


@dataclass(kw_only=True, slots=True, frozen=True)
class Request:
    """The arguments of a call beside its tensors; :func:`split_attention` explains them."""

    scheme: str
    options: tuple[tuple[str, Any], ...]
    causal: bool = False
    window: int | None = None
    prefix_len: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    layout: str = "bshd"
    length: int | None = None
    cu_seqlens: Offsets | None = None
    local_cu_seqlens: Offsets | None = None
    cu_seqlens_k: Offsets | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None or self.local_cu_seqlens is not None


@dataclass(kw_only=True, slots=True, frozen=True)
class Checked:
    """A kind of call that all ranks have agreed on."""

    scheme: SequenceParallelAttention
    spec: AttentionSpec
    """Without sinks, which each call has its own of."""
    real: Tensor | None
    """True for rows of real tokens, in a form that broadcasts to o; None without padding."""


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, not to be traced where torch.compile is tracing its caller."""
    # As a decorator it would import torch._dynamo with this module, in more than a second.
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


_THREAD = threading.local()


@contextlib.contextmanager
def attending() -> Iterator[None]:
    """While inside, on this thread, :func:`is_attending`."""
    before = is_attending()
    _THREAD.attending = True
    try:
        yield
    finally:
        _THREAD.attending = before


def is_attending() -> bool:
    """Whether this thread is inside a function of the library, and so what calls is a kernel."""
    return getattr(_THREAD, "attending", False)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to the dtype of torch.autocast where that is on, as PyTorch's attention does."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def given_lengths(request: Request) -> tuple[int, ...] | None:
    """Lengths as they were given, of whole sequences or of parts."""
    if not request.packed:
        if request.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k: needs cu_seqlens, offsets of whole sequences")
        return None
    if request.cu_seqlens is not None and request.local_cu_seqlens is not None:
        raise ValueError("cu_seqlens and local_cu_seqlens: give whole sequences or parts, not both")
    if request.length is not None:
        raise ValueError("length: is of dense sequences; cu_seqlens has those of a packed batch")
    name = "cu_seqlens" if request.cu_seqlens is not None else "local_cu_seqlens"
    found = LENGTHS.of(getattr(request, name), name)
    if request.cu_seqlens_k is not None and request.cu_seqlens_k is not getattr(request, name):
        checks.check_keys(found, request.cu_seqlens_k, name)
    return found


def kind_of(
    request: Request, lengths: tuple[int, ...] | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Any, ...]:
    """What tells calls apart, hashable: equal kinds have the same checks and the same results."""
    return (
        request.scheme,
        request.options,
        (request.causal, request.window, request.prefix_len, request.softcap),
        checks.form_of_sinks(request.sinks),
        request.scale,
        request.layout,
        request.length,
        "cu_seqlens" if request.cu_seqlens is not None else "local_cu_seqlens",
        lengths,
        needs_grad(q, k, v, request.sinks),
        q.device,
        *((tuple(x.shape), x.dtype) for x in (q, k, v)),
    )


def facts_of(kind: tuple[Any, ...]) -> str:
    """A kind of call in words, without what may differ between ranks."""
    scheme, options, mask, sinks, scale, *more, device, q, k, v = kind
    layout, length, name, lengths, with_grad = more
    tensors = (q, k, v)
    words = [f"{list(shape)} {str(dtype)[6:]}" for shape, dtype in tensors]
    words += [scheme, *(f"{key}={value}" for key, value in options)]
    words += mask_in_words(mask, sinks)
    words.append("with gradients" if with_grad else "no gradients")
    words += [device.type, f"scale={scale}"]
    words += [f"layout={layout}, length={length}"] if lengths is None else []
    words += [f"{name} of {list(lengths)}"] if lengths is not None else []
    return ", ".join(words)


def mask_in_words(mask: tuple[bool, int | None, int, float | None], sinks: Any) -> list[str]:
    """What a call asks for, where it is more than nothing."""
    causal, window, prefix_len, softcap = mask
    words = ["causal" if causal else "full"]
    words += [f"window={window}"] * (window is not None)
    words += [f"prefix_len={prefix_len}"] * (prefix_len != 0)
    words += [f"softcap={softcap}"] * (softcap is not None)
    return words if sinks is None else [*words, f"sinks {list(sinks[0])} {sinks[1]}"]


def checked(
    session: Session,
    request: Request,
    given: tuple[int, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Checked:
    """Everything that can be said of a call without the other ranks."""
    scheme = scheme_of(request.scheme, request.options)
    sizes = checks.sizes_of(q, k, v, layout=request.layout, packed=request.packed)
    mask = {name: getattr(request, name) for name in ("window", "prefix_len", "softcap")}
    checks.check_mask(**mask, causal=request.causal)
    checks.check_sinks(request.sinks, sizes.num_heads, q.device)
    layout = scheme.layout(session.num_ranks)
    if given is None:
        lengths: tuple[int, ...] = (
            checks.check_dense_part(sizes.num_tokens, request.length, layout),
        )
    else:
        whole = given if request.cu_seqlens is not None else checks.whole_lengths(given, layout)
        checks.check_packed_part(sizes.num_tokens, whole, layout, causal=request.causal)
        # A sequence without tokens changes no result, and some schemes do not expect one.
        lengths = tuple(length for length in whole if length)
    problem = AttentionProblem(
        batch_size=len(lengths) if request.packed else sizes.batch_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        q_len=max(lengths),
        kv_len=max(lengths),
        head_dim=sizes.head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        causal=request.causal,
        needs_grad=needs_grad(q, k, v, request.sinks),
        packed=request.packed,
        cp=session.num_ranks,
        autocast=torch.is_autocast_enabled(q.device.type),
        sinks=request.sinks is not None,
        **mask,
    )
    reason = scheme.why_unsupported(problem)
    if reason is not None:
        raise ValueError(f"{request.scheme}_attention: {reason}")
    return Checked(
        scheme=scheme,
        spec=AttentionSpec(
            causal=request.causal,
            scale=q.shape[-1] ** -0.5 if request.scale is None else request.scale,
            packing=_packing(lengths, q.device) if request.packed else None,
            **mask,
        ),
        real=_real_rows(layout, session.rank, lengths, q.device, packed=request.packed),
    )


def _packing(lengths: tuple[int, ...], device: torch.device) -> Packing:
    """The packing of whole sequences; one object for all calls, by which schemes know it again."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)


def _real_rows(
    layout: Layout, rank: int, lengths: tuple[int, ...], device: torch.device, *, packed: bool
) -> Tensor | None:
    """Which of this rank's rows are real tokens: [1, 1, S, 1], packed [T, 1, 1], or None: all."""
    rows = packed_parts.real_rows(layout, rank, lengths)
    if bool(rows.all()):
        return None
    return rows.to(device)[:, None, None] if packed else rows.to(device)[None, None, :, None]
