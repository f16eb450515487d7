"""The numeric check that a case passes before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.measure.attention_calls import AttentionCall
from harness.measure.passes import Passes
from kernels.reference import TOLERANCE, check_slice


def check_call(
    case: Case, bench: Bench, call: AttentionCall, passes: type[Passes] = Passes
) -> None:
    """Make a call at full size and compare slices of its parts with float64.

    The call is made twice, each time on new tensors, and the second result is compared: from
    the second call on, kernels may be launched another way, and that way is what is timed.
    A case measured in rounds is checked in the first.

    Raises WrongResult if any relative error exceeds the tolerance of the case's number format.
    """
    if not bench.in_first_round:
        return
    bench.stage("checking")
    problem = call.problem
    first_inputs = call.inputs()
    _results(passes(case, call, first_inputs), call, first_inputs)
    inputs = call.inputs()
    tensors = _results(passes(case, call, inputs), call, inputs)
    del first_inputs  # kept until here, so that the second call's tensors lie elsewhere
    with torch.no_grad():
        found = [
            check_slice(
                part.problem,
                {name: part.take(x) for name, x in tensors.items()},
                scale=problem.head_dim**-0.5,
                rows=part.rows,
                keys=part.keys,
            )
            for part in call.parts()
        ]
    require_accurate(case, bench, worst_of(found))


def _results(
    passes: Passes, call: AttentionCall, inputs: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Tensor]:
    """q, k, v, o and, if the problem needs gradients, do, dq, dk, dv."""
    tensors = {name: x.detach() for name, x in zip("qkv", inputs, strict=True)}
    o = passes.forward()
    tensors["o"] = o.detach()
    if call.problem.needs_grad:
        do = call.output_gradient(o)
        dq, dk, dv = passes.backward(o, do)
        tensors |= {"do": do, "dq": dq, "dk": dk, "dv": dv}
    return tensors


def worst_of(found: list[dict[str, float]]) -> dict[str, float]:
    """The largest error of each tensor over several comparisons."""
    return {name: max(errors[name] for errors in found) for name in found[0]}


def require_accurate(
    case: Case,
    bench: Bench,
    errors: dict[str, float],
    *,
    reference: str = "float64",
    prefix: str = "",
    times_tolerance: float = 1.0,
) -> None:
    """Note relative errors by tensor, beside those already noted, and hold them to a tolerance.

    Args:
        prefix: goes before the tensors' names in the note.
        times_tolerance: factor on the tolerance of one attention call in the case's format.

    Raises WrongResult if an error exceeds the tolerance, or is NaN.
    """
    number_format = case.precision.peak
    tolerance = times_tolerance * TOLERANCE[number_format]
    noted = (bench.outcome.check or {}).get("errors", {})
    noted = {**noted, **{f"{prefix}{name}": error for name, error in errors.items()}}
    bench.outcome.check = {"errors": noted, "tolerance": tolerance}
    for name, error in sorted(errors.items(), key=lambda item: -item[1]):
        if not error <= tolerance:
            raise WrongResult(
                f"relative error of {name} against {reference} is {error:.2g}; "
                f"{number_format} should stay under {tolerance:.2g}"
            )
