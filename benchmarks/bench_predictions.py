"""Predicted over measured peak memory of committed records, by task, and the cases that are off.

Some old records hold more than their case. :func:`also_held` says which and why; shares are
printed of all records, and of those that hold nothing else.

python -m benchmarks.bench_predictions [results/h200 ...]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from harness.analysis.predictions import OFF, ComparedPeak, compared_peak
from harness.cases.case import Case
from harness.paths import ROOT
from harness.predictions.training import gradient_sizes
from harness.store.record import Record, RecordStore
from kernels.flash.any_gpu import chunks
from kernels.flash.hopper import backward_memory, backward_schedule, schedule
from parallel.context import attention as schemes
from parallel.context.memory.sizes import CallSizes
from parallel.context.memory.transports import GatheredKeys

LEFT_BEHIND = "what earlier cases left in their process"

ATTENTION_LEFTOVERS = {"c13f4a3", "cf1b5fc+"}
"""Revisions at which attention was measured beside what earlier cases had left behind: the same
bytes more for every backend, 24, 73 and 171 MiB at 512, 1,024 and 2,048 tokens."""


def kind(case: dict) -> str:
    """The task, and of attention whether its sequences are split over ranks, and how."""
    name = str(case["task"]["name"])
    if name != "attention" or case["parallel"].get("cp", 1) == 1:
        return name
    if "ulysses" in case["attention"]["name"]:
        return "attention, heads exchanged"
    return "attention, gathered" if "llama3" in case["attention"]["name"] else "attention, rings"


def also_held(record: Record) -> str | None:
    """What a record's peak holds besides its case; None where nothing is known of that."""
    if any("baseline_allocated_bytes" in rank for rank in record.memory):
        return None
    case, revision = record.case, record.environment.get("git_revision")
    task = case["task"]
    match kind(case):
        case "attention" if revision in ATTENTION_LEFTOVERS:
            return LEFT_BEHIND
        case "decode" if revision == "428d25a":
            # 756 MiB more for either latent backend at 32 sequences of 16,384 tokens.
            return LEFT_BEHIND
        case "decode" if task["num_layers"] > 1 and case["cache"]["name"] != "contiguous":
            # 290 to 297 MiB more, whatever the batch: measured after cases of CUDA graphs.
            return LEFT_BEHIND
        case "decode" if revision == "e50545d" and _gathers_pages(case):
            # Until 12f9b5c what was gathered from a paged cache was copied once more, keys and then
            # values. With the keys of a layer added, predictions are within 3% of all 13 records.
            return "a second copy of a layer's keys"
        case "attention, gathered" if revision == "72c9d61" and _sums_contiguous_parts(case):
            # Until 3fca32f sums of contiguous parts were put in order, as those of chunks are. With
            # that copy predictions are within 3% of all 10 records.
            return "a second copy of the float32 dk of all ranks"
        case "precision_audit" if case["precision"]["name"] not in ("fp32", "tf32"):
            # Peaks were not reset: all have the first case's, to the byte.
            return "the peak of the case before"
        case "collectives" if case["precision"]["name"] == "fp32" and task["size_mib"] <= 0.1:
            # 64 MiB, of two workspaces, beside buffers of 10 and 100 KB.
            return LEFT_BEHIND
        case "train_step" if revision == "7567eaf" and _has_loose_gradients(record):
            # Until 6653610 gradients outside of buckets outlived being zeroed.
            return "the gradients of the step before"
    return None


SUMMED_IN_PLACE = "2026-11-26T22:40"
"""When records of flash_triton began to be of backward kernels that add up dk and dv in place."""


LEANER_SPLITS = "2026-11-27T02:25"
"""When records of split sequences began to be of rings in which the Hopper kernels sum dq over the
keys of all ranks, and of keys gathered over symmetric memory that come straight to their places,
and whose gradients leave without float32 sums of all of them."""


CUT_INTO_CHUNKS = "2026-11-28T04:48"
"""When records of the any-GPU kernels began to be of loops that are cut into chunks."""


TURNED_IN_PART = "2026-11-28T11:00"
"""When records of flash_triton began to be of backward kernels that turn few heads in part, which
have two sums of dq."""

FEWER_TURNED = "2026-11-28T12:00"
"""When heads with fewer than three tiles of keys to turn began to be turned as a whole again."""

IN_BANDS = "2026-11-28T14:20"
"""When records of flash_triton began to be of backward kernels whose turns are divided among
programs where these would all start at once, with a sum of dq for each part."""

IN_SECTIONS = "2026-11-30T04:40"
"""When records of flash_triton began to be of backward kernels that divide the turns of long heads,
with sums of dk and dv."""


def peak_of_its_kernel(record: Record) -> ComparedPeak | None:
    """As compared_peak, by the formulas of the code that a record was made with.

    Earlier backward kernels wrote dk and dv of every query head of a group in float32, of as many
    key heads at a time as keep these within 1 GiB, where later ones hold those of the key heads.
    """
    with ExitStack() as stack:
        if record.started_at < SUMMED_IN_PLACE:
            stack.enter_context(
                patch.object(backward_memory, "backward_workspace", _workspace_of_parts)
            )
        if record.started_at < CUT_INTO_CHUNKS:
            stack.enter_context(patch.object(chunks, "forward_workspace", _nothing))
            stack.enter_context(patch.object(chunks, "backward_workspace", _nothing))
        if record.started_at < TURNED_IN_PART:
            stack.enter_context(patch.object(backward_memory, "_bytes_of_further_sums", _no_bytes))
        elif record.started_at < FEWER_TURNED:
            stack.enter_context(patch.object(backward_schedule, "FEWEST_KEYS_TURNED", 1))
        if record.started_at < IN_BANDS:
            stack.enter_context(patch.object(backward_schedule, "bands_of", _none))
        if record.started_at < IN_SECTIONS:
            stack.enter_context(patch.object(backward_schedule, "sections_of", _none))
        if record.started_at < LEANER_SPLITS:
            stack.enter_context(patch.object(backward_memory, "query_gradient_memory", _none))
            stack.enter_context(patch.object(backward_schedule, "fewest_parts", _parts_by_mask))
            stack.enter_context(patch.object(schemes, "SymmetricGatherMemory", _SortedGatherMemory))
        return compared_peak(record)


def _parts_by_mask(
    group_size: int, num_queries: int, num_keys: int, causal: bool, window: int | None
) -> int:
    """As backward_schedule.fewest_parts, which did not look at how many queries there are."""
    return 1 if not causal or backward_schedule.is_narrow(window, num_keys) else group_size


def _nothing(*_: object) -> float:
    """As chunks.forward_workspace and its like, of kernels whose loops were whole."""
    return 0.0


def _no_bytes(**_: object) -> tuple[int, int]:
    """As backward_memory._bytes_of_further_sums, of kernels with one sum of dq."""
    return 0, 0


def _none(*_: object, **__: object) -> None:
    """As backward_memory.query_gradient_memory, of kernels that could not go on with their sums.

    Or as backward_schedule.bands_of and sections_of, of those that had none.
    """


class _SortedGatherMemory(GatheredKeys):
    """As SymmetricGatherMemory, of keys that came by rank and were put in order afterwards."""

    def begin(self, *, gradients: bool) -> None:
        published = self._sizes.kv + (self._everything if gradients else 0)
        copied = self._sizes.kv if self._copies_heads else 0.0
        self._ledger.hold(published=published, own_heads=copied, coming_keys=self._everything)

    def arrive(self, visit: int) -> None:
        coming = self._coming(visit)
        self._ledger.hold(coming_keys=self._everything + coming)
        before = self._everything if visit else 0.0
        self._ledger.hold(arranged_keys=before + self._arranged)
        self._ledger.hold(arranged_keys=self._everything, coming_keys=coming)

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        narrow = self._everything / 2 if self._sizes.wide > 1 else self._wide_total
        for _ in ("dk", "dv"):
            self._sum(calls)
            self._ledger.add(narrow_dk_dv=narrow)
            self._ledger.free("summed")
        self._ledger.add(own_dk_dv=2 * self._wide_total / self._sizes.layout.num_ranks)
        self._ledger.free("narrow_dk_dv")


def _workspace_of_parts(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int | None = None,
    causal: bool,
    window: int | None = None,
    hides_more: bool = False,
    packed: bool = False,
) -> int:
    """As backward_memory.backward_workspace, of the kernels before; masks made no difference."""
    row = 4 * schedule.columns(head_dim).stored + 8
    if num_heads == num_kv_heads or not causal:
        return batch_size * num_heads * q_len * row
    parts = 2 * 4 * batch_size * kv_len * head_dim * (num_heads // num_kv_heads)
    key_heads = min(num_kv_heads, max(1, (1 << 30) // parts))
    return key_heads * (batch_size * num_heads // num_kv_heads * q_len * row + parts)


def _sums_contiguous_parts(case: dict[str, Any]) -> bool:
    """Whether the peak of ``llama3`` is where dk and dv of several kernel calls are summed."""
    attention = case["attention"]
    several = attention["kernel"] == "sdpa_cudnn" or case["seq_len"] > 65_536
    return attention["name"] == "llama3" and case["parallel"]["cp"] == 4 and several


def _gathers_pages(case: dict[str, Any]) -> bool:
    return case["cache"]["name"] == "paged" and case["attention"]["name"] in ("sdpa", "standard")


def _has_loose_gradients(record: Record) -> bool:
    case = Case.from_dict(record.case)
    return case.parallel.loose_gradients(gradient_sizes(case)) > 0


def within(ratios: list[float], limit: float) -> float:
    """The share of ratios that are within a limit of 1."""
    return sum(abs(ratio - 1) <= limit for ratio in ratios) / len(ratios)


def main(folders: list[Path]) -> None:
    found: dict[str, list[tuple[float, Record]]] = defaultdict(list)
    unpredicted: dict[str, int] = defaultdict(int)
    for folder in folders:
        records, problems = RecordStore(folder).load()
        for problem in problems:
            print(problem, file=sys.stderr)
        for record in records.values():
            peak = peak_of_its_kernel(record)
            if peak is not None and peak.ratio is not None:
                found[kind(record.case)].append((peak.ratio, record))
            elif peak is not None:
                unpredicted[kind(record.case)] += 1
    print(f"{'':24}{'cases':>6}{'not predicted':>15}{'least':>8}{'median':>8}{'most':>8}", end="")
    print(f"{'within 10%':>12}{'within 3%':>11}{'case alone':>12}{'within 10%':>12}")
    everything = [item for rows in found.values() for item in rows]
    for name, rows in [*sorted(found.items()), ("all", everything)]:
        missing = sum(unpredicted.values()) if name == "all" else unpredicted[name]
        print_row(name, rows, missing)
    print(f"\nOff by more than {OFF:.0%}, predicted over measured:")
    for name, rows in sorted(found.items()):
        for ratio, record in sorted(rows, key=lambda item: item[0]):
            if abs(ratio - 1) > OFF:
                reason = also_held(record)
                why = f" (with {reason})" if reason else ""
                print(f"{ratio:8.3f}  {name}: {record.case_id}{why}")


def print_row(name: str, rows: list[tuple[float, Record]], missing: int) -> None:
    ratios = [ratio for ratio, _ in rows]
    alone = [ratio for ratio, record in rows if also_held(record) is None]
    print(f"{name:24}{len(rows):6}{missing:15}{min(ratios):8.3f}", end="")
    print(f"{median(ratios):8.3f}{max(ratios):8.3f}", end="")
    print(f"{within(ratios, 0.1):12.1%}{within(ratios, 0.03):11.1%}", end="")
    print(f"{len(alone):12}{within(alone, 0.1) if alone else float('nan'):12.1%}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [ROOT / "results" / "h200"])
