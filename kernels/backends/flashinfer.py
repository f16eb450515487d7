"""FlashInfer's paged decoding (Ye et al., 2025), with its fused rotary embedding of q and k.

Four kernels: rotary on both, append, attention, and the merge of split keys. Before a step the
host plans how to split the batch, from lengths that it knows; so a step cannot be replayed for
other lengths without planning anew.
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
from kernels.libraries import flashinfer
from kernels.registry import Look
from kernels.rotary import Rotary

INSTALL = "pip install flashinfer-python"

NEEDS = (
    ("", "BatchDecodeWithPagedKVCacheWrapper"),
    ("", "append_paged_kv_cache"),
    ("rope", "apply_rope_with_cos_sin_cache"),
)
"""Modules of the package, and the names that are called in them."""


@attention_backend("flashinfer", look=Look(colour="#009E73", marker="D"))
@dataclass(kw_only=True, slots=True)
class FlashInfer(Decoding):
    """Package flashinfer-python; a paged cache and one new token a sequence."""

    def version(self) -> str | None:
        for name in ("flashinfer-python", "flashinfer"):
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def libraries(self) -> tuple[str, ...]:
        return ("flashinfer-python", "flashinfer")

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        if problem.is_latent:
            return "takes keys and values here, not latents"
        if problem.device != "cuda":
            return "runs on CUDA devices only"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"takes float16 and bfloat16, not {problem.dtype}"
        if problem.block_size is None:
            return "takes a paged cache: use cache=paged"
        if problem.new_tokens > 1:
            return f"decodes one new token here, not task.new_tokens={problem.new_tokens}"
        if problem.cuda_graph:
            return "plans each step on the host, for lengths that a CUDA graph would not see change"
        return why_not_installed()

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> flashinfer.FlashInferDecoder:
        return flashinfer.FlashInferDecoder(problem, cache, rotary=rotary, scale=scale)


@cache
def why_not_installed() -> str | None:
    """None if the package can be imported and has these names, else the reason."""
    if find_spec("flashinfer") is None:
        return f"flashinfer is not installed: {INSTALL}"
    for module, name in NEEDS:
        full_name = f"flashinfer.{module}".rstrip(".")
        try:
            found = importlib.import_module(full_name)
        except Exception as error:
            words = " ".join(str(error).split())[:200]
            return f"flashinfer cannot be imported ({type(error).__name__}: {words})"
        if not hasattr(found, name):
            return f"flashinfer is of another version: {full_name} has no {name}: {INSTALL}"
    return None
