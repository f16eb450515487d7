"""``launcher=local``: warm workers on this host, or on several that run the same command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import psutil

from harness.cases.case import Case
from harness.cases.requirements import require_at_least
from harness.predictions.capacity import Machine
from harness.printing import warn
from harness.run import run_folder, runner
from harness.run.launcher import Launcher, LaunchError, PendingCases, launcher
from harness.run.nodes import agent, hosts
from harness.run.nodes.address import is_everywhere, split_endpoint
from harness.run.nodes.secret import VARIABLE, derived_key, given_secret, new_secret

BUSY_S = 0.3
"""How long other processes are watched before the first case."""

RANK_BYTES = 100 * 2**20
"""Memory that no worker process does without: an interpreter with torch has twice as much."""

_PROBE = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({
    "torch": torch.__version__, "built_for": torch.version.cuda,
    "names": [item.name for item in found], "memory_bytes": [item.total_memory for item in found],
}))
"""


@launcher("local")
@dataclass(kw_only=True, slots=True)
class Local(Launcher):
    """Runs every case on this host, one at a time.

    With ``nnodes`` above 1 the same command is started on every host, as with torchrun: the one
    with ``node_rank=0`` measures and records, and is the host of ``rdzv_endpoint``; the others
    start their ranks' workers for it.
    """

    private_keys: ClassVar[frozenset[str]] = frozenset({"rdzv_secret"})

    vote_timeout_s: float = 60.0
    """How long a rank waits for the others to agree on how a case ended."""
    nnodes: int = 1
    node_rank: int = 0
    ranks_per_node: int | None = None
    """Most ranks of a case on one host; None is the number of its GPUs, and must be given
    where cases run on CPUs of several hosts."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of the host with node_rank=0, as the others reach it."""
    rdzv_id: str = "attnbench"
    """Any word; hosts with different ones do not join."""
    rdzv_secret: str | None = None
    """Proves that hosts belong together. The one with node_rank=0 makes and prints one; the others
    must be given it, here, in ATTNBENCH_RDZV_SECRET, or in ``rdzv_secret_file``."""
    rdzv_secret_file: str | None = None
    """A file with the secret that only its owner may read, for hosts that share a file system."""

    def __post_init__(self) -> None:
        require_at_least("launcher.nnodes", self.nnodes, 1)
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"launcher.node_rank={self.node_rank}: must be from 0 to launcher.nnodes - 1, "
                f"which is {self.nnodes - 1}"
            )
        if self.ranks_per_node is not None:
            require_at_least("launcher.ranks_per_node", self.ranks_per_node, 1)
        if self.nnodes > 1:
            endpoint = split_endpoint(self.rdzv_endpoint)
            if endpoint is None or is_everywhere(endpoint[0]):
                raise ValueError(
                    f"launcher.rdzv_endpoint={self.rdzv_endpoint}: launcher.nnodes={self.nnodes} "
                    "needs HOST:PORT of the host with launcher.node_rank=0, as the others reach it"
                )
        if self.vote_timeout_s <= 0:
            raise ValueError(f"launcher.vote_timeout_s={self.vote_timeout_s}: must be positive")

    def resolve_device(self, device: str) -> str:
        if device == "cpu":
            return "cpu"
        found = probe_cuda()
        if device == "auto":
            return "cuda" if found["names"] else "cpu"
        if not found["names"]:
            raise ValueError(f"device=cuda: {found['reason']}; use device=cpu")
        return "cuda"

    def reaches(self, machine: Machine) -> Machine:
        if self.nnodes == 1 or machine.device != "cuda":
            return machine
        on_host = min(machine.gpus_per_host, self.ranks_per_node or machine.gpus_per_host)
        return replace(machine, num_devices=self.nnodes * on_host, gpus_per_host=on_host)

    def validate(self, cases: list[Case]) -> None:
        for case in cases:
            if self.nnodes > 1 and case.world_size > self._ranks_per_node(case) * self.nnodes:
                raise ValueError(
                    f"launcher.nnodes={self.nnodes}: {case.title} needs {case.world_size} ranks, "
                    f"and {self._ranks_per_node(case)} run on a host; use more nodes or fewer ranks"
                )
            if case.device == "cpu":
                _require_room(case, self.ranks_per_node or case.world_size)
            if (
                self.nnodes == 1
                and case.device == "cuda"
                and case.world_size > len(probe_cuda()["names"])
            ):
                raise ValueError(
                    f"{_typed_ranks(case)}: needs {case.world_size} GPUs, this host has "
                    f"{len(probe_cuda()['names'])}; use fewer ranks, a scale= of the sweep that "
                    "has fewer, or device=cpu"
                )

    def launch(self, pending: PendingCases) -> list[str]:
        cases, options = pending.cases, pending.options
        if not cases and self.node_rank == 0:
            return []
        if options.until_decided:
            _warn_if_busy()
        if self.nnodes > 1:
            return self._launch_on_nodes(pending)
        with run_folder.local_run(pending, self.name) as progress:
            local_runner = runner.Runner(
                options,
                pending.store,
                progress,
                grouping=pending.grouping,
                workers=pending.workers,
            )
            local_runner.run(cases)
        return []

    def _launch_on_nodes(self, pending: PendingCases) -> list[str]:
        endpoint = split_endpoint(self.rdzv_endpoint)
        assert endpoint is not None, "checked when the key was read"
        address, port = endpoint
        key = derived_key(self._secret(), "attnbench agents")
        per_node = self.ranks_per_node or len(probe_cuda()["names"])
        if self.node_rank > 0:
            logs = pending.options.results / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            ranks = range(self.node_rank * per_node, (self.node_rank + 1) * per_node)
            serve = partial(
                agent.serve_agent, address=address, port=port, key=key, run=self.rdzv_id, logs=logs
            )
            with ThreadPoolExecutor(max_workers=per_node) as pool:
                started = sum(pool.map(lambda rank: serve(rank=rank), ranks))
            return [f"node {self.node_rank} started {started} workers for {address}, which records"]
        with (
            hosts.Hosts.gathered(
                address=address,
                port=port,
                world_size=self.nnodes * per_node,
                local_ranks=per_node,
                ranks_per_node=per_node,
                key=key,
                run=self.rdzv_id,
            ) as gathered,
            run_folder.local_run(pending, self.name) as progress,
        ):
            for warning in gathered.warnings:
                warn(warning)
            joint = runner.Runner(pending.options, pending.store, progress, gathered)
            joint.run(pending.cases)
        return []

    def _secret(self) -> str:
        """The secret that all nodes know; the leader makes and prints one if it was given none."""
        try:
            given = given_secret(
                typed=self.rdzv_secret, file=self.rdzv_secret_file, environment=os.environ
            )
        except ValueError as error:
            raise LaunchError(str(error)) from error
        if given is not None:
            return given
        if self.node_rank > 0:
            raise LaunchError(
                f"launcher.node_rank={self.node_rank}: add the launcher.rdzv_secret=... that the "
                f"command with launcher.node_rank=0 prints, or give all of them one in {VARIABLE}"
            )
        made = new_secret()
        others = "1" if self.nnodes == 2 else f"1 to {self.nnodes - 1}"
        warn(
            f"on the other hosts, run this command with launcher.node_rank={others} "
            f"and launcher.rdzv_secret={made}"
        )
        return made

    def _ranks_per_node(self, case: Case) -> int:
        if self.ranks_per_node is not None:
            return self.ranks_per_node
        if case.device == "cuda":
            return len(probe_cuda()["names"])
        raise ValueError(
            f"launcher.nnodes={self.nnodes}: say with launcher.ranks_per_node how many ranks "
            "run on the CPU of each host"
        )


def _typed_ranks(case: Case) -> str:
    """The keys that give a case its ranks, as a user types them."""
    axes = case.parallel.axes
    typed = " ".join(f"parallel.{axis}={ranks}" for axis, ranks in axes.items())
    return typed or f"task.ranks={case.world_size}"


def _require_room(case: Case, ranks: int) -> None:
    """Raise ValueError for more processes than the memory of any host like this one holds."""
    if ranks == 1:
        return
    host_bytes = psutil.virtual_memory().total
    if ranks * RANK_BYTES > host_bytes:
        raise ValueError(
            f"{_typed_ranks(case)}: {ranks:,} processes need {ranks * RANK_BYTES / 2**30:,.0f} GiB "
            f"before they begin, and this host has {host_bytes / 2**30:,.0f}; use fewer ranks"
        )


def _warn_if_busy() -> None:
    """Say on stderr if other processes keep this host busy, before this one starts any."""
    # Loads numpy, which a plan does not need.
    from harness.analysis.disturbance import BUSY_CPUS

    share = psutil.cpu_percent(interval=BUSY_S) / 100
    if share > BUSY_CPUS:
        number = psutil.cpu_count() or 1
        warn(
            f"this machine is busy: other processes use {share * number:.1f} of its "
            f"{number} CPUs; times will vary, and more pairs stay UNCLEAR"
        )


@cache
def probe_cuda() -> dict[str, Any]:
    """Names and memory of the CUDA devices that torch sees, and the reason if there are none.

    A separate process asks torch, so that this one need not import it; where no driver is
    installed nobody asks.
    """
    drivers = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if not any(Path(path).exists() for path in drivers) and shutil.which("nvidia-smi") is None:
        return {"names": [], "reason": "this host has no GPU driver"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"names": [], "reason": f"torch cannot look for GPUs ({last})"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if not found["names"]:
        kind = "sees no GPU" if found["built_for"] else "is built for CPUs only"
        found["reason"] = f"the installed torch {found['torch']} {kind}"
    return found
