"""The text of ``attnbench --help``: what can be chosen, and the composed configuration.

Hydra would write the same from the template. It takes seconds, for it collects what the template
does not show: all options of all groups, its own included.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from string import Template

from omegaconf import OmegaConf

from harness.paths import config_files
from harness.request.choices import choices
from harness.request.config import GROUPS
from harness.request.config_store import compose_config
from kernels.backends.auto import CHAINS, DECODE_CHAINS

_TEMPLATE = """\
attnbench: which attention backend and which parallel strategy to run on your hardware.

Usage: attnbench KEY=VALUE[,VALUE...] ...     measure every combination
       attnbench sweeps=NAME [KEY=VALUE...]   run a named sweep; your keys win over its own
       attnbench recommend model=NAME ...     how to train it here, or on machine=h200
       attnbench fits model=NAME ...          largest batch, longest sequence, fewest GPUs
       attnbench backends [device=cpu]        list the attention backends that run here
       attnbench-report RESULTS [SWEEP...]    make tables, figures and reports again
       attnbench-writeup RESULTS...           a paper and an appendix: Markdown, PDF, HTML
       attnbench-compare A B [--in RESULTS]   what became faster or slower, case by case
       attnbench-status RESULTS               what is queued, running, done or failed
       attnbench-cancel RESULTS [JOB...]      stop what is queued or running

Examples:
  attnbench model=tiny attention=naive,sdpa seq_len=128,256
  attnbench task=attention attention=naive,sdpa seq_len=256,1024,4096 task.head_dim=64
  attnbench model=tiny parallel=ddp_bucketed parallel.dp=2 parallel.tp=2
  attnbench sweeps=benchmarking_script scale=tiny plan=true

Choices (KEY=CHOICE):
@CHOICES@

Every parallel= has three axes, whose product is the number of ranks: parallel.dp splits
batches (2 unless parallel=none), parallel.cp sequences, parallel.tp weights and heads.

attention=auto takes the first that runs:
@CHAINS@
and from a cache, with task=decode or task=generate:
@DECODE_CHAINS@

Values and their defaults (KEY=VALUE; those of a choice as task.mode=forward):
$CONFIG
How to run, rather than what to measure:
  device      auto, cpu or cuda
  results     folder for records, tables, figures and reports
  scale       size of a named sweep: full, tiny, or another that its file has; auto is full
              on a GPU, tiny without
  plan        print the cases with predicted memory and time, and run nothing
  retry       measure failed cases again
  remeasure   measure recorded cases again: stale (those whose code, libraries, driver or host
              differ now, and cases that take turns with them) or all; the new attempt counts,
              and the old one is kept
  timeout_s   limit for one case
  isolate     a process of its own for each case
  machine     with plan=true, what fits and runs on here or on hardware of conf/hardware: h200
  wait        with launcher=slurm, follow the jobs and report at the end
  interleave  number of rounds that each case's measured passes are split into, so that cases
              which differ in attention or strategy alone take turns, in random order; 5 where
              such cases are compared
  fresh_rounds  whether each round has processes of its own, since two processes differ in
              speed for as long as they live; auto shares them between two rounds of several
              GPUs, which take long to start
  until       decided adds rounds to compared cases that are still UNCLEAR, up to max_rounds=
              and for budget_s= seconds in all; rounds adds none

Flags: --config-dir DIR adds choices of your own (DIR/model/mine.yaml, DIR/sweeps/mine.yaml), as
ATTNBENCH_CONFIG=DIR does; --cfg job prints the composed configuration; --info all and --hydra-help
tell more.
"""


def help_text(overrides: Sequence[str], *, resolve: bool = False) -> str:
    """The whole text, for the configuration of a command line."""
    config = OmegaConf.to_yaml(compose_config(overrides), resolve=resolve)
    return Template(template()).substitute(CONFIG=config)


def template() -> str:
    """Hydra's help template, with the choices of every group."""
    names = {group: choices(group) for group in GROUPS}
    names["sweeps"] = sorted(config_files("sweeps"))
    lines = [f"  {group:<10} {', '.join(found)}" for group, found in names.items()]
    text = _TEMPLATE.replace("@CHOICES@", "\n".join(lines))
    text = text.replace("@DECODE_CHAINS@", _chains(DECODE_CHAINS))
    return text.replace("@CHAINS@", _chains(CHAINS))


def _chains(chains: dict[str, tuple[str, ...]]) -> str:
    """The order in which attention=auto tries backends, on each kind of device."""
    return "\n".join(
        textwrap.fill(
            ", ".join(names),
            width=88,
            initial_indent=f"  {device:<11}",
            subsequent_indent=" " * 13,
        )
        for device, names in chains.items()
    )
