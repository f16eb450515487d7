"""Masks of the backends that compile, ``flex`` and ``compiled``, against the definition.

Compiling takes ten seconds, so each mask of flex is computed by the reference that PyTorch has for
FlexAttention, eagerly and with gradients; both backends are compiled once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_masks import KINDS, check_mask
from torch.nn.attention import flex_attention as library

from kernels.backends import flex
from kernels.backends.compiled import Compiled
from kernels.toolchain import why_not_compile
from tests.support.attention_by_definition import assert_close, backend_of, problem_of
from tests.support.masked_attention import masked_attention


class AsOnGpu(flex.Flex):
    """Its refusals are those on a GPU, which has gradients and the log-sum-exp."""

    def why_unsupported(self, problem) -> str | None:
        return flex.Flex.why_unsupported(self, replace(problem, device="cuda"))


@pytest.fixture
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention by PyTorch's own reference; it refuses gradients on a CPU by its kernel."""
    monkeypatch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_compiled_attention", flex._flex_attention)
    monkeypatch.setattr(flex, "why_not_compile", lambda device: None)


@pytest.mark.usefixtures("_unfused")
@pytest.mark.parametrize("kind", KINDS)
def test_flex(kind: str) -> None:
    check_mask(AsOnGpu(name="flex"), problem_of(**KINDS[kind]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["flex", "compiled"])
def test_on_a_gpu(name: str, kind: str) -> None:
    check_mask(backend_of(name), problem_of(device="cuda", dtype="bfloat16", **KINDS[kind]))


def test_flex_compiled() -> None:
    problem = problem_of(window=8, softcap=3.0, needs_grad=False)
    backend = backend_of("flex")
    if reason := backend.why_unsupported(problem):
        pytest.skip(reason)
    want = masked_attention(problem)
    with torch.no_grad():
        o = backend.attend(want.q, want.k, want.v, want.spec)
    assert_close(o, want.o, problem.dtype, "o")


def test_compiled_is_compiled_once_for_the_sinks_of_every_layer() -> None:
    problem = problem_of(window=8, softcap=3.0, sinks=True, num_heads=4)
    if reason := why_not_compile("cpu"):
        pytest.skip(reason)
    backend = Compiled(name="compiled")
    from kernels.backends.compiled import _compiled_attention

    before = _compiled_attention._compiled.cache_info().misses
    for _ in range(2):
        check_mask(backend, problem)
    assert _compiled_attention._compiled.cache_info().misses == before + 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": 4, "causal": False, "kv_len": 20, "q_len": 30}, "rows without any key"),
        ({"window": 11, "causal": False, "kv_len": 20, "q_len": 30}, None),
        ({"prefix_len": 4}, None),
    ],
)
@pytest.mark.parametrize("name", ["flex", "compiled", "naive"])
def test_windows_that_leave_rows_without_keys(
    name: str, changes: dict[str, int], reason: str | None
) -> None:
    problem = problem_of(needs_grad=False, **changes)
    found = backend_of(name).why_unsupported(problem)
    if found is not None and "rows without" not in found:
        pytest.skip(found)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_flex_gives_no_log_sum_exp_on_a_cpu() -> None:
    reason = backend_of("flex").why_unsupported(problem_of(sinks=True, needs_grad=False))
    assert reason == "takes no attention.sinks=True"


def test_memory_of_flex_counts_the_blocks_of_any_mask() -> None:
    backend = backend_of("flex")
    problem = problem_of(device="cuda", q_len=300, kv_len=520, causal=False)

    def tables(**changes: object) -> float:
        return (backend.peak_memory(replace(problem, **changes)) or {}).get("block_mask", 0.0)

    assert tables() == 0
    assert tables(window=9) == tables(causal=True) == 4 * 4 * 3 * 5
    assert backend.peak_memory(replace(problem, sinks=True)) is None
