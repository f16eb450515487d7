"""FlashAttention 2, 3 and 4 under windows and caps, as their sources word them, in float64.

For tests on a CPU: functions with the parameters of the libraries' private ones, that compute.
What each does to a window before its kernels see it is copied from its public source:
``csrc/flash_attn/flash_api.cpp`` (2.8.3), ``hopper/flash_api.cpp`` and
``flash_attn/cute/interface.py`` (4.0.0b36) of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Side = int | None


class Band(NamedTuple):
    """Keys left and right of the diagonal that a query sees; None sees all of them."""

    left: Side
    right: Side

    def visible(self, q_len: int, kv_len: int) -> Tensor:
        distance = torch.arange(kv_len) - (torch.arange(q_len)[:, None] + kv_len - q_len)
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if self.left is not None:
            seen &= distance >= -self.left
        if self.right is not None:
            seen &= distance <= self.right
        return seen


def band_of_2(causal: bool, left: int, right: int, q_len: int, kv_len: int) -> Band:
    """Of the longest lengths of a packed batch."""
    if left >= kv_len:
        left = -1
    if right >= kv_len:
        right = -1
    if causal and q_len > 1:
        right = 0
    return Band(None if left < 0 else left, None if right < 0 else right)


def band_of_3(causal: bool, left: int, right: int, q_len: int, kv_len: int) -> Band:
    if left >= kv_len - 1:
        left = -1
    if right >= q_len - 1:
        right = -1
    if causal:
        right = 0
    return Band(None if left < 0 else left, None if right < 0 else right)


def band_of_4(causal: bool, left: Side, right: Side) -> Band:
    if causal:
        right = 0
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return Band(left, right)


class Call(NamedTuple):
    """A sequence's scores and its tensors, in float64 with a key head for each query head."""

    scores: Tensor
    slope: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def call_of(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, softcap: float) -> Call:
    """q, k and v are [S, H, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * scale
    slope = torch.full_like(scores, scale)
    if softcap > 0:
        scores = softcap * (scores / softcap).tanh()
        slope = scale * (1 - (scores / softcap).square())
    hidden = ~band.visible(q.shape[1], k.shape[1])
    return Call(scores.masked_fill(hidden, -torch.inf), slope, q, k, v)


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """o [S, H, D] in float64 and lse [H, S], minus infinity without keys."""
    call = call_of(*arguments)
    lse = call.scores.logsumexp(-1)
    return (call.scores.softmax(-1).nan_to_num() @ call.v).transpose(0, 1), lse


def gradients(do: Tensor, o: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """As their kernels take them: from any o and lse of the rows, which they trust."""
    call = call_of(*arguments)
    num_kv_heads = arguments[1].shape[1]
    do, o = (x.double().transpose(0, 1) for x in (do, o))
    p = (call.scores - lse.double()[..., None]).exp().nan_to_num()
    dp = do @ call.v.mT
    ds = p * (dp - (do * o).sum(-1, keepdim=True)) * call.slope
    parts = (ds @ call.k, ds.mT @ call.q, p.mT @ do)
    dq, dk, dv = (x.transpose(0, 1) for x in parts)
    return dq, *(x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (dk, dv))


Run = Callable[..., tuple[Tensor, ...]]


def of_each_sequence(
    run: Run, cu_q: Tensor | None, cu_k: Tensor | None, by_query: tuple[Tensor, ...],
    by_key: tuple[Tensor, ...], lse: Tensor | None,
) -> list[tuple[Tensor, ...]]:  # fmt: skip
    """``run`` on the tensors of each sequence of a batch, dense or packed."""
    if cu_q is None or cu_k is None:
        return [
            run([x[n] for x in by_query], [x[n] for x in by_key], None if lse is None else lse[n])
            for n in range(len(by_query[0]))
        ]
    found = []
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        part = None if lse is None else lse[:, rows]
        found.append(run([x[rows] for x in by_query], [x[keys] for x in by_key], part))
    return found


def forward(x: dict[str, Any], band: Band, softcap: float) -> tuple[Tensor, Tensor]:
    q, cu_q = x["q"], x.get("cu_seqlens_q")
    settings = (band, x["softmax_scale"], softcap)
    pairs = of_each_sequence(
        lambda rows, keys, lse: attention(*rows, *keys, *settings),
        cu_q, x.get("cu_seqlens_k"), (q,), (x["k"], x["v"]), None,
    )  # fmt: skip
    outputs, statistics = zip(*pairs, strict=True)
    if cu_q is None:
        return torch.stack(outputs).to(q.dtype), torch.stack(statistics).float()
    return torch.cat(outputs).to(q.dtype), torch.cat(statistics, -1).float()


def backward(
    x: dict[str, Any], out: Tensor, lse: Tensor, band: Band, softcap: float
) -> tuple[Tensor, ...]:
    settings = (band, x["softmax_scale"], softcap)
    found = of_each_sequence(
        lambda rows, keys, part: gradients(*rows[1:], part, rows[0], *keys, *settings),
        x.get("cu_seqlens_q"), x.get("cu_seqlens_k"), (x["q"], x["dout"], out),
        (x["k"], x["v"]), lse,
    )  # fmt: skip
    join = torch.stack if x.get("cu_seqlens_q") is None else torch.cat
    return tuple(join(parts).to(x["q"].dtype) for parts in zip(*found, strict=True))


def lengths(x: dict[str, Any]) -> tuple[int, int]:
    if x.get("cu_seqlens_q") is None:
        return x["q"].shape[1], x["k"].shape[1]
    return x["max_seqlen_q"], x["max_seqlen_k"]


def give(x: dict[str, Any], results: tuple[Tensor, ...]) -> None:
    for name, result in zip(("dq", "dk", "dv"), results, strict=True):
        x[name].copy_(result)


# Parameters as in the libraries' signatures; a call by name goes by them.


def functions_of_2() -> dict[str, Callable[..., Any]]:
    def run_forward(x: dict[str, Any]) -> tuple[Tensor, ...]:
        sides = (x["window_size_left"], x["window_size_right"])
        o, lse = forward(x, band_of_2(x["causal"], *sides, *lengths(x)), x["softcap"])
        # Rows without a key.
        return o, lse.masked_fill(lse == -torch.inf, torch.inf), None, None

    def run_backward(x: dict[str, Any]) -> None:
        sides = (x["window_size_left"], x["window_size_right"])
        band = band_of_2(x["causal"], *sides, *lengths(x))
        give(x, backward(x, x["out"], x["softmax_lse"], band, x["softcap"]))

    def _flash_attn_forward(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    ):  # type: ignore[no-untyped-def]
        return run_forward(locals())

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    ):  # type: ignore[no-untyped-def]
        return run_forward(locals())

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):  # type: ignore[no-untyped-def]
        run_backward(locals())

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):  # type: ignore[no-untyped-def]
        run_backward(locals())

    return {name: f for name, f in locals().items() if name.startswith("_flash")}


def functions_of_3() -> dict[str, Callable[..., Any]]:
    def _flash_attn_forward(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
    ):  # type: ignore[no-untyped-def]
        x = locals()
        band = band_of_3(causal, window_size_left, window_size_right, *lengths(x))
        return *forward(x, band, softcap), None, None

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
    ):  # type: ignore[no-untyped-def]
        x = locals()
        band = band_of_3(is_causal, window_size_left, window_size_right, *lengths(x))
        give(x, backward(x, out, softmax_lse, band, softcap))

    return {name: f for name, f in locals().items() if name.startswith("_flash")}


def functions_of_4() -> dict[str, Callable[..., Any]]:
    def _flash_attn_fwd(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        learnable_sink=None,
        return_lse=False,
    ):  # type: ignore[no-untyped-def]
        x = locals()
        assert return_lse
        band = band_of_4(causal, window_size_left, window_size_right)
        return *forward(x, band, softcap or 0.0), None, None

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dlse=None,
        learnable_sink=None,
    ):  # type: ignore[no-untyped-def]
        x = locals()
        band = band_of_4(causal, window_size_left, window_size_right)
        return backward(x, out, lse, band, softcap)

    return {name: f for name, f in locals().items() if name.startswith("_flash")}


FUNCTIONS = {
    "flash_attn_2": functions_of_2,
    "flash_attn_3": functions_of_3,
    "flash_attn_4": functions_of_4,
}
