"""The choice ``compile=``: what torch.compile is applied to."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cases.requirements import require_choice

COMPILE_SCOPES = ("none", "model", "block")
COMPILE_MODES = (
    "default",
    "reduce-overhead",
    "max-autotune",
    "max-autotune-no-cudagraphs",
)

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes whose kernels are launched as CUDA graphs."""


@dataclass(kw_only=True, slots=True)
class Compile:
    """The part that torch.compile compiles; values live in ``conf/compile/*.yaml``."""

    scope: str = "none"
    """``none``, the whole ``model``, or each transformer ``block`` on its own."""
    mode: str = "default"
    """torch.compile's mode; reduce-overhead brings CUDA graphs."""

    def __post_init__(self) -> None:
        require_choice("compile.scope", self.scope, COMPILE_SCOPES)
        require_choice("compile.mode", self.mode, COMPILE_MODES)
        if self.scope == "none" and self.mode != "default":
            raise ValueError(
                f"compile.mode={self.mode}: compiles nothing unless compile=model or compile=block"
            )

    @property
    def label(self) -> str:
        """In answers and progress lines: ``block (reduce-overhead)``."""
        return self.scope if self.mode == "default" else f"{self.scope} ({self.mode})"
