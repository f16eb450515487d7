"""``launcher=slurm``: submits one job array for each shape of resources, through submitit."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from harness.cases.case import Case
from harness.cases.requirements import require_at_least
from harness.paths import ROOT
from harness.predictions.capacity import Machine
from harness.printing import say
from harness.run.held_signals import signals_held
from harness.run.launcher import Launcher, LaunchError, PendingCases, launcher
from harness.run.nodes.secret import SECRET_FILE, write_secret
from harness.run.rounds.options import RunOptions
from harness.run.run_files import writable_s
from harness.run.run_folder import (
    RunFolder,
    RunManifest,
    clock_offset_s,
    planning_lock,
    submitted_run,
)
from harness.run.slurm import commands as slurm
from harness.run.slurm.follow import follow
from harness.run.slurm.jobs import (
    cancel_command,
    follow_command,
    job_name,
)
from harness.run.slurm.queue import active_cases, take_back
from harness.run.slurm.shares import Shape, Share, counted, pack, shape_of
from harness.run.warm_workers import predicted_starts_s
from harness.store.record import RecordStore, file_case

OWN_OPTIONS = frozenset(
    {"array", "nodes", "ntasks", "ntasks-per-node", "output", "error", "open-mode", "signal"}
    | {"job-name", "requeue", "no-requeue"}
)
"""Options of sbatch that follow from the cases, or that requeueing depends on."""

CLUSTERS = frozenset({"cluster", "clusters", "M"})
"""Options of sbatch that name clusters, of which squeue and scancel would know nothing."""


@launcher("slurm")
@dataclass(kw_only=True, slots=True)
class Slurm(Launcher):
    """Submits the cases as job arrays and returns; ``wait=true`` follows them."""

    measures_here: ClassVar[bool] = False

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_min: int = 60
    """Time limit of a task; one that is not done by then is requeued and goes on."""
    memory_gb: float | None = None
    """Memory of a node; None is the cluster's default, 0 all of it."""
    cpus_per_task: int | None = None
    """CPU cores of each rank."""
    gpus_per_node: int = 8
    """GPUs of a node, and so the most ranks on one; with device=cpu the most ranks alone."""
    gpu_type: str | None = None
    exclusive: bool = False
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start: module load, source, export."""
    srun: list[str] = field(default_factory=list)
    """Options of srun, such as those that name a container."""
    python: str | None = None
    """Interpreter on the nodes; None is the one that submits."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Any further #SBATCH option, by its long name; an empty value makes a flag."""
    array_parallelism: int = 256
    """Tasks of an array that may run at the same time."""
    cases_per_task: int | None = None
    """None packs by predicted time, up to ``task_min``."""
    task_min: float = 20.0
    """Predicted minutes of a task that small cases are packed into."""
    stop_s: int = 90
    """How long before its time limit a task is told to stop."""
    poll_s: float = 5.0
    """How often ``wait=true`` looks."""
    vote_timeout_s: float = 60.0
    """How long a rank waits for the others to agree on how a case ended."""

    def __post_init__(self) -> None:
        require_at_least("launcher.time_min", self.time_min, 2)
        require_at_least("launcher.gpus_per_node", self.gpus_per_node, 1)
        require_at_least("launcher.array_parallelism", self.array_parallelism, 1)
        require_at_least("launcher.stop_s", self.stop_s, 5)
        if self.cases_per_task is not None:
            require_at_least("launcher.cases_per_task", self.cases_per_task, 1)
        for key in ("task_min", "poll_s", "vote_timeout_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"launcher.{key}={getattr(self, key)}: must be positive")
        latest_s = 60 * self.time_min - slurm.WARNS_EARLY_S
        if self.stop_s >= latest_s:
            raise ValueError(
                f"launcher.stop_s={self.stop_s}: must be less than {latest_s:.0f} with "
                f"launcher.time_min={self.time_min}, since Slurm may warn "
                f"{slurm.WARNS_EARLY_S:.0f} s earlier than it is asked to"
            )
        for key in self.sbatch:
            if key.lstrip("-") in OWN_OPTIONS:
                raise ValueError(f"launcher.sbatch.{key}: attnbench sets this one itself")
            if key.lstrip("-") in CLUSTERS:
                raise ValueError(
                    f"launcher.sbatch.{key}: export SLURM_CLUSTERS={self.sbatch[key]} instead, "
                    "which squeue and scancel obey as well"
                )

    def resolve_device(self, device: str) -> str:
        # The host that submits need not have what the nodes have.
        return "cuda" if device == "auto" else device

    def reaches(self, machine: Machine) -> Machine:
        if machine.device != "cuda":
            return machine
        # How many nodes a cluster has is known to its controller alone, which refuses too many.
        return replace(machine, num_devices=sys.maxsize, gpus_per_host=self.gpus_per_node)

    def validate(self, cases: list[Case]) -> None:
        for case in cases:
            shape_of(case, self.gpus_per_node)

    def launch(self, pending: PendingCases) -> list[str]:
        if not pending.cases:
            return []
        options = pending.options
        self._require_time_for(options)
        slurm.require_slurm()
        slurm.require_partition(self.partition)
        with planning_lock(options.results):
            under_way = active_cases(options.results)
            cases = [case for case in pending.cases if case.id not in under_way]
            said = []
            if len(cases) < len(pending.cases):
                number = len(pending.cases) - len(cases)
                said.append(f"{counted(number, 'case')} queued or running already")
            if cases:
                said += self._submit(cases, pending)
        if options.wait:
            for line in said:
                say(line)
            sys.stdout.flush()
            follow(pending, self.poll_s)
            return []
        return [
            *said,
            f"follow them  {follow_command(options.results)}",
            f"cancel them  {cancel_command(options.results)}",
            f"tables       attnbench-report {shlex.quote(str(options.results))}",
        ]

    def _require_time_for(self, options: RunOptions) -> None:
        if options.timeout_s > 60 * self.time_min:
            raise LaunchError(
                f"timeout_s={options.timeout_s:g}: a case may take longer than "
                f"launcher.time_min={self.time_min} lets its job run; raise one or lower the other"
            )

    def _submit(self, cases: list[Case], pending: PendingCases) -> list[str]:
        """Freeze the cases in shares and submit them; returns lines for the user."""
        starts_s = predicted_starts_s(cases, pending.options)
        packed = pack(
            cases,
            ranks_per_node=self.gpus_per_node,
            predict=pending.predict,
            cases_per_task=self.cases_per_task,
            task_s=max(1.0, 60 * self.task_min - starts_s),
            max_tasks=slurm.max_array_size(),
            together=pending.options.in_turns,
        )
        shares = [share for of_shape in packed.values() for share in of_shape]
        with submitted_run(pending.options.results.resolve()) as folder:
            return self._submit_shares(folder, packed, shares, pending)

    def _submit_shares(
        self,
        folder: RunFolder,
        packed: dict[Shape, list[Share]],
        shares: list[Share],
        pending: PendingCases,
    ) -> list[str]:
        """Write the run's files and submit an array for each shape; returns lines for the user."""
        run = RunManifest(
            id=folder.path.name,
            launcher="slurm",
            command=pending.command,
            created_s=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            clock_offset_s=clock_offset_s(folder.path),
            case_ids=[[case.id for case in share.cases] for share in shares],
            predicted_s=[list(map(writable_s, share.predicted_s)) for share in shares],
            jobs=[None] * len(shares),
            shapes=[str(share.shape) for share in shares],
        )
        said, first = [], 0
        try:
            self._freeze(folder, shares, pending)
            folder.write_run(run)
            for shape, of_shape in packed.items():
                indices = range(first, first + len(of_shape))
                # Nobody could cancel a job whose id is not in the run's file yet.
                with signals_held():
                    run.jobs[first : indices.stop] = self._submit_array(folder, shape, indices)
                    folder.write_run(run)
                number = sum(len(share.cases) for share in of_shape)
                array = str(run.jobs[first]).split("_")[0]
                said.append(
                    f"submitted job {array}: {counted(number, 'case')} in "
                    f"{counted(len(of_shape), 'task')} of {shape}"
                )
                first += len(of_shape)
        except BaseException as error:
            with signals_held():
                take_back(folder, run, may_be_queued=isinstance(error, slurm.UnsureError))
            raise
        return said

    def _freeze(self, folder: RunFolder, shares: list[Share], pending: PendingCases) -> None:
        # A task has nobody to follow.
        options = replace(pending.options, results=folder.results, wait=False)
        files = _files_by_case(pending.store)
        write_secret(folder.path / SECRET_FILE)
        for index, share in enumerate(shares):
            before = [name for case in share.cases for name in files.get(case.id, ())]
            folder.write_share(index, share.cases, options, before)

    def _submit_array(self, folder: RunFolder, shape: Shape, indices: range) -> list[str]:
        """Submit one array (or one job, for a single share); returns job ids in order."""
        # submitit takes half a second to load, and only this launcher needs it.
        from harness.run.slurm.submission import submit_array
        from harness.run.slurm.task import ShareTask

        tasks = [
            ShareTask(
                str(folder.results),
                folder.path.name,
                index,
                shape.ranks_per_node,
                self.time_min,
                self.stop_s,
            )
            for index in indices
        ]
        return submit_array(
            folder,
            tasks,
            name=job_name(folder.path.name, indices.start),
            parameters=self._parameters(shape),
            python=self.python,
        )

    def _parameters(self, shape: Shape) -> dict[str, Any]:
        """The parameters of submitit, which writes the batch script."""
        parameters: dict[str, Any] = {
            "time": self.time_min,
            "nodes": shape.nodes,
            "ntasks_per_node": shape.ranks_per_node,
            "cpus_per_task": self.cpus_per_task,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "signal_delay_s": self.stop_s,
            "array_parallelism": self.array_parallelism,
            "wckey": None,
            # The nodes run the code that submits, installed there or not.
            "setup": [
                # scancel --full signals the batch script as well.
                "trap '' USR2",
                *self.setup,
                f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
                # The working folder, which `python -m` would search first, may have a models.py.
                "export PYTHONSAFEPATH=1",
            ],
            "srun_args": list(self.srun) or None,
        }
        if self.cpus_per_task is not None:
            # Since Slurm 22.05 srun does not take it from the job any more.
            parameters["setup"].append(f"export SRUN_CPUS_PER_TASK={self.cpus_per_task}")
        if self.exclusive:
            parameters["exclusive"] = True
        further: dict[str, Any] = {"requeue": True, "distribution": "block"}
        if self.memory_gb is not None:
            further["mem"] = f"{int(1024 * self.memory_gb)}M"
        if shape.device == "cuda":
            kind = f"{self.gpu_type}:" if self.gpu_type else ""
            further["gpus-per-node"] = f"{kind}{shape.ranks_per_node}"
        further |= {key.lstrip("-"): value or True for key, value in self.sbatch.items()}
        parameters["additional_parameters"] = further
        return {key: value for key, value in parameters.items() if value is not None}


def _files_by_case(store: RecordStore) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name in store.names():
        found = file_case(name)
        if found is not None:
            files.setdefault(found[0], []).append(name)
    return files
