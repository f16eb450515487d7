"""Small models, containers of them, and training on several ranks and in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data import FSDP, BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP, Zero1, Zero2

WIDTH, BATCH, STEPS = 8, 12, 4

TINY_MB = 300 / 2**20
"""A bucket that holds one weight matrix of the models below and a bias, but not two."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


class Tied(Plain):
    """One weight in two layers, whose gradient is the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)


class Unused(Plain):
    """The last layer is used by no rank, and the second one where the first number is positive."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        if x[0, 0] > 0:
            # Rows by themselves: a batch in one piece uses it for the same rows as its parts do.
            return first + self.layers[1](x) * (x[:, :1] > 0)
        return first


class TwoDtypes(Plain):
    """Parameters in bfloat16 between others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        return self.layers[2](self.layers[1](x.bfloat16()).float())


class Strided(Plain):
    """A convolution whose weight is laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.convolution(image).sum((1, 2, 3)).unsqueeze(1) * super().forward(x)


class Large(Plain):
    """A weight that no number of ranks divides, nor the alignment of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 5 * WIDTH + 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


MODELS = [Plain, Tied, Frozen, Unused, TwoDtypes, Strided, Large]


def bucketed(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return BucketedDDP(module, TINY_MB, group=group)


def naive(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return NaiveDDP(module, group=group)


def flat(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return FlatDDP(module, group=group)


def overlapped(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return OverlappedDDP(module, group=group)


def zero_1(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return Zero1(module, TINY_MB, group=group)


def zero_2(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return Zero2(module, TINY_MB, group=group)


def fsdp(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Weights are sharded, biases whole on every rank."""
    return FSDP(module, replicate_below=WIDTH + 1, group=group)


def peer(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        module,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=isinstance(module, Unused),
    )


Wrap = Callable[[nn.Module, dist.ProcessGroup | None], nn.Module]

OWN: list[Wrap] = [naive, flat, overlapped, bucketed]

IN_PARTS: list[Wrap] = [zero_1, zero_2, fsdp]
"""Containers whose ``parameters()`` are shards of the module's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Run:
    """How a model is trained."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    passes: int = 1
    """Backward passes to a step: all but the last without synchronisation."""
    set_to_none: bool = True
    autocast: bool = False


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()


def batches(rank: int, num_ranks: int) -> Iterator[Tensor]:
    """This rank's rows of the batch of every step; rank 0 of one has all."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        whole = torch.randn(BATCH, WIDTH, generator=generator)
        # The first half of the ranks has the sign that Unused looks at, and one process sees it.
        whole[: BATCH // 2, 0] = whole[: BATCH // 2, 0].abs()
        whole[BATCH // 2 :, 0] = -whole[BATCH // 2 :, 0].abs()
        yield whole.chunk(num_ranks)[rank]


def train(model: nn.Module, run: Run, rank: int = 0, num_ranks: int = 1) -> dict[str, Tensor]:
    """Parameters and buffers after some steps on this rank's rows."""
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"momentum": 0.9} if run.optimizer is torch.optim.SGD else {"weight_decay": 0.1}
    optimizer = run.optimizer(trained, lr=0.05, **options)
    for batch in batches(rank, num_ranks):
        parts = batch.chunk(run.passes)
        for index, part in enumerate(parts):
            waits = no_sync(model) if index + 1 < len(parts) else contextlib.nullcontext()
            with waits, torch.autocast("cpu", torch.bfloat16, enabled=run.autocast):
                (model(part).float().square().mean() / len(parts)).backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad(set_to_none=run.set_to_none)
    state = model.state_dict()
    return {name.removeprefix("module."): value.clone() for name, value in state.items()}


def train_on_rank(
    group: dist.ProcessGroup, wrap: Wrap, model: type[nn.Module], run: Run
) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    # Replicas differ until they are wrapped.
    torch.manual_seed(100 + rank)
    return train(wrap(model(), group), run, rank, group.size())


def expected(model: type[nn.Module], run: Run) -> dict[str, Tensor]:
    torch.manual_seed(100)
    return train(model(), run)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor], **bounds: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: n + text, **bounds)


def bounds_of(model: type[nn.Module], run: Run) -> dict[str, float]:
    if model is TwoDtypes or run.autocast:
        # Gradients of halves of the batch are rounded to eight bits before they are summed.
        return {"rtol": 2e-2, "atol": 2e-2}
    return {"rtol": 1e-5, "atol": 1e-6}
