"""Wrong kernels through the task that times them: each ends as wrong, whatever it gets right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import wrong_kernels
from ranks import on_ranks

from harness.bench.bench import Bench
from harness.bench.outcome import PeerFailed, WrongResult
from harness.cases.case import Case
from harness.measure.check import check_call
from harness.measure.split_call import SplitCall
from harness.request.compose import compose_request
from parallel.context.attention import SequenceParallelAttention

SHAPE = (
    *("task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=32"),
    *("batch_size=3", "seq_len=160", "task.warmup_steps=1", "task.measure_steps=4"),
)

DENSE = [
    name for name in wrong_kernels.FAULTS if "packed" not in name and name != "top_left_alignment"
]

WITH = {
    "top_left_alignment": ("task.kv_len=200",),
    "packed_boundary": ("task.packing=ragged",),
    "packed_in_the_middle": ("task.packing=ragged",),
    "window_too_wide_by_one": ("attention.window=40",),
    "window_too_narrow_by_one": ("attention.window=40",),
    "window_forgotten": ("attention.window=150",),
    "window_on_one_side": ("attention.window=20", "task.causal=false"),
    "prefix_too_short_by_one": ("attention.prefix_len=50",),
    "softcap_forgotten_in_backward": ("attention.softcap=50",),
    "softcap_forgotten": ("attention.softcap=50",),
    "slope_of_the_cap_forgotten": ("attention.softcap=50",),
    **dict.fromkeys((*wrong_kernels.OF_SINKS, "sinks_missing_from_lse"), ("attention.sinks=true",)),
}

MASKS = (
    ("attention.window=40",),
    ("attention.window=1", "task.packing=ragged", "attention.sinks=true"),
    ("attention.window=20", "task.causal=false", "task.kv_len=200"),
    ("attention.prefix_len=50", "attention.softcap=3"),
    ("attention.softcap=50", "attention.sinks=true"),
    ("attention.softcap=120",),
)

BELOW_BF16 = {
    "inputs_rounded_to_float16": "finer than bfloat16",
    "accumulated_in_float16": "finer than bfloat16",
}
"""Faults that are smaller than the roundings of every bfloat16 result."""


@pytest.fixture(autouse=True, scope="module")
def planted() -> Iterator[None]:
    with wrong_kernels.registered():
        yield


def case_of(fault: str, *arguments: str) -> Case:
    words = [
        "task=attention",
        *SHAPE,
        f"attention=planted_{fault}",
        *WITH.get(fault, ()),
        *arguments,
        "device=cpu",
    ]
    (case,) = compose_request(words).cases
    return case


def run(case: Case) -> Bench:
    wrong_kernels.forget_calls()
    torch.manual_seed(case.seed)
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    return bench


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("fault", wrong_kernels.FAULTS)
def test_is_wrong(fault: str, precision: str) -> None:
    if precision == "bf16_pure" and fault in BELOW_BF16:
        pytest.skip(BELOW_BF16[fault])
    with pytest.raises(WrongResult) as caught:
        run(case_of(fault, f"precision={precision}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize(
    "arguments", [(), ("task.kv_len=200",), ("task.packing=ragged",), *MASKS], ids=" ".join
)
def test_without_a_fault_is_right(arguments: tuple[str, ...], precision: str) -> None:
    bench = run(case_of("none", f"precision={precision}", *arguments))
    assert bench.outcome.check is not None
    for limit in bench.outcome.check["limits"].values():
        assert limit["error"] <= limit["tolerance"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_rounded_scores_are_right(precision: str) -> None:
    """Under autocast scores have the format's few digits, also those that overflow exponentials."""
    words = ["task=attention", *SHAPE, "attention=flash_torch", f"precision={precision}"]
    (case,) = compose_request([*words, "device=cpu"]).cases
    assert run(case).outcome.check is not None


def check_ring(group: dist.ProcessGroup, kernel: str) -> str:
    """What the gate says of a ring with a planted kernel."""
    wrong_kernels.forget_calls()
    words = ["attention=ring", f"attention.kernel={kernel}", "parallel.cp=2"]
    with wrong_kernels.registered():
        return checked_ring(group, ["task=attention", *SHAPE, *words, "device=cpu"])


def checked_ring(group: dist.ProcessGroup, words: list[str]) -> str:
    (case,) = compose_request(words).cases
    device = torch.device("cpu")
    bench = Bench(device=device, rank=group.rank(), world_size=group.size(), vote_group=group)
    scheme = case.attention.role(SequenceParallelAttention)
    with scheme.bind(group, device) as attention:
        try:
            check_call(case, bench, SplitCall(case, device, attention))
        except WrongResult as error:
            with contextlib.suppress(PeerFailed):
                bench.vote("wrong")
            return str(error)
        except PeerFailed:
            return "right here"
    return "right"


@pytest.mark.parametrize(
    ("fault", "said"), [("none", "right"), ("lse_alone", "lse"), ("dk_of_early_keys", "dk")]
)
def test_inside_a_ring(fault: str, said: str) -> None:
    assert any(said in found for found in on_ranks(2, check_ring, f"planted_{fault}"))
