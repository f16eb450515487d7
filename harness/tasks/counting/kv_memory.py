"""``task=kv_memory``: memory of a model's cache, and the batch and length that fill a device.

Counted by formula, and compared with what the caches allocate on PyTorch's meta device, which
gives tensors a size and no memory. No other device is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note
from harness.cases.requirements import require_at_least, require_choice, require_one_process
from harness.cases.task import Task, Work, task
from kernels.caches import CACHES, CacheChoice, CacheShape
from kernels.caches.sizes import ATTENTION_TYPES, MODEL_SHAPES

GIB = 2**30


@task("kv_memory")
@dataclass(kw_only=True, slots=True)
class KvMemory(Task):
    """The cache of batch_size sequences of seq_len tokens, in the precision's compute dtype."""

    shape: str = "llama3_8b"
    """A model's layers and heads: llama3_8b, llama3_70b, llama3_405b or deepseek_v3."""
    attention_type: str = "gqa"
    """mha, gqa (as the model has it), mqa, or mla: latents of rank kv_lora_rank."""
    kv_lora_rank: int = 512
    """Rank of the latents (r), for mla."""
    rope_head_dim: int = 64
    """Width of their rotary part, for mla."""
    block_size: int | None = None
    """Tokens in a block of a paged cache; None lays tokens one after another."""
    device_gib: float = 140.0
    """Memory that the cache may fill, in GiB: all of an H200's 143,771 MiB by nvidia-smi."""

    gives_shape: ClassVar[bool] = True
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="kv_memory", read=note("kv_memory")),
    )
    attends: ClassVar[bool] = False
    measures: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_choice("task.shape", self.shape, list(MODEL_SHAPES))
        require_choice("task.attention_type", self.attention_type, ATTENTION_TYPES)
        for key in ("kv_lora_rank", "rope_head_dim", "block_size"):
            value = getattr(self, key)
            if value is not None:
                require_at_least(f"task.{key}", value, 1)
        if not 0 < self.device_gib < float("inf"):
            raise ValueError(f"task.device_gib={self.device_gib:g}: must be positive and finite")
        require_one_process(case)

    def words(self) -> list[str]:
        return [self.shape, self.attention_type]

    def num_passes(self) -> int:
        return 0

    def cache_shape(self, case: Case) -> CacheShape:
        model = replace(
            MODEL_SHAPES[self.shape],
            kv_lora_rank=self.kv_lora_rank,
            rope_head_dim=self.rope_head_dim,
        )
        return model.cache_shape(
            self.attention_type,
            batch_size=case.batch_size,
            max_len=case.seq_len,
            dtype=case.precision.compute,
        )

    def choice(self) -> CacheChoice:
        """The cache that is counted."""
        latent = self.attention_type == "mla"
        if latent:
            return CACHES["latent"].target(name="latent", block_size=self.block_size)  # type: ignore[call-arg]
        if self.block_size is None:
            return CACHES["contiguous"].target(name="contiguous")
        return CACHES["paged"].target(name="paged", block_size=self.block_size)  # type: ignore[call-arg]

    def work(self, case: Case) -> dict[str, Work]:
        """Work of one new token of each sequence over the whole cache, in all layers."""
        shape, model = self.cache_shape(case), MODEL_SHAPES[self.shape]
        # A score and a weighted value; in mla over a latent and over its first r numbers.
        width = 2 * model.head_dim
        if shape.kv_lora_rank:
            width = 2 * shape.kv_lora_rank + shape.rope_head_dim
        pairs = case.batch_size * case.seq_len * model.num_heads * shape.num_layers
        moved = float(self.choice().storage_bytes(shape))
        return {"step": Work(flops=2.0 * pairs * width, bytes=moved)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """The counts, which are all that is held."""
        return {"counts": 8.0 * len(self.results(case))}

    def results(self, case: Case) -> dict[str, Any]:
        """Bytes of the cache, and the batch and length that fill the device."""
        shape, choice = self.cache_shape(case), self.choice()
        total = choice.storage_bytes(shape)
        budget = self.device_gib * GIB
        return {
            "bytes_per_token": shape.bytes_per_token,
            "total_bytes": total,
            "index_bytes": choice.index_bytes(shape),
            "fits": total <= budget,
            # Whole sequences of this length, and tokens of a sequence at this batch.
            "largest_batch": int(budget // (total / shape.batch_size)),
            "longest_len": int(budget // (shape.batch_size * shape.bytes_per_token)),
        }

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("counting")
        results = self.results(case)
        allocated = self.choice().allocate(self.cache_shape(case), "meta").storage_bytes
        if allocated != results["total_bytes"]:
            raise WrongResult(
                f"the formula gives {results['total_bytes']:,} bytes, and the cache allocates "
                f"{allocated:,}"
            )
        bench.outcome.notes["kv_memory"] = {**results, "allocated_bytes": allocated}
