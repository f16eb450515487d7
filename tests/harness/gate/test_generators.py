"""Wrong generations through the task that times them end as wrong; right ones raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import wrong_decoders
from profiles import case_of
from roofs import shrink_roofs
from torch import Tensor

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from models.generation import Generator, Prompts

OUTPUT = 8

KEYS = (
    *("task=generate", "model=tiny", "model.num_layers=2", "model.d_model=64", "model.d_ff=96"),
    *("model.vocab_size=128", "batch_size=4", "seq_len=40", "task.lengths=ragged"),
    *(f"task.output_len={OUTPUT}", "task.warmup_steps=1", "task.measure_steps=2"),
)

PAGED = (*KEYS, "cache=paged", "cache.block_size=16")

SOUND_STEPS = OUTPUT - 1
"""Steps of the generation that is checked before the others."""

Step = Callable[[Generator, Tensor], Tensor]

Spoil = Callable[[Generator, Tensor, Step, int], Tensor]

SPOILED: dict[str, Spoil] = {}


def spoils(function: Spoil) -> Spoil:
    SPOILED[function.__name__] = function
    return function


@spoils
def logits_rolled(generator: Generator, tokens: Tensor, step: Step, number: int) -> Tensor:
    return step(generator, tokens).roll(1, -1)


@spoils
def logits_of_two_swapped(generator: Generator, tokens: Tensor, step: Step, number: int) -> Tensor:
    logits = step(generator, tokens)
    logits[:2] = logits[:2].flip(0).clone()
    return logits


@spoils
def tokens_of_two_swapped(generator: Generator, tokens: Tensor, step: Step, number: int) -> Tensor:
    return step(generator, tokens[[1, 0, 2, 3]])


@spoils
def nan_in_one_logit(generator: Generator, tokens: Tensor, step: Step, number: int) -> Tensor:
    logits = step(generator, tokens)
    if number == 4:
        logits[2, 7] = torch.nan
    return logits


@spoils
def wrong_token_in_the_middle(
    generator: Generator, tokens: Tensor, step: Step, number: int
) -> Tensor:
    """The model reads another token than it gave, once."""
    if number == 3:
        tokens = (tokens + 1) % 128
    return step(generator, tokens)


@spoils
def rotary_offset_in_late_steps(
    generator: Generator, tokens: Tensor, step: Step, number: int
) -> Tensor:
    rotary = generator._rotary
    if number % SOUND_STEPS != 5:
        return step(generator, tokens)
    kept = rotary.cos.clone(), rotary.sin.clone()
    for table in (rotary.cos, rotary.sin):
        table.copy_(table.roll(-1, 0))
    logits = step(generator, tokens)
    for table, before in zip((rotary.cos, rotary.sin), kept, strict=True):
        table.copy_(before)
    return logits


@spoils
def stale_row_of_a_late_step(
    generator: Generator, tokens: Tensor, step: Step, number: int
) -> Tensor:
    logits = step(generator, tokens)
    if number % SOUND_STEPS == 4:
        length = generator.cache.places.host_lengths[1]
        first, second = generator.cache.places.of_sequence(1, length)
        keys = generator.cache.keys[1]
        keys[first[-1], :, second[-1]] = keys[first[-2], :, second[-2]]
    return logits


@spoils
def only_after_the_check(generator: Generator, tokens: Tensor, step: Step, number: int) -> Tensor:
    logits = step(generator, tokens)
    return logits if number < SOUND_STEPS else logits.flip(-1)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shrink_roofs(monkeypatch)
    with wrong_decoders.registered():
        yield


def run(case: Case) -> Bench:
    torch.manual_seed(case.seed)
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    return bench


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize("fault", SPOILED)
def test_wrong_steps(fault: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true, numbers = Generator.step, iter(range(10**6))
    monkeypatch.setattr(
        Generator,
        "step",
        lambda self, tokens: SPOILED[fault](self, tokens, true, next(numbers)),
    )
    with pytest.raises(WrongResult):
        run(case_of(*PAGED, "attention=standard", f"precision={precision}"))


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_a_wrong_prefill(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of the first prompt are another's, in the cache of the first layer alone."""
    true = Generator.prefill

    def wrong(self: Generator, prompts: Prompts) -> Tensor:
        logits = true(self, prompts)
        first, second = self.cache.places.of_sequence(0, 5)
        self.cache.values[0][first, :, second] *= 1.2
        return logits

    monkeypatch.setattr(Generator, "prefill", wrong)
    with pytest.raises(WrongResult):
        run(case_of(*PAGED, "attention=standard", f"precision={precision}"))


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
@pytest.mark.parametrize(
    "fault",
    [
        *("first_page_ignored", "last_key_dropped", "two_sequences_swapped", "nan_in_one_head"),
        *("split_merge_without_lse", "stale_row", "stale_output", "rotary_offset_after_some_steps"),
    ],
)
def test_wrong_decoders(fault: str, precision: str) -> None:
    with pytest.raises(WrongResult):
        run(case_of(*PAGED, f"attention=wrong_decoder_{fault}", f"precision={precision}"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure", "fp16"])
@pytest.mark.parametrize(
    "keys",
    [
        (*PAGED, "attention=standard"),
        (*KEYS, "attention=sdpa", "task.prefill_attention=naive"),
        (*KEYS, "attention=mla_absorbed", "cache=latent", "model.kv_lora_rank=16"),
        (*KEYS, "attention=mla_materialised", "cache=latent", "model.kv_lora_rank=16"),
    ],
)
def test_no_alarm(keys: tuple[str, ...], precision: str) -> None:
    bench = run(case_of(*keys, f"precision={precision}"))
    assert bench.outcome.check is not None
    for limit in bench.outcome.check["limits"].values():
        assert limit["error"] <= limit["tolerance"]
