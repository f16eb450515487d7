"""The axis tp of a case: its place in the mesh, a rank's share of the task, its name in tables."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import on_ranks
from records import make_record
from tensor_parallel_training import CPU, MODEL, ON_FOUR, case_of

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.request.compose import compose_request
from parallel import STRATEGIES
from parallel.data import AgreeingGradScaler


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


def ask_for_a_wrong_mesh(group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError, match=r"^parallel") as error:
        STRATEGIES["none"].target(name="none", tp=3).tp_mesh()
    return str(error.value)
