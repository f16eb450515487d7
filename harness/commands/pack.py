"""``attnbench-pack``: moves the records of results folders into compressed archives, or back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.cases import format as fmt
from harness.printing import say, warn
from harness.run.run_folder import runs_of
from harness.store.packing import Packed, PackingError, pack, unpack
from harness.store.record import RecordStore, in_short
from harness.store.sweep_plan import planned_labels


def main(arguments: list[str] | None = None) -> int:
    """Pack or unpack the records of a results folder; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="attnbench-pack",
        description="Move records into compressed archives, records/archive/SWEEP.jsonl.xz, which "
        "every command reads like files. Each file is removed once the archive has given it back "
        "byte for byte. New records join the archive of their sweep; none is dropped.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    parser.add_argument(
        "sweeps",
        nargs="*",
        metavar="SWEEP",
        help="whose records to pack; all records if none is named",
    )
    parser.add_argument(
        "--unpack",
        action="store_true",
        help="make all archived records files again, and remove the archives",
    )
    options = parser.parse_args(arguments)
    results: Path = options.results
    store = RecordStore(results)
    if reason := _why_not(results, options.sweeps, options.unpack):
        return _complain(reason)
    try:
        done = unpack(store) if options.unpack else pack(store, options.sweeps)
    except PackingError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{store.folder}: {error.strerror}; what was not packed is still a file")
    for line in in_short(done.left):
        warn(line, command="attnbench-pack")
    say(_said(done, store, options.unpack))
    return 1 if done.left else 0


def _why_not(results: Path, named: list[str], unpacks: bool) -> str | None:
    """The mistake in the arguments, or the run that measures, in one line."""
    if not results.is_dir():
        return f"RESULTS={results}: no such folder"
    if not (results / "records").is_dir():
        return f"RESULTS={results}: not a results folder (without records)"
    if unpacks and named:
        return "--unpack: makes all records files again; name no SWEEP"
    known = planned_labels(results)
    for label in named:
        if label not in known:
            return f"SWEEP={label}: not in {results}; one of {', '.join(known) or 'none'}"
    for folder, run in runs_of(results):
        if not run.is_submitted and folder.is_running(run):
            return f"{folder.path}: a run measures into {results}; pack when it has ended"
    return None


def _said(done: Packed, store: RecordStore, unpacked: bool) -> str:
    records = fmt.counted(done.num_records, "record")
    if unpacked:
        return f"{records} unpacked into {store.folder}"
    if not done.num_records:
        return f"{store.folder}: no record to pack"
    size = sum(path.stat().st_size for path in done.archives) / 1e6
    archives = fmt.counted(len(done.archives), "archive")
    return f"{records} packed into {archives} of {size:.2f} MB in {store.archives.folder}"


def _complain(message: str) -> int:
    warn(message, command="attnbench-pack")
    return 2


if __name__ == "__main__":
    sys.exit(main())
