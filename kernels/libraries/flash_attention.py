"""The FlashAttention libraries as backends: what their versions 2, 3 and 4 have in common.

Each keeps tensors as [B, S, H, D] or, packed, [T, H, D], aligns causal masks to the bottom
right, takes fewer heads in k and v, and has a private forward that returns (o, lse, ...) and a
private backward that takes that lse. Those are called here and not the public functions: they
give the lse to a ring, and take back the lse of the whole ring. This project's [B, H, S, D] is
handed over as a transposed view; the kernels take strides.

Private functions change, so they are called by name (:mod:`kernels.libraries.adapter`), and a
version without a parameter that the result depends on is refused.

A window is a number of keys on each side of the diagonal, which they align to the bottom right
too. Their backward passes subtract rowsum(do * o) and take probabilities from the lse, so sinks
are added from the outside (:mod:`kernels.sinks`); version 4 alone has an argument for them.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, ClassVar

import torch

from kernels import accounting
from kernels.backend import Attention, Decoding
from kernels.decoding import DecodeProblem
from kernels.libraries import flash_kvcache
from kernels.libraries.adapter import DTYPES, parameters_of
from kernels.problem import AttentionProblem, AttentionSpec, Packing
from kernels.registry import joined_later
from kernels.rotary import Rotary

_SIDES = ("window_size_left", "window_size_right")
_MASK_PARAMETERS = {"window": _SIDES, "shift": _SIDES, "softcap": ("softcap",)}
"""What the functions must have for a mask; sinks are added from the outside."""


@dataclass(kw_only=True, slots=True)
class FlashLibrary(Attention, Decoding):
    """A FlashAttention library as a backend; subclasses say which functions to call."""

    takes: ClassVar[frozenset[str]] = frozenset(("window", "softcap", "sinks", "shift"))

    modules: ClassVar[tuple[str, ...]]
    """Modules that may hold the functions; the first that exists is taken."""
    distribution: ClassVar[str]
    """The package's name on PyPI, whose version counts."""
    install: ClassVar[str]
    """Command that installs it."""
    needs: ClassVar[dict[str, tuple[str, ...]]]
    """Functions that are called, and the parameters that they must have."""
    oldest: ClassVar[tuple[int, ...]] = ()
    """The first version whose private functions give what is needed."""

    deterministic: bool = joined_later(False)
    """Gradients bit for bit the same in every call, at the cost of time and memory."""

    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        # Some versions take a negative side for one without a bound. No block of a ring has one.
        bounds = [side for side in problem.mask.sides if side is not None]
        return self.takes if min(bounds, default=0) >= 0 else self.takes - {"shift"}

    def libraries(self) -> tuple[str, ...]:
        return (self.distribution,)

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.device != "cuda":
            return "runs on CUDA devices only"
        if problem.dtype not in DTYPES:
            return f"takes {' and '.join(DTYPES)}, not {problem.dtype}"
        return (
            self.why_not_installed() or self._why_not_masked(problem) or self.why_not_here(problem)
        )

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of float32 sums of dq, of heads' widths rounded up to 32, and two numbers a row.

        With grouped queries dk and dv are summed in float32 as well.
        """
        rows = 4.0 * problem.batch_size * problem.num_heads * problem.q_len
        workspace = rows * accounting.rounded(problem.head_dim, 32) + 2 * rows
        if problem.num_heads > problem.num_kv_heads:
            kv_rows = 4.0 * problem.batch_size * problem.num_kv_heads * problem.kv_len
            widths = problem.head_dim, problem.v_dim
            workspace += kv_rows * sum(accounting.rounded(width, 32) for width in widths)
        return workspace

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        reason = flash_kvcache.why_not(problem) or self._why_not_importable()
        if reason is not None:
            return reason
        name = f"{self.distribution} {self.version() or ''}".strip()
        reason = flash_kvcache.why_no_function(self.load(), name)
        return reason or self.why_not_decode_here(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> flash_kvcache.KvCacheDecoder:
        return flash_kvcache.KvCacheDecoder(self.load(), cache, rotary=rotary, scale=scale)

    def why_not_decode_here(self, problem: DecodeProblem) -> str | None:
        """None if this GPU and this cache will do, else the reason."""
        return None

    def why_not_installed(self) -> str | None:
        """None if the library can be imported and is recent enough, else the reason."""
        reason = self._why_not_importable()
        if reason is not None:
            return reason
        module = self.load()
        for function, parameters in self.needs.items():
            if self.deterministic and "dout" in parameters_of(getattr(module, function, None)):
                parameters = (*parameters, "deterministic")
            if reason := self._why_not_called(function, parameters):
                return reason
        return None

    def _why_not_masked(self, problem: AttentionProblem) -> str | None:
        """None if the functions of this version have parameters for the mask, else the reason."""
        names = [name for kind in problem.asks_for() for name in _MASK_PARAMETERS.get(kind, ())]
        reasons = (self._why_not_called(function, tuple(names)) for function in self.needs)
        return next((reason for reason in reasons if reason), None)

    def _why_not_called(self, function: str, parameters: tuple[str, ...]) -> str | None:
        """None if the library's function has these parameters, else the reason."""
        found = parameters_of(getattr(self.load(), function, None))
        missing = [name for name in parameters if name not in found]
        if not missing:
            return None
        what = f"its {function} takes no {missing[0]}" if found else f"has no {function}"
        return f"{self.distribution} {self.version() or ''} is of another version: {what}"

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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse [B, H, S] in the library's layout, or packed [T, H, D] and [H, T]."""
        raise NotImplementedError

    def library_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv in the library's layout."""
        raise NotImplementedError

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.packing is not None:
            return self.library_forward(q, k, v, spec)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o_BSHD, lse = self.library_forward(q, k, v, spec)
        return o_BSHD.transpose(1, 2), lse

    def backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # A ring keeps o in float32; the libraries want one dtype for all.
        do, o, lse = do.to(q.dtype), o.to(q.dtype), lse.contiguous()
        if spec.packing is not None:
            return self.library_backward(do, q, k, v, o, lse, spec)
        do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
        dq, dk, dv = self.library_backward(do, q, k, v, o, lse, spec)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


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


def mask_of(spec: AttentionSpec) -> dict[str, Any]:
    """The arguments that every library names the same: the mask, and a cap where asked for."""
    given: dict[str, Any] = {"causal": spec.causal and not spec.shift}
    if not spec.mask.is_plain:
        sides = zip(_SIDES, spec.mask.sides, strict=True)
        given |= {name: side for name, side in sides if side is not None}
    if spec.softcap is not None:
        given["softcap"] = spec.softcap
    return given


def _numbers(version: str) -> tuple[int, ...]:
    """2.8.3.post1 -> (2, 8, 3); suffixes of a release are ignored."""
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
