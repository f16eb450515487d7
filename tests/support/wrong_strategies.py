"""Strategies with a planted fault each, as choices of ``parallel=``: ``planted_NAME``.

Replicas average their gradients one parameter after another, ZeRO-1 and FSDP are this project's;
the faults lie in what is averaged, or in the optimizer of one rank. ``planted_none`` and its like
have none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.strategies.fsdp import FSDPStrategy
from parallel.strategies.none import NoDataParallelism
from parallel.strategies.strategy import STRATEGIES, Strategy, strategy
from parallel.strategies.zero_1 import Zero1Strategy

SOUND_STEPS = 8
"""Steps in which a fault that comes late is right: those of the check before the measured ones."""

WRONG_RANK = 1

STEPS: dict[str, int] = {}
"""Optimizer steps by fault, of this process."""

EARLIER: dict[str, list[Tensor]] = {}


@dataclass(kw_only=True, slots=True)
class Gradients:
    """Averaged gradients of a step, in the order of the module, which a fault spoils in place."""

    names: list[str]
    own: list[Tensor]
    """Before they were averaged."""
    average: list[Tensor]
    step: int
    rank: int
    ranks: int
    tied: bool

    @property
    def last_bucket(self) -> range:
        """The parameters whose gradients come last: the first of the model."""
        return range(len(self.average) // 4)


Fault = Callable[[Gradients], None]

IN_GRADIENTS: dict[str, Fault] = {}


def spoils(function: Fault) -> Fault:
    IN_GRADIENTS[function.__name__] = function
    return function


@spoils
def not_averaged(x: Gradients) -> None:
    _take(x, range(len(x.own)), x.own)


@spoils
def summed(x: Gradients) -> None:
    for average in x.average:
        average *= x.ranks


@spoils
def one_bucket_skipped(x: Gradients) -> None:
    size = len(x.own) // 4
    _take(x, range(size, 2 * size), x.own)


@spoils
def one_parameter_skipped(x: Gradients) -> None:
    number = x.names.index("blocks.1.feed_forward_norm.weight")
    _take(x, [number], x.own)


@spoils
def last_bucket_too_early(x: Gradients) -> None:
    """Before the backward pass had filled it: the other ranks' part is missing."""
    for number in x.last_bucket:
        x.average[number].copy_(x.own[number] / x.ranks)


@spoils
def last_bucket_stale(x: Gradients) -> None:
    earlier = EARLIER.get("last_bucket_stale")
    EARLIER["last_bucket_stale"] = [x.average[number].clone() for number in x.last_bucket]
    if earlier is not None and x.step % 4:
        for number, old in zip(x.last_bucket, earlier, strict=True):
            x.average[number].copy_(old)


@spoils
def one_rank_left_out(x: Gradients) -> None:
    if x.ranks > 1:
        for average, own in zip(x.average, x.own, strict=True):
            part = own / x.ranks if x.rank == WRONG_RANK else torch.zeros_like(own)
            dist.all_reduce(part)
            average -= part


@spoils
def mean_over_twice_the_ranks(x: Gradients) -> None:
    for average in x.average:
        average /= 2


@spoils
def two_gradients_swapped(x: Gradients) -> None:
    one, other = (x.names.index(f"blocks.{block}.attention.q_proj.weight") for block in range(2))
    kept = x.average[one].clone()
    x.average[one].copy_(x.average[other])
    x.average[other].copy_(kept)


@spoils
def tied_weights_counted_twice(x: Gradients) -> None:
    if x.tied:
        x.average[x.names.index("embedding.weight")] *= 2


@spoils
def ranks_drift_after_step_2(x: Gradients) -> None:
    if x.step % 4 >= 2 and x.rank == WRONG_RANK:
        _take(x, range(3), x.own)


@spoils
def one_parameter_not_updated_on_one_rank(x: Gradients) -> None:
    if x.rank == WRONG_RANK:
        x.average[x.names.index("final_norm.weight")].zero_()


@spoils
def nan_in_one_gradient(x: Gradients) -> None:
    if x.rank == WRONG_RANK and x.step % 4 == 3:
        x.average[5].view(-1)[3] = math.nan


@spoils
def one_row_of_a_gradient_missing(x: Gradients) -> None:
    x.average[x.names.index("blocks.0.feed_forward.w1.weight")][-1] = 0


@spoils
def gradients_accumulate_over_steps(x: Gradients) -> None:
    """Those of the step before have not been cleared in one parameter."""
    number = x.names.index("blocks.1.attention.o_proj.weight")
    earlier = EARLIER.get("gradients_accumulate_over_steps")
    EARLIER["gradients_accumulate_over_steps"] = [x.average[number].clone()]
    if earlier is not None and x.step % 4:
        x.average[number] += earlier[0]


@spoils
def after_some_steps(x: Gradients) -> None:
    if x.step >= SOUND_STEPS:
        summed(x)


def _take(x: Gradients, numbers: Iterable[int], values: list[Tensor]) -> None:
    for number in numbers:
        x.average[number].copy_(values[number])


@dataclass(kw_only=True, slots=True)
class PlantedReplicas(Strategy):
    """Replicas that are right but for the fault."""

    dp: int = 2
    fault: str = "none"

    def after_backward(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        own = [p.grad.clone() for _, p in named if p.grad is not None]
        average = [p.grad for _, p in named if p.grad is not None]
        for gradient in average:
            dist.all_reduce(gradient)
            gradient /= self.data_ranks
        step = STEPS.get(self.fault, 0)
        STEPS[self.fault] = step + 1
        if self.fault in IN_GRADIENTS:
            IN_GRADIENTS[self.fault](
                Gradients(
                    names=[name for name, _ in named],
                    own=own,
                    average=average,
                    step=step,
                    rank=dist.get_rank(),
                    ranks=self.data_ranks,
                    tied="head.weight" not in dict(named),
                )
            )


@dataclass(kw_only=True, slots=True)
class PlantedZero(Zero1Strategy):
    """ZeRO-1 whose optimizer is wrong on one rank."""

    fault: str = "none"

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        return _spoiled(Zero1Strategy.optimizer, self, params, cls, kwargs)


@dataclass(kw_only=True, slots=True)
class PlantedFSDP(FSDPStrategy):
    """FSDP whose optimizer is wrong on one rank."""

    fault: str = "none"

    def optimizer(
        self, params: Iterable[nn.Parameter], cls: type[torch.optim.Optimizer], **kwargs: Any
    ) -> torch.optim.Optimizer:
        return _spoiled(FSDPStrategy.optimizer, self, params, cls, kwargs)


@dataclass(kw_only=True, slots=True)
class PlantedParts(NoDataParallelism):
    """Split sequences or weights, and gradients that are wrong on one rank, or not averaged."""

    fault: str = "none"

    def after_backward(self, model: nn.Module) -> None:
        if self.fault != "parts_not_averaged":
            NoDataParallelism.after_backward(self, model)
        if self.fault == "part_of_a_weight_doubled" and dist.get_rank() == WRONG_RANK:
            name = "blocks.1.feed_forward.w2.weight"
            gradient = dict(model.named_parameters())[name].grad
            assert gradient is not None
            gradient *= 2
        if self.fault == "norm_not_summed" and dist.get_rank() == WRONG_RANK:
            gradient = dict(model.named_parameters())["final_norm.weight"].grad
            assert gradient is not None
            gradient /= self.world_size


OF_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "another_learning_rate": {"lr": 1.1},
    "weight_decay_missing": {"weight_decay": 0.0},
    "other_eps": {"eps": 3.0},
}
"""Factors on the options of one rank's optimizer."""

OF_STEPS = (
    "one_step_ahead",
    "no_step",
    "momentum_forgotten",
    "nan_in_one_shard",
    "element_left",
    "none",
)


def _spoiled(
    make: Callable[..., torch.optim.Optimizer],
    scheme: Any,
    params: Iterable[nn.Parameter],
    cls: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
) -> torch.optim.Optimizer:
    fault = scheme.fault.split("_", 1)[1]
    if dist.get_rank() != WRONG_RANK:
        return make(scheme, params, cls, **kwargs)
    factors = OF_OPTIMIZERS.get(fault, {})
    kwargs = {name: value * factors.get(name, 1.0) for name, value in kwargs.items()}
    kwargs["fused"] = True
    optimizer = make(scheme, params, cls, **kwargs)
    if fault in OF_STEPS:
        optimizer.register_step_pre_hook(lambda made, *_: _before(made, fault))
    return optimizer


def _before(optimizer: torch.optim.Optimizer, fault: str) -> None:
    """Spoil one rank's shards, or the state of its optimizer, before a step."""
    shards = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    for shard in shards:
        state = optimizer.state[shard]
        if fault == "no_step":
            shard.grad = None
        if not state:
            continue
        if fault == "one_step_ahead" and int(state["step"]) == 1:
            state["step"] += 1
        if fault == "momentum_forgotten":
            state["exp_avg"].zero_()
        if fault == "nan_in_one_shard" and shard is shards[-1]:
            with torch.no_grad():
                shard.view(-1)[0] = math.nan
        if fault == "element_left" and shard.grad is not None:
            shard.grad.view(-1)[-1] = 0
            state["exp_avg"].view(-1)[-1] = 0


OF_SHARDS = [
    f"{kind}_{fault}"
    for kind in ("zero", "fsdp")
    for fault in (*OF_OPTIMIZERS, *OF_STEPS)
    if fault != "none"
]

OF_PARTS = {
    "parts_not_averaged": ("parallel.cp=4", "attention=ring"),
    "part_of_a_weight_doubled": ("parallel.tp=4",),
    "norm_not_summed": ("parallel.tp=4",),
}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Have them among the choices; other tests go over all that there are."""
    kinds: dict[str, type[Strategy]] = {
        **dict.fromkeys((*IN_GRADIENTS, "none"), PlantedReplicas),
        **{name: PlantedZero for name in (*OF_SHARDS, "zero_none") if name.startswith("zero")},
        **{name: PlantedFSDP for name in (*OF_SHARDS, "fsdp_none") if name.startswith("fsdp")},
        **dict.fromkeys((*OF_PARTS, "parts_none"), PlantedParts),
    }
    STEPS.clear()
    EARLIER.clear()
    for name, kind in kinds.items():
        strategy(f"planted_{name}", fault=name)(kind)
    try:
        yield
    finally:
        for name in kinds:
            del STRATEGIES._entries[f"planted_{name}"]
