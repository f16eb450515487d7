"""Tensor parallelism, layer by layer: weights, activations and the loss are split, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from tensor_parallel_training import CPU, case_of, make_model, naive, tp_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from harness.cases.case import Case
from harness.tasks.batch import whole_batch
from models.memory import TrainingStep
from models.transformer import NO_TARGET, cross_entropy
from parallel.tensor import (
    ColumnParallel,
    GatherInput,
    RowParallel,
    SequenceParallelNorm,
    VocabParallelEmbedding,
    split_transformer,
    vocab_parallel_cross_entropy,
)
from parallel.tensor.exchanges import gather_sequence, scatter_sum, summed_gradient


def shapes_of(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """Shapes of parameters and activations, and collectives of a forward and backward pass."""
    mesh = tp_mesh(group)
    model = make_model(case, naive(), "meta")
    split_transformer(model, mesh, CPU)
    outputs: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, inputs, output, name=name: outputs.update({name: tuple(output.shape)})
        )
    batch = whole_batch(case, CPU, 0)
    with CommDebugMode() as comm:
        logits = model(batch.tokens, batch.positions)
        vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh).backward()
    counts: dict[str, int] = {}
    for operation, count in comm.get_comm_counts().items():
        kind = next(k for k in ("gather", "scatter", "reduce") if k in str(operation))
        kind = "scatter" if "reduce_scatter" in str(operation) else kind
        counts[kind] = counts.get(kind, 0) + count
    types = {type(parameter) for parameter in model.parameters()} | {type(logits)}
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {"outputs": outputs, "parameters": parameters, "counts": counts, "types": types}


def test_weights_and_activations_are_really_split() -> None:
    """Batch 2, 16 tokens, width 32, d_ff 48, 24 words, 4 heads of 8 for 2 key heads; two ranks."""
    for found in on_ranks(2, shapes_of, case_of("parallel.tp=2")):
        outputs, parameters = found["outputs"], found["parameters"]
        own_tokens = ["embedding", "final_norm", "blocks.1", "blocks.1.attention"]
        own_tokens += [f"blocks.0.{name}" for name in ("attention_norm", "feed_forward_norm")]
        own_tokens += ["blocks.0.attention.o_proj", "blocks.0.feed_forward.w2"]
        for name in own_tokens:
            assert outputs[name] == (2, 8, 32), name
        assert outputs["blocks.0.attention.q_proj"] == (2, 16, 16)
        assert outputs["blocks.0.attention.k_proj"] == (2, 16, 8)
        assert outputs["blocks.0.feed_forward.w1"] == (2, 16, 24)
        assert outputs["head"] == outputs[""] == (2, 16, 12)
        assert parameters["embedding.weight"] == parameters["head.weight"] == (12, 32)
        assert parameters["blocks.0.attention.q_proj.weight"] == (16, 32)
        assert parameters["blocks.0.attention.v_proj.weight"] == (8, 32)
        assert parameters["blocks.0.attention.o_proj.weight"] == (32, 16)
        assert parameters["blocks.0.feed_forward.w3.weight"] == (24, 32)
        assert parameters["blocks.0.feed_forward.w2.weight"] == (32, 24)
        assert parameters["final_norm.weight"] == (32,)
        # Two gathers a block and the head's, as many in the backward pass of what was scattered;
        # a norm's weight has one reduction, and the loss two.
        assert found["counts"] == {"gather": 2 * 5, "scatter": 2 * 5, "reduce": 5 + 2}
        assert found["types"] == {nn.Parameter, Tensor}


MOVES: dict[str, Any] = {
    # Ours, then the placements of its input, of its output and of its output's gradient.
    "gather_sequence": (gather_sequence, Shard(1), Replicate(), Partial()),
    "scatter_sum": (scatter_sum, Partial(), Shard(1), Shard(1)),
    "summed_gradient": (summed_gradient, Replicate(), Replicate(), Partial()),
}


def moved_both_ways(group: dist.ProcessGroup, name: str, batch: int) -> list[list[Tensor]]:
    """Output and input gradient by ours and by DTensor."""
    move, placed, wanted, of_gradient = MOVES[name]
    mesh, rank = tp_mesh(group), dist.get_rank(group)

    def dtensor(x: Tensor, mesh: DeviceMesh) -> Tensor:
        part = DTensor.from_local(x, mesh, [placed], run_check=False)
        return part.redistribute(placements=[wanted]).to_local(grad_placements=[of_gradient])

    found = []
    for way in (move, dtensor):
        torch.manual_seed(rank)
        x = torch.randn(batch, 4 * group.size(), 3).requires_grad_()
        y = way(x, mesh)
        (gradient,) = torch.autograd.grad(y, x, torch.randn(y.shape))
        found.append([y.detach(), gradient])
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_those_of_dtensor(name: str, batch: int) -> None:
    for num_ranks in (2, 4):
        for ours, theirs in on_ranks(num_ranks, moved_both_ways, name, batch):
            for found, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(found, wanted)


def second_order(group: dist.ProcessGroup, name: str) -> tuple[Tensor, Tensor]:
    """This rank's input of a move, and the gradient of its squared gradient; of a cubic loss."""
    move, rank = MOVES[name][0], dist.get_rank(group)
    torch.manual_seed(0 if name == "summed_gradient" else rank)
    x = torch.randn(1, 4 * group.size(), 3, dtype=torch.float64).requires_grad_()
    y = move(x, tp_mesh(group))
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    return x.detach(), second


@pytest.mark.parametrize("name", MOVES)
def test_second_derivatives_are_those_of_one_process(name: str) -> None:
    """Of losses that the ranks add up, as first derivatives are."""
    xs, found = zip(*on_ranks(2, second_order, name), strict=True)
    if name == "scatter_sum":
        # Each summand has the same gradient: 3 (x_0 + x_1)^2.
        expected = [2 * 36 * (xs[0] + xs[1]) ** 3] * 2
    elif name == "gather_sequence":
        # Both ranks' losses have all tokens: 2 * 3 x^2.
        expected = [36 * 4 * x**3 for x in xs]
    else:
        # So they have the parameter, and both its squared gradient.
        expected = [2 * 36 * 4 * x**3 for x in xs]
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def loss_of_part(
    group: dist.ProcessGroup, logits: Tensor, targets: Tensor, num_targets: float | None
) -> list[Tensor]:
    own = logits.chunk(group.size(), -1)[dist.get_rank(group)].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, targets, num_targets, mesh=tp_mesh(group))
    (gradient,) = torch.autograd.grad(2 * loss, own)
    return [loss.detach(), gradient]


class TestLoss:
    @pytest.mark.parametrize("num_targets", [None, 7.0])
    @pytest.mark.parametrize("scale", [1.0, 1e4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_is_that_of_whole_logits(
        self, dtype: torch.dtype, scale: float, num_targets: float | None
    ) -> None:
        """Also where exponentials would overflow, and where targets do not count."""
        torch.manual_seed(0)
        logits = (scale * torch.randn(2, 6, 12)).to(dtype).requires_grad_()
        targets = torch.randint(12, (2, 6))
        targets[0, 3] = targets[1, 0] = NO_TARGET
        loss = cross_entropy(logits, targets, num_targets)
        (gradient,) = torch.autograd.grad(2 * loss, logits)
        ranks = on_ranks(2, loss_of_part, logits.detach(), targets, num_targets)
        for found, _ in ranks:
            torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(torch.cat([part for _, part in ranks], -1), gradient)

    def test_a_second_derivative_is_refused(self) -> None:
        for message in on_ranks(2, second_derivative_of_the_loss):
            assert message == (
                "vocab_parallel_cross_entropy: create_graph=True asks for second derivatives, "
                "which are not available"
            )


def second_derivative_of_the_loss(group: dist.ProcessGroup) -> str:
    logits = torch.randn(2, 6, 12).requires_grad_()
    targets = torch.zeros(2, 6, dtype=torch.int64)
    loss = vocab_parallel_cross_entropy(logits, targets, mesh=tp_mesh(group))
    try:
        torch.autograd.grad(loss, logits, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def saved_bytes(group: dist.ProcessGroup, case: Case, autocast: bool) -> int:
    """Bytes of distinct storages that autograd keeps of one step, without parameters."""
    mesh = tp_mesh(group)
    model = make_model(case, case.attention, "meta")
    split_transformer(model, mesh, CPU)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    batch = whole_batch(case, CPU, 0)
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        logits = model(batch.tokens, batch.positions)
        loss = vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh)
    assert loss.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize(("attention", "autocast"), [("naive", False), ("sdpa_flash", True)])
def test_predicted_activations_are_what_autograd_keeps(attention: str, autocast: bool) -> None:
    """Explicit scores without autocast alone, whose softmax is in float32 on CUDA only."""
    sizes = ("model.vocab_size=500", "model.d_model=96", "model.d_ff=256", "model.num_kv_heads=4")
    case = case_of(*sizes, "seq_len=128", "parallel.tp=2", f"attention={attention}")
    assert case.model is not None
    tokens = 2 * 128
    step = TrainingStep(
        config=case.model,
        batch_size=2,
        seq_len=128,
        mode="forward_backward",
        attention_saves_scores=attention == "naive",
        param_bytes=4,
        activation_bytes=2 if autocast else 4,
        autocast=autocast,
        tp=2,
    )
    predicted = step.predict_memory().activations
    # Not saved: the gradient with which the backward pass begins. Saved by norms on a CPU alone:
    # their normalised input, of this rank's tokens.
    predicted -= (6 if autocast else 4) * tokens * 500 / 2
    predicted += 5 * tokens / 2 * 96 * 4
    for measured in on_ranks(2, saved_bytes, case, autocast):
        assert measured == pytest.approx(predicted, rel=0.01)


class TestBadInput:
    def test_layers_that_cannot_be_split(self) -> None:
        bias, uneven, norm, embedding = on_ranks(2, split_what_cannot_be)[0]
        assert "a row-parallel layer cannot have a bias; use bias=False" in bias
        assert "3 along dim 0 do not divide by 2 tensor-parallel ranks" in uneven
        assert norm.startswith("LayerNorm(")
        assert norm.endswith("): must be an nn.RMSNorm")
        assert embedding.endswith("padding_idx=0): must be an nn.Embedding that only looks up")


def split_what_cannot_be(group: dist.ProcessGroup) -> list[str]:
    found = []
    refused: list[tuple[nn.Module, ParallelStyle]] = [
        (nn.Linear(4, 4), RowParallel()),
        (nn.Linear(4, 3), ColumnParallel()),
        (nn.LayerNorm(4), SequenceParallelNorm()),
        (nn.Embedding(4, 4, padding_idx=0), VocabParallelEmbedding()),
    ]
    for layer, style in refused:
        with pytest.raises(ValueError, match=r"4") as error:
            parallelize_module(layer, tp_mesh(group), style)
        found.append(str(error.value))
    return found


class Mlp(nn.Module):
    """Any module of two linear layers, the first with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(4, 6)
        self.w2 = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.relu(self.w1(x)))


def split_mlp(group: dist.ProcessGroup) -> Tensor:
    torch.manual_seed(1)
    mlp, x = Mlp(), torch.randn(2, 6, 4)
    parallelize_module(mlp, tp_mesh(group), GatherInput())
    parallelize_module(mlp, tp_mesh(group), {"w1": ColumnParallel(), "w2": RowParallel()})
    return mlp(x.chunk(group.size(), 1)[dist.get_rank(group)]).detach()


def test_styles_split_any_module() -> None:
    torch.manual_seed(1)
    mlp, x = Mlp(), torch.randn(2, 6, 4)
    torch.testing.assert_close(torch.cat(on_ranks(2, split_mlp), 1), mlp(x).detach())
