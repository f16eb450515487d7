"""ZeRO and FSDP: how they cut a model into shards, what cases declare of them, what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import IN_PARTS, Plain, Tied, Wrap, fsdp, zero_1, zero_2
from ranks import on_ranks
from strategy_training import case_of
from torch import nn

from parallel.data import FSDP, Zero1, optimizer_of_shards
from parallel.data.flat import ALIGNMENT, FlatLayout
from parallel.data.fsdp.blocks import parameters_of_blocks
from parallel.data.model_blocks import blocks_of


class TestLayout:
    def test_by_hand(self) -> None:
        """70, 3 and 100 elements: 128 + 64 + 128 with alignment, in three parts of 128."""
        layout = FlatLayout([torch.zeros(7, 10), torch.zeros(3), torch.zeros(100)], 3)
        assert ALIGNMENT == 64
        assert (layout.offsets, layout.shard_size, layout.size) == ([0, 128, 192], 128, 384)
        held = [[layout.held(place, shard) for shard in range(3)] for place in range(3)]
        assert held == [
            [(0, 70), (70, 70), (70, 70)],
            [(0, 0), (0, 3), (3, 3)],
            [(0, 0), (0, 64), (64, 100)],
        ]

    @pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
    def test_shards_make_up_the_whole(self, num_shards: int) -> None:
        """Shards in memory order; one tensor is transposed, and one a scalar."""
        tensors = [torch.randn(9, 30).t(), torch.randn(()), torch.randn(301)]
        layout = FlatLayout(tensors, num_shards)
        buffer = torch.zeros(layout.size)
        for view, tensor in zip(layout.views(buffer), tensors, strict=True):
            assert view.stride() == tensor.stride()
            view.copy_(tensor)
        cut = [layout.split_shard(layout.shard(buffer, n), n) for n in range(num_shards)]
        for place, tensor in enumerate(tensors):
            joined = torch.cat([slices[place] for slices in cut])
            assert torch.equal(joined.as_strided(tensor.shape, tensor.stride()), tensor)


class TestBlocks:
    def test_outermost_lists(self) -> None:
        inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        lists = nn.ModuleList([nn.ModuleList([inner]), nn.Linear(2, 2)])
        model = nn.ModuleDict({"first": nn.Linear(2, 2), "rest": lists})
        assert blocks_of(model) == [inner, lists[1]]
        assert blocks_of(nn.Linear(2, 2)) == []

    def test_what_is_shared_is_outside(self) -> None:
        model = Tied()
        inside, outside = parameters_of_blocks(model, list(model.layers))
        weights, biases = [m.weight for m in model.layers], [m.bias for m in model.layers]
        assert [list(map(id, members)) for members in inside] == [
            [id(biases[0])],
            [id(weights[1]), id(biases[1])],
            [id(biases[2])],
        ]
        assert list(map(id, outside)) == [id(weights[0])]

    def test_bad_input(self) -> None:
        model = Plain()
        with pytest.raises(ValueError, match=r"^blocks\[1\] is not in the module"):
            parameters_of_blocks(model, [model.layers[0], nn.ReLU()])
        with pytest.raises(ValueError, match=r"^blocks\[1\] is in blocks\[0\]: give blocks that"):
            parameters_of_blocks(model, [model.layers, model.layers[1]])


def wrong_state(group: dist.ProcessGroup) -> list[str]:
    model = fsdp(Plain(), group)
    state = model.state_dict()
    messages = []
    for changed in (
        {name: value for name, value in state.items() if name != "module.layers.1.weight"},
        {**state, "module.other": torch.zeros(1)},
    ):
        with pytest.raises(ValueError, match=r"^the state has") as error:
            model.load_state_dict(changed)
        messages.append(str(error.value))
    return messages


class TestBadInput:
    @pytest.mark.parametrize("wrap", IN_PARTS)
    def test_sharded_already(self, wrap: Wrap) -> None:
        module = Plain()
        module.layers[0].weight.device_mesh = None  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"^layers.0.weight is a DTensor, sharded already"):
            wrap(module, None)

    @pytest.mark.parametrize("wrap", IN_PARTS)
    @pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
    def test_nothing_trains(self, wrap: Wrap, module: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"^the module has no parameter that requires grad"):
            wrap(module, None)

    @pytest.mark.parametrize("wrap", [zero_1, zero_2])
    def test_devices(self, wrap: Wrap) -> None:
        split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match=r"^1.weight is on meta and 0.weight on cpu: move"):
            wrap(split, None)

    @pytest.mark.parametrize("size", [0, -1, float("inf"), float("nan")])
    def test_bucket_size(self, size: float) -> None:
        with pytest.raises(ValueError, match=r"^bucket_size_mb=.*: must be positive and finite$"):
            Zero1(Plain(), size)

    def test_replicate_below(self) -> None:
        with pytest.raises(ValueError, match=r"^replicate_below=-1: must be at least 0$"):
            FSDP(Plain(), replicate_below=-1)

    @pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
    def test_optimizers_of_whole_parameters(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"^{name} does not update each element by itself"):
            optimizer_of_shards(Plain().parameters(), getattr(torch.optim, name))

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match=r"^optimizer got an empty parameter list$"):
            optimizer_of_shards([], torch.optim.AdamW)

    def test_state_of_another_model(self) -> None:
        for messages in on_ranks(2, wrong_state):
            assert messages == [
                "the state has no module.layers.1.weight: give that of the same model",
                "the state has module.other, which the model has not",
            ]

    def test_keys(self) -> None:
        with pytest.raises(ValueError, match=r"^parallel\.compute_dtype=int8: must be null or one"):
            case_of("parallel=fsdp", "parallel.compute_dtype=int8")
        with pytest.raises(ValueError, match=r"^parallel\.replicate_below=-1: must be at least 0"):
            case_of("parallel=fsdp", "parallel.replicate_below=-1")
        with pytest.raises(ValueError, match=r"^parallel\.compute_dtype=bfloat16: PyTorch's fully"):
            case_of("parallel=fsdp_torch", "parallel.dp=1", "parallel.compute_dtype=bfloat16")


@pytest.mark.parametrize(
    ("name", "shares_of"),
    [
        ("zero_1", (1, 1, 0.25)),
        ("zero_2", (1, 0.25, 0.25)),
        ("fsdp", (0.25, 0.25, 0.25)),
        ("fsdp_torch", (0.25, 0.25, 0.25)),
        ("ddp_bucketed", (1, 1, 1)),
    ],
)
def test_shares_of_a_rank(name: str, shares_of: tuple[float, float, float]) -> None:
    found = case_of(f"parallel={name}", "parallel.dp=4").parallel
    assert (found.parameter_share, found.gradient_share, found.optimizer_state_share) == shares_of


def test_a_name_that_ends_in_a_number_is_kept_apart_from_the_ranks() -> None:
    assert "-zero_1x2-" in case_of("parallel=zero_1", "parallel.dp=2").slug
    assert "-fsdp2-" in case_of("parallel=fsdp", "parallel.dp=2").slug
