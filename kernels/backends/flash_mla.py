"""FlashMLA, DeepSeek's CUDA library for latent attention on Hopper, in absorbed form.

Its kernel reads blocks of 64 tokens of rank 512 with a rotary part of 64.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from kernels.backend import Decoding, attention_backend
from kernels.decoding import DecodeProblem
from kernels.libraries import flash_mla
from kernels.libraries.adapter import capability, parameters_of
from kernels.registry import Look
from kernels.rotary import Rotary

BLOCK_SIZE = 64
KV_LORA_RANK, ROPE_HEAD_DIM = 512, 64
INSTALL = "pip install git+https://github.com/deepseek-ai/FlashMLA"


@attention_backend("flash_mla", look=Look(colour="#0072B2", marker="P"))
@dataclass(kw_only=True, slots=True)
class FlashMla(Decoding):
    """Package flash_mla: its get_mla_metadata and flash_mla_with_kvcache."""

    def version(self) -> str | None:
        try:
            return metadata.version("flash-mla")
        except metadata.PackageNotFoundError:
            return None

    def libraries(self) -> tuple[str, ...]:
        return ("flash-mla",)

    @property
    def latent_block_size(self) -> int | None:
        return BLOCK_SIZE

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        if not problem.is_latent:
            return "takes latents: use cache=latent"
        if problem.device != "cuda":
            return "runs on CUDA devices only"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"takes float16 and bfloat16, not {problem.dtype}"
        if (problem.kv_lora_rank, problem.rope_head_dim) != (KV_LORA_RANK, ROPE_HEAD_DIM):
            return (
                f"takes rank {KV_LORA_RANK} with a rotary part of {ROPE_HEAD_DIM}, not "
                f"{problem.kv_lora_rank} with {problem.rope_head_dim}"
            )
        if problem.block_size != BLOCK_SIZE:
            return f"reads blocks of {BLOCK_SIZE} tokens: use cache.block_size={BLOCK_SIZE}"
        if problem.cuda_graph:
            return "plans each step's splits from its lengths, outside of a CUDA graph"
        major, minor = capability()
        if major < 9:
            return f"needs compute capability 9.0 (Hopper), this device has {major}.{minor}"
        return why_not_installed()

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> flash_mla.FlashMlaSteps:
        return flash_mla.FlashMlaSteps(problem, cache, rotary=rotary, scale=scale)


@cache
def why_not_installed() -> str | None:
    """None if the package can be imported and is of a version that is known, else the reason."""
    if find_spec("flash_mla") is None:
        return f"flash_mla is not installed: {INSTALL}"
    try:
        module = importlib.import_module("flash_mla")
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        return f"flash_mla cannot be imported ({type(error).__name__}: {words})"
    needed = {
        "get_mla_metadata": ("cache_seqlens",),
        "flash_mla_with_kvcache": (
            *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v"),
            *("tile_scheduler_metadata", "num_splits"),
        ),
    }
    for name, parameters in needed.items():
        found = parameters_of(getattr(module, name, None))
        missing = [item for item in parameters if item not in found]
        if missing:
            return f"flash_mla is of another version: its {name} takes no {missing[0]}"
    return None
