"""A lock on a device, because two runs that measure on it at once disturb each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive_device(device: str, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold a device against other runs on this host, waiting for them if necessary.

    The lock is a file in the temporary folder; the operating system releases it when its holder
    dies. Runs that see different GPUs (CUDA_VISIBLE_DEVICES) do not wait for each other. In a
    Slurm job that variable may count from 0 on any GPUs, so Slurm's own variables come first.
    """
    visible = ""
    if device == "cuda":
        names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
        visible = next((os.environ[name] for name in names if name in os.environ), "all")
    name = re.sub(r"[^a-z0-9]+", "_", f"{device} {visible}".lower())
    path = Path(tempfile.gettempdir()) / f"attnbench_{name}.lock"
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError:
        # A temporary folder that cannot be written is no reason not to measure.
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
