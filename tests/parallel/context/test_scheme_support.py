"""What schemes support and refuse, what ``auto`` chooses, and PyTorch's peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from split_attention import CPU, KERNELS, PROBLEM, SCHEMES, TRANSPORTS, scheme_of


class TestSupport:
    @pytest.mark.parametrize(
        ("name", "options", "changes", "reason"),
        [
            ("zigzag", {}, {"causal": False}, "balances a causal mask; without one use ring"),
            ("striped", {}, {"causal": False}, "balances a causal mask; without one use ring"),
            ("zigzag_llama3", {}, {"causal": False}, "balances a causal mask"),
            ("ring", {}, {"causal": False, "q_len": 63, "kv_len": 63}, "63 tokens do not divide"),
            ("ring", {}, {"kv_len": 128}, "are the same tokens"),
            (
                "ring",
                {"kernel": "sdpa_math"},
                {},
                "sdpa_math gives no log-sum-exp",
            ),
            (
                "zigzag",
                {"kernel": "sdpa_cudnn"},
                {},
                "kernel=sdpa_cudnn: PyTorch's cudnn",
            ),
            ("zigzag", {"kernel": "sdpa_flash"}, {"packed": True}, "takes no packed batch"),
            ("llama3", {"kv_heads_at_once": 3}, {}, "kv_heads_at_once=3: must divide the 2 KV"),
            ("zigzag_llama3", {"forward_mode": "fused"}, {}, "forward_mode=fused: needs a packed"),
            (
                "zigzag_llama3",
                {"backward_mode": "fused"},
                {},
                "backward_mode=fused: needs a pack",
            ),
            ("zigzag", {"transport": "symmetric"}, {"device": "cuda"}, "sees no CUDA device"),
        ],
    )
    def test_reasons_are_one_line(
        self, name: str, options: dict[str, Any], changes: dict[str, Any], reason: str
    ) -> None:
        if changes.get("device") == "cuda" and torch.cuda.is_available():
            pytest.skip("this host has CUDA devices")
        found = scheme_of(name, **options).supports(replace(PROBLEM, **changes))
        assert found is not None
        assert "\n" not in found
        assert reason in found

    @pytest.mark.parametrize("name", SCHEMES)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_what_works_is_supported(self, name: str, kernel: str) -> None:
        scheme = scheme_of(name, kernel=kernel)
        assert scheme.supports(PROBLEM) is None
        assert scheme.supports(replace(PROBLEM, q_len=61, kv_len=61)) is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel": "nothing"}, "attention.kernel=nothing: no such kernel, one of auto,"),
            ({"kernel": "ring"}, "attention.kernel=ring: must be an attention on one device"),
            ({"transport": "pigeon"}, "attention.transport=pigeon: must be one of auto, all_ga"),
            ({"kv_heads_at_once": -1}, "attention.kv_heads_at_once=-1: must be 0"),
            ({"forward_mode": "both"}, "attention.forward_mode=both: must be one of two_kernels"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match="attention") as caught:
            scheme_of("zigzag_llama3", **options)
        assert str(caught.value).startswith(message)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_the_choice_of_auto_is_told(self, name: str) -> None:
        transport = TRANSPORTS[name][0]
        chosen = f"{name}(kernel=sdpa_flash, transport={transport})"
        assert scheme_of(name).choice(PROBLEM) == chosen
        options = {"kernel": "naive", "transport": transport}
        assert scheme_of(name, **options).choice(PROBLEM) == name


class TestTorchPeer:
    """PyTorch's context_parallel, as far as it runs without GPUs."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"device": "cpu"}, "has kernels for CUDA devices only"),
            ({"packed": True}, "takes no packed batch"),
            ({"causal": False}, "refuses calls without"),
            ({"q_len": 60, "kv_len": 60}, "60 tokens do not divide by 8, and it does not pad"),
        ],
    )
    def test_limits_are_reasons(self, changes: dict[str, Any], reason: str) -> None:
        problem = replace(PROBLEM, **{"device": "cuda", **changes})
        found = scheme_of("context_parallel_torch").supports(problem)
        assert found is not None
        assert reason in found

    def test_otherwise_it_is_tried(self) -> None:
        peer = scheme_of("context_parallel_torch")
        assert peer.supports(replace(PROBLEM, device="cuda")) is None

    def test_the_context_is_entered_and_left(self) -> None:
        assert on_ranks(2, patched_and_restored, "alltoall") == [(True, True), (True, True)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"kernel": "flash_triton"},
                "attention.kernel=flash_triton: must be one of sdpa_flash",
            ),
            ({"rotate": "twist"}, "attention.rotate=twist: must be one of allgather, alltoall"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match="attention") as caught:
            scheme_of("context_parallel_torch", **options)
        assert str(caught.value).startswith(message)


def patched_and_restored(group: dist.ProcessGroup, rotate: str) -> tuple[bool, bool]:
    original = F.scaled_dot_product_attention
    with scheme_of("context_parallel_torch", rotate=rotate).bind(group, CPU) as bound:
        patched = F.scaled_dot_product_attention is not original
        assert bound.layout.num_ranks == 2
    return patched, F.scaled_dot_product_attention is original
