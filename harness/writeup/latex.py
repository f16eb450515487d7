r"""The write-up as LaTeX: one file that compiles as it stands, with its figures beside it.

A page has a size: tables that are too wide are cut into blocks of columns that repeat what
names the row, too long ones into blocks of rows, and very long ones end with a word on where
the rest is.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.render.latex import CHARACTER_MM, COLUMN_GAP_MM, escape, tabular
from harness.render.table import Column
from harness.writeup.document import Document, NumberedFigure, NumberedTable, Section

TEXT_WIDTH_MM = 174

MAX_WIDTH_MM = 255
"""Estimated width beyond which a table is scaled down to the width of the text."""

ROWS_PER_BLOCK = 44
MAX_ROWS = 132

LATEX_TIMEOUT_S = 300

_PREAMBLE = r"""\documentclass[10pt]{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[a4paper,margin=18mm]{geometry}
\usepackage{array,booktabs,graphicx,float}
\usepackage[hidelinks]{hyperref}
\setlength{\parindent}{0pt}
\setlength{\parskip}{4pt plus 1pt}
\emergencystretch=3em
\hbadness=10000
\newsavebox{\attnbenchbox}
\newcommand{\fitted}{%
  \ifdim\wd\attnbenchbox>\linewidth
    \resizebox{\linewidth}{!}{\usebox{\attnbenchbox}}%
  \else\usebox{\attnbenchbox}\fi}
"""


class LatexError(RuntimeError):
    """LaTeX did not compile the document; the message is one line with its own words."""


def to_latex_document(document: Document) -> str:
    """The whole file; figures are expected as ``figures/ANCHOR.pdf``."""
    lines = [_PREAMBLE, rf"\title{{{escape(document.title)}}}", r"\author{attnbench}", r"\date{}"]
    lines += [r"\begin{document}", r"\maketitle"]
    findings = list(document.main_findings())
    if findings:
        lines += [r"\section*{Main findings}", r"\begin{itemize}\setlength{\itemsep}{0pt}"]
        lines += [
            rf"\item {kind}~\ref{{{anchor}}}: {escape(finding)}"
            for kind, _, anchor, finding in findings
        ]
        lines.append(r"\end{itemize}")
    lines += [rf"\textbf{{Unreadable:}} {escape(problem)}\par" for problem in document.problems]
    for section in document.sections:
        lines += _section(section)
    lines += _closing(document)
    lines.append(r"\end{document}")
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield rf"\section{{{escape(section.title)}}}\label{{{section.anchor}}}"
    yield f"{escape(section.about)} {escape(section.counts)}\n"
    if section.command:
        yield rf"{{\small\raggedright\texttt{{{_breakable(section.command)}}}\par}}"
    for item in section.tables:
        yield from _table(item)
    for figure in section.figures:
        yield from _figure(figure)
    if section.failures:
        words = (
            f"{count} {escape(status)} ({escape(reason)})"
            for status, reason, count in section.failures
        )
        yield rf"Without a number: {'; '.join(words)}.\par"


def _breakable(command: str) -> str:
    """A command line that may break after commas, too."""
    return escape(command).replace(",", r",\allowbreak{}").replace(r"\_", r"\_\allowbreak{}")


def _table(item: NumberedTable) -> Iterator[str]:
    cells = item.table.cells()
    blocks = list(_column_blocks(item.table.columns, cells))
    for part, rows in enumerate(_row_blocks(cells[:MAX_ROWS])):
        for place, columns in enumerate(blocks):
            yield r"\begin{table}[H]\centering"
            if part == place == 0:
                yield rf"\caption{{{escape(item.table.caption)}}}\label{{{item.anchor}}}"
            else:
                yield rf"{{\small Table~\ref{{{item.anchor}}}, continued}}\par"
            yield r"\smallskip\begin{lrbox}{\attnbenchbox}\footnotesize"
            chosen = [[row[index] for index in columns] for row in rows]
            yield from tabular([item.table.columns[index] for index in columns], chosen)
            yield r"\end{lrbox}\fitted"
            yield r"\end{table}"
    notes = list(item.table.footnotes)
    if len(cells) > MAX_ROWS:
        notes.append(f"{len(cells) - MAX_ROWS} more rows are in {item.source.name}.csv.")
    yield from (rf"{{\footnotesize {escape(note)}\par}}" for note in notes)
    if item.finding:
        yield rf"\textit{{{escape(item.finding)}}}\par"


def _row_blocks(cells: list[list[str]]) -> Iterator[list[list[str]]]:
    """Blocks of about equal length, so that none is left with a line or two."""
    count = max(1, -(-len(cells) // ROWS_PER_BLOCK))
    size = -(-len(cells) // count)
    for start in range(0, max(1, len(cells)), max(1, size)):
        yield cells[start : start + size]


def _column_blocks(columns: list[Column], cells: list[list[str]]) -> Iterator[list[int]]:
    """Indices of the columns of each block; those that name the row are in all of them."""
    widths = []
    for index, column in enumerate(columns):
        longest = max([len(column.header), *(len(row[index]) for row in cells[:MAX_ROWS])])
        widths.append(CHARACTER_MM * longest + COLUMN_GAP_MM)
    named = [index for index, column in enumerate(columns) if column.point]
    base = sum(widths[index] for index in named)
    total = sum(widths) - base
    # As few blocks as fit, each about as wide as the others.
    count = max(1, math.ceil(total / max(1.0, MAX_WIDTH_MM - base)))
    block, width = list(named), 0.0
    for index, column in enumerate(columns):
        if column.point:
            continue
        if len(block) > len(named) and width + widths[index] / 2 > total / count:
            yield block
            block, width = list(named), 0.0
        block.append(index)
        width += widths[index]
    yield block


def _figure(item: NumberedFigure) -> Iterator[str]:
    width_mm = min(TEXT_WIDTH_MM, item.drawn.figure.get_figwidth() * 25.4)
    yield r"\begin{figure}[H]\centering"
    yield (
        rf"\includegraphics[width={width_mm:.0f}mm,height=0.78\textheight,keepaspectratio]"
        rf"{{figures/{item.anchor}.pdf}}"
    )
    yield rf"\caption{{{escape(item.drawn.caption)}}}\label{{{item.anchor}}}"
    yield r"\end{figure}"
    if item.drawn.finding:
        yield rf"\textit{{{escape(item.drawn.finding)}}}\par"


def _closing(document: Document) -> Iterator[str]:
    yield r"\section*{Environment}"
    yield r"\begin{tabular}{@{}p{0.25\linewidth}p{0.7\linewidth}@{}}\toprule"
    for name, value in document.environment:
        yield rf"\raggedright {escape(name)} & \raggedright\arraybackslash {escape(value)} \\"
    yield r"\bottomrule\end{tabular}"
    yield r"\section*{Method}"
    yield r"\begin{description}\setlength{\itemsep}{0pt}"
    for heading, text in document.method:
        yield rf"\item[{escape(heading)}] {escape(text)}"
    yield r"\end{description}"
    yield r"\section*{What is missing}"
    if not document.gaps:
        yield "Nothing: every case of every sweep has a result."
        return
    yield r"\begin{itemize}\setlength{\itemsep}{0pt}\raggedright"
    for gap in document.gaps:
        yield rf"\item {_breakable(gap.what)}: \texttt{{{_breakable(gap.command)}}}"
    yield r"\end{itemize}"


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
