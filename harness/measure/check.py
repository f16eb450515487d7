"""The numeric gate of a case: calls before it is timed, and the results of timed passes.

What is compared, and how tolerances come about, is :mod:`harness.gate`'s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.gate.findings import Finding, join_checks, to_check, worst
from harness.gate.gate import Part, check_part
from harness.gate.sink_gradient import SinkGradient
from harness.gate.tolerances import Format, format_of
from harness.measure.attention_calls import AttentionCall
from harness.measure.passes import Passes, autocast

NAMES = ("o", "dq", "dk", "dv", "dsinks")


def check_call(
    case: Case, bench: Bench, call: AttentionCall, passes: type[Passes] = Passes
) -> None:
    """Make calls at full size and compare their results with float64.

    Two calls are made, each on new tensors: the first on tensors that lie in memory in the other
    order that models use, the second as the case does. Scores that a cap bends are spread so widely
    in the first that it bends many of them. A forward pass follows in which all scores are so large
    that their exponentials overflow unless the maximum is taken off first. From the
    second call on, kernels may be launched another way, and that way is what is timed. Code that
    was compiled for one layout is called twice with that one. A case measured in rounds is checked
    so in the first.

    Raises WrongResult if an error exceeds its tolerance.
    """
    if not bench.in_first_round:
        return
    bench.stage("checking")
    first, kind = call, passes
    other = None if case.compiles else call.other_layout()
    if other is not None:
        first, kind = other, Passes
    first_inputs = _check_once(case, bench, first, kind, number=0)
    _check_once(case, bench, call, passes, number=1)
    del first_inputs  # kept until here, so that the second call's tensors lie elsewhere
    _check_large_scores(case, bench, call)


def _check_once(
    case: Case, bench: Bench, call: AttentionCall, kind: type[Passes], *, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make one call, check it and its log-sum-exp, and return its inputs."""
    inputs = call.inputs()
    if call.problem.softcap is not None and number == 0:
        with torch.no_grad():
            inputs[0].mul_(max(1.0, SPREAD_OF_CAPPED * call.problem.softcap))
    made = kind(case, call, inputs)
    timed = TimedResults(case, bench, call, inputs, first_draw=number)
    o = made.forward()
    if call.problem.needs_grad:
        timed.do = call.output_gradient(o)
        timed.keep(o, *made.backward(o, timed.do))
    else:
        timed.keep(o)
    del o
    timed.check()
    timed.forget()
    _check_lse(case, bench, call, inputs, number)
    return inputs


OVERFLOWING_SCORE = 96.0
"""exp(89) is more than float32 holds."""

SPREAD_OF_CAPPED = 0.125
"""The deviation of scores in the call that shows what a cap does, as a part of it. Random inputs
have a deviation of 1, and a cap of 50 changes such scores and their gradients by 0.04%."""


def _check_large_scores(case: Case, bench: Bench, call: AttentionCall) -> None:
    """Check a forward pass whose scores overflow an exponential, some twice as large as others.

    Only the first feature of queries and keys is not zero, and it is a power of two: keys have one
    of two scores, whatever format scores are rounded to, and the larger takes all the weight of a
    row. So a sound softmax is right in any precision, and one that takes off no maximum, or that
    of other keys than it has seen, is not. Its error is not that of the case: what rounds the
    difference of two such numbers in float32 errs as TF32 does, and no more is asked for. A cap
    below such scores leaves none that could overflow.
    """
    if call.problem.softcap is not None and call.problem.softcap < OVERFLOWING_SCORE:
        return
    q, k, v = call.inputs()
    exponent = math.ceil(math.log2(OVERFLOWING_SCORE * call.problem.head_dim**0.5))
    with torch.no_grad():
        larger = k[..., 0] > 0
        q.zero_()[..., 0] = 2.0 ** (exponent // 2)
        k.zero_()[..., 0] = 2.0 ** (exponent - exponent // 2) * (1 + larger)
    o = Passes(case, call, (q, k, v)).forward()
    tensors = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "o": o.detach()}
    name = case.precision.peak
    number_format = format_of("tf32" if name == "float32" else name)
    found = _findings(case, bench, call.parts(tensors), number_format, draw=2)
    broken = next((finding for finding in found.values() if not finding.holds), None)
    if broken is not None:
        raise WrongResult(f"where exponentials of scores overflow, {broken.said}")


def _check_lse(
    case: Case,
    bench: Bench,
    call: AttentionCall,
    inputs: tuple[Tensor, Tensor, Tensor],
    number: int,
) -> None:
    """Check the output and log-sum-exp of the explicit forward pass, where there is one."""
    q, k, v = (x.detach() for x in inputs)
    with autocast(case), torch.no_grad():
        given = call.attend_with_lse(q, k, v)
    if given is None:
        return
    tensors = {"q": q, "k": k, "v": v, "o": given[0], "lse": given[1]}
    check_parts(case, bench, call.parts(tensors), draw=number)


class TimedResults:
    """The results of the last pass, for the gate; a slot that each pass empties as it begins.

    Args:
        first_draw: which random rows the first check takes; each further one takes others.

    Before the second pass the sign of q changes, in place: a call that remembers results by where
    its inputs lie, or a graph that does not read them, gives those of the first pass.
    """

    def __init__(
        self,
        case: Case,
        bench: Bench,
        call: AttentionCall,
        inputs: tuple[Tensor, Tensor, Tensor],
        do: Tensor | None = None,
        *,
        first_draw: int = 3,
    ) -> None:
        self._case, self._bench, self._call = case, bench, call
        self._inputs = inputs
        self._draw = first_draw
        self._last: tuple[Tensor, ...] = ()
        self._begun = 0
        self.do = do

    def forget(self) -> None:
        """Free the last pass's results; called as the next begins, before it is timed."""
        self._last = ()
        self._begun += 1
        if self._begun == 2:
            with torch.no_grad():
                self._inputs[0].neg_()

    def keep(self, *results: Tensor) -> None:
        """Keep o, and where there are gradients dq, dk, dv and dsinks, of the pass that ends."""
        self._last = results

    def check(self) -> None:
        """Compare them with float64, in other rows each time.

        Raises WrongResult if an error exceeds its tolerance.
        """
        tensors = {name: x.detach() for name, x in zip("qkv", self._inputs, strict=True)}
        tensors |= {name: x.detach() for name, x in zip(NAMES, self._last, strict=False)}
        if self.do is not None:
            tensors["do"] = self.do
        with torch.no_grad():
            of_sinks = None
            if "dsinks" in tensors:
                of_sinks = SinkGradient(self._call.whole_sum(tensors.pop("dsinks")))
            parts = self._call.parts(tensors)
            check_parts(self._case, self._bench, parts, draw=self._draw, of_sinks=of_sinks)
        self._draw += 1


def check_parts(
    case: Case,
    bench: Bench,
    parts: Iterable[Part],
    *,
    draw: int,
    prefix: str = "",
    of_sinks: SinkGradient | None = None,
) -> None:
    """Note the errors of all parts of a call, and hold them to their tolerances.

    Args:
        draw: which random rows to compare: a number of its own for every check of a case.
        prefix: goes before the names of tensors in the record.
        of_sinks: has the gradient of the call's sinks, which all parts add up to.

    Raises WrongResult if an error exceeds its tolerance.
    """
    number_format = format_of(case.precision.peak)
    found = _findings(case, bench, parts, number_format, draw=draw, of_sinks=of_sinks)
    named = {f"{prefix}{name}": finding for name, finding in found.items()}
    note(case, bench, named, factor=number_format.factor)


def _findings(
    case: Case,
    bench: Bench,
    parts: Iterable[Part],
    number_format: Format,
    *,
    draw: int,
    of_sinks: SinkGradient | None = None,
) -> dict[str, Finding]:
    """The worst of all parts, by name."""
    seed = hash((case.seed, bench.round_index, draw)) % 2**32
    generator = torch.Generator().manual_seed(seed)

    def found() -> Iterator[Finding]:
        for part in parts:
            yield from check_part(part, number_format, generator, of_sinks)
        if of_sinks is not None:
            yield from of_sinks.findings(number_format)

    with torch.no_grad(), one_thread():
        return worst(found())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread of the CPU.

    The gate makes many small operations there. Shared among threads, each would wait for the one
    that the system runs last, which on a busy machine takes longer than the operation.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def note(case: Case, bench: Bench, found: dict[str, Finding], *, factor: float) -> None:
    """Keep findings for the record, and raise WrongResult for the worst that does not hold.

    Ranks vote, so that those whose share was right do not wait for one that has given up.
    """
    new = to_check(found, factor=factor)
    bench.outcome.check = join_checks([bench.outcome.check, new])
    broken = [finding for finding in found.values() if not finding.holds]
    if broken:
        worst_of_all = max(broken, key=lambda finding: (finding.is_of_tensor, finding.share))
        limit = "every bit should be the same" if worst_of_all.name == "kept" else ""
        if worst_of_all.name.endswith("finite"):
            limit = "every element has to be finite"
        elif worst_of_all.tolerance:
            limit = f"{case.precision.peak} should stay under {worst_of_all.tolerance:.2g}"
        raise WrongResult(f"{worst_of_all.said}; {limit}")
    bench.vote()
