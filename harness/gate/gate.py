"""The gate: tensors of an attention call in, findings out.

Every element has to be finite. Every batch entry and head is held to identities of whole tensors
(:mod:`harness.gate.identities`), and rows of every tile of every head are compared with float64
(:mod:`harness.gate.exact`), others at each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.gate import exact
from harness.gate.comparison import Place, compare, errors_of
from harness.gate.exact import Rows
from harness.gate.findings import Finding
from harness.gate.identities import check_identities
from harness.gate.lse import check_lse
from harness.gate.sampling import draw_rows
from harness.gate.scoring import EXACT, Arithmetic, Mask, Scoring
from harness.gate.sink_gradient import SinkGradient
from harness.gate.tolerances import Format

SCORES_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}
"""Scores that are held at once; some four float64 tensors of that size live together."""

CAREFUL_ROWS = 64
"""Rows of a head on which the careful computation is carried out."""

POSITIONS_AT_ONCE = 4096
"""Rows of a window are compared in blocks that reach over so many positions, or over a window if
that is more: each then meets few keys that none of its rows sees."""

OF_QUERIES = ("q", "o", "do", "dq", "lse")


@dataclass(kw_only=True, slots=True)
class Part:
    """A dense part of a call: the whole of a dense batch, or one sequence of a packed one."""

    tensors: dict[str, Tensor]
    """q, o, do, dq [B, heads, S, D], k, v, dk, dv [B, key-value heads, K, D]; lse [B, heads, S]."""
    causal: bool
    scale: float
    window: int | None = None
    prefix_len: int = 0
    softcap: float | None = None
    sinks: Tensor | None = None
    """A logit for each query head, [heads]."""
    sequence: int | None = None
    """Which sequence of a packed batch this is."""
    rounds_scores: bool = False
    """Whether the attention rounds scores to the tensors' dtype."""
    share: tuple[int, int] = (0, 1)
    """Of several ranks that hold the same tensors: which one this is, of how many."""


def check_part(
    part: Part,
    number_format: Format,
    generator: torch.Generator,
    of_sinks: SinkGradient | None = None,
) -> Iterator[Finding]:
    """All findings of one part of a call, those that hold as well.

    Args:
        generator: draws the rows, on the CPU; the next check gets others from it.
        of_sinks: takes the part's share of their gradient.
    """
    yield from _check_finite(part)
    grouped = _by_group(part.tensors)
    sinks = None if part.sinks is None else part.sinks.unflatten(0, (grouped["k"].shape[1], -1))
    for batch, groups in _chunks(grouped, part):
        tensors = {name: x[batch, groups] for name, x in grouped.items()}
        group = tensors["q"].shape[2]
        heads = _Heads(
            tensors=tensors,
            scoring=Scoring(
                mask=_mask(part),
                scale=part.scale,
                softcap=part.softcap,
                sinks=None if sinks is None else sinks[groups],
            ),
            careful=number_format.careful(rounds_scores=part.rounds_scores),
            place=_places(part, batch.start, groups.start, group),
            first_head=groups.start * group,
        )
        yield from heads.check(number_format, generator, of_sinks)


def _mask(part: Part) -> Mask:
    return Mask(
        causal=part.causal,
        offset=part.tensors["k"].shape[2] - part.tensors["q"].shape[2],
        window=part.window,
        prefix_len=part.prefix_len,
    )


def _check_finite(part: Part) -> Iterator[Finding]:
    """Every element of every result."""
    for name in ("o", "dq", "dk", "dv"):
        x = part.tensors.get(name)
        if x is None:
            continue
        finite = torch.isfinite(x)
        error, said = 0.0, ""
        if not bool(finite.all()):
            batch, head, row, column = (~finite).nonzero()[0].tolist()
            error = float("inf")
            value = float(x[batch, head, row, column])
            said = f"{name} is {value} in {_entry(part, batch)}, head {head}, row {row}"
        yield Finding(name=f"{name} finite", error=error, tolerance=0.0, said=said)


def _entry(part: Part, batch: int) -> str:
    return f"batch entry {batch}" if part.sequence is None else f"sequence {part.sequence}"


def _places(part: Part, first_batch: int, first_group: int, group: int) -> Place:
    """Says where [b, g] or [b, g, h] of a chunk lies in the call's tensors."""

    def place(index: tuple[int, ...]) -> str:
        b, g, *rest = index
        said = f"{_entry(part, first_batch + b)}, "
        if not rest:
            return f"{said}key-value head {first_group + g}"
        return f"{said}head {(first_group + g) * group + rest[0]}"

    return place


def _by_group(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of query heads as [B, G, H, S, ...], H of them for each key-value head."""
    groups = tensors["k"].shape[1]
    return {
        name: x.unflatten(1, (groups, -1)) if name in OF_QUERIES else x
        for name, x in tensors.items()
    }


def _chunks(grouped: dict[str, Tensor], part: Part) -> Iterator[tuple[slice, slice]]:
    """Batch entries and key-value heads that are compared at once, those of this rank."""
    batch, groups, group, length = grouped["q"].shape[:4]
    rows = min(length, exact.BLOCK)
    seen = grouped["k"].shape[2]
    if part.window is not None:
        seen = min(seen, rows + 2 * part.window)
    at_once = max(1, SCORES_AT_ONCE[grouped["q"].device.type] // (group * rows * seen))
    groups_at_once = min(groups, at_once)
    batch_at_once = max(1, at_once // groups)
    rank, ranks = part.share
    if ranks > 1:
        # Single heads, so that every rank has some of them.
        groups_at_once = batch_at_once = 1
    chunks = [
        (slice(b, min(b + batch_at_once, batch)), slice(g, min(g + groups_at_once, groups)))
        for b in range(0, batch, batch_at_once)
        for g in range(0, groups, groups_at_once)
    ]
    if part.sinks is not None:
        # Of a head whose sink's gradient is compared a rank has every row of every sequence.
        yield from (chunk for chunk in chunks if chunk[1].start % ranks == rank)
        return
    # Packed sequences may have one chunk each: another rank begins with each of them.
    yield from chunks[(rank - (part.sequence or 0)) % ranks :: ranks]


@dataclass(kw_only=True, slots=True)
class _Heads:
    """Some batch entries and heads of a part, few enough to be compared at once."""

    tensors: dict[str, Tensor]
    """q, o, do, dq [B, G, H, S, D], k, v, dk, dv [B, G, K, D], lse [B, G, H, S]."""
    scoring: Scoring
    careful: Arithmetic
    place: Place
    first_head: int
    """The place of the first query head in the call."""

    def check(
        self, number_format: Format, generator: torch.Generator, of_sinks: SinkGradient | None
    ) -> Iterator[Finding]:
        """Rows of o, lse and dq, rows of dk and dv, and the identities."""
        batch, groups, group, length = self.tensors["q"].shape[:4]
        keys = self.tensors["k"].shape[2]
        device = self.tensors["q"].device
        rows = draw_rows(batch * groups * group, length, generator).to(device)
        rows = rows.unflatten(0, (batch, groups, group))

        def query_rows(arithmetic: Arithmetic, chosen: Tensor) -> Rows:
            return self._in_blocks(
                lambda some: exact.rows_of_queries(self.tensors, some, self.scoring, arithmetic),
                chosen,
                group,
                keys,
            )

        reached: dict[str, float] = {}
        right, careful = self._both(query_rows, rows)
        terms_of_dq = right.terms.get("dq")
        yield from self._compare(rows, right, careful, number_format, keys, reached)
        if "lse" in self.tensors:
            given = torch.take_along_dim(self.tensors["lse"], rows, dim=-1)
            yield from check_lse(given, right, careful, number_format, rows, self.place)
        if terms_of_dq is None:
            return
        lse = exact.log_sum_exp(self.tensors["q"], self.tensors["k"], self.scoring)
        if of_sinks is not None:
            of_sinks.add(self.tensors, lse, self.scoring, self.careful, self.first_head)
        rows = draw_rows(batch * groups, keys, generator).to(device)
        rows = rows.unflatten(0, (batch, groups))

        def key_rows(arithmetic: Arithmetic, chosen: Tensor) -> Rows:
            return self._in_blocks(
                lambda some: exact.rows_of_keys(self.tensors, lse, some, self.scoring, arithmetic),
                chosen,
                group,
                length,
            )

        right, careful = self._both(key_rows, rows)
        yield from self._compare(rows, right, careful, number_format, group * length, reached)
        yield from check_identities(self.tensors, reached, terms_of_dq, number_format, self.place)

    def _both(
        self, compute: Callable[[Arithmetic, Tensor], Rows], rows: Tensor
    ) -> tuple[Rows, tuple[Rows, Rows]]:
        """Rows in float64, and some of them in float64 and by the careful computation."""
        right = compute(EXACT, rows)
        some = slice(None, None, max(1, rows.shape[-1] // CAREFUL_ROWS))
        careful = compute(self.careful, rows[..., some])
        return right, (right.some(some), careful)

    def _compare(
        self,
        rows: Tensor,
        right: Rows,
        careful: tuple[Rows, Rows],
        number_format: Format,
        num_terms: int,
        reached: dict[str, float],
    ) -> Iterator[Finding]:
        """Compare what the call gave in these rows, each element a sum of so many terms.

        ``reached`` learns what can be reached.
        """
        exactly, carefully = careful
        for name, terms in right.terms.items():
            got = errors_of(exact.take(self.tensors[name], rows), right.values[name], terms)
            best = errors_of(carefully.values[name], exactly.values[name], exactly.terms[name])
            reached[name] = max(best.worst_head, number_format.least_of_sum(num_terms))
            yield from compare(
                name,
                got,
                best,
                number_format,
                rows=rows,
                place=self.place,
                num_terms=num_terms,
            )

    def _in_blocks(
        self, compute: Callable[[Tensor], Rows], rows: Tensor, group: int, columns: int
    ) -> Rows:
        """Compute as many of the rows at once as may be.

        Args:
            group: query heads to a key-value head; columns: keys of a row, or queries of one.
        """
        batch, groups = rows.shape[:2]
        window = self.scoring.mask.window
        blocks = 1
        if window is not None:
            reach = max(window, POSITIONS_AT_ONCE)
            blocks = -(-columns // reach)
            columns = min(columns, reach + 2 * window)
        limit = SCORES_AT_ONCE[rows.device.type]
        at_once = max(1, limit // (batch * groups * group * columns))
        at_once = min(at_once, -(-rows.shape[-1] // blocks))
        return Rows.joined([compute(some) for some in rows.split(at_once, dim=-1)])
