"""What the FlashAttention libraries have in common, and where their versions differ.

Each keeps tensors as [B, S, H, D] or, packed, [T, H, D], aligns causal masks to the bottom
right, takes fewer heads in k and v, and has a private forward that returns (o, lse, ...) and a
private backward that takes that lse. Those are called here and not the public functions: they
give the lse to a ring, and take the one of the whole ring back. This project's [B, H, S, D] is
handed over as a transposed view; the kernels take strides.

Private functions change. Arguments are passed by name, and only those that the installed
version's signature has; a version without one that the result depends on is refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from kernels.backend import Attention, Decoding
from kernels.problem import AttentionProblem, AttentionSpec, Packing

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.decoding import DecodeProblem
    from kernels.libraries.flash_kvcache import KvCacheDecoder
    from kernels.rotary import Rotary

DTYPES = ("float16", "bfloat16")


@dataclass(kw_only=True, slots=True)
class FlashLibrary(Attention, Decoding):
    """A FlashAttention library as a backend; subclasses say which functions to call."""

    modules: ClassVar[tuple[str, ...]]
    """Where the functions may lie; the first module that exists is taken."""
    distribution: ClassVar[str]
    """The package's name on PyPI, whose version counts."""
    install: ClassVar[str]
    """Command that installs it."""
    needs: ClassVar[dict[str, tuple[str, ...]]]
    """Functions that are called, and the parameters without which they are of no use here."""
    oldest: ClassVar[tuple[int, ...]] = ()
    """The first version whose private functions give what is needed."""

    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda":
            return "runs on CUDA devices only"
        if problem.dtype not in DTYPES:
            return f"takes {' and '.join(DTYPES)}, not {problem.dtype}"
        return self.why_not_installed() or self.why_not_here(problem)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        from kernels.libraries import flash_kvcache as kvcache

        reason = kvcache.why_not(problem) or self._why_not_importable()
        if reason is not None:
            return reason
        name = f"{self.distribution} {self.version() or ''}".strip()
        reason = kvcache.why_no_function(self.load(), name)
        return reason or self.why_not_decode_here(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> KvCacheDecoder:
        from kernels.libraries.flash_kvcache import KvCacheDecoder

        return KvCacheDecoder(self.load(), cache, rotary=rotary, scale=scale)

    def why_not_decode_here(self, problem: DecodeProblem) -> str | None:
        """None if this GPU and this cache will do, else the reason."""
        return None

    def why_not_installed(self) -> str | None:
        """None if the library can be imported and is recent enough, else the reason."""
        reason = self._why_not_importable()
        if reason is not None:
            return reason
        version, module = self.version(), self.load()
        for function, parameters in self.needs.items():
            found = parameters_of(getattr(module, function, None))
            missing = [name for name in parameters if name not in found]
            if missing:
                what = f"its {function} takes no {missing[0]}" if found else f"has no {function}"
                return f"{self.distribution} {version or ''} is of another version: {what}"
        return None

    def _why_not_importable(self) -> str | None:
        version = self.version()
        try:
            self.load()
        except Exception as error:
            if _is_absent(self.modules, error):
                return f"{self.distribution} is not installed: {self.install}"
            return f"{self.distribution} cannot be imported ({_one_line(error)})"
        if version is not None and _numbers(version) < self.oldest:
            oldest = ".".join(str(number) for number in self.oldest)
            return f"{self.distribution} {version} is too old, {oldest} is needed: {self.install}"
        return None

    def why_not_here(self, problem: AttentionProblem) -> str | None:
        """None if this GPU and this head_dim will do, else the reason."""
        raise NotImplementedError

    @classmethod
    def load(cls) -> ModuleType:
        """The library's module; raises what importing raises."""
        *others, last = cls.modules
        for name in others:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not _is_absent((name,), error):
                    raise
        return importlib.import_module(last)

    def library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """o and lse [B, H, S] in the library's layout, or packed [T, H, D] and [H, T]."""
        raise NotImplementedError

    def library_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the library's layout."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        if spec.packing is not None:
            return self.library_forward(q, k, v, spec)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o_BSHD, lse = self.library_forward(q, k, v, spec)
        return o_BSHD.transpose(1, 2), lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # A ring keeps o in float32; the libraries want one dtype for all.
        do, o, lse = do.to(q.dtype), o.to(q.dtype), lse.contiguous()
        if spec.packing is not None:
            return self.library_backward(do, q, k, v, o, lse, spec)
        do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
        dq, dk, dv = self.library_backward(do, q, k, v, o, lse, spec)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def call_by_name(function: Callable[..., Any], **values: Any) -> Any:
    """Call by name with the values that this version's signature has a parameter for.

    A parameter of another version that has no default is a feature not used here: None.
    """
    parameters = parameters_of(function)
    given = {name: value for name, value in values.items() if name in parameters}
    given |= {
        name: None
        for name, has_default in parameters.items()
        if not has_default and name not in given
    }
    return function(**given)


@cache
def parameters_of(function: Callable[..., Any] | None) -> dict[str, bool]:
    """Parameter names, and whether each has a default; empty for None."""
    if function is None:
        return {}
    # torch.library.custom_op hides the signature of the function that it wraps.
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return {
        name: parameter.default is not parameter.empty
        for name, parameter in signature.parameters.items()
    }


def lengths_of(packing: Packing | None) -> dict[str, Any]:
    """The arguments that every library names the same for a packed batch."""
    if packing is None:
        return {}
    return {
        "cu_seqlens_q": packing.cu_seqlens_q,
        "cu_seqlens_k": packing.cu_seqlens_k,
        "max_seqlen_q": packing.max_q_len,
        "max_seqlen_k": packing.max_kv_len,
    }


def capability() -> tuple[int, int]:
    """Compute capability of the current CUDA device; (0, 0) without one."""
    import torch

    if not torch.cuda.is_available():
        return (0, 0)
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def why_not_head_dim(head_dim: int, most: int) -> str | None:
    """The libraries read 16 bytes of a row at a time, and were built up to some head_dim."""
    if head_dim % 8 or head_dim > most:
        return f"takes a head_dim that is a multiple of 8 and at most {most}, not {head_dim}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """2.8.3.post1 -> (2, 8, 3); what follows a release is of no interest."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _is_absent(names: tuple[str, ...], error: Exception) -> bool:
    """Whether one of the modules, or a package that it lies in, is what was not found."""
    if not isinstance(error, ModuleNotFoundError):
        return False
    return any(f"{name}.".startswith(f"{error.name}.") for name in names)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
