"""Windows, prefixes, caps and sinks, from the command line to the gate."""

from __future__ import annotations

import random

import pytest
import torch
from attention_by_definition import problem_of
from masked_attention import is_seen, masked_attention

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.gate import exact
from harness.gate.gate import Part, check_part
from harness.gate.scoring import EXACT, Arithmetic, Mask, Scoring
from harness.gate.tolerances import format_of
from harness.request.compose import compose_request

SHAPE = (
    *("task.num_heads=4", "task.head_dim=16"),
    *("batch_size=2", "seq_len=64", "task.warmup_steps=1", "task.measure_steps=2"),
)


def make_case(*arguments: str, attention: str = "naive", kv_heads: int = 2) -> Case:
    words = ["task=attention", f"attention={attention}", f"task.num_kv_heads={kv_heads}"]
    (case,) = compose_request([*words, *SHAPE, *arguments, "device=cpu"]).cases
    return case


class TestOptions:
    def test_reach_the_problem(self) -> None:
        problem = make_case("attention.window=8", "attention.softcap=30").attention_problem
        assert (problem.window, problem.softcap, problem.sinks) == (8, 30.0, False)
        problem = make_case("attention.prefix_len=9", "attention.sinks=true").attention_problem
        assert (problem.prefix_len, problem.window, problem.sinks) == (9, None, True)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("attention.prefix_len=4", "task.causal=false"), "attention.prefix_len=4: with task."),
            (
                ("attention.window=4", "task.causal=false", "task.kv_len=10"),
                "task.kv_len=10: with attention.window=4, .* at least 61$",
            ),
            (("attention.window=0",), "attention.window=0: must be at least 1"),
        ],
    )
    def test_that_make_no_sense(self, arguments: tuple[str, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            make_case(*arguments)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("task", ["decode", "prefill", "generate"])
    @pytest.mark.parametrize("option", ["window=4", "prefix_len=4", "softcap=4.0", "sinks=true"])
    def test_that_tasks_with_a_cache_do_not_take(self, task: str, option: str) -> None:
        words = [f"task={task}", "attention=sdpa", f"attention.{option}", "device=cpu"]
        with pytest.raises(ValueError, match=rf"attention\.{option}: task={task} takes no "):
            compose_request(words)

    def test_work_is_that_of_the_pairs_that_are_seen(self) -> None:
        case = make_case("attention.window=8", "task.kv_len=100")
        pairs = sum(8 for _ in range(64))
        work = case.task.work(case)["forward"]
        assert work.flops == 4 * 2 * 4 * 16 * pairs
        # q and o, the 64 + 7 keys and values that some query sees, and a log-sum-exp by row.
        assert work.bytes == 4 * 2 * (2 * 4 * 64 * 16 + 2 * 2 * 71 * 16 + 4 * 64)

    @pytest.mark.parametrize("mask", ["window=8", "softcap=5", "sinks=true", "prefix_len=9"])
    @pytest.mark.parametrize("attention", ["naive", "flash_torch"])
    def test_predicted_memory_is_what_autograd_keeps(self, attention: str, mask: str) -> None:
        case = make_case(f"attention.{mask}", attention=attention, kv_heads=4)
        bench = Bench(device=torch.device("cpu"))
        case.task.run(case, bench)
        predicted = case.task.predicted_before_backward(case)
        assert predicted is not None
        measured = bench.outcome.memory["before_backward_bytes"]
        assert measured == pytest.approx(sum(predicted.values()), rel=0.01)

    def test_peak_memory_is_predicted_with_sinks(self) -> None:
        plain, masked = (
            sum((case.task.predicted_memory(case) or {}).values())
            for case in (
                make_case("attention.softcap=5", attention="naive"),
                make_case("attention.softcap=5", "attention.sinks=true", attention="naive"),
            )
        )
        # A column of float32 beside the keys in each of the four matrices of scores.
        assert masked - plain == 4 * 4 * (2 * 4 * 64)


def test_the_gradient_of_sinks_is_checked_and_timed() -> None:
    case = make_case("attention.sinks=true", "task.packing=ragged")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    assert bench.outcome.check is not None
    assert 0 < bench.outcome.check["errors"]["dsinks"] < 1e-5
    assert set(bench.outcome.samples_ms) == {"forward", "backward", "forward_backward"}


class TestTheGatesMask:
    def test_hides_what_is_not_seen(self) -> None:
        draw = random.Random(5)
        for _ in range(200):
            problem = problem_of(
                q_len=draw.randint(1, 12),
                kv_len=draw.randint(1, 12),
                causal=draw.random() < 0.6,
                window=draw.choice((None, 1, 2, 5)),
            )
            if problem.causal and problem.window is None:
                problem = problem_of(
                    q_len=problem.q_len, kv_len=problem.kv_len, prefix_len=draw.choice((0, 4))
                )
            mask = Mask(
                causal=problem.causal,
                offset=problem.kv_len - problem.q_len,
                window=problem.window,
                prefix_len=problem.prefix_len,
            )
            rows, keys = torch.arange(problem.q_len), torch.arange(problem.kv_len)
            hidden = mask.hidden(rows[:, None], keys)
            seen = [[is_seen(problem, int(i), int(j)) for j in keys] for i in rows]
            if hidden is None:
                assert all(map(all, seen))
            else:
                assert torch.equal(~hidden, torch.tensor(seen))
            first = draw.randrange(problem.q_len)
            last = draw.randrange(first, problem.q_len)
            found = mask.keys_of(first, last, problem.kv_len)
            for i in range(first, last + 1):
                assert all(found.start <= j < found.stop for j in keys if seen[i][j])
            first = draw.randrange(problem.kv_len)
            last = draw.randrange(first, problem.kv_len)
            found = mask.queries_of(first, last, problem.q_len)
            for j in range(first, last + 1):
                assert all(found.start <= i < found.stop for i in rows if seen[i][j])

    @pytest.mark.parametrize(
        "kind",
        [
            {"window": 9},
            {"window": 5, "causal": False},
            {"window": 9, "q_len": 20, "kv_len": 50, "num_heads": 6},
            {"prefix_len": 11, "softcap": 3.0},
            {"softcap": 1.5, "causal": False, "sinks": True},
            {"window": 8, "softcap": 3.0, "sinks": True},
        ],
        ids=str,
    )
    def test_rows_are_those_of_the_definition(
        self, kind: dict[str, object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exact, "BLOCK", 8)
        problem = problem_of(**kind)
        want = masked_attention(problem)
        kv_heads = problem.num_kv_heads
        tensors = {name: getattr(want, name).double() for name in ("q", "k", "v", "do", "o")}
        for name in ("q", "do", "o"):
            tensors[name] = tensors[name].unflatten(1, (kv_heads, -1))
        sinks = None if want.sinks is None else want.sinks.unflatten(0, (kv_heads, -1))
        scoring = Scoring(
            mask=Mask(
                causal=problem.causal,
                offset=problem.kv_len - problem.q_len,
                window=problem.window,
                prefix_len=problem.prefix_len,
            ),
            scale=want.spec.scale,
            softcap=problem.softcap,
            sinks=sinks,
        )
        lse = exact.log_sum_exp(tensors["q"], tensors["k"], scoring)
        assert (lse.flatten(1, 2) - want.lse).abs().max() < 1e-6
        for rows in torch.arange(problem.q_len).split(7):
            index = rows.expand(*tensors["q"].shape[:3], -1)
            found = exact.rows_of_queries(tensors, index, scoring, EXACT).values
            for name in ("o", "dq"):
                right = getattr(want, name)[:, :, rows]
                assert (found[name].flatten(1, 2) - right).abs().max() < 1e-12
        for rows in torch.arange(problem.kv_len).split(7):
            index = rows.expand(*tensors["k"].shape[:2], -1)
            found = exact.rows_of_keys(tensors, lse, index, scoring, EXACT).values
            for name in ("dk", "dv"):
                right = getattr(want, name)[:, :, rows]
                assert (found[name] - right).abs().max() < 1e-5

    def test_a_window_costs_scores_of_its_keys_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        length, sizes = 8192, []
        scores = Arithmetic.scores

        def spy(self: Arithmetic, q: torch.Tensor, k: torch.Tensor, *scale: float) -> torch.Tensor:
            found = scores(self, q, k, *scale)
            sizes.append(found.numel())
            return found

        monkeypatch.setattr(Arithmetic, "scores", spy)
        tensors = {name: torch.randn(1, 1, length, 8) for name in ("q", "k", "v", "do")}
        tensors |= {name: torch.zeros(1, 1, length, 8) for name in ("o", "dq", "dk", "dv")}
        part = Part(tensors=tensors, causal=True, scale=1.0, window=32)
        generator = torch.Generator().manual_seed(0)
        list(check_part(part, format_of("float32"), generator))
        assert sum(sizes) < length**2 / 8
        assert max(sizes) < 2**20
