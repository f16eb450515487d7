"""``attnbench-pack``: moves the records of results folders into compressed archives, or back."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cases import format as fmt
from harness.commands.results_folder import (
    complain,
    require_folder,
    require_sweeps,
    results_parser,
)
from harness.printing import say, warn
from harness.run.run_folder import runs_of
from harness.store.packing import Packed, PackingError, pack, unpack
from harness.store.record import RecordStore, in_short

COMMAND = "attnbench-pack"


def main(arguments: list[str] | None = None) -> int:
    """Pack or unpack the records of a results folder; returns the exit code."""
    parser = results_parser(
        COMMAND,
        "Move records into compressed archives, records/archive/SWEEP.jsonl.xz, which "
        "every command reads like files. Each file is removed once the archive has given it back "
        "byte for byte. New records join the archive of their sweep; none is dropped.",
        sweeps="whose records to pack; all records if none is named",
    )
    parser.add_argument(
        "--unpack",
        action="store_true",
        help="make all archived records files again, and remove the archives",
    )
    options = parser.parse_args(arguments)
    results: Path = options.results
    store = RecordStore(results)
    try:
        require_folder(results, ["records"])
        if options.unpack and options.sweeps:
            raise ValueError("--unpack: makes all records files again; name no SWEEP")
        require_sweeps(results, options.sweeps)
        _require_no_run(results)
    except ValueError as error:
        return complain(error, COMMAND)
    try:
        done = unpack(store) if options.unpack else pack(store, options.sweeps)
    except PackingError as error:
        return complain(error, COMMAND)
    except OSError as error:
        problem = f"{store.folder}: {error.strerror}; what was not packed is still a file"
        return complain(problem, COMMAND)
    for line in in_short(done.left):
        warn(line, command=COMMAND)
    say(_said(done, store, options.unpack))
    return 1 if done.left else 0


def _require_no_run(results: Path) -> None:
    """Raise ValueError if a run measures into the folder."""
    for folder, run in runs_of(results):
        if not run.is_submitted and folder.is_running(run):
            raise ValueError(
                f"{folder.path}: a run measures into {results}; pack when it has ended"
            )


def _said(done: Packed, store: RecordStore, unpacked: bool) -> str:
    records = fmt.counted(done.num_records, "record")
    if unpacked:
        return f"{records} unpacked into {store.folder}"
    if not done.num_records:
        return f"{store.folder}: no record to pack"
    size = sum(path.stat().st_size for path in done.archives) / 1e6
    archives = fmt.counted(len(done.archives), "archive")
    return f"{records} packed into {archives} of {size:.2f} MB in {store.archives.folder}"


if __name__ == "__main__":
    sys.exit(main())
