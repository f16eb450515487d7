"""Calls Slurm's commands, more than once where a controller may be busy; errors are one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.printing import warn
from harness.run.launcher import LaunchError

ACTIVE = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"}
    | {"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "STAGE_OUT", "SPECIAL_EXIT"}
)
"""States, in squeue, of a job that is to run, runs, or is to run again."""

DEFAULT_MAX_ARRAY = 1001
"""MaxArraySize where slurm.conf does not say."""

PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0)
"""How long to wait before a question is asked again that a busy controller did not answer."""

WARNS_EARLY_S = 75.0
"""Slurm checks time limits about once a minute, so its warning may come early by as much."""

SUBMIT_TIMEOUT_S = 120.0
TIMEOUT_S = 30.0
_IDS_A_CALL = 200


class SlurmError(LaunchError):
    """Slurm is missing or refuses; the message is one line with the remedy."""


class UnansweredError(SlurmError):
    """Slurm did not answer, or not in words that can be read; it may when asked again."""


class UnsureError(SlurmError):
    """A job may have been queued or not: sbatch's answer was lost, and squeue does not know."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Job:
    """One job, or one task of an array, as squeue or sacct sees it."""

    state: str
    nodes: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_ending(self) -> bool:
        """Whether its processes are being ended: cancelled, requeued or done, it hides which."""
        return self.state == "COMPLETING"

    @property
    def is_held(self) -> bool:
        """Whether it starts only after somebody has released it."""
        held = self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or "held" in self.reason.lower()
        return self.is_active and held


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
    known = sorted(set(_ask("sinfo", "--noheader", "--all", "--format=%R").split()))
    for part in name.split(","):
        if part not in known:
            raise SlurmError(
                f"launcher.partition={part}: this cluster has no such partition; "
                f"one of {', '.join(known)}"
            )


def max_array_size() -> int:
    """The number of tasks that one array may have."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"), re.M)
    # The largest index is one less than MaxArraySize, and ours begin at 0. With 0, for no arrays,
    # a job is still one task.
    return max(1, int(found.group(1))) if found else DEFAULT_MAX_ARRAY


def queued(array_ids: Iterable[str], *, patient: bool = True) -> dict[str, Job]:
    """The jobs of the given arrays in squeue, by ids such as ``123_4`` (or ``123``).

    Args:
        patient: ask again where Slurm does not answer.
    """
    wanted = set(array_ids)
    if not wanted:
        return {}
    # Ask for all of the user's jobs: squeue fails as a whole for an id that it has forgotten.
    found = {}
    for array, task, state, nodes, reason in _squeue("%F|%K|%T|%N|%r", patient=patient):
        if array in wanted:
            job_id = array if task == "N/A" else f"{array}_{task}"
            found[job_id] = Job(state=state, nodes=nodes, reason=reason)
    return found


def named(prefix: str) -> dict[str, list[tuple[str, int]]]:
    """The jobs in squeue whose names begin with ``prefix``: by name, ids and array indices."""
    found: dict[str, list[tuple[str, int]]] = {}
    for array, task, name in _squeue("%F|%K|%j", patient=True):
        if name.startswith(prefix):
            alone = task == "N/A"
            item = (array, 0) if alone else (f"{array}_{task}", int(task))
            found.setdefault(name, []).append(item)
    return found


def _squeue(columns: str, *, patient: bool) -> list[list[str]]:
    """Rows of the user's jobs; raises UnansweredError rather than leave one of them out."""
    command = ("squeue", "--noheader", "--array", "--me", "--states=all", f"--format={columns}")
    text = _ask(*command, pauses_s=PAUSES_S if patient else ())
    number = columns.count("|")
    rows = []
    for line in filter(str.strip, text.splitlines()):
        cells = [cell.strip() for cell in line.split("|", number)]
        if len(cells) == number + 1 and re.fullmatch(r"\d+\|(\d+|N/A)", "|".join(cells[:2])):
            rows.append(cells)
        elif "|" in line:
            raise UnansweredError(f"squeue: cannot read its answer {line.strip()[:80]!r}")
    # Lines without columns are a site's own words, and those alone are no answer.
    if not rows and (words := [line for line in text.splitlines() if not _HEADING.match(line)]):
        raise UnansweredError(f"squeue: cannot read its answer {words[0].strip()[:80]!r}")
    return rows


def accounted(array_ids: Iterable[str]) -> dict[str, Job]:
    """The jobs of the given arrays in sacct; empty where the cluster keeps no accounts."""
    found: dict[str, Job] = {}
    wanted = sorted(set(array_ids))
    for start in range(0, len(wanted), _IDS_A_CALL):
        try:
            text = _ask(
                "sacct",
                "--noheader",
                "--parsable2",
                "--allocations",
                "--format=JobID,State,NodeList",
                f"--jobs={','.join(wanted[start : start + _IDS_A_CALL])}",
                # Without accounts no patience helps.
                pauses_s=PAUSES_S[:1],
            )
        except SlurmError:
            return found
        for line in text.splitlines():
            cells = line.split("|")
            if len(cells) >= 3:
                # "CANCELLED by 1000"
                found[cells[0]] = Job(state=cells[1].split(" ")[0], nodes=cells[2])
    return found


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs, arrays or tasks of arrays; those that have ended are ignored."""
    ids = list(job_ids)
    for start in range(0, len(ids), _IDS_A_CALL):
        try:
            _ask("scancel", *ids[start : start + _IDS_A_CALL])
        except SlurmError as error:
            if not _HAS_ENDED.search(str(error)):
                raise


def submit(script: Path, name: str) -> str:
    """Submit a batch script as the job of a name that no other job has; returns its id.

    Where sbatch's answer is lost, the job is looked for by its name. A terminal's Ctrl-C does
    not reach sbatch. Raises UnsureError if it may have been queued, SlurmError if not.
    """
    # Variables of sbatch's own would win over the script.
    environment = {key: value for key, value in os.environ.items() if key not in _OVERRIDE}
    command = ("sbatch", str(script))
    try:
        said = _call(*command, timeout_s=SUBMIT_TIMEOUT_S, environment=environment)
        if ids := _SUBMITTED.findall(said) or _PARSABLE.findall(said):
            return str(ids[-1])
        problem = SlurmError(f"sbatch: cannot read its answer {said.strip()[:80]!r}")
        is_sure = False
    except SlurmError as error:
        problem = error
        is_sure = not isinstance(error, UnansweredError) and not _LOST.search(str(error))
    try:
        for pause_s in (0.0,) if is_sure else (0.0, *PAUSES_S):
            time.sleep(pause_s)
            if jobs := named(name).get(name):
                return jobs[0][0].split("_")[0]
    except SlurmError:
        if is_sure:
            raise problem from None
    if is_sure:
        raise problem
    raise UnsureError(
        f"{problem}; if it was queued all the same, its name is {name}, and attnbench-status, "
        "attnbench-cancel and the next command find it by that"
    ) from problem


def refusal(stderr: str) -> str:
    """The reason of a refusal, from the lines that Slurm printed."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = [re.sub(r"^\w+: (error: )?", "", line) for line in lines if "error:" in line]
    return "; ".join(dict.fromkeys(said)) or (lines[-1] if lines else "it gave no reason")


_NO_CONTROLLER = re.compile("resolve_ctls_from_dns_srv|fetch_config|Unable to contact slurm")
"""Messages of Slurm's commands on hosts outside a cluster, or whose controller is down."""


_SUBMITTED = re.compile(r"^Submitted batch job (\d+)\b", re.M)
_PARSABLE = re.compile(r"^(\d+)(?:;\S+)?\s*$", re.M)
"""The line of sbatch's answer that holds the id; a site may print others around it."""

_HEADING = re.compile(r"\s*$|CLUSTER: ")

_LOST = re.compile("(?i)timed? ?out|unable to contact|zero bytes|connection|communication")
"""Errors of sbatch after which the controller may have taken the job."""

_HAS_ENDED = re.compile("(?i)invalid job id|already complet")
_FINAL = re.compile(f"{_HAS_ENDED.pattern}|is disabled|permission|access")

_OVERRIDE = frozenset(
    {"SBATCH_ARRAY_INX", "SBATCH_JOB_NAME", "SBATCH_NO_REQUEUE", "SBATCH_SIGNAL"}
    | {"SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_OPEN_MODE", "SBATCH_WAIT", "SBATCH_TEST_ONLY"}
)


def _ask(*command: str, pauses_s: tuple[float, ...] | None = None) -> str:
    """The answer to a question, asked again after pauses, and said so, where there is none."""
    pauses_s = PAUSES_S if pauses_s is None else pauses_s
    for number, pause_s in enumerate(pauses_s):
        try:
            return _call(*command)
        except UnansweredError as error:
            if "did not answer in" in str(error):
                # It has been waited for already.
                raise
            if number == 0:
                warn(f"{error}; asking again")
            time.sleep(pause_s)
    return _call(*command)


def _call(
    *command: str,
    timeout_s: float | None = None,
    environment: dict[str, str] | None = None,
) -> str:
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"no {command[0]} on the path; run this on a login node of the cluster"
        ) from error
    except OSError as error:
        raise SlurmError(f"{command[0]}: cannot be started ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        raise UnansweredError(
            f"{command[0]} did not answer in {timeout_s:g} s; is the Slurm controller up?"
        ) from error
    if done.returncode != 0:
        if _NO_CONTROLLER.search(done.stderr):
            again = "Unable to contact" in done.stderr
            raise (UnansweredError if again else SlurmError)(
                f"{command[0]} finds no Slurm controller; run this on a login node of the "
                "cluster, or set SLURM_CONF to its slurm.conf"
            )
        # What sbatch refuses, and what has ended, stays so.
        final = command[0] == "sbatch" or _FINAL.search(done.stderr)
        raise (SlurmError if final else UnansweredError)(f"{command[0]}: {refusal(done.stderr)}")
    return done.stdout
