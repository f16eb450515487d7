"""The attention task's packed batches, key lengths and compilation, against hand counts."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import harness.measure.passes
from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run.workers.worker import why_unsupported
from harness.tasks.attention.attention import AttentionTask
from harness.tasks.lengths import ragged_lengths
from kernels import Packing
from kernels.backends.naive import Naive
from kernels.problem import AttentionSpec

SHAPE = (
    *("task=attention", "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=16"),
    *("batch_size=3", "seq_len=64", "task.warmup_steps=1", "task.measure_steps=2"),
)


def make_case(*arguments: str) -> Case:
    (case,) = compose_request([*SHAPE, *arguments, "device=cpu"]).cases
    return case


def lengths_of(case: Case) -> list[int]:
    assert isinstance(case.task, AttentionTask)
    return case.task.lengths(case)


def run(case: Case) -> Bench:
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    return bench


class TestRaggedLengths:
    @pytest.mark.parametrize(("num_sequences", "seq_len"), [(8, 4096), (4, 256), (2, 128)])
    def test_as_many_pairs_as_the_dense_batch(self, num_sequences: int, seq_len: int) -> None:
        dense = num_sequences * seq_len * (seq_len + 1) // 2
        for seed in range(20):
            lengths = ragged_lengths(num_sequences, seq_len, seed)
            assert len(lengths) == num_sequences
            counted = sum(length * (length + 1) // 2 for length in lengths)
            assert counted == pytest.approx(dense, rel=0.01)
            assert any(length % 16 for length in lengths)
            assert len(set(lengths)) > 1

    def test_the_distribution_is_as_stated(self) -> None:
        lengths = ragged_lengths(10_000, 4096, 0)
        mean = sum(lengths) / len(lengths)
        # Uniform from 1/4 to 7/4 of the mean has a mean square of 1 + 1.5**2 / 12 of it.
        assert mean == pytest.approx(4096 / (1 + 1.5**2 / 12) ** 0.5, rel=0.01)
        assert min(lengths) / mean == pytest.approx(0.25, abs=0.01)
        assert max(lengths) / mean == pytest.approx(1.75, abs=0.01)

    def test_follows_from_the_seed_alone(self) -> None:
        """The lengths of seed 0 are typed in: records of another day have them too."""
        assert ragged_lengths(8, 4096, 0) == LENGTHS_OF_SEED_0
        assert ragged_lengths(8, 4096, 1) != LENGTHS_OF_SEED_0
        assert lengths_of(make_case("task.packing=ragged", "seed=3")) == ragged_lengths(3, 64, 3)


LENGTHS_OF_SEED_0 = [6095, 4124, 1537, 3241, 2181, 5728, 4755, 2649]


class TestWork:
    def test_ragged_is_counted_over_its_own_lengths(self) -> None:
        case = make_case("task.packing=ragged", "task.causal=false")
        lengths = lengths_of(case)
        work = case.task.work(case)
        # Two matmuls of 2 x S x S x 16 for each of 4 heads; backward has five.
        assert work["forward"].flops == sum(2 * 2 * 4 * s * s * 16 for s in lengths)
        assert work["backward"].flops == sum(5 * 2 * 4 * s * s * 16 for s in lengths)
        tokens = sum(lengths)
        # float32: q and o of 4 heads, k and v of 2, and one lse for each token and head.
        assert work["forward"].bytes == 4 * tokens * (2 * 4 * 16 + 2 * 2 * 16 + 4)
        assert work["forward_backward"].tokens == tokens
        assert tokens < 3 * 64

    def test_equal_is_the_dense_work(self) -> None:
        assert lengths_of(make_case("task.packing=equal")) == [64] * 3
        dense, packed = make_case(), make_case("task.packing=equal")
        assert packed.task.work(packed) == dense.task.work(dense)

    def test_fewer_queries_than_keys(self) -> None:
        case = make_case("task.kv_len=100")
        pairs = sum(
            1 for row, column in itertools.product(range(64), range(100)) if column <= row + 36
        )
        # The formula leaves out half of the diagonal, as S^2 / 2 does.
        assert case.task.work(case)["forward"].flops == 4 * 3 * 4 * 16 * (pairs - 64 / 2)

    @pytest.mark.parametrize("packing", ["equal", "ragged"])
    @pytest.mark.parametrize("attention", ["naive", "flash_torch"])
    def test_predicted_memory_is_what_autograd_keeps(self, attention: str, packing: str) -> None:
        case = make_case(f"attention={attention}", f"task.packing={packing}")
        measured = run(case).outcome.memory["before_backward_bytes"]
        predicted = case.task.predicted_before_backward(case)
        assert predicted is not None
        assert measured == pytest.approx(sum(predicted.values()), rel=0.01)

    def test_what_is_not_predicted_says_so(self) -> None:
        for words in (["task.cuda_graph=true"], ["task.compile=true"], ["task.packing=equal"]):
            case = make_case("attention=naive", *words)
            assert case.task.predicted_memory(case) is None


class TestWhatABackendIsAsked:
    def test_packed(self) -> None:
        problem = make_case("task.packing=ragged").attention_problem
        longest = max(ragged_lengths(3, 64, 0))
        assert problem.packed
        assert (problem.batch_size, problem.q_len, problem.kv_len) == (3, longest, longest)

    def test_dense(self) -> None:
        problem = make_case("task.kv_len=100").attention_problem
        assert not problem.packed
        assert (problem.q_len, problem.kv_len) == (64, 100)


class TestRun:
    @pytest.mark.parametrize("packing", ["equal", "ragged"])
    def test_packed_is_called_with_its_packing(
        self, packing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[torch.Size, Packing]] = []
        attend = Naive.attend

        def spy(self: Naive, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            assert spec.packing is not None
            seen.append((q.shape, spec.packing))
            assert k.shape == v.shape == (q.shape[0], 2, 16)
            return attend(self, q, k, v, spec)

        monkeypatch.setattr(Naive, "attend", spy)
        case = make_case("attention=naive", f"task.packing={packing}")
        lengths = lengths_of(case)
        outcome = run(case).outcome
        # The check's three, the memory before backward, a warm-up, one more after the check of its
        # results, and two measured passes.
        assert len(seen) == 8
        assert seen[0][0] == (sum(lengths), 4, 16)
        starts = [0, *itertools.accumulate(lengths)]
        assert seen[0][1].cu_seqlens_q.tolist() == seen[0][1].cu_seqlens_k.tolist() == starts
        assert seen[0][1].cu_seqlens_q.dtype == torch.int32
        assert seen[0][1].max_q_len == max(lengths)
        assert set(outcome.samples_ms) == {"forward", "backward", "forward_backward"}
        assert outcome.check is not None
        assert 0 < max(outcome.check["errors"].values()) < 1e-5

    @pytest.mark.parametrize("which", ["last", "longest"])
    def test_a_wrong_sequence_is_found(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        case = make_case("attention=naive", "task.packing=ragged", "seed=1")
        lengths = lengths_of(case)
        assert lengths.index(max(lengths)) < 2
        index = 2 if which == "last" else lengths.index(max(lengths))
        break_sequence(monkeypatch, lengths, index, 2.0)
        with pytest.raises(WrongResult, match="relative error of"):
            run(case)

    def test_no_number_is_no_small_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = make_case("attention=naive", "task.packing=ragged", "seed=1")
        break_sequence(monkeypatch, lengths_of(case), 2, float("nan"))
        with pytest.raises(WrongResult):
            run(case)

    def test_a_kernel_that_remembers_its_first_tensors_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As one would that is launched again with the addresses of the first time."""
        remembered: list[Any] = []
        attend = Naive.attend

        def forgetful(self: Naive, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            if not remembered:
                remembered[:] = [k, v]
                return attend(self, q, k, v, spec)
            return attend(self, q, *remembered, spec) + 0 * (k.sum() + v.sum())

        monkeypatch.setattr(Naive, "attend", forgetful)
        with pytest.raises(WrongResult, match="relative error of"):
            run(make_case("attention=naive"))

    def test_more_keys_than_queries(self) -> None:
        outcome = run(make_case("attention=naive", "task.kv_len=100")).outcome
        assert outcome.check is not None
        assert max(outcome.check["errors"].values()) < 1e-5

    def test_a_backend_that_attends_from_caches_alone(self) -> None:
        """It is refused, and nothing is asked of it that it cannot know."""
        case = make_case("attention=flash_mla")
        assert "from a cache only" in str(why_unsupported(case))
        assert case.task.predicted_memory(case) is None
        assert case.task.predicted_before_backward(case) is not None

    @pytest.mark.parametrize("packing", ["none", "ragged"])
    def test_values_narrower_than_keys(self, packing: str) -> None:
        case = make_case("attention=naive", "task.value_dim=8", f"task.packing={packing}")
        outcome = run(case).outcome
        assert outcome.check is not None
        assert max(outcome.check["errors"].values()) < 1e-5
        wide = make_case("attention=naive", f"task.packing={packing}")
        work, of_wide = case.task.work(case), wide.task.work(wide)
        assert work["forward"].flops == 0.75 * of_wide["forward"].flops
        assert work["backward"].flops == 0.8 * of_wide["backward"].flops

    def test_who_cannot_take_narrower_values_says_so(self) -> None:
        case = make_case("attention=sdpa_flash", "task.value_dim=8")
        assert why_unsupported(case) == "takes no task.value_dim=8"


class Graph:
    """Stands in for a CUDA graph: a replay reads the inputs and writes the results in place."""

    made: ClassVar[list[Graph]] = []

    def __init__(self, step: Any, results: Any) -> None:
        self.replays = 0
        self._step, self._results = step, results
        Graph.made.append(self)

    def pool(self) -> Graph:
        return self

    def replay(self) -> None:
        self.replays += 1
        fresh, held = (x if isinstance(x, tuple) else (x,) for x in (self._step(), self._results))
        for new, old in zip(fresh, held, strict=True):
            old.detach().copy_(new.detach())


class TestCudaGraph:
    @pytest.fixture
    def warm_ups(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Results of the calls before each capture, of graphs that a CPU can have."""
        seen: list[Any] = []

        def capture(step: Any, *, warm_up: Any = None, pool: Any = None) -> tuple[Graph, Any]:
            again = warm_up or step
            seen.append(again())
            assert pool is None or pool in Graph.made
            results = step()
            return Graph(again, results), results

        monkeypatch.setattr(harness.measure.passes, "capture", capture)
        monkeypatch.setattr(Graph, "made", [])
        return seen

    def test_each_pass_is_captured_once_and_replayed(self, warm_ups: list[Any]) -> None:
        outcome = run(make_case("attention=naive", "task.cuda_graph=true")).outcome
        # A call of the check; then memory before backward, two warm-ups and two measured passes.
        assert [graph.replays for graph in Graph.made] == [1, 1, 5, 4]
        assert len(warm_ups) == 4
        assert outcome.check is not None
        assert 0 < max(outcome.check["errors"].values()) < 1e-5
        assert set(outcome.samples_ms) == {"forward", "backward", "forward_backward"}

    def test_without_gradients_there_is_one(self, warm_ups: list[Any]) -> None:
        run(make_case("attention=naive", "task.mode=forward", "task.cuda_graph=true"))
        assert [graph.replays for graph in Graph.made] == [1, 4]

    def test_needs_a_device_that_has_them(self) -> None:
        case = make_case("attention=naive", "task.cuda_graph=true")
        assert why_unsupported(case) == "CUDA graphs exist on CUDA devices only"

    def test_several_ranks_need_one_too(self) -> None:
        split = make_case("attention=ring", "parallel.cp=2", "task.cuda_graph=true")
        assert why_unsupported(split) == "CUDA graphs exist on CUDA devices only"
        assert split.task.predicted_memory(split) is None

    def test_the_name_says_so(self) -> None:
        plain, graphed = make_case("attention=naive"), make_case("task.cuda_graph=true")
        assert "cuda_graph" in graphed.task.words()
        assert "cuda_graph" not in plain.task.words()

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize(
        ("attention", "mode"),
        [
            ("sdpa", "forward"),
            ("flash_triton", "forward_backward"),
            *(
                pytest.param(attention, "forward_backward", marks=pytest.mark.exhaustive)
                for attention in ("naive", "sdpa", "sdpa_cudnn", "flex")
            ),
        ],
    )
    def test_on_a_gpu(self, attention: str, mode: str) -> None:
        words = [f"attention={attention}", f"task.mode={mode}", "task.cuda_graph=true"]
        shape = ["task=attention", "task.num_heads=4", "task.head_dim=64", *SHAPE[4:]]
        words += [*shape, "precision=bf16_pure", "device=cuda"]
        (case,) = compose_request(words).cases
        bench = Bench(device=torch.device("cuda"))
        case.task.run(case, bench)
        assert bench.outcome.check is not None
        assert 0 < max(bench.outcome.check["errors"].values()) <= bench.outcome.check["tolerance"]


def break_sequence(
    monkeypatch: pytest.MonkeyPatch, lengths: Sequence[int], index: int, factor: float
) -> None:
    """Let naive attention multiply one sequence of its packed output by ``factor``."""
    attend = Naive.attend
    starts = [0, *itertools.accumulate(lengths)]

    def broken(self: Naive, *arguments: Any) -> Tensor:
        factors = torch.ones(starts[-1], 1, 1)
        factors[starts[index] : starts[index + 1]] = factor
        return attend(self, *arguments) * factors

    monkeypatch.setattr(Naive, "attend", broken)


class TestCompile:
    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The functions given to torch.compile, which compiles nothing here."""
        names: list[str] = []

        def compile_nothing(function: Any, **options: Any) -> Any:
            names.append(function.__name__)
            return function

        monkeypatch.setattr(torch, "compile", compile_nothing)
        return names

    def test_the_call_is_compiled_once(self, compiled: list[str]) -> None:
        run(make_case("attention=naive", "task.compile=true"))
        assert compiled == ["attend"]

    def test_only_if_asked(self, compiled: list[str]) -> None:
        run(make_case("attention=naive"))
        assert compiled == []

    def test_a_backend_that_compiles_itself_is_called_as_it_is(
        self, compiled: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Naive, "compiles", True)
        run(make_case("attention=naive", "task.compile=true"))
        assert compiled == []

    def test_needs_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        reason = why_unsupported(make_case("attention=naive", "task.compile=true"))
        assert reason is not None
        assert "C++ compiler" in reason
        assert why_unsupported(make_case("attention=naive")) is None

    def test_through_inductor(self) -> None:
        """Really compiled, both passes: some seconds."""
        case = make_case("attention=naive", "task.compile=true")
        if why_unsupported(case) is not None:
            pytest.skip(str(why_unsupported(case)))
        torch._dynamo.reset()
        bench = Bench(device=torch.device("cpu"))
        with bench.compile_watch.watching():
            case.task.run(case, bench)
        assert bench.compile_watch.count > 0
        assert bench.outcome.compilation["recompilations"] == 0
        assert bench.outcome.check is not None
        assert max(bench.outcome.check["errors"].values()) < 1e-5


class TestAutotuneSeconds:
    def test_what_a_case_spent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        total = 7.0
        module = types.SimpleNamespace(autotune_seconds=lambda: total)
        monkeypatch.setitem(sys.modules, "kernels.flash.any_gpu.configs", module)
        watch = Bench(device=torch.device("cpu")).compile_watch
        with watch.watching():
            total = 9.5
        total = 100.0
        assert watch.autotune_seconds == 2.5

    def test_nothing_where_the_kernels_were_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "kernels.flash.any_gpu.configs", raising=False)
        watch = Bench(device=torch.device("cpu")).compile_watch
        with watch.watching():
            pass
        assert watch.autotune_seconds == 0.0
        assert "kernels.flash.any_gpu.configs" not in sys.modules

    def test_imported_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "kernels.flash.any_gpu.configs", raising=False)
        watch = Bench(device=torch.device("cpu")).compile_watch
        with watch.watching():
            module = types.SimpleNamespace(autotune_seconds=lambda: 1.5)
            monkeypatch.setitem(sys.modules, "kernels.flash.any_gpu.configs", module)
        assert watch.autotune_seconds == 1.5


class TestNames:
    def test_options_show(self) -> None:
        case = make_case("task.packing=ragged", "task.compile=true", "attention=naive")
        assert case.slug == "attention-forward_backward-naive-fp32-b3-s64-ragged-torch_compile-cpu"
        assert case.title.endswith("x 4:2 heads of 16 ragged torch_compile")
        assert "kv100" in make_case("task.kv_len=100").slug
        assert make_case("task.value_dim=8").title.endswith("x 4:2 heads of 16 values_8")

    def test_the_usual_ones_do_not(self) -> None:
        assert (
            make_case("attention=naive").slug == "attention-forward_backward-naive-fp32-b3-s64-cpu"
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["task.packing=tight"], ["task.packing=tight:", "none, equal, ragged"]),
        (["task.packing=ragged", "batch_size=1"], ["task.packing=ragged:", "batch_size=2"]),
        (["task.kv_len=0"], ["task.kv_len=0:", "at least 1"]),
        (["task.kv_len=32"], ["task.kv_len=32:", "seq_len=64"]),
        (["task.kv_len=100", "task.packing=equal"], ["task.kv_len=100:", "task.packing=none"]),
        (["task.value_dim=0"], ["task.value_dim=0:", "at least 1"]),
        (["task.value_dim=16"], ["task.value_dim=16:", "task.head_dim=16"]),
        (
            ["task.value_dim=8", "attention=ring", "parallel.cp=2"],
            ["task.value_dim=8:", "parallel.cp=2"],
        ),
        (["task.compile=maybe"], ["task.compile=maybe:", "bool"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: list[str]) -> None:
    given = {argument.split("=")[0] for argument in arguments}
    shape = [argument for argument in SHAPE if argument.split("=")[0] not in given]
    with pytest.raises(ValueError, match="task") as caught:
        compose_request([*shape, *arguments, "device=cpu"])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(words[0])
    assert all(word in message for word in words)


def test_fewer_keys_without_a_mask() -> None:
    outcome = run(make_case("attention=naive", "task.kv_len=32", "task.causal=false")).outcome
    assert outcome.check is not None
    assert max(outcome.check["errors"].values()) < 1e-5
