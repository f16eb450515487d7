"""Placement of a packed batch's documents on ranks: equal tokens, equal work, few keys to send.

Under a causal mask a token at position p attends to p + 1 keys. Each rank gets as many tokens as
any other, and close to the mean number of query-key pairs, but documents stay whole where they
can: only a run of tokens whose document begins on another rank needs keys from there.

Two ways to place documents are tried, and the result with the fewest keys to receive is taken:

    settled   a local search assigns whole documents to ranks
              (:mod:`~parallel.context.documents.owners`), which then exchange heavy tokens for
              light ones until all have their shares (:mod:`~parallel.context.documents.transfers`)
    windows   ranks are filled one after another with windows of the documents laid end to end
              (:mod:`~parallel.context.documents.windows`), in several orders

:mod:`~parallel.context.documents.lower_bound` says how many keys any such placement needs.

Other ways to the same end: WLB-LLM (Wang et al. 2025) splits each document over all ranks, or none;
ByteScale (Ge et al. 2025) and FlexSP (Wang et al. 2025) give long sequences more ranks;
MagiAttention deals out chunks of equal size by their work. Everything is computed in integers, so
that all ranks find the same placement.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallel.context.documents import owners, runs, transfers, windows
from parallel.context.documents.runs import Run, pairs_up_to

TOLERANCE = 0.01
"""Pairs that a rank may have above or below the mean, as a share of it."""

_TRIED_STEPS = 1024
"""Orders of windows are tried until documents x ranks x orders reach this; two in any case."""

_MOST_ORDERS = 16

_SETTLED_STEPS = 1024
"""Owners are settled until documents x ranks^2 x owners reach this; one in any case."""

_MOST_SETTLED = 6

_LARGEST_SETTLED = 512
"""Documents x ranks up to which owners are searched: beyond that windows alone are faster."""

_SEARCHES_STEPS = 256
"""Local searches for owners until documents x ranks x searches reach this; one in any case."""

_MOST_SEARCHES = 8

_CHANGES = 2000
"""Changes of owners to look at, about 10 us each."""

_BEAM = 3

_PLACEMENTS_KEPT = 64
"""A training run packs each batch anew; its layers and passes share one placement."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Placement:
    """Which runs of which documents each rank holds."""

    lengths: tuple[int, ...]
    """Tokens of each document."""
    parts: tuple[tuple[Run, ...], ...]
    """The runs of each rank in the order of its local tokens.

    Whole documents come first, then beginnings of documents, then other runs, of several of one
    document the first before the second: what attends to a rank's own keys alone is one slice of
    its tokens under any mask, and so is what does not.
    """

    @property
    def num_ranks(self) -> int:
        return len(self.parts)

    @property
    def local_len(self) -> int:
        """Tokens on each rank; up to one of them, the last, is padding."""
        return -(-sum(self.lengths) // self.num_ranks)

    def tokens(self, rank: int) -> int:
        """Tokens of ``rank`` without padding."""
        return sum(run.tokens for run in self.parts[rank])

    def pairs(self, rank: int) -> int:
        """Causal query-key pairs that ``rank`` computes."""
        return sum(run.pairs for run in self.parts[rank])

    def is_whole(self, run: Run) -> bool:
        return run.start == 0 and run.stop == self.lengths[run.document]

    def ends(self, rank: int) -> dict[int, int]:
        """For each document of which ``rank`` has tokens, the position after its last one."""
        return runs.ends(self.parts[rank])

    def received(self, rank: int) -> int:
        """Keys of other ranks that the queries of ``rank`` see under a causal mask."""
        return runs.keys_received(self.parts[rank])


@functools.lru_cache(maxsize=_PLACEMENTS_KEPT)
def place(lengths: tuple[int, ...], num_ranks: int) -> Placement:
    """Place documents of these lengths, of which some may be empty.

    Tokens differ by at most one between ranks. Pairs differ from the mean by at most
    :data:`TOLERANCE` of it and the pairs of one token, which is at most the longest document.
    """
    pairs = sum(map(pairs_up_to, lengths))
    slack = int(TOLERANCE * pairs / num_ranks)
    band = pairs // num_ranks - slack, pairs // num_ranks + slack
    documents = sum(length > 0 for length in lengths)
    best: Sequence[Sequence[Run]] | None = None
    received: int | None = None
    if documents > 1 and 1 < num_ranks <= _LARGEST_SETTLED // documents:
        for parts in _settled(lengths, num_ranks, band):
            keys = sum(map(runs.keys_received, parts))
            if received is None or keys < received:
                best, received = parts, keys
    for order in range(_num_orders(documents, num_ranks)):
        if received == 0:
            break
        rest = [[Run(document, 0, length)] for document, length in enumerate(lengths) if length]
        filled = windows.fill(rest, num_ranks, band, order, received)
        if filled is not None:
            keys = sum(map(runs.keys_received, filled))
            if received is None or keys < received:
                best, received = filled, keys
    assert best is not None, "without a limit windows are found"
    return _arranged(lengths, best)


def _num_orders(documents: int, num_ranks: int) -> int:
    if documents < 2 or num_ranks < 2:
        return 1
    return min(_MOST_ORDERS, max(2, _TRIED_STEPS // (documents * num_ranks)))


def _settled(
    lengths: tuple[int, ...], num_ranks: int, band: tuple[int, int]
) -> Iterator[list[list[Run]]]:
    """Placements by exchanges between ranks that own documents."""
    documents = [document for document, length in enumerate(lengths) if length]
    documents.sort(key=lambda document: (-lengths[document], document))
    steps = len(documents) * num_ranks
    tokens, more = divmod(sum(lengths), num_ranks)
    exchanges = owners.Exchanges(
        lengths=[lengths[document] for document in documents],
        tokens=tokens,
        pairs=(band[0] + band[1]) // 2,
        slack=(band[1] - band[0]) // 2,
    )
    likely = owners.likely_owners(
        exchanges,
        num_ranks,
        starts=min(_MOST_SEARCHES, max(1, _SEARCHES_STEPS // steps)),
        kept=min(_MOST_SETTLED, max(1, _SETTLED_STEPS // (steps * num_ranks))),
        budget=_CHANGES,
    )
    shares = transfers.Shares(
        tokens=tuple(tokens + (rank < more) for rank in range(num_ranks)),
        least_pairs=band[0],
        most_pairs=band[1],
    )
    for owned in likely:
        parts = [
            [document for bit, document in enumerate(documents) if part >> bit & 1]
            for part in owned
        ]
        yield transfers.settle(parts, lengths, shares, _BEAM)


def _arranged(lengths: tuple[int, ...], parts: Iterable[Iterable[Run]]) -> Placement:
    """The placement, with each rank's runs joined where they touch and in local order."""
    found: list[tuple[Run, ...]] = []
    for part in parts:
        joined: list[Run] = []
        for run in sorted(part):
            last = joined[-1] if joined else None
            if last and last.document == run.document and last.stop == run.start:
                joined[-1] = Run(run.document, last.start, run.stop)
            else:
                joined.append(run)
        keyed = []
        seen: dict[int, int] = defaultdict(int)
        for run in joined:
            place_in_document = seen[run.document]
            seen[run.document] += 1
            kind = 0 if run.tokens == lengths[run.document] else 1 if run.start == 0 else 2
            keyed.append((kind, place_in_document, run))
        found.append(tuple(run for _, _, run in sorted(keyed)))
    return Placement(lengths=lengths, parts=tuple(found))
