"""A few records of each kind, with every status that a case can have."""

from __future__ import annotations

from records import Samples, make_record

from harness.store.record import Record


def step_samples(forward: float, backward: float, optimizer: float) -> Samples:
    """Three samples per phase, the middle one the median."""
    total = forward + backward + optimizer
    values = {"forward": forward, "backward": backward, "optimizer": optimizer, "step": total}
    return {name: [[value * 1.04, value, value * 0.96]] for name, value in values.items()}


def status_examples() -> list[Record]:
    """A little of everything, with every status."""
    found = [
        make_record(attention="naive", samples_ms=step_samples(10, 20, 10)),
        make_record(attention="sdpa_flash", samples_ms=step_samples(5, 10, 5)),
        make_record(attention="naive", precision="fp32", samples_ms=step_samples(40, 80, 10)),
        make_record(attention="sdpa_flash", precision="fp32", status="unsupported", message="fp32"),
        make_record(model="large", status="oom", message="CUDA out of memory", environment={}),
        make_record(model="large", attention="flex", status="wrong", message="o is off by 10%"),
        make_record(model="large", attention="sdpa_flash", status="timeout", message="600 s"),
        make_record(model="large", attention="sdpa_math", status="failed", message="a_b & 50% | $"),
    ]
    for seq_len, attention in [(a, b) for a in (1024, 2048) for b in ("naive", "flex")]:
        time = seq_len / 1024 * (1 if attention == "flex" else 4)
        found.append(
            make_record(
                task="attention",
                mode="forward_backward",
                attention=attention,
                seq_len=seq_len,
                samples_ms={
                    "forward": [[time] * 3],
                    "backward": [[2 * time] * 3],
                    "forward_backward": [[3 * time] * 3],
                },
                memory=[
                    {
                        "source": "cuda",
                        "peak_allocated_bytes": 2**30,
                        "before_backward_bytes": 512 * 2**20,
                    }
                ],
                notes={"predicted_memory": {"inputs": 2**28, "output": 2**28}},
            )
        )
    return found
