"""Wrong decoders through the task that times them end as wrong; right ones raise no alarm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import wrong_decoders
from profiles import case_of
from roofs import shrink_roofs

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case

KEYS = (
    *("task=decode", "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=32"),
    *("batch_size=4", "seq_len=70", "task.lengths=ragged", "task.num_layers=2"),
    *("task.warmup_steps=1", "task.measure_steps=4", "cache=paged", "cache.block_size=16"),
)

LATENT = (
    *("task=decode", "cache=latent", "task.num_heads=4", "task.head_dim=32", "batch_size=3"),
    *("task.kv_lora_rank=64", "task.rope_head_dim=16", "seq_len=150"),
    *("task.warmup_steps=1", "task.measure_steps=4"),
)


@pytest.fixture(autouse=True, scope="module")
def planted() -> Iterator[None]:
    with wrong_decoders.registered():
        yield


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_roofs(monkeypatch)


def run(case: Case) -> Bench:
    torch.manual_seed(case.seed)
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    return bench


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("fault", wrong_decoders.FAULTS)
def test_is_wrong(fault: str, precision: str) -> None:
    with pytest.raises(WrongResult) as caught:
        run(case_of(*KEYS, f"attention=wrong_decoder_{fault}", f"precision={precision}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure", "fp16"])
@pytest.mark.parametrize(
    "keys",
    [
        (*KEYS, "attention=wrong_decoder_none"),
        (*KEYS, "attention=sdpa", "task.new_tokens=3", "task.rotary=halves"),
        (*LATENT, "attention=mla_absorbed"),
        (*LATENT, "attention=mla_materialised", "task.new_tokens=2"),
    ],
)
def test_no_alarm(keys: tuple[str, ...], precision: str) -> None:
    bench = run(case_of(*keys, f"precision={precision}"))
    assert bench.outcome.check is not None
    for limit in bench.outcome.check["limits"].values():
        assert limit["error"] <= limit["tolerance"]
