"""Attention on a packed stream that is cut into equal parts regardless of its sequences.

Each rank gathers the keys of the whole stream, takes those that its queries see, and calls the
kernel once, as Llama 3 was trained (Grattafiori et al. 2024, section 3.3.2); the parts are those of
:mod:`parallel.split.stream_parts`. The backward pass gathers keys again and reduce-scatters their
gradients, summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec
from kernels import sinks as attention_sinks
from kernels.problem import Mask
from parallel.context.attention import SequenceParallelAttention
from parallel.split import calls, checks
from parallel.split.checks import Offsets
from parallel.split.gradients import refuse_second_order
from parallel.split.offsets import LENGTHS
from parallel.split.session import Session, session_of
from parallel.split.stream_parts import StreamPart, part_of

# Renamed in torch 2.13, which warns of the names that older versions know alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_Choices: TypeAlias = tuple[tuple[bool, int | None, int, float | None], float | None, str, int]
"""(causal, window, prefix_len, softcap), scale, kernel, and KV heads at once."""


def stream_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Offsets,
    cu_seqlens_k: Offsets | None = None,
    causal: bool = False,
    window: int | None = None,
    prefix_len: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    kv_heads_at_once: int = 0,
    group: dist.ProcessGroup | None = None,
    compare: str = "new",
) -> Any:
    """Attention within the sequences of a packed stream that the ranks hold in equal parts.

    All ranks of the group call it together. Nothing is padded but the end of a stream whose tokens
    the ranks do not divide (:func:`parallel.split.shard_stream`): rows of that padding have output
    zero and lse minus infinity, and neither give nor get a gradient.

    Args:
        q: this rank's [T/P, H, D], T tokens in the stream and P ranks; float32, float16 or
            bfloat16, and under torch.autocast cast to its dtype.
        k, v: [T/P, H_kv, D]; H_kv divides H.
        cu_seqlens: offsets of the sequences in the whole stream: 0, then the end of each.
        cu_seqlens_k: for callers that have both; must be the same.
        causal: a query sees the keys at its own and at earlier positions of its sequence.
        window: with causal, a query sees its own key and the window - 1 before.
        prefix_len, softcap, sinks: as of :func:`parallel.split.split_attention`.
        scale: 1/sqrt(D) if not given.
        return_lse: give (o, lse), lse float32 [H, T/P], for which no gradient is known.
        kernel: any attention on one device that takes packed batches and gives its log-sum-exp.
        kv_heads_at_once: KV heads to gather at a time, which bounds the memory; 0 is all of them.
        group: the whole world if not given.
        compare: ranks compare their calls at each ``new`` shape or packing, or at ``every`` call.

    Returns:
        o [T/P, H, D], or (o, lse).

    Raises:
        ValueError: on all ranks, in one line: what one of them cannot do, or where they differ.
        RuntimeError: in a backward pass with create_graph=True.
    """
    found = calls.eagerly(_attend)(
        group,
        (q, k, v),
        (cu_seqlens, cu_seqlens_k),
        ((causal, window, prefix_len, softcap), scale, kernel, kv_heads_at_once),
        sinks,
        compare,
    )
    return found if return_lse else found[0]


def _attend(
    group: dist.ProcessGroup | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Offsets, Offsets | None],
    choices: _Choices,
    sinks: Tensor | None,
    compare: str,
) -> tuple[Tensor, Tensor]:
    session = session_of(group)
    try:
        q, k, v = calls.autocast(*tensors)
        lengths = LENGTHS.of(offsets[0], "cu_seqlens")
        if offsets[1] is not None and offsets[1] is not offsets[0]:
            checks.check_keys(lengths, offsets[1])
        tensors_kind = [(tuple(x.shape), x.dtype) for x in (q, k, v)]
        kind: tuple[Any, ...] = (
            "stream",
            choices,
            lengths,
            calls.needs_grad(q, k, v, sinks),
            checks.form_of_sinks(sinks),
            q.device,
            *tensors_kind,
        )
    except Exception as error:
        session.refuse(error)

    def check() -> _Plan:
        return _checked(session, q, k, v, lengths, choices, sinks)

    plan = session.agreed(kind, check, lambda: _facts(kind), compare=compare)
    with calls.attending():
        found: tuple[Tensor, Tensor] = _StreamAttention.apply(q, k, v, sinks, plan)
    return found


def _facts(kind: tuple[Any, ...]) -> str:
    _, choices, lengths, with_grad, sinks, device, *tensors = kind
    mask, scale, kernel, heads_at_once = choices
    words = [f"{list(shape)} {str(dtype)[6:]}" for shape, dtype in tensors]
    words += calls.mask_in_words(mask, sinks)
    words.append("with gradients" if with_grad else "no gradients")
    words += [
        device.type,
        f"scale={scale}",
        f"kernel={kernel}",
        f"kv_heads_at_once={heads_at_once}",
    ]
    return ", ".join([*words, f"a stream of {list(lengths)}"])


@dataclass(kw_only=True, slots=True, frozen=True)
class _Plan:
    """A rank's share of the attention on one stream."""

    kernel: Attention
    part: StreamPart
    spec: AttentionSpec
    session: Session
    heads_at_once: int

    @property
    def num_real(self) -> int:
        """Tokens of this rank that are no padding."""
        return self.part.queries.stop - self.part.queries.start


def _checked(
    session: Session,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    choices: _Choices,
    sinks: Tensor | None,
) -> _Plan:
    """Everything that can be said of a call without the other ranks."""
    (causal, window, prefix_len, softcap), scale, name, heads_at_once = choices
    sizes = checks.sizes_of(q, k, v, layout="bshd", packed=True)
    checks.check_stream_part(sizes.num_tokens, lengths, session.num_ranks)
    heads_at_once = heads_at_once or sizes.num_kv_heads
    if heads_at_once < 0 or sizes.num_kv_heads % heads_at_once:
        raise ValueError(
            f"kv_heads_at_once={heads_at_once}: must divide the {sizes.num_kv_heads} KV heads"
        )
    checks.check_mask(causal=causal, window=window, prefix_len=prefix_len, softcap=softcap)
    checks.check_sinks(sinks, sizes.num_heads, q.device)
    mask = Mask(causal=causal, window=window, prefix_len=prefix_len)
    part = part_of(lengths, mask, session.rank, session.num_ranks, q.device)
    kernel = _kernel_of(name)
    if part.packing is not None:
        problem = AttentionProblem(
            batch_size=part.packing.cu_seqlens_q.shape[0] - 1,
            num_heads=sizes.num_heads // sizes.num_kv_heads * heads_at_once,
            num_kv_heads=heads_at_once,
            q_len=part.packing.max_q_len,
            kv_len=part.packing.max_kv_len,
            head_dim=sizes.head_dim,
            dtype=str(q.dtype).removeprefix("torch."),
            device=q.device.type,
            causal=causal,
            needs_grad=calls.needs_grad(q, k, v, sinks),
            packed=True,
            window=window,
            prefix_len=prefix_len,
            softcap=softcap,
        )
        reason = kernel.why_unsupported(problem)
        if reason is not None:
            raise ValueError(f"stream_attention: kernel={name}: {reason}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    spec = AttentionSpec(
        causal=causal,
        scale=scale,
        packing=part.packing,
        window=window,
        prefix_len=prefix_len,
        softcap=softcap,
    )
    return _Plan(kernel=kernel, part=part, spec=spec, session=session, heads_at_once=heads_at_once)


def _kernel_of(name: str) -> Attention:
    entry = BACKENDS[name]
    target = entry.target
    if not issubclass(target, Attention) or issubclass(target, SequenceParallelAttention):
        raise ValueError(f"kernel={name}: must be an attention on one device")
    kernel = entry.target(name=name, **entry.preset).role(Attention)
    if not kernel.gives_lse:
        raise ValueError(f"kernel={name}: gives no log-sum-exp, which the backward pass needs")
    return kernel


class _StreamAttention(torch.autograd.Function):
    """Saves this rank's q, k, v, o and lse; other ranks' keys come again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        o = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
        real = slice(0, plan.num_real)
        for queries, keys, (all_k, all_v) in _gathered(q, k, v, plan):
            if plan.num_real:
                part = plan.kernel.forward(q[real, queries], all_k, all_v, plan.spec)
                o[real, queries], lse[queries, real] = part
            del keys, all_k, all_v
        if sink_logits is not None:
            o[real], lse[:, real] = attention_sinks.add(o[real], lse[:, real], sink_logits)
        ctx.save_for_backward(q, k, v, o, lse, sink_logits)
        ctx.plan = plan
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Any) -> Any:
        refuse_second_order("stream_attention")
        q, k, v, o, lse, sink_logits = ctx.saved_tensors
        plan: _Plan = ctx.plan
        real = slice(0, plan.num_real)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        for queries, keys, (all_k, all_v) in _gathered(q, k, v, plan):
            parts: tuple[Tensor | None, ...] = (None, None)
            if plan.num_real:
                dq[real, queries], *parts_found = plan.kernel.backward(
                    do[real, queries],
                    q[real, queries],
                    all_k,
                    all_v,
                    o[real, queries],
                    lse[queries, real].contiguous(),
                    plan.spec,
                )
                parts = tuple(parts_found)
            del all_k, all_v
            for mine, part in zip((dk, dv), parts, strict=True):
                mine[:, keys] = _summed(mine[:, keys], part, plan)
        d_sinks = None
        if sink_logits is not None:
            d_sinks = attention_sinks.gradient(do[real], o[real], lse[:, real], sink_logits)
        return dq, dk, dv, d_sinks, None


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, plan: _Plan
) -> Iterator[tuple[slice, slice, list[Tensor]]]:
    """Some query heads, their KV heads, and (k, v) of those that this rank's queries see.

    The next heads travel while these are computed.
    """
    num_kv_heads, step = k.shape[1], plan.heads_at_once
    group_size = q.shape[1] // num_kv_heads
    groups = [slice(first, first + step) for first in range(0, num_kv_heads, step)]
    coming = _start(k, v, groups[0], plan)
    for index, heads in enumerate(groups):
        arrived = [wait() for wait in coming]
        if index + 1 < len(groups):
            coming = _start(k, v, groups[index + 1], plan)
        queries = slice(heads.start * group_size, heads.stop * group_size)
        yield queries, heads, [x[plan.part.keys] for x in arrived]


def _start(k: Tensor, v: Tensor, heads: slice, plan: _Plan) -> list[Callable[[], Tensor]]:
    """Waits for some heads of k and of v of the whole stream, which are on their way."""
    return [_start_one(x[:, heads].contiguous(), plan) for x in (k, v)]


def _start_one(own: Tensor, plan: _Plan) -> Callable[[], Tensor]:
    whole = own.new_empty((plan.session.num_ranks * own.shape[0], *own.shape[1:]))
    work = _all_gather(whole, own, group=plan.session.group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return whole

    return wait


def _summed(own: Tensor, part: Tensor | None, plan: _Plan) -> Tensor:
    """This rank's share of all ranks' gradients of keys, summed in float32."""
    shape = (plan.session.num_ranks * own.shape[0], *own.shape[1:])
    total = own.new_zeros(shape, dtype=torch.float32)
    if part is not None:
        total[plan.part.keys] = part.float()
    result = own.new_empty(own.shape, dtype=torch.float32)
    _reduce_scatter(result, total, group=plan.session.group)
    return result.to(own.dtype)
