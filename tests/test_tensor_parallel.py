"""Tensor parallelism on gloo ranks, alone and on a mesh with other axes, against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import device_of, on_ranks
from records import make_record
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from harness.bench import Bench
from harness.case import Case
from harness.compose import compose_request
from harness.frame import build_frame
from harness.tasks._batch import Batch, split_batch, whole_batch
from kernels import BACKENDS
from models import accounting
from models.transformer import NO_TARGET, Transformer, cross_entropy
from parallel import STRATEGIES
from parallel.data_parallel import AgreeingGradScaler
from parallel.tensor_parallel import (
    ColumnParallel,
    GatherInput,
    RowParallel,
    SequenceParallelNorm,
    VocabParallelEmbedding,
    gradient_norm,
    split_transformer,
    vocab_parallel_cross_entropy,
    whole_parameters,
)
from parallel.tensor_parallel.moves import gather_sequence, scatter_sum, summed_gradient
from parallel.tensor_parallel.plan import split_dim

CPU = torch.device("cpu")

STEPS = 3

SIZES = {
    "vocab_size": 24,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}

MODEL = ("model=tiny", *(f"model.{key}={value}" for key, value in SIZES.items()))

ON_FOUR = "model.num_kv_heads=4"
"""Four ranks need a key head each."""


def case_of(*arguments: str) -> Case:
    keys = {"batch_size": "2", "seq_len": "16", "device": "cpu", "attention": "naive"}
    keys |= dict(argument.split("=", 1) for argument in (*MODEL, *arguments))
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    return case


def tp_mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def make_model(case: Case, attention: Any, device: torch.device | str = CPU) -> Transformer:
    torch.manual_seed(5)
    assert case.model is not None
    return Transformer(case.model, attention, device=device)


def naive() -> Any:
    return BACKENDS["naive"].target(name="naive")


OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
}

BOUNDS = {
    "sgd": {"rtol": 1e-4, "atol": 1e-6},
    # It divides by the size of a gradient, and so makes the rounding of small ones visible.
    "adamw": {"rtol": 1e-3, "atol": 1e-4},
}


def train_one_process(
    case: Case, num_batches: int, optimizer: str, device: torch.device = CPU
) -> dict[str, Tensor]:
    """Weights after some steps on several ranks' batches at once."""
    cls, options = OPTIMIZERS[optimizer]
    model = make_model(case, naive(), device)
    optimizer_of_all = cls(model.parameters(), **options)
    for _ in range(STEPS):
        optimizer_of_all.zero_grad()
        for index in range(num_batches):
            batch = whole_batch(case, device, index)
            logits = model(batch.tokens, batch.positions)
            (cross_entropy(logits, batch.targets) / num_batches).backward()
        optimizer_of_all.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@contextlib.contextmanager
def bound(case: Case, device: torch.device) -> Iterator[tuple[Any, Batch]]:
    """Attention and this rank's part of the batch."""
    rank = case.parallel.data_rank(dist.get_rank())
    if case.parallel.cp == 1:
        yield case.attention, whole_batch(case, device, rank)
        return
    with case.attention.bind(case.parallel.cp_group(), device) as attention:
        yield attention, split_batch(case, device, rank, attention.layout)


def train_on_mesh(group: dist.ProcessGroup, case: Case, optimizer: str) -> dict[str, Tensor]:
    """The same through the strategy, on a mesh of all processes; whole weights, on each rank."""
    assert group.size() == dist.get_world_size() == case.world_size
    cls, options = OPTIMIZERS[optimizer]
    mesh, device = case.parallel.tp_mesh(), device_of(group)
    with bound(case, device) as (attention, batch):
        module = make_model(case, attention, "meta")
        split_transformer(module, mesh, device)
        model = case.parallel.wrap(module)
        own = case.parallel.optimizer(model.parameters(), cls, **options)
        for _ in range(STEPS):
            logits = model(batch.tokens, batch.positions)
            loss = vocab_parallel_cross_entropy(logits, batch.targets, batch.num_targets, mesh=mesh)
            loss.backward()
            case.parallel.after_backward(model)
            own.step()
            model.zero_grad(set_to_none=True)
    return {name: x.cpu() for name, x in whole_parameters(own_parameters(model), mesh).items()}


def own_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """What a rank of the axis tp has of each parameter, whatever its data ranks divide."""
    found = []
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.append((name.removeprefix("module."), whole))
    return found


def train_fully_sharded(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    """Gradients with PyTorch's FSDP over the data ranks of a model that tp ranks share."""
    tp, data = case.parallel.tp_mesh(), case.parallel.data_mesh()
    module = make_model(case, case.attention, "meta")
    split_transformer(module, tp, CPU)
    for block in module.blocks:
        fully_shard(block, mesh=data)
    fully_shard(module, mesh=data)
    batch = whole_batch(case, CPU, case.parallel.data_rank(dist.get_rank()))
    logits = module(batch.tokens, batch.positions)
    vocab_parallel_cross_entropy(logits, batch.targets, mesh=tp).backward()
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.to_local().numel() == parameter.grad.numel() // 2
        found[name] = parameter.grad.full_tensor()
    # Every rank has its part of weights; one after the other they make the whole.
    parts: list[Any] = [None] * tp.size()
    dist.all_gather_object(parts, found, group=tp.get_group())
    dims = {name: split_dim(name) for name in found}
    return {
        name: parts[0][name] if dim is None else torch.cat([part[name] for part in parts], dim)
        for name, dim in dims.items()
    }


MESHES = {
    "tp": (ON_FOUR, "parallel.tp=4"),
    "cp x tp": ("attention=zigzag", "attention.kernel=naive", "parallel.cp=2", "parallel.tp=2"),
    "cp x tp, padded": (
        *("attention=ring", "attention.kernel=naive", "seq_len=15"),
        *("parallel.cp=2", "parallel.tp=2"),
    ),
    "dp x tp of one rank": ("parallel=ddp_naive", "parallel.dp=4"),
    "dp of one rank x tp": (ON_FOUR, "parallel=ddp_bucketed", "parallel.dp=1", "parallel.tp=4"),
    **{
        f"{name} x tp": (f"parallel={name}", "parallel.dp=2", "parallel.tp=2")
        for name in STRATEGIES.names()
        if name != "none"
    },
}


class TestWeightsAreThoseOfOneProcess:
    @pytest.mark.parametrize(
        ("name", "optimizer"),
        [
            *((name, "sgd") for name in MESHES),
            *((name, "adamw") for name in ("tp", "cp x tp", "sharded_optimizer x tp")),
        ],
    )
    def test_every_mesh(self, name: str, optimizer: str) -> None:
        case = case_of(*MESHES[name])
        wanted = train_one_process(case, case.parallel.dp, optimizer)
        ranks = on_ranks(4, train_on_mesh, case, optimizer)
        for found in ranks:
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key], value, msg=lambda text, key=key: key + text, **BOUNDS[optimizer]
                )
                # Also of what is not split, which nothing but its gradient's sum keeps equal.
                assert torch.equal(found[key], ranks[0][key]), key

    def test_fully_sharded_over_the_data_ranks(self) -> None:
        """A container that shards sees plain parameters, and needs the data ranks alone."""
        case = case_of("parallel=ddp_naive", "parallel.dp=2", "parallel.tp=2")
        model = make_model(case, naive())
        for index in range(2):
            batch = whole_batch(case, CPU, index)
            (cross_entropy(model(batch.tokens, batch.positions), batch.targets) / 2).backward()
        for found in on_ranks(4, train_fully_sharded, case):
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad)

    def test_two_ranks_step_by_step(self) -> None:
        """Grouped queries; first weights to the bit, losses, gradients and their norm."""
        case = case_of("parallel.tp=2")
        model = make_model(case, naive())
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        batch = whole_batch(case, CPU, 0)
        loss = cross_entropy(model(batch.tokens, batch.positions), batch.targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        for found in on_ranks(2, step_by_step, case):
            assert found["first"].keys() == first.keys()
            assert all(torch.equal(found["first"][name], first[name]) for name in first)
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
            assert found["norm"] == pytest.approx(float(norm), rel=1e-5)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found["gradients"][name], parameter.grad)


def step_by_step(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    mesh = tp_mesh(group)
    model = make_model(case, naive(), "meta")
    split_transformer(model, mesh, CPU)
    first = whole_parameters(model.named_parameters(), mesh)
    batch = whole_batch(case, CPU, 0)
    logits = model(batch.tokens, batch.positions)
    loss = vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh)
    loss.backward()
    norm = gradient_norm(model.named_parameters(), mesh)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    gradients = whole_parameters(model.named_parameters(), mesh)
    return {"first": first, "loss": loss.item(), "norm": float(norm), "gradients": gradients}


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


def train_compiled(group: dist.ProcessGroup, case: Case) -> list[list[Tensor]]:
    """Gradients with and without blocks compiled, each in one graph."""
    mesh = tp_mesh(group)
    batch = whole_batch(case, CPU, 0)
    found = []
    for compiled in (False, True):
        model = make_model(case, naive(), "meta")
        split_transformer(model, mesh, CPU)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        logits = model(batch.tokens, batch.positions)
        vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch._dynamo.reset()
    return found


def test_compiled_blocks_have_the_same_gradients() -> None:
    """In one graph each: exchanges between ranks do not break it."""
    for plain, compiled in on_ranks(2, train_compiled, case_of("parallel.tp=2")):
        assert len(plain) == len(compiled) == 21
        for found, wanted in zip(compiled, plain, strict=True):
            torch.testing.assert_close(found, wanted)


def step_with_overflow(group: dist.ProcessGroup, overflows: bool) -> tuple[bool, float]:
    """Whether a rank that sees no overflow itself moved, and the scale afterwards."""
    strategy = STRATEGIES["none"].target(name="none", tp=4)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = strategy.grad_scaler("cpu", enabled=True)
    scaler.scale(weight.sum()).backward()
    if overflows and dist.get_rank() == 2:
        assert weight.grad is not None
        weight.grad[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return bool((weight != 1).any()), scaler.get_scale()


@pytest.mark.parametrize(
    ("overflows", "outcome"), [(False, (True, 2.0**16)), (True, (False, 2.0**15))]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    overflows: bool, outcome: tuple[bool, float]
) -> None:
    assert on_ranks(4, step_with_overflow, overflows) == [outcome] * 4


def groups_of(group: dist.ProcessGroup) -> dict[str, list[int]]:
    strategy = STRATEGIES["ddp_naive"].target(name="ddp_naive", dp=2, tp=2)
    data = strategy.data_group()
    assert data is not None
    assert strategy.data_mesh().get_group() is data
    found = {"data": data, "tp": strategy.tp_mesh().get_group(), "cp": strategy.cp_group()}
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}


def whole_world_is_the_world(group: dist.ProcessGroup) -> list[bool]:
    target = STRATEGIES["ddp_naive"].target
    found = [target(name="ddp_naive", dp=4).data_group()]
    found += [target(name="ddp_naive", dp=2, cp=2).data_group()]
    found += [target(name="ddp_naive", dp=1, cp=4).cp_group()]
    return [item is dist.group.WORLD for item in found]


class TestMesh:
    def test_tp_is_innermost(self) -> None:
        for rank, found in enumerate(on_ranks(4, groups_of)):
            assert found["tp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert found["data"] == [rank % 2, rank % 2 + 2]
            assert found["cp"] == [rank]

    def test_a_group_of_all_ranks_is_no_second_one(self) -> None:
        assert on_ranks(4, whole_world_is_the_world) == [[True] * 3] * 4

    def test_data_ranks(self) -> None:
        strategy = STRATEGIES["ddp_naive"].target(name="ddp_naive", dp=2, cp=3, tp=2)
        assert strategy.world_size == 12
        assert strategy.data_ranks == 6
        assert [strategy.data_rank(rank) for rank in range(12)] == [
            0,
            0,
            1,
            1,
            2,
            2,
            3,
            3,
            4,
            4,
            5,
            5,
        ]
        assert strategy.axes == {"dp": 2, "cp": 3, "tp": 2}


def run_task(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    """The training task as a worker runs it."""
    bench = Bench(
        device=CPU, rank=dist.get_rank(), world_size=group.size(), vote_group=dist.group.WORLD
    )
    unscale = AgreeingGradScaler._unscale_grads_
    with mock.patch.object(AgreeingGradScaler, "_unscale_grads_", autospec=True) as agreeing:
        agreeing.side_effect = unscale
        case.task.run(case, bench)
    return bench.outcome.notes | {"agreements": agreeing.call_count}


SHORT = ("task.warmup_steps=1", "task.measure_steps=2")


class TestTask:
    @pytest.mark.parametrize(
        "arguments",
        [
            (ON_FOUR, "parallel.tp=4"),
            (ON_FOUR, "parallel.tp=4", "precision=bf16"),
            (ON_FOUR, "parallel.tp=4", "precision=fp16"),
            ("attention=ring", "attention.kernel=naive", "parallel.cp=2", "parallel.tp=2"),
        ],
        ids=["tp", "tp, bf16", "tp, fp16", "cp x tp"],
    )
    def test_loss_is_that_of_one_process(self, arguments: tuple[str, ...]) -> None:
        """After two steps of AdamW, so that a wrong gradient would show."""
        case = case_of(*SHORT, *arguments)
        bench = Bench(device=CPU)
        assert case.model is not None
        alone = case_of(
            *SHORT, f"model.num_kv_heads={case.model.kv_heads}", f"precision={case.precision.name}"
        )
        alone.task.run(alone, bench)
        low = case.precision.compute != "float32"
        for notes in on_ranks(4, run_task, case):
            assert notes["loss"] == pytest.approx(
                bench.outcome.notes["loss"], rel=1e-3 if low else 1e-6
            )
            assert (notes["agreements"] > 0) == case.precision.grad_scaler

    def test_a_rank_has_its_share_of_heads_and_work(self) -> None:
        one, two = case_of(), case_of("parallel.tp=2")
        assert two.attention_problem.num_heads == 2
        assert two.attention_problem.num_kv_heads == 1
        for phase, work in two.task.work(two).items():
            assert work.flops == one.task.work(one)[phase].flops / 2
        assert two.task.work(two)["step"].tokens == 2 * 16 / 2
        both = case_of("attention=ring", "parallel.cp=2", "parallel.tp=2")
        assert both.task.work(both)["step"].flops == one.task.work(one)["step"].flops / 4
        assert two.slug == one.slug.replace("-cpu", "-tp2-cpu")
        three = case_of("attention=ring", "parallel=ddp_naive", *(f"parallel.{a}=2" for a in AXES))
        assert "-ddp_naive2-cp2-tp2-" in three.slug

    def test_parameters_and_state_of_a_rank_by_hand(self) -> None:
        """All but the five norms of 32 is halved; state is two moments, shared by data ranks.

        And the counts of steps of 21 tensors.
        """
        case = case_of("parallel.tp=2")
        block = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
        own = (2 * 24 * 32 + 2 * block) // 2 + 5 * 32
        predicted = case.task.predicted_memory(case)
        assert predicted["parameters"] == 4 * own
        assert predicted["optimizer_state"] == 8 * own + 4 * 21
        shared = case_of("parallel=sharded_optimizer", "parallel.dp=2", "parallel.tp=2")
        assert shared.task.predicted_memory(shared)["optimizer_state"] == 4 * own + 2 * 21


AXES = ("dp", "cp", "tp")


def test_tables_tell_the_axes_apart() -> None:
    """Ranks have a column of their own, from which dp or cp follows; old records have no tp."""
    records = []
    meshes = [
        {"name": "none", "dp": 1},
        {"name": "none", "dp": 1, "cp": 1, "tp": 2},
        {"name": "none", "dp": 1, "cp": 1, "tp": 4},
        {"name": "ddp_naive", "dp": 2, "cp": 1},
        {"name": "ddp_naive", "dp": 2, "cp": 1, "tp": 1},
        {"name": "ddp_naive", "dp": 2, "cp": 1, "tp": 2},
    ]
    for number, mesh in enumerate(meshes):
        record = make_record(samples_ms={"step": [[1.0]]})
        record.case["parallel"] = mesh
        record.case_id += str(number)
        records.append(record)
    frame = build_frame(records)
    names = ["none", "none(tp=2)", "none(tp=4)", "ddp_naive", "ddp_naive", "ddp_naive(tp=2)"]
    assert list(frame["strategy"]) == names
    assert list(frame["world_size"]) == [1, 2, 4, 2, 2, 4]
    # Also where all rows have it.
    assert list(build_frame(records[1:2])["strategy"]) == ["none(tp=2)"]


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
    predicted = accounting.predict_memory(
        case.model,
        batch_size=2,
        seq_len=128,
        mode="forward_backward",
        attention_saves_scores=attention == "naive",
        param_bytes=4,
        activation_bytes=2 if autocast else 4,
        autocast=autocast,
        tp=2,
    ).activations
    # Not saved: the gradient with which the backward pass begins. Saved by norms on a CPU alone:
    # their normalised input, of this rank's tokens.
    predicted -= (6 if autocast else 4) * tokens * 500 / 2
    predicted += 5 * tokens / 2 * 96 * 4
    for measured in on_ranks(2, saved_bytes, case, autocast):
        assert measured == pytest.approx(predicted, rel=0.01)


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["parallel.tp=0"], r"parallel\.tp=0: must be at least 1"),
            (["parallel.tp=3"], r"parallel\.tp=3: must divide model\.num_heads=4 of model=tiny"),
            (["parallel.tp=4"], r"parallel\.tp=4: must divide model\.num_kv_heads=2 of .*"),
            (["parallel.tp=2", "model.d_ff=47"], r"parallel\.tp=2: must divide model\.d_ff=47 .*"),
            (
                ["parallel.tp=2", "model.vocab_size=23"],
                r"parallel\.tp=2: must divide model\.vocab_size=23 of .*",
            ),
            (["parallel.tp=2", "seq_len=15"], r"parallel\.tp=2: must divide seq_len=15: .*"),
            (
                ["parallel.tp=2", "parallel.cp=2", "attention=ring", "seq_len=17"],
                r"parallel\.tp=2: must divide seq_len=17, of which each of parallel\.cp=2 ranks "
                r"holds 9 tokens: .*",
            ),
            (["parallel.tp=2", "task=attention"], r"parallel\.tp=2: task=attention has no .*"),
            (
                ["parallel.tp=2", "task=precision_audit"],
                r"parallel\.tp=2: task=precision_audit runs in one process; leave it at 1",
            ),
            (
                ["parallel.tp=2", "task=collectives"],
                r"parallel\.tp: task=collectives trains nothing; say task\.ranks=",
            ),
            (
                ["parallel=tensor_parallel"],
                r"parallel=tensor_parallel: a mesh axis of every choice; write parallel\.tp=2",
            ),
        ],
    )
    def test_one_line_that_names_the_key(self, arguments: list[str], message: str) -> None:
        chosen = [] if "task=attention" in arguments else ["attention=naive"]
        keys = dict(argument.split("=", 1) for argument in (*MODEL, *chosen, *arguments))
        if keys.get("task", "train_step") in ("attention", "collectives"):
            keys = {k: v for k, v in keys.items() if not k.startswith("model")}
        with pytest.raises(ValueError, match=f"^{message}$"):
            compose_request([f"{key}={value}" for key, value in keys.items()] + ["device=cpu"])

    def test_a_mesh_of_another_size_than_the_world(self) -> None:
        for message in on_ranks(4, ask_for_a_wrong_mesh):
            assert message == (
                "parallel.dp=1 x parallel.cp=1 x parallel.tp=3: makes 3 ranks, and the world has 4"
            )
        with pytest.raises(ValueError, match=r"^parallel\.dp=1 .*: needs a process group; call"):
            STRATEGIES["none"].target(name="none", tp=2).tp_mesh()

    def test_layers_that_cannot_be_split(self) -> None:
        bias, uneven, norm, embedding = on_ranks(2, split_what_cannot_be)[0]
        assert "a row-parallel layer cannot have a bias; use bias=False" in bias
        assert "3 along dim 0 do not divide by 2 tensor-parallel ranks" in uneven
        assert norm.startswith("LayerNorm(")
        assert norm.endswith("): must be an nn.RMSNorm")
        assert embedding.endswith("padding_idx=0): must be an nn.Embedding that only looks up")


def ask_for_a_wrong_mesh(group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError, match=r"^parallel") as error:
        STRATEGIES["none"].target(name="none", tp=3).tp_mesh()
    return str(error.value)


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
