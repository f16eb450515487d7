"""Models built on the meta device: FSDP gives them memory and values unit by unit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import WIDTH, Large, Plain, Run, Tied, assert_equal, train
from ranks import RankError, on_ranks
from sharded_steps import loss_of
from torch import Tensor, nn

from parallel.data import FSDP, BucketedDDP


def fill(module: nn.Module) -> None:
    """Values that follow from shapes alone."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        values = torch.linspace(-1, 1, tensor.numel()) * (0.3 + 0.1 * tensor.dim())
        tensor.copy_(values.view(tensor.shape))


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


def train_on_rank(
    group: dist.ProcessGroup, kind: type[nn.Module], dtype: torch.dtype | None, below: int
) -> dict[str, Tensor]:
    model = FSDP(on_meta(kind), dtype, replicate_below=below, group=group, init_fn=fill)
    return train(model, Run(), dist.get_rank(group), group.size())


@pytest.mark.parametrize("kind", [Plain, Tied, Large])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_trains_as_one_process(kind: type[nn.Module], num_ranks: int) -> None:
    module = kind()
    with torch.no_grad():
        module.apply(fill)
    wanted = train(module, Run())
    for below in (0, WIDTH + 1):
        for found in on_ranks(num_ranks, train_on_rank, kind, None, below):
            assert_equal(found, wanted, rtol=1e-5, atol=1e-6)


class Scaled(Plain):
    """With a way to make its own buffer, as modules have that are built on the meta device."""

    def reset_parameters(self) -> None:
        self.scale.uniform_()


def default_values(group: dist.ProcessGroup) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(dist.get_rank(group))
    model = FSDP(on_meta(Scaled), replicate_below=0, group=group)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model, torch.ones(2, WIDTH)).backward()
    model.finish_gradient_synchronization()
    return whole, [p.numel() for p in model.parameters()]


def test_modules_reset_their_parameters() -> None:
    """nn.Linear's uniform values of at most 8^-1/2, those of the first rank on all."""
    (first, held), (_, others) = on_ranks(2, default_values)
    (alone, _), *_ = on_ranks(1, default_values)
    assert_equal(first, alone, rtol=0, atol=0)
    assert sum(held) + sum(others) == 3 * (64 + 8)
    for name in (f"module.layers.{n}.weight" for n in range(3)):
        assert 0.2 < float(first[name].abs().max()) <= WIDTH**-0.5
        assert float(first[name].std()) == pytest.approx((WIDTH**-0.5) / 3**0.5, rel=0.3)
    assert not torch.equal(first["module.layers.0.weight"], first["module.layers.1.weight"])
    assert 0 < float(first["module.scale"].min()) < float(first["module.scale"].max()) < 1


def memory(group: dist.ProcessGroup) -> list[int]:
    """Bytes of all parameters that have memory, whenever a module is initialised."""
    module = on_meta(Large)
    seen = []

    def note(inner: nn.Module) -> None:
        fill(inner)
        parameters = [*module.parameters()]
        seen.append(sum(p.untyped_storage().nbytes() for p in parameters))

    FSDP(module, replicate_below=0, group=group, init_fn=note)
    return seen


def test_one_unit_is_whole_at_a_time() -> None:
    """Three layers of 72 elements, the buffer's module, and 387 elements outside of layers."""
    for seen in on_ranks(2, memory):
        assert sorted(seen) == [4 * 72, 4 * 72, 4 * 72, 4 * 387, 4 * 387]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"^the module \(Bare\) is on the meta device and has no"):
        FSDP(on_meta(Bare))
    with pytest.raises(ValueError, match=r"^weight is on the meta device: give the module memory"):
        BucketedDDP(on_meta(Bare))


class Forgets(Plain):
    """A module whose reset_parameters() was written for its weight alone."""

    def __init__(self, forgotten: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("phase", torch.ones(WIDTH), persistent=False)
        self.register_buffer("places", torch.arange(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))
        self.forgotten = forgotten

    def reset_parameters(self) -> None:
        own = {"gain": self.gain, "phase": self.phase, "places": self.places, "scale": self.scale}
        for name, tensor in own.items():
            if name != self.forgotten:
                tensor.fill_(1)
        self.mask.fill_(True)


def forget(group: dist.ProcessGroup, name: str) -> None:
    with torch.device("meta"):
        module = Forgets(name)
    FSDP(module, replicate_below=0, group=group)


@pytest.mark.parametrize("name", ["gain", "phase", "places"])
def test_what_was_not_initialised_is_named(name: str) -> None:
    with pytest.raises(RankError) as error:
        on_ranks(2, forget, name)
    wanted = f"ValueError: {name} comes from the meta device and was not initialised"
    assert str(error.value).count(wanted) == 2
    on_ranks(2, forget, "nothing")


class Remade(Plain):
    """A buffer that reset_parameters() replaces in place of writing into it."""

    def reset_parameters(self) -> None:
        self.scale = torch.rand(WIDTH)


def remade(group: dist.ProcessGroup) -> Tensor:
    torch.manual_seed(dist.get_rank(group))
    return FSDP(on_meta(Remade), replicate_below=0, group=group).module.scale


def test_a_buffer_that_was_replaced_is_the_first_ranks() -> None:
    first, second = on_ranks(2, remade)
    assert torch.equal(first, second)


def first_alone(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """The first rank reads a file, say."""

    def read(module: nn.Module) -> None:
        if dist.get_rank(group) == 0:
            fill(module)

    return FSDP(on_meta(Plain), replicate_below=0, group=group, init_fn=read).state_dict()


def test_values_of_the_first_rank_are_enough() -> None:
    first, second = on_ranks(2, first_alone)
    assert_equal(second, first, rtol=0, atol=0)
