"""Slurm's commands as small scripts that answer from files, and fail as a test tells them to.

In the folder of :class:`FakeSlurm`: ``script-N`` are the batch scripts that were submitted,
``queue`` and ``accounts`` what squeue and sacct answer, ``names`` the jobs that sbatch has taken,
``calls`` every call of squeue and sacct, and ``then-COMMAND`` shell lines that a command runs
before it answers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

_THEN = '[ -e "$FAKE/then-$(basename "$0")" ] && . "$FAKE/then-$(basename "$0")"\n'

_SCRIPTS = {
    "sbatch": """
number=$(ls "$FAKE" | grep -c '^script-')
cp "$1" "$FAKE/script-$number"
job=$((701 + number))
name=$(sed -n "s/^#SBATCH --job-name=//p" "$1")
last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" "$1")
if [ -z "$last" ]; then echo "$job|N/A|$name" >> "$FAKE/names"
else for task in $(seq 0 $last); do echo "$job|$task|$name" >> "$FAKE/names"; done; fi
THEN
echo "Submitted batch job $job"
""",
    "squeue": """
echo "$0" >> "$FAKE/calls"
THEN
case "$*" in *%j*) cat "$FAKE/names" ;; *) cat "$FAKE/queue" ;; esac
""",
    "sacct": 'echo "$0" >> "$FAKE/calls"\nTHEN\ncat "$FAKE/accounts"\n',
    "scontrol": 'echo "$@" >> "$FAKE/scontrol"\nTHEN\necho "MaxArraySize            = 5"\n',
    "sinfo": "THEN\necho debug\n",
    "scancel": 'THEN\necho "$@" >> "$FAKE/cancelled"\n',
    # The command, without srun's options.
    "srun": """
while [ "${1#--}" != "$1" ]; do [ "$1" = --unbuffered ] || shift; shift; done
THEN
exec "$@"
""",
}


@dataclass(slots=True)
class FakeSlurm:
    """The folder through which the commands and a test talk."""

    path: Path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def read(self, name: str) -> str:
        path = self.path / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def then(self, command: str, lines: str) -> None:
        """Have a command run shell lines before it answers."""
        self.write(f"then-{command}", lines)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put the commands on the path."""
    commands = folder / "commands"
    data = folder / "data"
    for made in (commands, data):
        made.mkdir(parents=True)
    for name, body in _SCRIPTS.items():
        script = commands / name
        script.write_text(f"#!/bin/bash\n{body.replace('THEN', _THEN)}", encoding="utf-8")
        script.chmod(0o755)
    for name in ("queue", "names", "accounts"):
        (data / name).touch()
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(data))
    return FakeSlurm(data)
