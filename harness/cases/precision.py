"""The choice ``precision=``: the number formats of parameters and of matmuls."""

from __future__ import annotations

from dataclasses import dataclass

from harness.cases.requirements import require_choice

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element of each dtype that a precision may use."""

DTYPES = tuple(DTYPE_BYTES)


@dataclass(kw_only=True, slots=True)
class Precision:
    """Number formats of a training step; values live in ``conf/precision/*.yaml``."""

    name: str
    parameters: str = "float32"
    """dtype of parameters, gradients and optimizer state."""
    autocast: str | None = None
    """dtype that torch.autocast casts matmuls to; None runs in the parameters' dtype."""
    tf32: bool = False
    """Let float32 matmuls run in TF32 on CUDA: about three decimal digits, much faster."""
    grad_scaler: bool = False
    """Scale the loss so that small float16 gradients do not become zero."""

    def __post_init__(self) -> None:
        require_choice("precision.parameters", self.parameters, DTYPES)
        if self.autocast is not None:
            require_choice("precision.autocast", self.autocast, DTYPES[1:])
        if self.grad_scaler and self.compute != "float16":
            raise ValueError(
                f"precision.grad_scaler=true: only float16 gradients need scaling, "
                f"and this precision computes in {self.compute}"
            )

    @property
    def compute(self) -> str:
        """dtype that matmuls and attention see."""
        return self.autocast or self.parameters

    @property
    def peak(self) -> str:
        """The hardware's peak rate that bounds the matmuls: a dtype, or ``tf32``."""
        return "tf32" if self.compute == "float32" and self.tf32 else self.compute
