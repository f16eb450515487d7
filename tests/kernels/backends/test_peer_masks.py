"""Windows, caps and sinks of FlashAttention 2, 3 and 4, against the definition.

Stand-ins compute what the libraries would of the arguments that they are given.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_masks import KINDS, check_mask
from test_peers import NAMES, PARAMETERS, Install, Library
from test_peers import install as install  # a fixture

from kernels import BACKENDS, Attention, AttentionProblem, Packing
from kernels.problem import MASKS, Mask
from parallel.context.blocks.score_blocks import visible
from tests.support.attention_by_definition import assert_close, problem_of
from tests.support.masked_attention import masked_attention
from tests.support.masked_libraries import FUNCTIONS

SHIFTED = {
    "later, no window": {"shift": 5},
    "later, many queries": {"shift": 25, "q_len": 30, "kv_len": 12},
    "at the window's end": {"shift": 7, "window": 8, "sinks": True},
    "a block of a ring": {"shift": 7, "window": 8, "q_len": 7, "kv_len": 7, "softcap": 2.0},
    "later, on both sides": {"shift": 3, "window": 8, "causal": False},
    "earlier, on both sides": {"shift": -3, "window": 8, "causal": False},
}
REFUSED = ("earlier queries",)
TAKEN = [name for name, kind in KINDS.items() if "prefix_len" not in kind and name not in REFUSED]
EACH = {name: KINDS[name] for name in TAKEN} | SHIFTED
ROWS_WITHOUT_KEYS = {"window": 4, "causal": False, "q_len": 30, "kv_len": 12}
LONGER_THAN_THE_KEYS = {"window": 20, "causal": False, "q_len": 30, "kv_len": 12}


def masked(**changes: Any) -> AttentionProblem:
    return problem_of(dtype="bfloat16", **({"head_dim": 32} | changes))


def as_on_gpu(name: str) -> Attention:
    """The backend, with the refusals of a GPU for tensors of a CPU."""
    target: Any = BACKENDS[name].target

    class AsOnGpu(target):  # type: ignore[misc]
        def why_unsupported(self, problem: AttentionProblem) -> str | None:
            return target.why_unsupported(self, replace(problem, device="cuda"))

    found: Attention = AsOnGpu(name=name)
    return found


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("name", NAMES)
def test_mask(install: Install, name: str, kind: str) -> None:
    install(name, **FUNCTIONS[name]())
    backend = as_on_gpu(name)
    problem = masked(**EACH[kind])
    if name == "flash_attn_2" and kind == "later, many queries":
        assert "further right than the keys are long" in str(backend.why_unsupported(problem))
        problem = replace(problem, shift=29)
    assert backend.why_unsupported(problem) is None
    check_mask(backend, problem)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_without_any_key(install: Install, name: str, sinks: bool) -> None:
    install(name, **FUNCTIONS[name]())
    check_mask(as_on_gpu(name), masked(**ROWS_WITHOUT_KEYS, sinks=sinks))


@pytest.mark.parametrize("name", NAMES)
def test_a_window_longer_than_the_keys(install: Install, name: str) -> None:
    """Version 2 takes it for none, and is not asked."""
    install(name, **FUNCTIONS[name]())
    backend, problem = as_on_gpu(name), masked(**LONGER_THAN_THE_KEYS)
    if name == "flash_attn_2":
        assert "further right than the keys are long" in str(backend.why_unsupported(problem))
        for changes in ({"window": 12}, {"window": 30}, {"causal": True}):
            assert backend.why_unsupported(replace(problem, **changes)) is None
            check_mask(backend, replace(problem, **changes))
    else:
        check_mask(backend, problem)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_packed(install: Install, name: str, causal: bool) -> None:
    """A batch of three sequences, each as it is alone, which the definition was compared with."""
    install(name, **FUNCTIONS[name]())
    backend = as_on_gpu(name)
    problem = masked(batch_size=1, num_heads=4, window=6, causal=causal)
    lengths = [(9, 14), (20, 20), (6, 3)]
    alone = [masked_attention(replace(problem, q_len=q, kv_len=k)) for q, k in lengths]
    sinks = torch.linspace(-1, 2, 4, requires_grad=True)
    spec = replace(alone[0].spec, softcap=2.0, sinks=sinks)
    wanted = []
    for want in alone:
        leaves = [x.clone().requires_grad_() for x in (want.q, want.k, want.v)]
        o = backend.attend(*leaves, spec)
        wanted.append((o, *torch.autograd.grad(o, [*leaves, sinks], want.do)))

    def tokens(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x[0].transpose(0, 1) for x in tensors]).detach()

    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 29, 35], [0, 14, 34, 37]))
    packing = Packing(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q_len=20, max_kv_len=20)
    leaves = [tokens([getattr(x, name) for x in alone]).requires_grad_() for name in "qkv"]
    o = backend.attend(*leaves, replace(spec, packing=packing))
    found = torch.autograd.grad(o, [*leaves, sinks], tokens([x.do for x in alone]))
    for number, got in enumerate((o, *found[:3])):
        assert_close(got, tokens([x[number] for x in wanted]).double(), "bfloat16", f"{number}")
    assert_close(found[3], sum(x[4] for x in wanted).double(), "float16", "dsinks")


@pytest.mark.parametrize("name", NAMES)
class TestSupport:
    def test_masks(self, install: Install, name: str) -> None:
        install(name, **FUNCTIONS[name]())
        backend = as_on_gpu(name)
        assert backend.why_unsupported(masked(prefix_len=4)) == "takes no attention.prefix_len=4"
        for changes in ({"shift": -1}, {"shift": 8, "window": 8}):
            reason = backend.why_unsupported(masked(**changes))
            assert reason == f"takes no attention.shift={changes['shift']}"
        assert backend.why_unsupported(masked(window=4, softcap=9.0, packed=True)) is None

    @pytest.mark.parametrize("kind", ["window", "softcap"])
    def test_a_version_without_a_parameter(self, install: Install, name: str, kind: str) -> None:
        """A call by name would leave the mask out without a word."""
        last = list(PARAMETERS[name])[-1]
        parameters = " ".join(
            parameter
            for parameter in {*PARAMETERS[name][last].split(), "window_size_left"}
            if parameter not in ("softcap", "window_size_right")
        )
        computing = FUNCTIONS[name]()
        without = Library(name).stand_in(parameters, backward=True)
        install(name, **(computing | {last: without}))
        missing = {"window": "window_size_right", "softcap": "softcap"}[kind]
        reason = as_on_gpu(name).why_unsupported(masked(**{kind: 4}))
        assert f"its {last} takes no {missing}" in str(reason)
        assert as_on_gpu(name).why_unsupported(masked(sinks=True)) is None


def test_flash_attn_4_on_other_gpus(install: Install) -> None:
    backend = as_on_gpu("flash_attn_4")
    for capability in ((8, 0), (12, 0)):
        install("flash_attn_4", capability=capability, **FUNCTIONS["flash_attn_4"]())
        plain = masked(needs_grad=False)
        for changes in ({"window": 4}, {"softcap": 4.0}):
            reason = backend.why_unsupported(replace(plain, **changes))
            assert "takes no window or softcap on compute capability" in str(reason)
        assert backend.why_unsupported(replace(plain, sinks=True)) is None
    install("flash_attn_4", capability=(10, 0), **FUNCTIONS["flash_attn_4"]())
    wide = masked(head_dim=256, softcap=4.0)
    assert "no gradients with a softcap" in str(backend.why_unsupported(wide))
    assert backend.why_unsupported(replace(wide, needs_grad=False)) is None
    assert backend.why_unsupported(replace(wide, softcap=None, window=4)) is None


def test_the_documentation_says_what_each_takes() -> None:
    """A table of docs/kernels.md, held to the backends on a GPU."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    table = page.split("| backend | window |")[1].split("\n\n")[0]
    said = {
        name: {kind for kind, word in zip(MASKS, words.split(" | "), strict=True) if word != "no"}
        for names, words in re.findall(r"^\| (`.*`) \| (\w.*) \|$", table, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    found = {}
    for entry in BACKENDS:
        backend = entry.target(name=entry.name, **entry.preset)
        of_kernels = type(backend).__module__.startswith("kernels.")
        if of_kernels and isinstance(backend, Attention) and entry.name != "auto":
            found[entry.name] = set(backend.takes_here(problem_of(device="cuda"))) & {*MASKS}
    assert said == found


def test_no_block_of_a_ring_has_a_negative_side() -> None:
    """So that the libraries take every block of a split sequence but those of a prefix."""
    draw = random.Random(5)
    banded = 0
    for _ in range(3000):
        causal = draw.random() < 0.6
        step = draw.choice((1, 2, 3)) if causal else 1
        runs = [
            range(first, first + step * draw.randint(1, 12), step)
            for first in (draw.randint(0, 40), draw.randint(0, 40))
        ]
        mask = Mask(causal=causal, window=draw.choice((None, 1, 2, 5, 9, 30)))
        block = visible(*runs, mask)
        sides = [] if block is None else [side for side in block.mask.sides if side is not None]
        banded += bool(sides)
        assert min(sides, default=0) >= 0
    assert banded > 500
