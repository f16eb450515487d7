"""FSDP says what it does not shard, and finds blocks by their classes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import WIDTH, Large, Plain, Run, assert_equal, expected, train_on_rank
from ranks import on_ranks
from torch import Tensor, nn

from parallel.data import FSDP
from parallel.data.fsdp.blocks import named_blocks


class Attributes(nn.Module):
    """Layers that no list holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


def said(group: dist.ProcessGroup, kind: type[nn.Module], options: dict) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(kind(), group=group, **options)
    return [str(warning.message) for warning in caught]


def test_nothing_is_sharded() -> None:
    """Large has 3 x (64 + 8) + 344 + 43 elements in eight parameters."""
    first, second = on_ranks(2, said, Large, {})
    assert first == [
        "FSDP shards nothing: the largest of 8 parameters has 344 elements, fewer than "
        "replicate_below=32,768; every rank holds all 603"
    ]
    assert second == []


def test_layers_outside_of_lists() -> None:
    first, second = on_ranks(2, said, Attributes, {"replicate_below": 9})
    assert len(first) == 1
    assert first[0].startswith("FSDP found no blocks: no ModuleList or Sequential holds layers, ")
    assert "2 parameters of 128 elements" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Plain, {"replicate_below": 9}),
        (Attributes, {"replicate_below": 9, "blocks": []}),
        (Attributes, {"replicate_below": 9, "blocks": Layer}),
        (Large, {"replicate_below": 300}),
    ],
)
def test_nothing_to_say(kind: type[nn.Module], options: dict) -> None:
    assert on_ranks(2, said, kind, options) == [[], []]


def by_class(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    model = FSDP(module, replicate_below=0, blocks="Layer", group=group)
    assert len(model._units) == 2
    return model


def test_blocks_by_the_name_of_their_class_train() -> None:
    for found in on_ranks(2, train_on_rank, by_class, Attributes, Run()):
        assert_equal(found, expected(Attributes, Run()), rtol=1e-5, atol=1e-6)


def test_classes_and_modules() -> None:
    module = Attributes()
    both = [module.first, module.second]
    assert named_blocks(module, Layer) == both
    assert named_blocks(module, [Layer]) == both
    assert named_blocks(module, "Module") == both
    assert named_blocks(module, [module.second]) == [module.second]
    inner = [module.first.inner, module.second.inner]
    assert named_blocks(module, nn.Linear) == inner
    with pytest.raises(ValueError, match=r"^blocks: no module inside Attributes is a Conv2d$"):
        named_blocks(module, [nn.Conv2d])


def test_the_dtype_may_be_positional() -> None:
    model = FSDP(nn.Linear(2, 2), torch.bfloat16)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
