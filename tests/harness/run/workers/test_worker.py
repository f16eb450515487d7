"""The start of workers, which every sweep waits for."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT


def test_no_dynamo_before_a_case_compiles() -> None:
    """It takes as long to import as torch itself."""
    chosen = "TASKS['attention'], TASKS['train_step'], BACKENDS['naive'], BACKENDS['auto']"
    code = (
        "import sys, harness.run.workers.worker; from harness.cases.task import TASKS; "
        f"from kernels import BACKENDS; {chosen}; "
        "print([name for name in ('torch._dynamo', 'matplotlib', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
