"""Records of a small write-up: attention over length, and training steps."""

from __future__ import annotations

from pathlib import Path

from records import make_record

from harness.store.record import Record

SPEEDS = {"naive": 4.0, "flex": 1.0, "sdpa_flash": 2.0}

LENGTHS = (512, 1024, 2048, 4096)


def scaling() -> list[Record]:
    """Attention over length: flex is fastest from 1,024 tokens on, naive runs out at 4,096."""
    records = []
    for seq_len in LENGTHS:
        for name, factor in SPEEDS.items():
            ms = 10 * factor * (seq_len / 1024) ** 2
            if name == "sdpa_flash" and seq_len == 512:
                ms = 1.0
            out = name == "naive" and seq_len == 4096
            passes = {"forward": ms, "backward": 2 * ms, "forward_backward": 3 * ms}
            samples = {key: [[0.9 * value, value, 1.3 * value]] for key, value in passes.items()}
            records.append(
                make_record(
                    task="attention",
                    mode="forward_backward",
                    attention=name,
                    seq_len=seq_len,
                    samples_ms=None if out else samples,
                    status="oom" if out else "ok",
                    message="CUDA out of memory" if out else "",
                )
            )
    return records


def steps() -> list[Record]:
    found = []
    for name, ms in {"naive": 40.0, "sdpa_flash": 16.0}.items():
        phases = {"forward": ms / 4, "backward": ms / 2, "optimizer": ms / 4, "step": ms}
        samples = {key: [[value, value, 1.1 * value]] for key, value in phases.items()}
        found.append(make_record(attention=name, samples_ms=samples))
    return found


def gray(path: Path) -> tuple[int, int, bytes]:
    """Width, height and pixels of a binary PGM."""
    kind, width, height, _, pixels = path.read_bytes().split(maxsplit=4)
    assert kind == b"P5"
    return int(width), int(height), pixels[-int(width) * int(height) :]
