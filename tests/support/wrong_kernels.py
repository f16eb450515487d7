"""Attention kernels with a planted fault each, as choices of ``attention=``: ``planted_NAME``.

They are FlashAttention in PyTorch, which is right, with something done to its arguments or its
results. Faults are counted by call, forward and backward apart, from the first call of a case.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import BACKENDS, attention_backend
from kernels.backends.flash_torch import FlashTorch
from kernels.problem import AttentionSpec

Results = dict[str, Tensor]

SOUND_CALLS = 4
"""Calls that a fault which comes late is right in: two before the passes that are timed."""

LSE_OFF = 0.1


@dataclass(kw_only=True, slots=True)
class Call:
    """One call of a planted kernel: its arguments, and how many there have been before."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    number: int
    do: Tensor | None = None
    earlier: Results

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]


Fault = Callable[[Results, Call], None]
"""Spoils results in place; forward has o and lse, backward dq, dk and dv."""

SPOILED: dict[str, Fault] = {}

CHANGED: dict[str, Callable[[Call], tuple[Tensor, Tensor, Tensor, AttentionSpec]]] = {}
"""Faults in what a kernel computes with, in both passes."""

EARLIER: dict[str, Results] = {}

CALLS: Counter[tuple[str, str]] = Counter()


def forget_calls() -> None:
    """Count from the first call again."""
    CALLS.clear()
    EARLIER.clear()
    REMEMBERED.clear()


@dataclass(kw_only=True, slots=True)
class Planted(FlashTorch):
    """Attention that is right but for its fault."""

    fault: str = "none"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        call = self._call("forward", q, k, v, spec)
        q, k, v, spec = self._arguments(call)
        o, lse = FlashTorch.forward(self, q, k, v, spec)
        results = {"o": o, "lse": lse}
        self._spoil(results, call)
        return results["o"], results["lse"]

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = self._call("backward", q, k, v, spec)
        call.do = do
        q, k, v, spec = self._arguments(call)
        if self.fault == "lse_alone":
            lse = lse - LSE_OFF
        elif self.fault.startswith("lse_"):
            o, lse = FlashTorch.forward(self, q, k, v, spec)
        dq, dk, dv = FlashTorch.backward(self, do, q, k, v, o, lse, spec)
        results = {"dq": dq, "dk": dk, "dv": dv}
        self._spoil(results, call)
        return results["dq"], results["dk"], results["dv"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.sinks is not None and self.fault in OF_SINKS:
            spec = replace(spec, sinks=_Spoilt.apply(spec.sinks, OF_SINKS[self.fault]))
        return FlashTorch.attend(self, q, k, v, spec)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        o, lse = FlashTorch.attend_with_lse(self, q, k, v, spec)
        if self.fault == "sinks_missing_from_lse":
            return o, self.forward(q, k, v, replace(spec, sinks=None))[1]
        return o, lse

    def _call(self, kind: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Call:
        number = CALLS[self.fault, kind]
        CALLS[self.fault, kind] += 1
        earlier = EARLIER.get(f"{self.fault} {kind}", {})
        return Call(q=q, k=k, v=v, spec=spec, number=number, earlier=earlier)

    def _arguments(self, call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
        if self.fault in CHANGED:
            return CHANGED[self.fault](call)
        return call.q, call.k, call.v, call.spec

    def _spoil(self, results: Results, call: Call) -> None:
        kind = "forward" if "o" in results else "backward"
        right = {name: x.clone() for name, x in results.items()}
        if self.fault in SPOILED:
            SPOILED[self.fault](results, call)
        EARLIER[f"{self.fault} {kind}"] = right


def spoils(function: Fault) -> Fault:
    """Register a fault in results, under the function's name."""
    SPOILED[function.__name__] = function
    return function


# What the audit planted.


@spoils
def nan_in_a_middle_row(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][0, 1, x["o"].shape[2] // 2, 3] = math.nan


@spoils
def first_head(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][:, 0] *= 1.5


@spoils
def first_batch_entry(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][0] *= -1


@spoils
def middle_rows(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][:, -1, 70:82] = x["o"][:, -1, 60:72]


@spoils
def dk_of_early_keys(x: Results, call: Call) -> None:
    if "dk" in x:
        x["dk"][:, -1, :16] *= 2


@spoils
def nan_dk_of_early_keys(x: Results, call: Call) -> None:
    if "dk" in x:
        x["dk"][:, -1, :16] = math.nan


@spoils
def lse_alone(x: Results, call: Call) -> None:
    """The backward pass takes it off again: outputs and gradients are right, in a ring too."""
    if "lse" in x:
        x["lse"] += LSE_OFF


@spoils
def other_layout(x: Results, call: Call) -> None:
    if "o" in x and not call.q.is_contiguous():
        x["o"] += 0.1 * x["o"].roll(1, 2)


@spoils
def after_some_calls(x: Results, call: Call) -> None:
    if "o" in x and call.number >= SOUND_CALLS:
        x["o"] *= 1.5


@spoils
def in_odd_calls(x: Results, call: Call) -> None:
    if "dq" in x and call.number % 2 == 0:
        x["dq"] *= 1.5


@spoils
def in_even_calls(x: Results, call: Call) -> None:
    if "dq" in x and call.number % 2 == 1:
        x["dq"] *= 1.5


@spoils
def dq_by_1_percent(x: Results, call: Call) -> None:
    _scale(x, "dq", 1.01)


@spoils
def dq_by_3_percent(x: Results, call: Call) -> None:
    _scale(x, "dq", 0.97)


@spoils
def dq_with_noise_of_1_percent(x: Results, call: Call) -> None:
    _noise(x, "dq", 0.01)


@spoils
def dq_with_noise_of_3_percent(x: Results, call: Call) -> None:
    _noise(x, "dq", 0.03)


# Heads, batch entries and groups.


def _group_mapping(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Head h reads the keys of h modulo their number, in place of h over the group's size."""
    return call.q, call.k.flip(1), call.v.flip(1), call.spec


CHANGED["keys_of_another_head"] = _group_mapping


@spoils
def dv_of_one_head_zero(x: Results, call: Call) -> None:
    if "dv" in x:
        x["dv"][:, 0] = 0


@spoils
def dk_and_dq_of_two_heads_swapped(x: Results, call: Call) -> None:
    if "dk" in x:
        x["dk"], x["dq"] = x["dk"].flip(1), x["dq"].flip(1)


@spoils
def dk_not_summed_over_the_group(x: Results, call: Call) -> None:
    if "dk" in x:
        x["dk"] /= call.group


@spoils
def dv_of_batch_entries_swapped(x: Results, call: Call) -> None:
    if "dv" in x and x["dv"].shape[0] > 1:
        x["dv"][:2] = x["dv"][:2].flip(0)


@spoils
def second_batch_entry_only(x: Results, call: Call) -> None:
    """Right for a batch of one."""
    if "o" in x and x["o"].shape[0] > 1:
        x["o"][1] = x["o"][0]


@spoils
def dq_of_one_head_without_scale(x: Results, call: Call) -> None:
    if "dq" in x:
        x["dq"][:, 2] /= call.spec.scale


# Tiles, tails and rows.


@spoils
def one_tile(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][0, 2, 64:128] = x["o"][0, 1, 64:128]


@spoils
def last_partial_tile(x: Results, call: Call) -> None:
    if "dq" in x:
        length = x["dq"].shape[2]
        x["dq"][:, 1, length - length % 64 :] = 0


@spoils
def one_tile_of_dv(x: Results, call: Call) -> None:
    if "dv" in x:
        x["dv"][1, 0, 64:128] *= 0.9


@spoils
def uninitialised_tail_of_dk(x: Results, call: Call) -> None:
    if "dk" in x:
        x["dk"][:, :, -5:] = 0.3


@spoils
def one_infinity(x: Results, call: Call) -> None:
    if "dv" in x:
        x["dv"][1, 1, 77, 5] = math.inf


@spoils
def rows_shifted_by_one(x: Results, call: Call) -> None:
    if "o" in x:
        x["o"][:, :, 1:] = x["o"][:, :, :-1].clone()


@spoils
def long_sequences_only(x: Results, call: Call) -> None:
    if "o" in x and x["o"].shape[2] > 128:
        x["o"][:, :, 128:] *= 0.95


# Scores and masks.


def _scale_by_1_percent(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    return call.q, call.k, call.v, replace(call.spec, scale=1.01 * call.spec.scale)


CHANGED["scale_by_1_percent"] = _scale_by_1_percent


def _no_mask(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    return call.q, call.k, call.v, replace(call.spec, causal=False)


CHANGED["no_mask"] = _no_mask


def _mask_off_by_one(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Every query sees its own key only from the next one on: keys move on by one."""
    return call.q, call.k.roll(-1, 2), call.v.roll(-1, 2), call.spec


CHANGED["mask_off_by_one"] = _mask_off_by_one


def _block_dropped(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Values of one block of keys in one head count as zero."""
    v = call.v.clone()
    v[0, 1, 64:80] = 0
    return call.q, call.k, v, call.spec


CHANGED["one_block_of_values_dropped"] = _block_dropped


def _narrow(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """As if products were rounded to float16."""
    return *(x.half().to(x.dtype) for x in (call.q, call.k, call.v)), call.spec


CHANGED["inputs_rounded_to_float16"] = _narrow


@spoils
def accumulated_in_float16(x: Results, call: Call) -> None:
    for name in x:
        if name != "lse":
            x[name] = x[name].half().to(x[name].dtype)


@spoils
def gradients_without_row_sums(x: Results, call: Call) -> None:
    """dS = P dP, without D: dq gains scale * D * sum_j p_j k_j, in one head."""
    if "dq" not in x or call.do is None:
        return
    group, head = call.group, 1
    k, v = (y[:, head // group].float() for y in (call.k, call.v))
    q, do = call.q[:, head].float(), call.do[:, head].float()
    scores = q @ k.mT * call.spec.scale
    length, keys = scores.shape[-2:]
    if call.spec.causal:
        seen = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        scores = scores.masked_fill(~seen, -math.inf)
    p = scores.softmax(-1)
    dots = (do * (p @ v)).sum(-1, keepdim=True)
    x["dq"][:, head] += (call.spec.scale * dots * (p @ k)).to(x["dq"].dtype)


# The log-sum-exp.


@spoils
def lse_in_log2(x: Results, call: Call) -> None:
    if "lse" in x:
        x["lse"] *= math.log2(math.e)


@spoils
def lse_without_the_scale(x: Results, call: Call) -> None:
    if "lse" in x:
        x["lse"] /= call.spec.scale


@spoils
def lse_of_one_head_of_zeros(x: Results, call: Call) -> None:
    if "lse" in x:
        x["lse"][:, 1] = 0


# Calls.


@spoils
def stale_output(x: Results, call: Call) -> None:
    """The result of the call before."""
    if "o" in x and "o" in call.earlier and call.earlier["o"].shape == x["o"].shape:
        x["o"] = call.earlier["o"].to(x["o"].dtype)


@spoils
def stale_dk(x: Results, call: Call) -> None:
    """Sums onto that of the call before, late."""
    if "dk" in x and "dk" in call.earlier and call.number >= SOUND_CALLS:
        x["dk"] += call.earlier["dk"]


@spoils
def remembered_by_address(x: Results, call: Call) -> None:
    """What came of the tensors that lay in the same memory before, whatever they hold now."""
    name = "o" if "o" in x else "dq"
    at = f"{call.q.data_ptr()} {tuple(call.q.shape)} {name}"
    x[name] = REMEMBERED.setdefault(at, {name: x[name].clone()})[name].clone()


REMEMBERED: dict[str, Results] = {}


@spoils
def no_maximum_taken_off(x: Results, call: Call) -> None:
    """A softmax that is right until an exponential overflows."""
    if "o" not in x or call.spec.packing is not None:
        return
    k, v = (y.float().repeat_interleave(call.group, 1) for y in (call.k, call.v))
    powers = (call.q.float() @ k.mT * call.spec.scale).exp()
    if call.spec.causal:
        powers = powers.tril(k.shape[2] - call.q.shape[2])
    x["o"] = (powers @ v / powers.sum(-1, keepdim=True)).to(x["o"].dtype)


# Packed batches and other lengths of keys; elsewhere these are right.


def _top_left(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """A causal mask aligned to the top left: late keys come first."""
    offset = call.k.shape[2] - call.q.shape[2]
    return call.q, call.k.roll(offset, 2), call.v.roll(offset, 2), call.spec


CHANGED["top_left_alignment"] = _top_left


@spoils
def packed_boundary(x: Results, call: Call) -> None:
    """The first token of a sequence as in the one before."""
    if "o" in x and call.spec.packing is not None:
        start = int(call.spec.packing.cu_seqlens_q[1])
        x["o"][start] = x["o"][start - 1]


@spoils
def packed_in_the_middle(x: Results, call: Call) -> None:
    if "dv" in x and call.spec.packing is not None:
        starts = call.spec.packing.cu_seqlens_k.tolist()
        x["dv"][starts[1] : starts[2]] *= 1.1


# Windows, prefixes, caps and sinks; without the option these are right.


def _window(call: Call, by: int) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    spec = call.spec
    if spec.window is not None:
        spec = replace(spec, window=spec.window + by)
    return call.q, call.k, call.v, spec


CHANGED["window_too_wide_by_one"] = lambda call: _window(call, 1)
CHANGED["window_too_narrow_by_one"] = lambda call: _window(call, -1)


def _window_not_seen(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    return call.q, call.k, call.v, replace(call.spec, window=None)


CHANGED["window_forgotten"] = _window_not_seen


def _window_on_one_side(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Keys after the query's own are hidden though no mask is causal."""
    return call.q, call.k, call.v, replace(call.spec, causal=True)


CHANGED["window_on_one_side"] = _window_on_one_side


def _prefix_too_short(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    spec = replace(call.spec, prefix_len=max(0, call.spec.prefix_len - 1))
    return call.q, call.k, call.v, spec


CHANGED["prefix_too_short_by_one"] = _prefix_too_short


def _in_backward(call: Call, spec: AttentionSpec) -> AttentionSpec:
    return call.spec if call.do is None else spec


def _cap_forgotten(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    return call.q, call.k, call.v, _in_backward(call, replace(call.spec, softcap=None))


CHANGED["softcap_forgotten_in_backward"] = _cap_forgotten


def _no_cap(call: Call) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    return call.q, call.k, call.v, replace(call.spec, softcap=None)


CHANGED["softcap_forgotten"] = _no_cap


@spoils
def slope_of_the_cap_forgotten(x: Results, call: Call) -> None:
    """Probabilities are right, and their gradients reach the scores as if nothing bent these."""
    if "dq" not in x or call.spec.softcap is None:
        return
    assert call.do is not None
    k, v = (y.float().repeat_interleave(call.group, 1) for y in (call.k, call.v))
    q, do = call.q.float(), call.do.float()
    bent = call.spec.softcap * (q @ k.mT * (call.spec.scale / call.spec.softcap)).tanh()
    seen = torch.ones(bent.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    p = bent.masked_fill(~seen, -math.inf).softmax(-1)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * call.spec.scale
    x["dq"] = (ds @ k).to(x["dq"].dtype)
    dk = (ds.mT @ q).unflatten(1, (-1, call.group)).sum(2)
    x["dk"] = dk.to(x["dk"].dtype)


OF_SINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "gradient_of_sinks_with_the_wrong_sign": lambda gradient: -gradient,
    "gradient_of_one_sink_zero": lambda gradient: gradient * (torch.arange(len(gradient)) != 1),
    "gradient_of_sinks_of_half_the_batch": lambda gradient: gradient / 2,
    "sinks_by_3_percent": lambda gradient: 1.03 * gradient,
}
"""What faults make of the gradient of the sinks."""


class _Spoilt(torch.autograd.Function):
    """Sinks as they are, whose gradient is spoilt."""

    @staticmethod
    def forward(ctx: Any, sinks: Tensor, fault: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.fault = fault
        return sinks.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.fault(gradient), None


def _scale(x: Results, name: str, factor: float) -> None:
    if name in x:
        x[name] = (x[name].float() * factor).to(x[name].dtype)


def _noise(x: Results, name: str, share: float) -> None:
    if name in x:
        noise = torch.randn(x[name].shape, generator=torch.Generator().manual_seed(5))
        size = x[name].float().norm(dim=-1, keepdim=True) * x[name].shape[-1] ** -0.5
        x[name] = (x[name].float() + share * size * noise).to(x[name].dtype)


FAULTS = (*SPOILED, *CHANGED, *OF_SINKS, "sinks_missing_from_lse")


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Have them among the choices; other tests go over all that there are."""
    names = [f"planted_{fault}" for fault in ("none", *FAULTS)]
    for name in names:
        attention_backend(name, fault=name.removeprefix("planted_"))(Planted)
    try:
        yield
    finally:
        for name in names:
            del BACKENDS._entries[name]
