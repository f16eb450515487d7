"""Attention over ranks as functions: one for each scheme, and one that takes a scheme's name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import BACKENDS, AttentionSpec
from parallel.context.attention import SequenceParallelAttention
from parallel.context.bound import SplitAttention
from parallel.split import calls, gradients
from parallel.split.checks import Offsets
from parallel.split.session import Session, resolved, session_of


def split_attention(
    scheme: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    prefix_len: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bshd",
    length: int | None = None,
    cu_seqlens: Offsets | None = None,
    local_cu_seqlens: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
    compare: str = "new",
    **options: Any,
) -> Any:
    """o = softmax(q k^T * scale) v of sequences that are split over the ranks of a group.

    All ranks of the group call it together, each with its part of every sequence as
    :func:`parallel.split.shard` gives it; gradients reach q, k and v.

    Args:
        scheme: a choice of ``attention=`` that splits sequences, see :func:`scheme_names`.
        q: this rank's [B, S, H, D], or [B, H, S, D] with ``layout="bhsd"``, or of a packed batch
            [T, H, D]; float32, float16 or bfloat16, and under torch.autocast cast to its dtype.
        k, v: the same with H_kv heads, which divide H.
        causal: a query sees the keys at its own and at earlier positions of its whole sequence.
        window: a query sees its own key and the window - 1 before, and without causal as many
            after; keys that no query of a rank sees are not sent to it, where the scheme can.
        prefix_len: with causal, the first keys of each sequence, which all queries see.
        softcap: scores s become softcap tanh(s / softcap), after the scale.
        sinks: [H], a logit for each query head that takes part in the softmax and has no value;
            the same on all ranks. Its gradient is of what this rank has computed: sum it over
            ranks, as that of any parameter that ranks share.
        scale: 1/sqrt(D) if not given.
        length: real tokens of each whole dense sequence, where :func:`parallel.split.shard` padded
            it; gradients that reach padding are dropped. Padding of packed batches is known.
        cu_seqlens: offsets of whole sequences over all ranks, without padding: 0, then the end of
            each; makes the batch a packed one, of which each sequence is split by itself.
        local_cu_seqlens: instead, offsets of this rank's parts, the same on all ranks; none padded.
        cu_seqlens_k: for callers that have both; must be the same.
        return_lse: give (o, lse), lse float32 [B, H, S] or [H, T] over the keys of all ranks and
            sinks, for which no gradient is known. With gradients it costs a second forward pass.
        group: the whole world if not given.
        compare: ranks compare their calls at each ``new`` shape or packing, or at ``every`` call.
        options: of the scheme, such as ``kernel="flash_triton"`` (any attention on one device;
            ``auto`` if not given) and ``transport="send_recv"``.

    Returns:
        o in the form of q, or (o, lse).

    Raises:
        ValueError: on all ranks, in one line: what one of them cannot do, or where they differ.
        RuntimeError: in a backward pass with create_graph=True.
    """
    request = calls.Request(
        scheme=scheme,
        options=tuple(sorted(options.items())),
        causal=causal,
        window=window,
        prefix_len=prefix_len,
        softcap=softcap,
        sinks=sinks,
        scale=scale,
        layout=layout,
        length=length,
        cu_seqlens=cu_seqlens,
        local_cu_seqlens=local_cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
    )
    return calls.eagerly(_attend)(None, group, request, q, k, v, return_lse, compare)


@contextlib.contextmanager
def bound_attention(
    scheme: str, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Iterator[Callable[..., Any]]:
    """A function ``attend(q, k, v, *, causal=..., ...)`` while inside; frees all it held after.

    Its arguments are those of :func:`split_attention`, which keeps what it needs until
    :func:`parallel.split.release` or the end of the group. Backward runs inside.
    """
    with Session(resolved(group)) as session:

        def attend(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            return_lse: bool = False,
            compare: str = "new",
            **more: Any,
        ) -> Any:
            request = calls.Request(scheme=scheme, options=tuple(sorted(options.items())), **more)
            return calls.eagerly(_attend)(session, group, request, q, k, v, return_lse, compare)

        yield attend


@functools.cache
def function_of(scheme: str) -> Callable[..., Any] | None:
    """:func:`split_attention` of one scheme; None if there is no such scheme."""
    if scheme not in BACKENDS:
        return None
    target = BACKENDS[scheme].target
    if not issubclass(target, SequenceParallelAttention):
        return None

    def attention(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        return split_attention(scheme, q, k, v, **arguments)

    signature = inspect.signature(split_attention)
    own = [item for name, item in signature.parameters.items() if name != "scheme"]
    attention.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    attention.__name__ = attention.__qualname__ = f"{scheme}_attention"
    about = (inspect.getdoc(inspect.getmodule(target)) or "").strip()
    lines = (inspect.getdoc(split_attention) or "").splitlines()
    arguments = [line for line in lines if not line.lstrip().startswith("scheme:")]
    attention.__doc__ = "\n".join([about, "", *arguments])
    return attention


def _attend(
    session: Session | None,
    group: dist.ProcessGroup | None,
    request: calls.Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    return_lse: bool,
    compare: str,
) -> Any:
    """:func:`split_attention` in a session, or in that of the group."""
    session = session or session_of(group)
    try:
        q, k, v = calls.autocast(q, k, v)
        lengths = calls.given_lengths(request)
        kind = calls.kind_of(request, lengths, q, k, v)
        # An option may be a list.
        hash(kind)
    except Exception as error:
        session.refuse(error)

    def check() -> calls.Checked:
        return calls.checked(session, request, lengths, q, k, v)

    found = session.agreed(kind, check, lambda: calls.facts_of(kind), compare=compare)
    bound = session.bound(found.scheme, request.options, q.device)
    swap = request.layout == "bshd" and not request.packed
    if swap:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with calls.attending():
        spec = found.spec
        if request.sinks is not None:
            spec = replace(spec, sinks=request.sinks)
        o, lse = _both(bound, found.scheme.name, spec, q, k, v, return_lse=return_lse)
    o = gradients.guarded(o, found.real, f"{request.scheme}_attention")
    o = o.transpose(1, 2) if swap else o
    return (o, lse) if return_lse else o


def _both(
    bound: SplitAttention,
    scheme: str,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """o and, if asked for, lse; with gradients by a pass for each, since one does not have both."""
    lse = None
    if return_lse:
        with torch.no_grad():
            found = bound.attend_with_lse(q.detach(), k.detach(), v.detach(), spec)
        if found is None:
            # Without a collective, and so on all ranks.
            raise ValueError(f"return_lse=True: {scheme} hides its log-sum-exp")
        o, lse = found
        if not calls.needs_grad(q, k, v, spec.sinks):
            return o, lse
    return bound.attend(q, k, v, spec), lse
