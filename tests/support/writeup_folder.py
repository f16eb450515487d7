"""Fixtures: a small results folder, its document, and both documents in every format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.writeup.document import Document

# The fixtures import what they use: every run of tests loads this module, and few need matplotlib.


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sweeps, one of them with a case that was never measured."""
    from records import in_rounds, write_plan
    from writeup_examples import scaling, steps

    from harness.store.record import RecordStore

    folder = tmp_path_factory.mktemp("written") / "results_50%"
    store = RecordStore(folder)
    store.create()
    for record in map(in_rounds, [*scaling(), *steps()]):
        store.write(record)
    write_plan(
        folder,
        "lengths",
        scaling(),
        tables=["attention_summary", "flash_benchmarking", "cases"],
        figures=["attention_scaling", "tflops_over_length"],
        missing=["attention-planned-0123456789"],
    )
    write_plan(folder, "steps", steps(), tables=["summary"], figures=["step_time"])
    return folder


@pytest.fixture(scope="session")
def document(results: Path) -> Document:
    from harness.writeup.collecting import collect

    return collect([results])


@pytest.fixture(scope="session")
def written(results: Path, document: Document) -> Path:
    """The folder with both documents in every format that can be made here."""
    from harness.commands.writeup import write_document

    folder = results / "writeup"
    write_document(document, folder)
    return folder
