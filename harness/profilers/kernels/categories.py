"""The category of a kernel, and the FLOPs and bytes of an operator.

Categories are those of the CS336 text's question on kernels besides matmuls (nsys_profile c),
with those of distributed training. A kernel's category follows from the operator that launched
it, else from its name. An operator's FLOPs follow from its shapes: two for each multiply-add of
a matmul; by convention, since kernels differ, five an element for softmax and normalisation and
one for elementwise operations and reductions. Its bytes are those of all inputs and of the
output, each moved once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CATEGORIES = (
    *("matmul", "attention", "softmax", "normalisation", "elementwise", "reduction"),
    *("copy", "optimizer", "communication", "other"),
)

SMALL_ONES = "(small ones)"
"""Row of the kernels of one range and category that are too short for a row each."""

_OPERATORS = {
    "matmul": r"(aten::)?(mm|addmm|bmm|baddbmm|addmv|mv|dot|linear|matmul|addbmm|_scaled_mm"
    r"|_addmm_activation|mkldnn_linear|_mkl_linear)(_out)?$",
    "attention": r".*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention"
    r"|attnbench::flash|flash_attn|flex_attention|flash_forward|flash_backward)",
    "softmax": r"(aten::)?_?(log_)?softmax(_backward_data)?$|aten::logsumexp",
    "normalisation": r"aten::(native_|_fused_)?(rms|layer|batch|group)_norm(_backward)?$",
    "optimizer": r"aten::(_fused_|_foreach_).*|Optimizer\.step",
    "communication": r"(c10d|_c10d_functional|nccl|gloo|symm_mem)::?.*|record_param_comms",
    "copy": r"aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|index_select|embedding|gather"
    r"|repeat_interleave|repeat|index|slice_backward|select_backward|fill_|zero_|zeros|ones"
    r"|index_put_|_index_put_impl_|embedding_dense_backward|scatter_?|arange|copysign)$|Memcpy"
    r"|Memset",
    "reduction": r"aten::(sum|mean|nll_loss_forward|nll_loss_backward|nll_loss_nd|max|min|amax"
    r"|norm|linalg_vector_norm|var|cumsum|argmax|all|any)$",
    "elementwise": r"aten::(add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|silu|silu_backward|sigmoid"
    r"|gelu|where|masked_fill|tril|triu|cos|sin|reciprocal|bitwise_not|logical_not|eq|ne|lt|gt|le"
    r"|ge|abs|clamp|reciprocal|threshold_backward|relu|tanh|tanh_backward|addcmul|addcdiv|lerp)_?$",
}

_KERNELS = {
    "communication": r"nccl|^all_?reduce|one_shot_|two_shot_|multimem",
    "copy": r"^Memcpy|^Memset|\[CUDA mem|CatArrayBatched|direct_copy_kernel|FillFunctor"
    r"|indexSelect|index_elementwise|_to_copy|embedding|bfloat16_copy|float16_copy|copy_kernel",
    "attention": r"flash|fmha|attention|sdpa|attn",
    "optimizer": r"multi_tensor_apply|FusedAdam|adamw?_",
    "softmax": r"softmax",
    "normalisation": r"rms_?norm|layer_?norm|RowwiseMoments|GammaBeta|batch_norm",
    "matmul": r"gemm|gemv|cutlass|cublas|xmma|wgmma|nvjet|splitK|matmul|triton_mm|_mm_|triton_tem",
    "reduction": r"reduce|nll_loss|triton_red|triton_per|cub::.*(Sum|Scan)|sum_",
    "elementwise": r"elementwise|triton_poi|Functor|pointwise|tril|triu|fused",
}
"""Patterns of kernel names by category, tried in this order."""

FLOPS_PER_ELEMENT = {"softmax": 5, "normalisation": 5, "elementwise": 1, "reduction": 1}

ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "bool": 1,
    "int": 4,
    "long int": 8,
    "long": 8,
    "unsigned char": 1,
    "signed char": 1,
    "short int": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
"""Bytes of an element, by the dtype's name in torch.profiler."""

_NORM_RANGE, _SOFTMAX_RANGE = "norm", "softmax"


@cache
def operator_category(name: str) -> str | None:
    """Category of an operator by its name; None if no pattern matches."""
    for category, pattern in _OPERATORS.items():
        if re.match(pattern, name):
            return category
    return None


@cache
def kernel_category(name: str) -> str:
    """Category of a kernel by its name alone."""
    for category, pattern in _KERNELS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return category
    return "other"


@cache
def category_of(kernel: str, operator: str | None, phase: str, path: tuple[str, ...]) -> str:
    """Category of a kernel from its name, its operator, its phase and its ranges.

    Args:
        operator: the innermost operator that launched it.
        path: the ranges around it, outermost first. They tell the elementwise operators of an
            explicit norm or softmax from others.
    """
    by_operator = operator_category(operator) if operator else None
    by_kernel = kernel_category(kernel)
    if "communication" in (by_operator, by_kernel):
        return "communication"
    if phase == "optimizer":
        return "optimizer"
    found = by_operator or by_kernel
    innermost = path[-1] if path else ""
    if innermost == _NORM_RANGE and found in ("elementwise", "reduction", "other"):
        return "normalisation"
    if innermost == _SOFTMAX_RANGE and found in ("elementwise", "reduction", "other"):
        return "softmax"
    return found


@dataclass(kw_only=True, slots=True, frozen=True)
class Cost:
    """The least that an operator has to compute and to move."""

    flops: float
    bytes: float


Shapes = Sequence[Sequence[int]]


def operator_cost(name: str, shapes: Shapes, dtypes: Sequence[str]) -> Cost | None:
    """FLOPs and bytes of one call; None where the shapes do not give them.

    Args:
        shapes: one for each argument; empty for arguments that are not tensors.
        dtypes: one for each argument, by its name in torch.profiler.
    """
    category = operator_category(name)
    tensors = [
        (list(shape), ELEMENT_BYTES[dtype])
        for shape, dtype in zip(shapes, dtypes, strict=False)
        if shape and dtype in ELEMENT_BYTES and all(isinstance(size, int) for size in shape)
    ]
    if not tensors or category is None:
        return None
    moved = sum(math.prod(shape) * size for shape, size in tensors)
    if category == "matmul":
        return _matmul_cost(name, tensors, moved)
    if category not in FLOPS_PER_ELEMENT:
        return None
    largest = max(math.prod(shape) for shape, _ in tensors)
    output = 0 if category == "reduction" else largest * tensors[0][1]
    return Cost(flops=float(FLOPS_PER_ELEMENT[category] * largest), bytes=float(moved + output))


def _matmul_cost(name: str, tensors: list[tuple[list[int], int]], moved: float) -> Cost | None:
    """Cost of mm, bmm and addmm; linear and matmul call these, which count."""
    short = name.removeprefix("aten::")
    if short in ("linear", "matmul"):
        return None
    factors = [item for item in tensors if len(item[0]) >= 2][-2:]
    if len(factors) < 2 or factors[0][0][-1] != factors[1][0][-2]:
        return None
    (left, size), (right, _) = factors
    *batch, rows, inner = left
    outputs = math.prod(batch) * rows * right[-1]
    return Cost(flops=2.0 * outputs * inner, bytes=float(moved + outputs * size))
