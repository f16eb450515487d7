"""Every legal combination, counted against composing each of them as the command line does."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import questions

from harness.predictions.capacity import GIB, Machine
from harness.recommend.commands import command_of
from harness.recommend.enumeration import enumerate_combinations
from harness.recommend.fitting import MemoryModel, fit, misfits
from harness.recommend.longest import longest
from harness.recommend.predicting import front, order_of, predict
from harness.recommend.question import Question
from harness.request.command_line import parse
from harness.request.grid import Parts, expand
from models.accounting import count_parameters
from parallel import STRATEGIES

PARTS = Parts()


def question(model: str = "small", gpus: int = 4, seq_len: int = 1024, **typed: Any) -> Question:
    return questions.question(model, seq_len=seq_len, gpus=gpus, sequences=8, **typed)


class TestEnumeration:
    def test_what_no_device_computes_is_illegal_on_an_absent_one_too(self) -> None:
        """A packed batch is all that this scheme places, and a training step's is dense."""
        found = enumerate_combinations(question(attention=["documents", "zigzag"]))
        assert {base.base.attention.name for base in found.bases} == {"zigzag"}
        assert any("packed batch" in reason for reason in found.fallen)

    def test_is_what_composing_every_point_allows(self) -> None:
        """Independent: each point of the whole grid composed alone, legal if no error comes."""
        names = ["none", "fsdp", "zero_1"]
        attention = ["sdpa", "naive", "ring", "zigzag"]
        found = enumerate_combinations(question(attention=attention, parallel=names))
        axes = [1, 2, 4]
        legal = 0
        for dp, cp, tp, name, backend in itertools.product(axes, axes, axes, names, attention):
            if dp * cp * tp != 4 or (backend in ("ring", "zigzag")) != (cp > 1):
                continue
            for size in (number for number in range(1, 9) if (8 // dp) % number == 0):
                point = {"task": "train_step", "model": "small", "seq_len": 1024}
                point |= {"attention": backend, "parallel": name, "batch_size": size}
                point |= {"parallel.dp": dp, "parallel.cp": cp, "parallel.tp": tp}
                try:
                    PARTS.case({**point, "precision": "bf16"}, "cuda")
                except ValueError:
                    continue
                legal += 1
        assert len(found.bases) == legal > 50
        ids = {base.case.id for base in found.bases}
        assert len(ids) == legal
        # 4 ways to checkpoint, and none, block and model compiled, the last two with graphs too;
        # none, block and model are captured without a strategy, which decides on the host.
        captured = sum(base.base.parallel.name == "none" for base in found.bases)
        assert 0 < captured < legal
        assert found.num_legal == 4 * (legal * 5 + captured * 3)

    def test_says_why_a_family_falls_out(self) -> None:
        found = enumerate_combinations(question(gpus=16, **{"parallel.tp": [8]}))
        # 12 heads are not divided by 8 ranks.
        assert not found.bases
        assert any("must divide model.num_heads=12" in reason for reason in found.fallen)

    @pytest.mark.parametrize(
        ("gpus", "pinned", "name", "reason"),
        [
            (1, {}, "zigzag", "splits sequences, and of 1 GPU, no mesh has parallel.cp over 1"),
            (4, {"parallel.cp": [1]}, "zigzag", "of 4 GPUs, no mesh has parallel.cp over 1"),
            (2, {"parallel.cp": [2]}, "sdpa", "takes whole sequences, and of 2 GPUs"),
        ],
    )
    def test_says_which_attention_no_mesh_has_a_use_for(
        self, gpus: int, pinned: dict[str, list[int]], name: str, reason: str
    ) -> None:
        found = enumerate_combinations(question(gpus=gpus, attention=[name], **pinned))
        assert not found.bases
        assert any(item.names == [name] and reason in item.reason for item in found.left_out)

    def test_leaves_out_strategies_that_others_improve_on(self) -> None:
        found = enumerate_combinations(question(attention=["sdpa"]))
        used = {base.base.parallel.name for base in found.bases}
        improved = {entry.target.improves_on for entry in STRATEGIES} - {None}
        assert improved
        assert not used & improved
        assert any(set(item.names) == improved for item in found.left_out)

    def test_a_mesh_that_cannot_be_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"gpus=4: no mesh has the given"):
            enumerate_combinations(question(**{"parallel.tp": [3]}))

    @pytest.mark.parametrize(
        ("gpus", "cp", "tp", "near"),
        [
            *((16, 16, 1, False), (16, 8, 1, True), (16, 8, 2, False)),
            # Six on each of two hosts.
            *((12, 4, 1, False), (12, 6, 1, True)),
        ],
    )
    def test_peers_are_read_within_a_host_only(
        self, gpus: int, cp: int, tp: int, *, near: bool
    ) -> None:
        """Half of the ranks lie on another host, and ranks of one sequence are tp apart."""
        pins = {"attention": ["ring"], "attention.transport": ["symmetric"]}
        pins |= {"parallel.cp": [cp], "parallel.tp": [tp]}
        asked = replace(question(gpus=gpus, **pins), sequences=24)
        found = enumerate_combinations(asked)
        assert bool(found.bases) == near
        assert any("on one host" in reason for reason in found.fallen) != near


class TestFitting:
    def test_splits_at_the_memory_of_the_machine(self) -> None:
        asked = question(model="xl", seq_len=16384, attention=["sdpa", "zigzag"])
        memory = MemoryModel()
        found = enumerate_combinations(asked)
        fitting, others = fit(found, asked.machine, memory)
        assert fitting
        assert others
        for item in (fitting[0], fitting[-1], others[0], others[-1]):
            if item.accumulation == 1:
                predicted = item.case.task.predicted_memory(item.case)
                assert predicted is not None
                assert item.memory_bytes == pytest.approx(sum(predicted.values()))
            assert item.fits == (item.memory_bytes <= 0.95 * 141 * GIB)
        assert others[0].short_gib <= others[-1].short_gib

    def test_accumulated_gradients_are_held_beside_activations(self) -> None:
        """Of one GPU in float32: four bytes for each of the parameters."""
        asked = question(gpus=1, attention=["sdpa"])
        memory = MemoryModel()
        case = next(b for b in enumerate_combinations(asked).bases if b.case.batch_size == 8).base
        held = memory.peak_bytes(case, 2, None) - memory.peak_bytes(case, 1, None)
        assert held == pytest.approx(4 * count_parameters(asked.model).total, rel=1e-3)

    def test_what_is_advised_fits(self) -> None:
        asked = question(model="2.7B", seq_len=32768, attention=["sdpa", "zigzag"])
        memory = MemoryModel()
        fitting, others = fit(enumerate_combinations(asked), asked.machine, memory)
        advised = [item for item in misfits(fitting, others, asked.machine, memory) if item.remedy]
        assert advised
        for item in advised:
            assert item.remedy is not None
            assert not item.nearest.fits
            composed = compose(command_of(item.remedy.case, PARTS.choice))
            needed = memory.peak_bytes(composed, item.remedy.accumulation, composed.checkpoint)
            assert needed <= asked.machine.usable_bytes

    def test_a_strategy_that_another_attention_fits_misses_nothing(self) -> None:
        """Of whole matrices of scores 32,768 tokens need hundreds of GiB, under any strategy."""

        def named(*attention: str) -> list[str]:
            asked = question(model="medium", seq_len=32768, gpus=4, attention=list(attention))
            memory = MemoryModel()
            fitting, others = fit(enumerate_combinations(asked), asked.machine, memory)
            return [item.name for item in misfits(fitting, others, asked.machine, memory)]

        assert "ddp_torch" in named("naive")
        assert "ddp_torch" not in named("naive", "sdpa_flash")


def compose(command: str) -> Any:
    """The one case that a command line plans."""
    name, *arguments = command.split()
    assert name == "attnbench"
    (case,) = expand([{}], parse(arguments), "cuda").values()
    return case


class TestLongest:
    def test_each_is_as_long_as_fits_and_stands_once(self) -> None:
        asked = question(gpus=1, attention=["sdpa", "sdpa_cudnn"])
        memory = MemoryModel()
        fitting, _ = fit(enumerate_combinations(asked), asked.machine, memory)
        found = longest(fitting, asked.machine, memory)
        # Two backends, four ways to checkpoint; micro-batches make no difference.
        assert len(found) == 8
        assert [item.base.seq_len for item in found] == sorted(
            (item.base.seq_len for item in found), reverse=True
        )
        for item in found:
            more = replace(item.base, seq_len=item.base.seq_len + 256)
            assert item.fits
            assert memory.peak_bytes(more, 1, item.checkpoint) > item.usable_bytes

    def test_one_that_keeps_scores_is_shorter(self) -> None:
        asked = question(gpus=1, attention=["flash_triton", "naive"], checkpoint=["block"])
        memory = MemoryModel()
        fitting, _ = fit(enumerate_combinations(asked), asked.machine, memory)
        fused, naive = longest(fitting, asked.machine, memory)
        assert (fused.base.attention.name, naive.base.attention.name) == ("flash_triton", "naive")
        assert naive.base.seq_len < fused.base.seq_len / 5
        assert naive.fits
        assert fused.fits


class TestCommands:
    def test_plan_exactly_the_recommended_case(self) -> None:
        found = enumerate_combinations(question())
        for base in found.bases[:: max(1, len(found.bases) // 40)]:
            for variant in found.variants_of(base):
                item = base.varied(variant)
                assert compose(command_of(item.case, PARTS.choice)).id == item.case.id

    def test_options_in_parentheses_are_one_word_of_a_name(self) -> None:
        pins = {"attention": ["zigzag"], "attention.window": [256], "parallel.cp": [2]}
        found = enumerate_combinations(question(**pins, **{"attention.transport": ["symmetric"]}))
        assert found.bases[0].words[0] == "zigzag(window=256, transport=symmetric)"


class TestCapture:
    """Each point of the grid composed alone, and asked of its task, is the truth."""

    PINS: ClassVar[dict[str, Any]] = {"attention": ["sdpa", "zigzag"], "checkpoint": ["none"]}
    NAMES = ("none", "ddp_bucketed", "sharded_optimizer", "zero_2", "fsdp_torch")

    def test_is_enumerated_where_the_task_allows_it(self) -> None:
        found = enumerate_combinations(question(gpus=2, parallel=[*self.NAMES], **self.PINS))
        assert {base.base.parallel.name for base in found.bases} == set(self.NAMES)
        for base in found.bases:
            captured = [item for item in found.variants_of(base) if item.is_captured]
            item = base.varied(replace(found.variants[0], task=found.variants[-1].task))
            assert item.is_captured
            reason = item.case.task.why_unsupported(item.case)
            assert bool(captured) == ("CUDA graph" not in str(reason)), base.name
            assert all(one.compile.mode == "default" for one in captured)

    def test_what_cannot_be_captured_is_counted_by_reason(self) -> None:
        found = enumerate_combinations(question(gpus=2, parallel=[*self.NAMES], **self.PINS))
        refused = [base for base in found.bases if not base.can_capture]
        counted = Counter(base.base.parallel.name for base in refused)
        assert set(counted) == {"zero_2", "fsdp_torch"}
        # Eager, and the model or each block compiled.
        for name, number in counted.items():
            (reason,) = (
                text for text in found.fallen if f"parallel={name} is not captured" in text
            )
            assert found.fallen[reason] == 3 * number
        (twice,) = (text for text in found.fallen if "captures CUDA graphs itself" in text)
        assert found.fallen[twice] == 2 * len(found.bases)

    def test_can_be_pinned(self) -> None:
        both = enumerate_combinations(question(gpus=2, **self.PINS))
        launched, captured = (
            enumerate_combinations(question(gpus=2, **self.PINS, **{"task.cuda_graph": [pin]}))
            for pin in (False, True)
        )
        assert launched.num_legal + captured.num_legal == both.num_legal
        assert not any(variant.is_captured for variant in launched.variants)
        assert all(base.is_captured for base in captured.bases)
        assert launched.number + captured.number == both.number

    def test_a_cpu_has_no_graphs(self) -> None:
        host = Machine(name="here", device="cpu", memory_bytes=GIB, num_devices=1, is_here=True)
        pins = {"attention": ["sdpa"], "machine": host, "precision": "fp32"}
        found = enumerate_combinations(question(gpus=1, **pins))
        assert not any(variant.is_captured for variant in found.variants)
        assert not any("CUDA graph" in reason for reason in found.fallen)
        pinned = enumerate_combinations(question(gpus=1, **pins, **{"task.cuda_graph": [True]}))
        assert not pinned.num_legal
        assert "CUDA graphs exist on CUDA devices only" in pinned.fallen


class Step:
    """A prediction of a fixed time."""

    notes = ()

    def __init__(self, ms: float, waiting_ms: float = 0.0) -> None:
        self.median_ms = self.low_ms = self.high_ms = ms
        self.waiting_ms = waiting_ms


class Times:
    """A host takes ``host_ms`` to launch a step, and a device ``device_ms`` to run it."""

    def __init__(self, host_ms: float, device_ms: float) -> None:
        self._host_ms, self._device_ms = host_ms, device_ms

    def why_not(self, case: Any) -> str | None:
        return None

    def step(self, case: Any) -> Any:
        host_ms = 0.0 if case.task.cuda_graph else self._host_ms
        ms = max(host_ms, self._device_ms)
        return Step(ms, ms - self._device_ms)


class TestCapturedTimes:
    PINS: ClassVar[dict[str, Any]] = {"attention": ["sdpa"], "checkpoint": ["none"]}

    def ranked(self, host_ms: float, device_ms: float, goal: str = "tokens_per_s") -> list[Any]:
        pins = {**self.PINS, "compile": ["none"], "batch_size": [8]}
        found = enumerate_combinations(question(gpus=1, **pins))
        assert (len(found.bases), found.num_legal) == (1, 2)
        ranked = predict(found, found.bases, Times(host_ms, device_ms), goal).ranked
        return [("captured" if item.is_captured else "launched") for item in ranked]

    def test_a_step_that_waits_for_its_host_is_captured(self) -> None:
        assert self.ranked(9.0, 5.0) == ["captured", "launched"]

    def test_ties_are_launched(self) -> None:
        """1% is not told apart; where nothing waits there is nothing to gain."""
        assert self.ranked(5.05, 5.0) == ["launched", "captured"]
        assert self.ranked(5.0, 9.0) == ["launched"]

    def test_memory_that_is_not_predicted_is_not_the_least(self) -> None:
        for goal in ("memory", "longest_sequence"):
            assert self.ranked(9.0, 5.0, goal) == ["launched", "captured"]

    def test_one_that_is_slow_to_launch_alone_is_captured_too(self) -> None:
        """Of two attentions one takes its host three times as long, and its device half."""

        class ByName(Times):
            def step(self, case: Any) -> Any:
                slow = case.attention.name == "naive"
                return (Times(30.0, 4.0) if slow else Times(10.0, 8.0)).step(case)

        pins = {**self.PINS, "attention": ["sdpa", "naive"], "compile": ["none"]}
        found = enumerate_combinations(question(gpus=1, batch_size=[8], **pins))
        best = predict(found, found.bases, ByName(0, 0), "tokens_per_s").ranked[0]
        assert best.base.attention.name == "naive"
        assert best.is_captured
        assert "captured" in best.name
        assert "task.cuda_graph=true" in command_of(best.case, PARTS.choice)


class TestOrder:
    def test_front_and_goals(self) -> None:
        bases = enumerate_combinations(question(gpus=1, attention=["sdpa"])).bases[:3]
        for item, gib, ms in zip(bases, (3, 2, 1), (5.0, 9.0, 9.5), strict=True):
            item.memory_bytes = gib * GIB
            # The same time a token at any micro-batch.
            item.step = Step(ms / item.accumulation)
        fast, middle, small = bases
        assert front(bases) == [small, middle, fast]
        middle.step = Step(20.0 / middle.accumulation)
        assert front(bases) == [small, fast]
        assert sorted(bases, key=order_of("memory")) == [small, middle, fast]
        assert sorted(bases, key=order_of("tokens_per_s")) == [fast, small, middle]
