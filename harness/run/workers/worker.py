"""A warm worker: one rank's process, which measures one case after another.

Reads one JSON line per job and writes one JSON line per event
(:mod:`harness.run.children.events`): ``ready`` once, then for each job ``began``, its stages and
one ``result``. Python's output and that of libraries goes to the worker's log, never into the
protocol.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import harness.measure.check  # noqa: F401 (loaded before the first case, not by it)
import models.transformer  # noqa: F401
from harness.bench import devices
from harness.bench.bench import Bench
from harness.bench.environment import environment, library_versions
from harness.bench.outcome import Outcome, PeerFailed, PeerSilent, WrongResult
from harness.cases.case import Case
from harness.run.children.worker_side import Channel, CleanStart
from harness.run.nodes.outcomes import OutcomeError, gather_outcomes
from harness.run.nodes.plain_objects import restrict_object_collectives
from harness.run.nodes.store import group_arguments
from harness.run.workers.on_hosts import on_hosts
from kernels import BACKENDS
from kernels.toolchain import why_not_compile

NCCL_WATCHDOG_S = 0.25
"""PyTorch may hold buffers of the last case for so long: its watchdog releases finished collectives
every 0.1 s."""


TRACEBACK_CHARACTERS = 50_000
"""A record keeps so much of a traceback, from its end, where the error is."""


def main(channel: Channel, words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m harness.run.workers.worker_main", description=__doc__
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--local-rank", type=int, default=0)
    parser.add_argument("--ranks-on-host", type=int, default=1)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rendezvous", default="", help="torch.distributed's init_method")
    parser.add_argument("--caches", required=True, help="folder for compiled code of this run")
    parser.add_argument("--vote-timeout-s", type=float, default=30.0)
    parser.add_argument("--dynamo", action="store_true", help="imported before the first case")
    parser.add_argument("--collective-timeout-s", type=float, default=600.0)
    arguments = parser.parse_args(words)
    faulthandler.enable()
    if arguments.dynamo:
        importlib.import_module("torch._dynamo")
    Worker(arguments, channel).serve()


class Worker:
    """One rank: its device, its process groups, and the loop over cases."""

    def __init__(self, arguments: argparse.Namespace, channel: Channel) -> None:
        self.rank: int = arguments.rank
        self.world_size: int = arguments.world_size
        self._ranks_on_host: int = arguments.ranks_on_host
        self._compile_caches = Path(arguments.caches) / f"compile-rank{self.rank}"
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        self._users_caches = {name: os.environ.get(name) for name in names}
        self._channel = channel
        self._job = 0
        self.vote_group: dist.ProcessGroup | None = None
        self._num_modules = 0
        """How many modules were imported when what lived then was set aside."""
        if arguments.device == "cuda":
            self.device = torch.device("cuda", arguments.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            if self.world_size > 1:
                torch.set_num_threads(max(1, cores // arguments.ranks_on_host))
            devices.limit_host_memory()
        if self.world_size > 1:
            restrict_object_collectives()
            dist.init_process_group(
                "nccl" if arguments.device == "cuda" else "gloo",
                **group_arguments(
                    arguments.rendezvous,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=arguments.collective_timeout_s),
                ),
            )
            # On the CPU whatever the device, so that ranks can agree that one of them has
            # lost its GPU's memory, and with a timeout of its own, so that they soon do.
            self.vote_group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=arguments.vote_timeout_s)
            )

    def serve(self) -> None:
        """Measure cases until there are no more jobs."""
        gc.enable()
        self._set_aside_modules()
        clean_start = CleanStart()
        self._channel.send(event="ready", environment=environment(self.device))
        for job in self._channel.jobs():
            self._job = job["job"]
            self._channel.send(event="began", job=self._job)
            clean_start.restore()
            case = Case.from_dict(job["case"])
            outcome = self.measure(
                case,
                job["rounds"],
                job["round"],
                Path(job["artifacts"]),
                until_decided=job["until_decided"],
            )
            outcomes, healthy = self._gather(outcome)
            if self.rank == 0 or not healthy:
                results = [asdict(item) for item in outcomes]
                self._channel.send(event="result", job=self._job, outcomes=results, healthy=healthy)
            if not healthy:
                # The group is broken: a clean shutdown would wait for ranks that are stuck.
                os._exit(1)

    def measure(
        self,
        case: Case,
        rounds: int,
        round_index: int,
        artifacts: Path | None = None,
        *,
        until_decided: bool = False,
    ) -> Outcome:
        """Measure one case on this rank; every error becomes the outcome's status."""
        self._forget_last_case(case)
        bench = Bench(
            device=self.device,
            rank=self.rank,
            world_size=self.world_size,
            vote_group=self.vote_group,
            on_stage=lambda stage: self._channel.send(event="stage", job=self._job, stage=stage),
            rounds=rounds,
            round_index=round_index,
            longer_if_busy=until_decided,
            artifacts=artifacts,
        )
        outcome = bench.outcome
        try:
            case, reason = on_hosts(case, self._ranks_on_host)
            reason = reason or why_unsupported(case)
            if reason is not None:
                outcome.status, outcome.error = "unsupported", {"message": reason}
            else:
                chosen = case.task.attention_choice(case)
                if chosen != case.attention.name:
                    outcome.notes["attention_choice"] = chosen
                _note_libraries(case, chosen, outcome)
                with bench.compile_watch.watching(), case.attention.noting(outcome.notes):
                    case.task.run(case, bench)
                    if case.profile is not None and bench.in_last_round:
                        case.profile.after(case, bench)
        except PeerFailed:
            # The peer that failed has voted already; its outcome tells why.
            return outcome
        except PeerSilent as error:
            _note_silence(outcome, error)
            return outcome
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            outcome.status = "wrong" if isinstance(error, WrongResult) else "failed"
            if _is_out_of_memory(error):
                outcome.status = "oom"
            outcome.error = {
                "message": _one_line(error),
                "stage": bench.current_stage,
                "rank": self.rank,
            }
            if outcome.status == "failed":
                outcome.error["traceback"] = traceback.format_exc()[-TRACEBACK_CHARACTERS:]
        bench.note_stages()
        outcome.compilation["compile_s"] = bench.compile_watch.seconds
        outcome.compilation["compilations"] = bench.compile_watch.count
        outcome.compilation["autotune_s"] = bench.compile_watch.autotune_seconds
        try:
            bench.vote(outcome.status)
        except PeerFailed:
            pass
        except PeerSilent as error:
            _note_silence(outcome, error)
        return outcome

    def _gather(self, outcome: Outcome) -> tuple[list[Outcome], bool]:
        """Every rank's outcome, and whether the group can take another case."""
        if self.vote_group is None:
            return [outcome], True
        if "vote" in outcome.notes:
            return [outcome], False
        try:
            return gather_outcomes(outcome, self.vote_group), True
        except (RuntimeError, OutcomeError) as error:
            _note_silence(outcome, error)
            return [outcome], False

    def _forget_last_case(self, case: Case) -> None:
        """Start every case alike: no cached memory, no compiled code, explicit numerics."""
        if case.uses_dynamo:
            # Now, and not inside one of the case's passes.
            importlib.import_module("torch._dynamo")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self._set_aside_modules()
        self._use_compile_cache_of(case)
        if self.world_size > 1 and self.device.type == "cuda":
            time.sleep(NCCL_WATCHDOG_S)
        # A training step must not depend on what an earlier case left in the allocator.
        Bench(device=self.device).release_memory()
        torch.manual_seed(case.seed)
        torch.set_float32_matmul_precision("high" if case.precision.tf32 else "highest")

    def _set_aside_modules(self) -> None:
        """Have collections of garbage leave out what lives now, if modules were imported meanwhile.

        Otherwise every case would walk several times through all objects of torch and Dynamo, at
        0.05 to 0.15 s a time. Nothing of a case may live when this is called.
        """
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _use_compile_cache_of(self, case: Case) -> None:
        """Give torch.compile an empty cache for each case, so that compile times are comparable.

        Rounds of one interleaved case share a cache, whichever processes measure them. Cases
        without torch.compile use the user's Triton cache: compiling one backend's kernels takes ten
        seconds that nothing measures.
        """
        if not case.compiles:
            for name, value in self._users_caches.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            return
        folder = self._compile_caches / case.id
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
        if "torch._inductor.utils" in sys.modules:
            torch._inductor.utils.clear_caches()


def why_unsupported(case: Case) -> str | None:
    """None if this machine can run the case, else the reason in one line."""
    if case.precision.tf32 and case.device != "cuda":
        return "TF32 exists on CUDA devices only"
    if case.task.compiles(case):
        reason = why_not_compile(case.device)
        if reason is not None:
            return reason
    if case.profile is not None:
        reason = case.profile.supports(case)
        if reason is not None:
            return reason
    return case.task.why_unsupported(case)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, says that a GPU or the CPU ran out of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        text = str(error)
        if "DefaultCPUAllocator: can't allocate memory" in text or "CUDA out of memory" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _note_libraries(case: Case, chosen: str, outcome: Outcome) -> None:
    """Note the versions of the libraries behind the attention, and behind what it has chosen."""
    if not case.task.attends:
        return
    distributions = set(case.attention.libraries())
    for name in re.findall(r"[\w-]+", chosen):
        if name in BACKENDS:
            entry = BACKENDS[name]
            distributions |= set(entry.target(name=name, **entry.preset).libraries())
    if found := library_versions(sorted(distributions)):
        outcome.notes["libraries"] = found


def _note_silence(outcome: Outcome, error: BaseException) -> None:
    outcome.notes["vote"] = f"a rank did not answer the vote: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """The error's type and the first non-empty line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    if not lines:
        return name
    # The rest of PyTorch's message is advice on its allocator, half a screen long.
    said = re.split(r" GPU \d+ has a total", lines[0])[0]
    return f"{name}: {textwrap.shorten(said, 300)}"
