"""Calls Slurm's commands and turns their errors into one line."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from harness.run.launcher import LaunchError

ACTIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"}
    | {"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT", "SPECIAL_EXIT"}
)
"""States, in squeue, of a job that is to run, runs, or is to run again."""

DEFAULT_MAX_ARRAY = 1001
"""MaxArraySize where slurm.conf does not say."""

_TIMEOUT_S = 60.0
_IDS_A_CALL = 200


class SlurmError(LaunchError):
    """Slurm is missing or refuses; the message is one line with the remedy."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """One job, or one task of an array, as squeue or sacct sees it."""

    state: str
    nodes: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


def require_slurm() -> None:
    """Raise SlurmError unless this host can submit jobs."""
    for program in ("sbatch", "srun", "squeue", "scontrol", "sinfo"):
        if shutil.which(program) is None:
            raise SlurmError(
                f"launcher=slurm: no {program} on the path; run this on a login node of the "
                "cluster, or use launcher=local"
            )


def require_partition(name: str | None) -> None:
    """Raise SlurmError that lists the partitions unless there is one of this name."""
    if name is None:
        return
    known = sorted(set(_call("sinfo", "--noheader", "--all", "--format=%R").split()))
    for part in name.split(","):
        if part not in known:
            raise SlurmError(
                f"launcher.partition={part}: this cluster has no such partition; "
                f"one of {', '.join(known)}"
            )


def max_array_size() -> int:
    """The number of tasks that one array may have."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _call("scontrol", "show", "config"), re.M)
    # The largest index is one less than MaxArraySize, and ours begin at 0.
    return int(found.group(1)) if found else DEFAULT_MAX_ARRAY


def queued(array_ids: Iterable[str]) -> dict[str, Job]:
    """The jobs of the given arrays in squeue, by ids such as ``123_4`` (or ``123``)."""
    wanted = sorted(set(array_ids))
    if not wanted:
        return {}
    # Ask for all of the user's jobs: squeue fails as a whole for an id that it has forgotten.
    text = _call(
        "squeue", "--noheader", "--array", "--me", "--states=all", "--format=%F|%K|%T|%N|%r"
    )
    found = {}
    for line in text.splitlines():
        array, task, state, nodes, reason = (part.strip() for part in line.split("|"))
        job_id = array if task == "N/A" else f"{array}_{task}"
        if array in wanted:
            found[job_id] = Job(state=state, nodes=nodes, reason=reason)
    return found


def accounted(array_ids: Iterable[str]) -> dict[str, Job]:
    """The jobs of the given arrays in sacct; empty where the cluster keeps no accounts."""
    found: dict[str, Job] = {}
    wanted = sorted(set(array_ids))
    for start in range(0, len(wanted), _IDS_A_CALL):
        try:
            text = _call(
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--format=JobID,State,NodeList",
                f"--jobs={','.join(wanted[start : start + _IDS_A_CALL])}",
            )
        except SlurmError:
            return found
        for line in text.splitlines():
            job_id, state, nodes = line.split("|")[:3]
            # "CANCELLED by 1000"
            found[job_id] = Job(state=state.split(" ")[0], nodes=nodes)
    return found


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs, arrays or tasks of arrays; those that have ended are ignored."""
    ids = list(job_ids)
    for start in range(0, len(ids), _IDS_A_CALL):
        _call("scancel", *ids[start : start + _IDS_A_CALL])


def refusal(stderr: str) -> str:
    """The reason of a refusal, from the lines that Slurm printed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [re.sub(r"^\w+: (error: )?", "", line) for line in lines if "error:" in line]
    return "; ".join(dict.fromkeys(said)) or (lines[-1] if lines else "it gave no reason")


_NO_CONTROLLER = re.compile("resolve_ctls_from_dns_srv|fetch_config|Unable to contact slurm")
"""Messages of Slurm's commands on hosts outside a cluster, or whose controller is down."""


def _call(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"no {command[0]} on the path; run this on a login node of the cluster"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} did not answer in {_TIMEOUT_S:.0f} s; is the Slurm controller up?"
        ) from error
    if done.returncode != 0:
        if _NO_CONTROLLER.search(done.stderr):
            raise SlurmError(
                f"{command[0]} finds no Slurm controller; run this on a login node of the "
                "cluster, or set SLURM_CONF to its slurm.conf"
            )
        raise SlurmError(f"{command[0]}: {refusal(done.stderr)}")
    return done.stdout
