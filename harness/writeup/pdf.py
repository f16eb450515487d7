"""A LaTeX file made into a PDF, where a TeX is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

LATEX_TIMEOUT_S = 300


class LatexError(RuntimeError):
    """LaTeX did not compile the document; the message is one line with its own words."""


def compile_pdf(tex: Path) -> Path | None:
    """The PDF beside ``tex``; None where no TeX is installed.

    Raises:
        LatexError: where LaTeX fails, or leaves references undefined.
    """
    program = shutil.which("pdflatex")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        log = ""
        # The second run knows the numbers that the first one gave.
        for _ in range(2):
            done = subprocess.run(
                [
                    *(program, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape"),
                    *(f"-output-directory={name}", tex.name),
                ],
                cwd=tex.parent,
                env={**os.environ, "SOURCE_DATE_EPOCH": "0", "max_print_line": "1000"},
                capture_output=True,
                timeout=LATEX_TIMEOUT_S,
                check=False,
            )
            log = done.stdout.decode(errors="replace")
            if done.returncode:
                error = re.search(r"^! .*$", log, re.MULTILINE)
                raise LatexError(f"{tex}: {error[0] if error else log.strip()[-200:]}")
        if warning := re.search(r"LaTeX Warning: .*undefined.*", log):
            raise LatexError(f"{tex}: {warning[0]}")
        pdf = tex.with_suffix(".pdf")
        shutil.copyfile(Path(name) / pdf.name, pdf)
    return pdf
