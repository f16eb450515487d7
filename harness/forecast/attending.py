"""The time of a case's attention on one device, from its backend's law or the next best one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.cases.case import Case
from harness.forecast import masks, terms
from harness.forecast.balance import busiest
from harness.forecast.extract import AUTOCAST, attention_law
from harness.forecast.law import Estimate, Law, Observation
from kernels import Attention, AttentionProblem
from kernels.backend import DelegatedAttention
from models.variants import PLAIN
from parallel.context.attention import SequenceParallelAttention

FindLaw = Callable[[str], Law | None]

FUSED_LAUNCHES = {"forward": 2.0, "backward": 4.0}
UNFUSED_LAUNCHES = {"forward": 14.0, "backward": 12.0}
"""Launches of a block's attention in the kernel profiles of backends that keep no scores, and that
keep them."""

STAND_IN_ERROR = 0.12
"""Log error of a time that another backend's law stands in for."""

SINKS_ERROR = 0.3
"""Relative error of the pass that adds sinks, which is counted in bytes and was never timed."""

UNMEASURED_MASK_ERROR = 0.26
"""Log error of a backend under a mask that it was not measured with: what laws of causal calls are
off by at windows of 128 to 4,096 keys, of kernels that skip what these hide
(benchmarks/bench_windows.py)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Attended:
    """Attention's part of one phase."""

    time: Estimate
    """Of all blocks together."""
    notes: frozenset[str]
    """On what was not measured."""
    launches: float
    """Kernels of one block."""
    enqueued: float
    """The host's time of one block, in launches."""


class Attending:
    """Attention's part of steps.

    Args:
        find: a law by its name, or None.
        observations: by the name of a law.
        factors: of the calibration; ``enqueue/BACKEND/PHASE`` is the host's time of a call.
        is_elsewhere: whether the machine is another than this host.
    """

    def __init__(
        self,
        find: FindLaw,
        observations: Mapping[str, Sequence[Observation]],
        factors: Mapping[str, float],
        *,
        is_elsewhere: bool,
    ) -> None:
        self._find = find
        self._factors = factors
        self._is_elsewhere = is_elsewhere
        self._chosen: dict[tuple[object, ...], tuple[str, str | None]] = {}
        self._busiest: dict[tuple[int, AttentionProblem], float] = {}
        self._layers: dict[tuple[object, ...], Attended] = {}
        self._gives_here: dict[tuple[str, bool], bool] = {}
        self._kept: list[object] = []
        """What keys name by identity, kept alive so that none is reused."""
        laws = {
            name: items for name, items in observations.items() if name.startswith("attention/")
        }
        kinds = {(name, dtype.removesuffix(AUTOCAST)) for _, name, dtype, _ in map(_split, laws)}
        self._measured = sorted(kinds)
        self._masks = {
            name: set[str]().union(*(masks.options_of(item.shapes[0]) for item in items))
            for name, items in laws.items()
        }
        """Options of masks under which each law was measured."""
        self._fused = [name for name, _ in self._measured if _compiles_scores(name)]

    def _launches(self, case: Case, phase: str) -> float:
        keeps = case.attention.keeps_scores(replace(case.attention_problem, needs_grad=True))
        return (UNFUSED_LAUNCHES if keeps else FUSED_LAUNCHES)[phase]

    def _enqueued(self, case: Case, phase: str, launches: float) -> float:
        name, _ = self.backend(case)
        plain = self._factors.get(f"enqueue/{name}/{phase}", launches)
        if case.attention_variant == PLAIN:
            return plain
        added = masks.SINK_LAUNCHES[phase] if case.attention_variant.sinks else 0.0
        return self._factors.get(f"enqueue/{name}/{phase}/masked", plain) + added

    def backend(self, case: Case) -> tuple[str, str | None]:
        """The measured backend whose law a case takes, and a note if that is not its own."""
        key = key_of(case)
        if key not in self._chosen:
            self.keep(case)
            self._chosen[key] = self._choose(case)
        return self._chosen[key]

    def _choose(self, case: Case) -> tuple[str, str | None]:
        kernel, problem = case.attention, case.attention_problem
        if isinstance(kernel, SequenceParallelAttention):
            kernel = kernel.on_one_device
        name, dtype = kernel.name, _dtype(problem.dtype)
        same = [found for found, measured in self._measured if measured == dtype]
        if not same:
            return "", f"no attention was measured in {problem.dtype}"
        able = [found for found in same if _takes(found, problem)] or same
        if isinstance(kernel, Attention) and (why := masks.why_not(kernel, problem)):
            return self._fastest(able, case), why
        if _is_compiled(case) and kernel.keeps_scores(replace(problem, needs_grad=True)):
            # A compiler fuses an attention made of PyTorch's operators.
            name = next((found for found in self._fused if found in same), name)
        if name in same:
            return name, None
        if isinstance(kernel, DelegatedAttention) and self._is_elsewhere:
            # What this host would choose says nothing of another: the fastest measured there.
            given = [found for found in able if self._gives(found, with_lse=case.parallel.cp > 1)]
            if given:
                return self._fastest(given, case), None
        else:
            chosen = _choice(kernel, replace(problem, cp=1))
            if chosen in same:
                return chosen, None
        best = self._fastest(able, case)
        return best, f"{name} was not measured in {problem.dtype}; {best} stands in for it"

    def keep(self, case: Case) -> None:
        """Keep alive what :func:`key_of` names by identity, so that no other object gets it."""
        self._kept += [case.attention, case.model, case.precision]

    def _gives(self, name: str, *, with_lse: bool) -> bool:
        """As :func:`_gives`, which looks libraries up, once for each."""
        key = name, with_lse
        if key not in self._gives_here:
            self._gives_here[key] = _gives(name, with_lse=with_lse)
        return self._gives_here[key]

    def _fastest(self, names: Sequence[str], case: Case) -> str:
        problem = case.attention_problem

        def both_ms(name: str) -> float:
            shape = masks.attention_shape(problem, whole=masks.computes_all(name))
            laws = [self._law_of(name, case, phase)[1] for phase in ("forward", "backward")]
            return sum(law(shape).ms if law is not None else 1e9 for law in laws)

        return min(names, key=both_ms)

    def _law_of(self, name: str, case: Case, phase: str) -> tuple[str, Law | None]:
        """A backend's law under a case's precision, or with its softmax in the other format."""
        dtype, autocast = _dtype(case.attention_problem.dtype), case.precision.autocast is not None
        own = attention_law(name, dtype, phase, autocast=autocast)
        if (law := self._find(own)) is not None:
            return own, law
        other = attention_law(name, dtype, phase, autocast=not autocast)
        return other, self._find(other)

    def layers(self, case: Case, phase: str) -> Attended:
        """All blocks' attention in a phase, on one rank's heads and, with cp, its share."""
        key = phase, *key_of(case)
        if key not in self._layers:
            self.keep(case)
            self._layers[key] = self._all_layers(case, phase)
        return self._layers[key]

    def _all_layers(self, case: Case, phase: str) -> Attended:
        assert case.model is not None, "training steps have a model"
        notes = set[str]()
        ms = error_ms = distance = 0.0
        for variant, count in Counter(case.attention_variant.of_layers(case.model)).items():
            problem = replace(case.attention_problem, window=variant.window)
            one = self._estimate(case, problem, phase, notes)
            added_ms, added_error_ms = self._sinks(problem, phase)
            ms += count * (one.ms + added_ms)
            # What is off in one layer is off in all alike.
            error_ms += count * (one.ms * one.error + added_error_ms)
            distance = max(distance, one.distance)
        launches = self._launches(case, phase)
        return Attended(
            time=Estimate(ms=ms, error=error_ms / ms, distance=distance),
            notes=frozenset(notes),
            launches=launches,
            enqueued=self._enqueued(case, phase, launches),
        )

    def _estimate(
        self, case: Case, problem: AttentionProblem, phase: str, notes: set[str]
    ) -> Estimate:
        """The attention of one block, without sinks; adds to ``notes``."""
        name, note = self.backend(case)
        if note is not None:
            notes.add(note)
        share = self._share(case, problem)
        if not name:
            return self._from_flops(case, problem, phase, share)
        law_name, law = self._law_of(name, case, phase)
        assert law is not None, "measured backends have laws"
        shape = masks.attention_shape(problem, whole=masks.computes_all(name))
        found = law(shape)
        error = found.error
        if note is not None:
            error = max(error, STAND_IN_ERROR)
        for option in sorted(masks.options_of(shape) - self._masks[law_name]):
            error = max(error, UNMEASURED_MASK_ERROR)
            notes.add(f"{name} was not measured with attention.{option}")
        return replace(found, ms=share * found.ms, error=error)

    def _sinks(self, problem: AttentionProblem, phase: str) -> tuple[float, float]:
        """Milliseconds of the pass over o that adds sinks to one block, and their error."""
        copying = self._find("copy")
        if not problem.sinks or copying is None:
            return 0.0, 0.0
        elements = problem.batch_size * problem.num_heads * problem.kv_len * problem.v_dim
        moved = masks.SINK_BYTES[phase] * elements / problem.cp
        ms = copying((masks.SINK_LAUNCHES[phase], moved)).ms
        return ms, SINKS_ERROR * ms

    def _share(self, case: Case, problem: AttentionProblem) -> float:
        """Of a whole sequence's attention, what the busiest of the ranks that share it has."""
        if not isinstance(case.attention, SequenceParallelAttention) or case.parallel.cp == 1:
            return 1 / case.parallel.cp
        key = id(case.attention), problem
        if key not in self._busiest:
            self._kept.append(case.attention)
            self._busiest[key] = busiest(case.attention, problem)
        return self._busiest[key] / case.parallel.cp

    def _from_flops(
        self, case: Case, problem: AttentionProblem, phase: str, share: float
    ) -> Estimate:
        """A fifth of the matmul rate, where nothing was measured."""
        scores = terms.attention(masks.attention_shape(problem))[2]
        law = self._find(f"matmul/{case.precision.peak}")
        times = 20.0 if phase == "forward" else 50.0
        ms = times * scores / 50 if law is None else 5 * times * law((4096.0, 4096.0, 4096.0)).ms
        if law is not None:
            ms *= scores / 137
        return Estimate(ms=share * ms, error=0.5, distance=9.0)


def key_of(case: Case) -> tuple[object, ...]:
    """All of a case that its attention's time follows from, objects by identity."""
    return (
        *(id(case.attention), id(case.model), id(case.precision)),
        *(case.batch_size, case.seq_len, case.device),
        *(case.parallel.cp, case.parallel.tp),
        *(getattr(case.task, "mode", None), _is_compiled(case)),
    )


def _split(law: str) -> list[str]:
    return law.split("/")


def _gives(name: str, *, with_lse: bool) -> bool:
    """Whether it is a backend whose library is installed here, since nothing is known of those
    there, and, where a sequence is split, gives its log-sum-exp."""
    backend = masks.backend_named(name)
    if backend is None or backend.version() is None:
        return False
    return backend.gives_lse or not with_lse


def _takes(name: str, problem: AttentionProblem) -> bool:
    backend = masks.backend_named(name)
    return backend is not None and masks.why_not(backend, problem) is None


def _is_compiled(case: Case) -> bool:
    return case.compile is not None and case.compile.scope != "none"


def _compiles_scores(name: str) -> bool:
    """Whether a backend is a compiled one that computes whole matrices of scores."""
    backend = masks.backend_named(name)
    return backend is not None and backend.compiles and masks.computes_all(name)


def _choice(kernel: object, problem: object) -> str:
    try:
        return kernel.choice(problem) if isinstance(kernel, Attention) else ""  # type: ignore[arg-type]
    except (AssertionError, RuntimeError, ValueError, ImportError):
        return ""  # It asks a device that is not here.


def _dtype(dtype: str) -> str:
    # Kernels take as long in either 16-bit format.
    return "bfloat16" if dtype == "float16" else dtype
