"""The numeric check on right results, and on ones with a fault, of one attention call."""

from __future__ import annotations

import math

import pytest
import torch
from attention_by_definition import (
    attention_by_definition,
    backend_of,
    broken,
    expected_of,
    findings,
    problem_of,
    scale_of,
    tensors_of,
)
from torch import Tensor

from kernels import AttentionProblem, AttentionSpec

CHECKED = {
    "causal": {},
    "full": {"causal": False},
    "grouped": {"num_heads": 6, "num_kv_heads": 2},
    "short": {"q_len": 5, "kv_len": 5},
    "more keys": {"q_len": 5, "kv_len": 33},
    "long": {"q_len": 700, "kv_len": 700, "batch_size": 1, "num_heads": 1, "num_kv_heads": 1},
    "long, full": {
        "q_len": 700,
        "kv_len": 700,
        "batch_size": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "causal": False,
    },
}


def right_result(problem: AttentionProblem) -> dict[str, Tensor]:
    q, k, v, do = tensors_of(problem)
    expected = expected_of(problem)
    dtype = q.dtype
    return {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        **{what: getattr(expected, what).to(dtype) for what in ("o", "dq", "dk", "dv")},
    }


class TestTheGate:
    """It finds small planted errors, and reports no others."""

    @pytest.mark.parametrize(
        "length",
        [
            1,
            2,
        ],
    )
    @pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["naive", "sdpa_flash", "sdpa_math"])
    def test_gradients_that_cancel(self, length: int, head_dim: int, dtype: str, name: str) -> None:
        """A softmax over one key is constant: what is left of dq and dk is rounding."""
        problem = problem_of(q_len=length, kv_len=length, dtype=dtype, head_dim=head_dim)
        q, k, v, do = tensors_of(problem)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = backend_of(name).attend(*leaves, AttentionSpec(causal=True, scale=scale_of(problem)))
        dq, dk, dv = torch.autograd.grad(o, leaves, do)
        tensors = {"q": q, "k": k, "v": v, "do": do, "o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
        assert broken(problem, tensors, name) == {}

    @pytest.mark.parametrize("kind", CHECKED)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_passes_what_is_right(self, kind: str, dtype: str) -> None:
        problem = problem_of(**CHECKED[kind], dtype=dtype)
        found = findings(problem, right_result(problem))
        assert set(found) >= {"o", "dq", "dk", "dv", "q dq = k dk", "o do = v dv"}
        assert all(finding.share < 0.8 for finding in found.values())

    def test_without_gradients(self) -> None:
        problem = problem_of(needs_grad=False)
        tensors = right_result(problem)
        forward = {name: tensors[name] for name in ("q", "k", "v", "o")}
        assert set(findings(problem, forward)) == {"o", "o row", "o factor", "o finite"}

    @pytest.mark.parametrize("kind", CHECKED)
    @pytest.mark.parametrize("what", ["o", "dq", "dk", "dv"])
    @pytest.mark.parametrize("where", ["first", "last"])
    def test_finds_one_wrong_row(self, kind: str, what: str, where: str) -> None:
        problem = problem_of(**CHECKED[kind])
        tensors = right_result(problem)
        length = tensors[what].shape[2]
        row = 0 if where == "first" else length - 1
        wrong = tensors[what].clone()
        wrong[-1, -1, row] += 0.02 * wrong[-1, -1].norm(dim=-1).max()
        found = broken(problem, {**tensors, what: wrong})
        assert found
        # The gradient of keys is computed from o, here as in kernels.
        expected = {what, "dk"} if what == "o" else {what}
        assert all(expected & set(name.split()) for name in found)

    @pytest.mark.parametrize("what", ["o", "dq", "dk", "dv"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_finds_a_single_value_that_is_no_number(self, what: str, value: float) -> None:
        problem = problem_of()
        tensors = right_result(problem)
        wrong = tensors[what].clone()
        wrong[-1, -1, -1, 3] = value
        assert broken(problem, {**tensors, what: wrong})[f"{what} finite"].error == math.inf

    @pytest.mark.parametrize(
        ("mistake", "found_in"),
        [
            ("the mask is missing", {"o", "dq", "dk", "dv"}),
            ("the scale is another", {"o", "dq", "dk", "dv"}),
            ("top-left alignment", {"o", "dq", "dk", "dv"}),
            ("heads grouped the other way", {"o", "dq", "dk", "dv"}),
        ],
    )
    def test_finds_the_usual_mistakes(self, mistake: str, found_in: set[str]) -> None:
        problem = problem_of(num_heads=6, num_kv_heads=2, q_len=20, kv_len=33)
        q, k, v, do = tensors_of(problem)
        scale, causal = scale_of(problem), True
        if mistake == "the mask is missing":
            causal = False
        elif mistake == "the scale is another":
            scale *= 1.01
        if mistake == "top-left alignment":
            seen = problem.q_len
            part = attention_by_definition(
                q, k[:, :, :seen], v[:, :, :seen], do, causal=True, scale=scale
            )
            pad = (0, 0, 0, problem.kv_len - seen)
            part.dk, part.dv = (torch.nn.functional.pad(x, pad) for x in (part.dk, part.dv))
            got = part
        elif mistake == "heads grouped the other way":
            order = [0, 2, 4, 1, 3, 5]
            got = attention_by_definition(q[:, order], k, v, do[:, order], causal=True, scale=scale)
            back = sorted(range(6), key=order.__getitem__)
            got.o, got.dq = got.o[:, back], got.dq[:, back]
        else:
            got = attention_by_definition(q, k, v, do, causal=causal, scale=scale)
        tensors = {"q": q, "k": k, "v": v, "do": do}
        tensors |= {what: getattr(got, what).float() for what in ("o", "dq", "dk", "dv")}
        assert found_in <= set(broken(problem, tensors))
