"""Synthetic records for tests and benchmarks: one call, one record, with the usual defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.store import sweep_plan
from harness.store.record import Phase, Record, Round
from harness.store.sweep_plan import SweepPlan
from harness.tasks.counting.communication_accounting import CommunicationAccounting

MODELS = {
    "tiny": (128, 512, 2, 4),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
}

ATTENTION_OPTIONS = {
    f"sdpa_{kernel}": {"kernel": kernel} for kernel in ("flash", "efficient", "cudnn", "math")
}

PRECISIONS = {
    "fp32": {"parameters": "float32", "autocast": None, "tf32": False},
    "tf32": {"parameters": "float32", "autocast": None, "tf32": True},
    "bf16": {"parameters": "float32", "autocast": "bfloat16", "tf32": False},
    "fp16": {"parameters": "float32", "autocast": "float16", "tf32": False},
}

ENVIRONMENT = {
    "python": "3.12.3",
    "torch": "2.13.0",
    "triton": "3.7.0",
    "cuda": "13.0",
    "driver": "580.1",
    "platform": "Linux-6.8-x86_64",
    "cpu_model": "Example CPU",
    "num_cpus": 16,
    "num_threads": 8,
    "device_name": "NVIDIA H200",
    "device_memory_bytes": 150 * 2**30,
    "git_revision": "0123abc",
    "attnbench": "0.1.0",
}

Samples = dict[str, Sequence[Sequence[float]]]


def make_record(
    *,
    samples_ms: Samples | None = None,
    task: str = "train_step",
    mode: str = "train_step",
    model: str = "small",
    attention: str = "naive",
    precision: str = "bf16",
    compile_scope: str = "none",
    seq_len: int = 512,
    batch_size: int = 4,
    head_dim: int = 64,
    warmup_steps: int = 5,
    measure_steps: int = 10,
    seed: int = 0,
    dp: int = 1,
    device: str = "cuda",
    status: str = "ok",
    message: str = "",
    flops: float = 1e11,
    environment: dict[str, Any] | None = None,
    **fields: Any,
) -> Record:
    """A record of one case; ``samples_ms`` maps each phase to a list per rank."""
    trains = task == "train_step"
    options: dict[str, Any] = {"warmup_steps": warmup_steps, "measure_steps": measure_steps}
    if not trains:
        options |= {"num_heads": 16, "num_kv_heads": None, "head_dim": head_dim, "causal": True}
    d_model, d_ff, num_layers, num_heads = MODELS[model]
    case = {
        "task": {"name": task, "mode": mode, **options},
        "model": {
            "name": model,
            "vocab_size": 10000,
            "d_model": d_model,
            "d_ff": d_ff,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": None,
            "rope_theta": 10000.0,
            "norm_eps": 1e-5,
        }
        if trains
        else None,
        "attention": {"name": attention, **ATTENTION_OPTIONS.get(attention, {})},
        "precision": {"name": precision, **PRECISIONS[precision], "grad_scaler": False},
        "compile": {"scope": compile_scope, "mode": "default"} if trains else None,
        "parallel": {"name": "none" if dp == 1 else "ddp_torch", "dp": dp},
        "seq_len": seq_len,
        "batch_size": batch_size,
        "seed": seed,
        "device": device,
    }
    phases = samples_ms or {}
    names = list(phases) or (
        ["forward", "backward", "optimizer", "step"]
        if trains
        else ["forward", "backward", "forward_backward"]
    )
    digest = hashlib.sha256(
        json.dumps(case, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:10]
    tokens = batch_size * seq_len
    values: dict[str, Any] = {
        "work": {name: {"flops": flops, "bytes": None, "tokens": tokens} for name in names},
        "memory": [
            {"source": "cuda", "peak_allocated_bytes": 2 * 2**30, "peak_reserved_bytes": 3 * 2**30}
        ]
        * dp,
        "environment": dict(ENVIRONMENT) if environment is None else environment,
        "started_at": "2026-01-02T03:04:05+00:00",
        "wall_s": 1.5,
    }
    return Record(
        case_id=f"{task}-{model}-{attention}-{precision}-s{seq_len}-{digest}",
        case=case,
        status=status,
        error={"message": message} if message else None,
        phases={
            name: Phase(
                clock="host" if name == "step" else "cuda_event",
                samples_ms=[list(rank) for rank in ranks],
            )
            for name, ranks in phases.items()
        },
        **{**values, **fields},
    )


def in_rounds(record: Record, number: int = 5) -> Record:
    """The record with its samples measured again in each of so many rounds and processes."""
    num_samples = 0
    for phase in record.phases.values():
        num_samples = len(phase.samples_ms[0])
        phase.samples_ms = [list(rank) * number for rank in phase.samples_ms]
    began_at = [f"2026-01-02T03:04:{10 + index}+00:00" for index in range(number)]
    record.rounds = [num_samples] * number
    record.round_states = [
        Round(started_at=text, process=index) for index, text in enumerate(began_at)
    ]
    record.notes["rounds_started_at"] = began_at
    return record


SPLIT_ATTENTION = {
    "ring": {"kernel": "naive", "transport": "send_recv"},
    "zigzag": {"kernel": "naive", "transport": "send_recv"},
    "zigzag_llama3": {
        "kernel": "naive",
        "transport": "all_gather",
        "kv_heads_at_once": 0,
        "forward_mode": "two_kernels",
        "backward_mode": "two_kernels",
    },
}


def make_split_record(attention: str, *, ms: float, status: str = "ok", **fields: Any) -> Record:
    """Attention on a sequence split over two ranks, with a timeline; all of it took ``ms``."""
    spans = [[phase, kind, 0, 0.0, ms] for phase in PASSES for kind in ("compute", "wait")]
    rank = {"spans": spans, "sent_bytes": dict.fromkeys(PASSES, 2**20)}
    record = make_record(
        task="attention",
        mode="forward_backward",
        attention=attention,
        samples_ms={
            name: [[share * ms] * 2] * 2
            for name, share in (("forward", 0.25), ("backward", 0.75), ("forward_backward", 1))
        },
        status=status,
        notes={"timeline": [[rank, rank]] * 3, "kernel": "naive"},
        **fields,
    )
    record.case["attention"] = {"name": attention, **SPLIT_ATTENTION[attention]}
    record.case["parallel"] = {"name": "none", "dp": 1, "cp": 2}
    record.case_id += "-cp2"
    record.memory *= 2
    return record


PASSES = ("forward", "backward")


def make_balance_record(layout: str) -> Record:
    """Counts of task=flop_balance for two ranks."""
    counts = {name: [[1e12, 2e12], [2e12, 1e12]] for name in ("chunk", "pair", "tile")}
    record = make_record(task="attention", mode="forward", notes={"balance": counts})
    shape = {"num_heads": 32, "head_dim": 128, "layout": layout, "ranks": 2}
    record.case["task"] = {"name": "flop_balance", **shape}
    record.case_id = f"flop_balance-{layout}"
    return record


def make_collective_record(
    collective: str, *, ranks: int, size_mib: float, ms: float, wrong: int = 0, **fields: Any
) -> Record:
    """A collective operation that took ``ms`` on its slowest rank."""
    record = make_record(
        task="attention",
        mode="forward",
        attention="sdpa",
        samples_ms={"collective": [[ms / 2] * 3, *([[ms] * 3] * (ranks - 1))]},
        status="wrong" if wrong else "ok",
        notes={"size_bytes": int(size_mib * 2**20), "wrong_elements": wrong},
        **fields,
    )
    shape = {"collective": collective, "ranks": ranks, "size_mib": size_mib}
    steps = {"warmup_steps": 5, "measure_steps": 20}
    record.case["task"] = {"name": "collectives", **shape, **steps}
    record.case_id = f"collectives-{collective}-{ranks}-{size_mib}"
    record.memory *= ranks
    return record


def make_strategy_record(strategy: str, *, ms: float, status: str = "ok", **options: Any) -> Record:
    """A training step of two ranks that took ``ms``, half of it in sight of communication."""
    spans = [["forward", "compute", 0, 0.0, ms], ["backward", "communication", 0, ms / 2, 1.5 * ms]]
    traffic = [{"collective": "all_reduce", "ranks": 2, "calls": 1, "bytes": 2**20}]
    record = make_record(
        attention="sdpa",
        samples_ms=dict.fromkeys(("communication", "step"), [[ms, ms]] * 2),
        dp=2,
        status=status,
        notes={"timeline": [[{"spans": spans}] * 2], "traffic": [traffic] * 2},
    )
    record.case["parallel"] = {"name": strategy, "dp": 2, "cp": 1, **options}
    record.case_id += f"-{strategy}{options.get('bucket_size_mb', '')}".replace(".", "_")
    held = ("parameters", "gradients", "optimizer_state", "activations", "after_initialisation")
    record.memory = [
        {**rank, **{f"{name}_bytes": 2**30 for name in held}} for rank in record.memory
    ]
    return record


def make_accounting_record() -> Record:
    """The counts of task=communication_accounting at the text's sizes."""
    task = CommunicationAccounting(name="communication_accounting")
    record = make_record(task="attention", mode="forward", attention="sdpa")
    record.notes["communication_accounting"] = task.results()
    record.case["task"] = asdict(task)
    record.case_id = "communication_accounting-example"
    return record


def strategy_examples() -> list[Record]:
    """Training on two ranks, all-reduces of two sizes, and what counts without measuring."""
    return [
        make_strategy_record("ddp_torch", ms=5.0, bucket_size_mb=25),
        make_strategy_record("ddp_bucketed", ms=4.0, bucket_size_mb=1.0),
        make_strategy_record("ddp_bucketed", ms=4.5, bucket_size_mb=10.0),
        make_collective_record("all_reduce", ranks=2, size_mib=1, ms=5.0),
        make_collective_record("all_reduce", ranks=2, size_mib=10, ms=9.5),
        make_accounting_record(),
    ]


def split_examples() -> list[Record]:
    """Records of every kind that tables about several ranks are made of."""
    schemes = [
        make_split_record(name, ms=4.0 + index) for index, name in enumerate(SPLIT_ATTENTION)
    ]
    exchanges = [
        make_collective_record("all_reduce", ranks=2, size_mib=size, ms=size) for size in (1, 10)
    ]
    balances = [make_balance_record(layout) for layout in ("contiguous", "zigzag")]
    trained = [make_strategy_record("ddp_torch", ms=9.0, bucket_size_mb=25)]
    for size, ms in ((1.0, 8.0), (10.0, 7.0)):
        trained.append(make_strategy_record("ddp_bucketed", ms=ms, bucket_size_mb=size))
    return [*schemes, *balances, *exchanges, *trained, make_accounting_record()]


def audit_examples() -> list[Record]:
    """Records of every kind that tables about precision are made of."""
    counts = {"elements": 4096, "overflowed": 1, "underflowed": 1234, "subnormal": 20}
    norms = {"error_norm": 1e-3, "reference_norm": 1.0}
    tensors = [
        {"kind": kind, "name": f"blocks.{block}.attention.q_proj", "dtype": "float16"}
        | counts
        | norms
        for kind in ("output", "output_gradient", "gradient")
        for block in (0, 1)
    ]
    loss = {"loss": 7.03, "loss_float64": 7.031, "loss_scale": 65536.0, "skipped_steps": 1}
    audit = make_record(precision="fp16", notes={"audit": {**loss, "tensors": tensors}})
    audit.case["task"] = {"name": "precision_audit"}
    addition = make_record(
        task="attention",
        mode="forward",
        precision="fp32",
        notes={"accumulation": {"sum": 9.953125, "stored_term": 0.0100021}},
    )
    options = {"accumulator": "float16", "term_dtype": "float16", "cast_term": False}
    addition.case["task"] = {"name": "accumulation", "term": 0.01, "num_terms": 1000, **options}
    for record in (audit, addition):
        record.case_id = f"{record.case['task']['name']}-example"
    return [audit, addition]


def profile_examples(*, ms: float = 5.0, **fields: Any) -> list[Record]:
    """Records of every kind that tables about profiles are made of; all of them took ``ms``."""
    rows = [
        {
            "phase": phase,
            "range": f"block/attention/{innermost}",
            "kernel": f"void at::native::{innermost}_kernel<4, at::native::SomeFunctor<float> >",
            "category": category,
            "recomputed": phase == "backward",
            "calls": 24.0,
            "total_ms": ms,
            "flops": 1e9 * ms,
            "bytes": 1e8 * ms,
        }
        for phase in PASSES
        for innermost, category in (("scores", "matmul"), ("softmax", "softmax"))
    ]
    phase = {"kernel_ms": ms, "busy_ms": ms, "wall_ms": ms, "launches": 48.0}
    kernels = {"tool": "torch", "unit": "kernel", "steps": 2, "ranks": 1, "rows": rows}
    kernels["phases"] = dict.fromkeys((*PASSES, "step"), phase)
    size = int(ms * 2**20)
    memory = {
        "source": "cuda",
        "peak_bytes": size,
        "saved_bytes": size,
        "residual_stream_bytes": size,
        "tensor_bytes": {"parameters": size},
        "at_peak": {"parameters": size},
        "predicted": {"parameters": 2**20, "saved": 2**21},
        "largest": [{"bytes": size, "category": "parameters", "where": ["head_under_score"]}],
        "phases": [["forward", 0.0, ms]],
        "times_ms": [0.0, ms],
        "series": {"parameters": [size, size]},
        "peak_ms": ms,
    }
    notes: dict[str, dict[str, Any]] = {
        "torch": {"kernel_profile": kernels},
        "memory": {"memory_profile": memory},
    }
    status = fields.get("status", "ok")
    found = []
    for profile, checkpoint in (("torch", None), ("memory", None), ("memory", "block")):
        phases = {"forward": [[ms, ms]], "backward": [[ms, ms]], "step": [[2 * ms, 2 * ms]]}
        record = make_record(samples_ms=phases, notes=notes[profile], **fields)
        record.case["profile"] = {"name": profile}
        record.case["checkpoint"] = {"scope": checkpoint or "none", "every": 2}
        record.case_id = f"profile-{profile}-{checkpoint}-{status}"
        found.append(record)
    roof = make_record(
        task="attention", mode="forward", samples_ms={"copy": [[ms]], "matmul": [[ms]]}, **fields
    )
    roof.case["task"] = {"name": "roofline", "copy_mib": 1024, "matmul_size": 8192}
    roof.case_id = f"roofline-{status}"
    roof.work["copy"]["bytes"] = 1e9
    return [*found, roof]


def make_decode_record(
    attention: str,
    *,
    us: float,
    cache: str = "contiguous",
    cuda_graph: bool = False,
    gb: float = 1.0,
    status: str = "ok",
    **fields: Any,
) -> Record:
    """Steps of 32 query and 8 key heads of 128 that took ``us`` and have to move ``gb`` GB."""
    kernels = {"unit": "kernel", "kernels": 6.0, "launches": 1.0 if cuda_graph else 6.0}
    record = make_record(
        task="attention",
        mode="forward",
        attention=attention,
        samples_ms={"decode": [[us / 1e3] * 2]} if status != "oom" else None,
        status=status,
        **{"notes": {"decode": {"copy_bandwidth_gb_s": 4000.0, **kernels}}, **fields},
    )
    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    if cache == "latent":
        shape |= {"num_kv_heads": None, "kv_lora_rank": 512, "rope_head_dim": 64}
    record.case["task"] = {
        "name": "decode",
        "new_tokens": 1,
        "lengths": "equal",
        "rotary": "interleaved",
        "num_layers": 1,
        "prompts": 0,
        "prompt_len": 512,
        "cuda_graph": cuda_graph,
        "warmup_steps": 10,
        "measure_steps": 100,
        **shape,
    }
    record.case["cache"] = {"name": cache, **({} if cache == "contiguous" else {"block_size": 64})}
    sizes = f"b{record.case['batch_size']}-s{record.case['seq_len']}"
    record.case_id = f"decode-{attention}-{cache}-{sizes}-{cuda_graph}"
    record.work = {
        "decode": {"flops": 989.4e6, "bytes": gb * 1e9, "tokens": record.case["batch_size"]}
    }
    return record


def _decode_profile(parts: dict[str, float]) -> dict[str, Any]:
    """A profile of two steps whose parts take so many microseconds in a kernel each."""
    empty = {"category": "other", "recomputed": False, "flops": None, "bytes": None}
    rows = [
        {"phase": "decode", "range": part, "kernel": f"{part}_kernel", "calls": 2.0, **empty}
        | {"total_ms": 2 * us / 1e3}
        for part, us in parts.items()
    ]
    phase = {"kernel_ms": 1.0, "busy_ms": 1.0, "wall_ms": 1.0, "launches": float(len(parts))}
    phases = {"decode": phase, "step": phase}
    return {
        "tool": "torch",
        "unit": "kernel",
        "steps": 2,
        "ranks": 1,
        "rows": rows,
        "phases": phases,
    }


STANDARD_PARTS = {"rotary_q": 10.0, "rotary_k": 5.0, "append": 15.0, "attention/scores": 170.0}


def decode_examples() -> list[Record]:
    """Records of every kind that tables about caches are made of."""
    steps = [
        make_decode_record(name, us=us * seq_len / 1024, seq_len=seq_len, batch_size=batch_size)
        for name, us in (("standard", 1000.0), ("flash_decode", 300.0))
        for seq_len in (1024, 2048)
        for batch_size in (1, 4)
    ]
    replayed = [
        make_decode_record(name, us=us, seq_len=1024, batch_size=1, cuda_graph=True)
        for name, us in (("standard", 500.0), ("flash_decode", 280.0))
    ]
    latents = [
        make_decode_record("mla_absorbed", us=400.0, cache="latent"),
        make_decode_record("mla_materialised", us=0.0, cache="latent", status="oom"),
    ]
    for record in (*steps, *replayed, *latents):
        parts = {"fused": 200.0} if "flash" in record.case_id else STANDARD_PARTS
        if record.status == "ok":
            record.notes["kernel_profile"] = _decode_profile(parts)
    prefills = []
    for attention, packing, ms in (("sdpa", "padded", 4.0), ("flash_triton", "ragged", 2.0)):
        record = make_record(
            task="attention",
            mode="forward",
            attention=attention,
            samples_ms={"attention": [[ms / 2] * 3], "prefill": [[ms] * 3]},
            flops=989.4e9,
        )
        shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rotary": "halves"}
        record.case["task"] = {"name": "prefill", "packing": packing, **shape}
        record.case["cache"] = {"name": "contiguous"}
        record.case_id = f"prefill-{attention}-{packing}"
        prefills.append(record)
    return [*steps, *replayed, *latents, *prefills, *_counted_caches(), *_generated()]


def gone_wrong(records: Iterable[Record], *, ms: float) -> list[Record]:
    """The same cases with a wrong result, all of whose samples took ``ms``."""
    found = []
    for record in records:
        copy = Record.from_json(record.to_json())
        copy.status, copy.error = "wrong", {"message": "off"}
        copy.case_id += "-wrong"
        copy.case["seed"] = 1
        for phase in copy.phases.values():
            phase.samples_ms = [[ms for _ in samples] for samples in phase.samples_ms]
        found.append(copy)
    return found


def _counted_caches() -> list[Record]:
    found = []
    for attention_type, per_token in (("mha", 524288), ("mla", 36864)):
        for seq_len in (8192, 524288):
            record = make_record(task="attention", mode="forward", seq_len=seq_len)
            task = {"name": "kv_memory", "shape": "llama3_8b", "attention_type": attention_type}
            record.case["task"] = {**task, "device_gib": 128.0}
            record.case_id = f"kv_memory-{attention_type}-{seq_len}"
            total = 4 * seq_len * per_token
            record.notes["kv_memory"] = {
                "bytes_per_token": per_token,
                "total_bytes": total,
                "fits": total < 128 * 2**30,
                "largest_batch": 128 * 2**30 // (total // 4),
                "longest_len": 128 * 2**30 // (4 * per_token),
            }
            found.append(record)
    return found


def _generated() -> list[Record]:
    found = []
    for attention, ms in (("sdpa", 6.0), ("flash_decode", 5.0)):
        notes = {"copy_bandwidth_gb_s": 4000.0, "kernels": 300.0, "launches": 300.0}
        record = make_record(
            attention=attention,
            samples_ms={"prefill": [[20.0, 20.0]], "decode": [[ms] * 4]},
            notes={"generate": notes},
        )
        record.case["task"] = {"name": "generate", "output_len": 3, "lengths": "equal"}
        record.case["cache"] = {"name": "paged", "block_size": 64}
        record.case_id = f"generate-{attention}"
        record.work["decode"] = {"flops": 1e9, "bytes": 1e10, "tokens": 4}
        found.append(record)
    return found


def write_plan(
    results: Path,
    label: str,
    records: Iterable[Record],
    *,
    tables: Sequence[str],
    figures: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> None:
    """A sweep's plan.json over the records, with ``missing`` ids that have none."""
    plan = SweepPlan(
        label=label,
        name=label,
        title="A sweep of examples",
        about="What the examples show.",
        command=f"attnbench sweeps={label}",
        scale="full",
        tables=list(tables),
        figures=list(figures),
        case_ids=[*(record.case_id for record in records), *missing],
    )
    sweep_plan.write_plan(results, plan)
