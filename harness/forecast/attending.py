"""The time of a case's attention on one device, from its backend's law or the next best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.cases.case import Case
from harness.forecast import terms
from harness.forecast.balance import busiest
from harness.forecast.extract import attention_law, attention_shape
from harness.forecast.law import Estimate, Law, Shape
from kernels import BACKENDS, Attention, AttentionProblem
from kernels.backend import DelegatedAttention
from parallel.context.attention import SequenceParallelAttention

FindLaw = Callable[[str], Law | None]

FUSED_LAUNCHES = {"forward": 2.0, "backward": 4.0}
UNFUSED_LAUNCHES = {"forward": 14.0, "backward": 12.0}
"""Launches of a block's attention in the kernel profiles of backends that keep no scores, and that
keep them."""

STAND_IN_ERROR = 0.12
"""Log error of a time that another backend's law stands in for."""


class Attending:
    """Attention's part of steps.

    Args:
        find: a law by its name, or None.
        names: of all laws.
        factors: of the calibration; ``enqueue/BACKEND/PHASE`` is the host's time of a call.
        is_elsewhere: whether the machine is another than this host.
    """

    def __init__(
        self,
        find: FindLaw,
        names: list[str],
        factors: Mapping[str, float],
        *,
        is_elsewhere: bool,
    ) -> None:
        self._find = find
        self._factors = factors
        self._is_elsewhere = is_elsewhere
        self._chosen: dict[tuple[object, ...], tuple[str, str | None]] = {}
        self._busiest: dict[tuple[int, int, int], float] = {}
        self._kept: list[object] = []
        """Attentions whose identity is in a key."""
        self._measured = sorted(
            {tuple(name.split("/")[1:3]) for name in names if name.startswith("attention/")}
        )

        self._fused = [name for name, _ in self._measured if _compiles_scores(name)]

    def launches(self, case: Case, phase: str) -> float:
        """Kernels of one block's attention."""
        keeps = case.attention.keeps_scores(replace(case.attention_problem, needs_grad=True))
        return (UNFUSED_LAUNCHES if keeps else FUSED_LAUNCHES)[phase]

    def enqueued(self, case: Case, phase: str, launches: float) -> float:
        """The host's time of one block's attention, in launches."""
        name, _ = self.backend(case)
        return self._factors.get(f"enqueue/{name}/{phase}", launches)

    def backend(self, case: Case) -> tuple[str, str | None]:
        """The measured backend whose law a case takes, and a note if that is not its own."""
        key = id(case.attention), case.attention_problem, _is_compiled(case)
        if key not in self._chosen:
            self._kept.append(case.attention)
            self._chosen[key] = self._choose(case)
        return self._chosen[key]

    def _choose(self, case: Case) -> tuple[str, str | None]:
        kernel, problem = case.attention, case.attention_problem
        if isinstance(kernel, SequenceParallelAttention):
            kernel = kernel.on_one_device
        name, dtype = kernel.name, _dtype(problem.dtype)
        if _is_compiled(case) and kernel.keeps_scores(replace(problem, needs_grad=True)):
            # A compiler fuses an attention made of PyTorch's operators.
            name = next((found for found in self._fused if (found, dtype) in self._measured), name)
        if (name, dtype) in self._measured:
            return name, None
        same = [found for found, measured in self._measured if measured == dtype]
        if not same:
            return "", f"no attention was measured in {problem.dtype}"
        shape = _shape(case)
        if isinstance(kernel, DelegatedAttention) and self._is_elsewhere:
            # What this host would choose says nothing of another: the fastest measured there.
            able = [found for found in same if _gives(found, with_lse=case.parallel.cp > 1)]
            if able:
                return min(able, key=lambda found: self._both(found, dtype, shape)), None
        else:
            chosen = _choice(kernel, replace(problem, cp=1))
            if (chosen, dtype) in self._measured:
                return chosen, None
        best = min(same, key=lambda found: self._both(found, dtype, shape))
        return best, f"{name} was not measured in {problem.dtype}; {best} stands in for it"

    def _both(self, name: str, dtype: str, shape: Shape) -> float:
        laws = [self._find(attention_law(name, dtype, phase)) for phase in ("forward", "backward")]
        return sum(law(shape).ms if law is not None else 1e9 for law in laws)

    def estimate(self, case: Case, phase: str) -> tuple[Estimate, str | None]:
        """One block's attention in a phase, on one rank's heads and, with cp, its share."""
        name, note = self.backend(case)
        if not name:
            return self._from_flops(case, phase), note
        law = self._find(attention_law(name, _dtype(case.attention_problem.dtype), phase))
        assert law is not None, "measured backends have laws"
        found = law(_shape(case))
        if note is not None:
            found = replace(found, error=max(found.error, STAND_IN_ERROR))
        return replace(found, ms=self._share(case) * found.ms), note

    def _share(self, case: Case) -> float:
        """Of a whole sequence's attention, what the busiest of the ranks that share it has."""
        if not isinstance(case.attention, SequenceParallelAttention) or case.parallel.cp == 1:
            return 1 / case.parallel.cp
        key = id(case.attention), case.parallel.cp, case.attention_problem.num_heads
        if key not in self._busiest:
            self._kept.append(case.attention)
            self._busiest[key] = busiest(case.attention, case.attention_problem)
        return self._busiest[key] / case.parallel.cp

    def _from_flops(self, case: Case, phase: str) -> Estimate:
        """A fifth of the matmul rate, where nothing was measured."""
        scores = terms.attention(_shape(case))[2]
        law = self._find(f"matmul/{case.precision.peak}")
        times = 20.0 if phase == "forward" else 50.0
        ms = times * scores / 50 if law is None else 5 * times * law((4096.0, 4096.0, 4096.0)).ms
        if law is not None:
            ms *= scores / 137
        return Estimate(ms=self._share(case) * ms, error=0.5, distance=9.0)


def _gives(name: str, *, with_lse: bool) -> bool:
    """Whether it is a backend and, where a sequence is split, gives its log-sum-exp."""
    if name not in BACKENDS:
        return False
    entry = BACKENDS[name]
    backend = entry.target(name=name, **entry.preset)
    return isinstance(backend, Attention) and (backend.gives_lse or not with_lse)


def _is_compiled(case: Case) -> bool:
    return case.compile is not None and case.compile.scope != "none"


def _compiles_scores(name: str) -> bool:
    """Whether a backend is a compiled one that computes whole matrices of scores."""
    if name not in BACKENDS:
        return False
    entry = BACKENDS[name]
    backend = entry.target(name=name, **entry.preset)
    return backend.compiles and backend.keeps_scores(_SMALL)


_SMALL = AttentionProblem(
    batch_size=1,
    num_heads=1,
    num_kv_heads=1,
    q_len=128,
    kv_len=128,
    head_dim=64,
    dtype="bfloat16",
    device="cuda",
    causal=True,
    needs_grad=True,
)


def _choice(kernel: object, problem: object) -> str:
    try:
        return kernel.choice(problem) if isinstance(kernel, Attention) else ""  # type: ignore[arg-type]
    except (AssertionError, RuntimeError, ValueError, ImportError):
        return ""  # It asks a device that is not here.


def _dtype(dtype: str) -> str:
    # Kernels take as long in either 16-bit format.
    return "bfloat16" if dtype == "float16" else dtype


def _shape(case: Case) -> Shape:
    problem = case.attention_problem
    return attention_shape(
        problem.batch_size, problem.num_heads, problem.num_kv_heads, case.seq_len, problem.head_dim
    )
