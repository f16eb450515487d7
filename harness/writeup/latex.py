r"""The appendix as LaTeX, and what the paper shares with it: one file, its figures beside it.

A page has a size: tables that are too wide are cut into blocks of columns, whose rows have numbers
then, and long ones end with a word on where the rest is. A listing beside other tables of its sweep
is named and not printed: it repeats them, measurement by measurement. The CSV files and the page
writeup.html have every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from harness.cases import format as fmt
from harness.render.latex import CHARACTER_MM, COLUMN_GAP_MM, escape, tabular
from harness.render.table import Column
from harness.writeup.document import Document, NumberedFigure, NumberedTable, Section

TEXT_WIDTH_MM = 174

MAX_WIDTH_MM = 255
"""Estimated width beyond which a table is scaled down to the width of the text."""

MAX_ROWS = 56
"""Rows that are printed, about a page of them."""

FIGURE_HEIGHT = 0.4
"""Greatest height of a figure in the appendix, over that of the text."""

PRINTED = (
    f"Printed are the first {MAX_ROWS} rows of a table, in its order, and no table that lists "
    "every measurement beside others. All rows and tables are in the CSV files of each sweep, in "
    "its folder tables, and in writeup.html."
)

PREAMBLE = r"""\documentclass[10pt]{article}
\usepackage[T1]{fontenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[a4paper,margin=18mm]{geometry}
\usepackage{array,booktabs,graphicx,float}
\usepackage[hidelinks]{hyperref}
\setlength{\parindent}{0pt}
\setlength{\parskip}{4pt plus 1pt}
\setlength{\abovecaptionskip}{3pt}
\setlength{\belowcaptionskip}{2pt}
\setlength{\intextsep}{6pt plus 2pt}
\emergencystretch=3em
\hbadness=10000
\vbadness=10000
\newsavebox{\attnbenchbox}
\newcommand{\fitted}{%
  \ifdim\wd\attnbenchbox>\linewidth
    \resizebox{\linewidth}{!}{\usebox{\attnbenchbox}}%
  \else\usebox{\attnbenchbox}\fi}
"""


def to_latex_appendix(document: Document) -> str:
    """The whole file; figures are expected as ``figures/ANCHOR.pdf``."""
    lines = [PREAMBLE, rf"\title{{{escape(document.title)}: everything}}"]
    lines += [r"\author{attnbench}", r"\date{}"]
    lines += [r"\renewcommand{\thetable}{A\arabic{table}}"]
    lines += [r"\renewcommand{\thefigure}{A\arabic{figure}}"]
    lines += [r"\setcounter{tocdepth}{2}", r"\begin{document}", r"\maketitle"]
    lines += [rf"\textbf{{Unreadable:}} {escape(problem)}\par" for problem in document.problems]
    lines += [escape(PRINTED), r"\tableofcontents"]
    for theme in document.themes:
        if theme.sections:
            lines.append(rf"\clearpage\section{{{escape(theme.title)}}}\label{{{theme.anchor}}}")
        for section in theme.sections:
            lines += _section(section)
    lines.append(r"\section*{Environment}")
    lines += environment(document.environment)
    lines.append(r"\section*{Method}")
    lines += paragraphs(document.method)
    lines += _missing(document)
    lines.append(r"\end{document}")
    return "\n".join(lines) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield rf"\subsection{{{escape(section.title)}}}\label{{{section.anchor}}}"
    yield f"{escape(section.about)} {escape(section.counts)}\n"
    if section.command:
        yield rf"{{\small\raggedright\texttt{{{breakable(section.command)}}}\par}}"
    is_alone = all(item.table.is_listing for item in section.tables)
    for item in section.tables:
        yield from _named(item) if item.table.is_listing and not is_alone else _table(item)
    for figure in section.figures:
        yield from figure_lines(figure, FIGURE_HEIGHT)
        if figure.drawn.finding:
            yield rf"\textit{{{escape(figure.drawn.finding)}}}\par"
    if section.failures:
        words = (
            f"{count} {escape(status)} ({escape(reason)})"
            for status, reason, count in section.failures
        )
        yield rf"{{\small Without a number: {'; '.join(words)}.\par}}"
    if section.unshown:
        names = ", ".join(map(breakable, section.unshown))
        yield rf"{{\small\raggedright Without a row of their own: {names}.\par}}"


def breakable(command: str) -> str:
    """A command line that may break after commas, too."""
    return escape(command).replace(",", r",\allowbreak{}").replace(r"\_", r"\_\allowbreak{}")


def _named(item: NumberedTable) -> Iterator[str]:
    """A table that is not printed: its number, its caption and where it is."""
    rows = fmt.counted(len(item.table.rows), "row")
    yield rf"\refstepcounter{{table}}\label{{{item.anchor}}}"
    yield (
        rf"{{\small Table~\thetable{{}} is not printed: {escape(item.table.caption)} "
        rf"{escape(f'Its {rows} are in {item.source.name}.csv and in writeup.html.')}\par}}"
    )
    if item.finding:
        yield rf"\textit{{{escape(item.finding)}}}\par"


def _table(item: NumberedTable) -> Iterator[str]:
    cells = item.table.cells()
    columns = item.table.columns
    blocks = list(_column_blocks(columns, cells))
    if len(blocks) > 1:
        # Blocks beyond the first know their rows by number.
        columns = [Column(key="", header="row", format=str), *columns]
        cells = [[str(number), *row] for number, row in enumerate(cells, 1)]
        blocks = [[0, *(index + 1 for index in block)] for block in blocks]
    for place, block in enumerate(blocks):
        yield r"\begin{table}[H]\centering"
        if place == 0:
            yield rf"\caption{{{escape(item.table.caption)}}}\label{{{item.anchor}}}"
        else:
            yield rf"{{\small Table~\ref{{{item.anchor}}}, continued}}\par"
        chosen = [[row[index] for index in block] for row in cells[:MAX_ROWS]]
        yield from fitted([columns[index] for index in block], chosen)
        yield r"\end{table}"
    notes = [*item.table.footnotes, *item.folded]
    if len(cells) > MAX_ROWS:
        notes.append(
            f"{len(cells) - MAX_ROWS} more rows are in {item.source.name}.csv and in writeup.html."
        )
    yield from (rf"{{\scriptsize {escape(note)}\par}}" for note in notes)
    if item.finding:
        yield rf"\textit{{{escape(item.finding)}}}\par"


def fitted(
    columns: Sequence[Column], cells: list[list[str]], size: str = "footnotesize"
) -> Iterator[str]:
    """A tabular in letters of LaTeX's ``size``, scaled down to the line where it is wider."""
    yield rf"\begin{{lrbox}}{{\attnbenchbox}}\{size}"
    yield from tabular(list(columns), cells)
    yield r"\end{lrbox}\fitted"


def _column_blocks(columns: list[Column], cells: list[list[str]]) -> Iterator[list[int]]:
    """Indices of the columns of each block: as few blocks as fit, each about as wide."""
    widths = []
    for index, column in enumerate(columns):
        longest = max([len(column.header), *(len(row[index]) for row in cells[:MAX_ROWS])])
        widths.append(CHARACTER_MM * longest + COLUMN_GAP_MM)
    total = sum(widths)
    share = total / max(1, math.ceil(total / MAX_WIDTH_MM))
    block: list[int] = []
    width = 0.0
    for index, one in enumerate(widths):
        if block and width + one / 2 > share:
            yield block
            block, width = [], 0.0
        block.append(index)
        width += one
    yield block


def figure_lines(item: NumberedFigure, height: float, caption: str = "") -> Iterator[str]:
    """A figure with its caption, or another one, at most as high as this part of the text."""
    width_mm = min(TEXT_WIDTH_MM, item.drawn.figure.get_figwidth() * 25.4)
    yield r"\begin{figure}[H]\centering"
    yield (
        rf"\includegraphics[width={width_mm:.0f}mm,height={height}\textheight,keepaspectratio]"
        rf"{{figures/{item.anchor}.pdf}}"
    )
    yield rf"\caption{{{escape(caption or item.drawn.caption)}}}\label{{{item.anchor}}}"
    yield r"\end{figure}"


def environment(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What the cases ran on, as a table of names and values."""
    yield r"{\small\begin{tabular}{@{}p{0.25\linewidth}p{0.7\linewidth}@{}}\toprule"
    for name, value in rows:
        yield rf"\raggedright {escape(name)} & \raggedright\arraybackslash {escape(value)} \\"
    yield r"\bottomrule\end{tabular}\par}"


def paragraphs(items: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Headings with a paragraph each."""
    yield r"\begin{description}\setlength{\itemsep}{0pt}\setlength{\parskip}{1pt}"
    for heading, text in items:
        # Names of cases are longer than a line, and hold no other place to break.
        broken = escape(text).replace(r"\_", r"\_\allowbreak{}")
        yield rf"\item[{escape(heading)}] {broken}"
    yield r"\end{description}"


def _missing(document: Document) -> Iterator[str]:
    yield r"\section*{What is missing}"
    if not document.gaps:
        yield "Nothing: every case of every sweep has a result."
        return
    yield r"\begin{itemize}\setlength{\itemsep}{0pt}\raggedright"
    for gap in document.gaps:
        yield rf"\item {breakable(gap.what)}: \texttt{{{breakable(gap.command)}}}"
    yield r"\end{itemize}"
