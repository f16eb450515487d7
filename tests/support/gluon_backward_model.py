"""Runs the source of the Hopper backward kernels on :mod:`gluon_model`.

All programs of a call are modelled, as they add to the same sums of dQ, dK and dV: a few run at
once, and others start in their order as these end. Shared memory that threads have written, which
matmuls read, counts as written once they have issued a fence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from gluon_model import (
    ANYTHING,
    Anything,
    Barrier,
    Buffers,
    Descriptor,
    Language,
    Machine,
    Matmul,
    Place,
    ProtocolError,
    Role,
    Tile,
    load,
    tile_names,
)

KEY_SUMS, KEY_COUNTS = 1 << 40, 1 << 41
"""Addresses; sums and counts of dQ begin at 0."""

Rows = tuple[int, int]
"""A head and the first of 64 rows, counted through a packed batch."""

Range = tuple[int, int] | None
"""The first of columns and their number; None for all."""


@dataclass(frozen=True)
class Pair(Anything):
    """A tile of 64 queries and 64 keys of S, P, dP or dS."""

    kind: str
    query: Rows
    key: Rows
    is_masked: bool = False
    width: int = field(default=0, compare=False)
    """Columns of which S or dP is the product; of P those of which dP has to be."""

    def to(self, _: Any) -> Pair:
        return self

    def __mul__(self, other: Any) -> Pair:
        if (other.query, other.key) != (self.query, self.key):
            raise ProtocolError(f"{self} times {other}")
        product = {
            ("p", "dp - delta"): "ds",
            # Under a cap on the scores.
            ("p", "slope"): "p * slope",
            ("p * slope", "dp - delta"): "ds",
            ("ds", "slope"): "ds",
        }.get((self.kind, other.kind))
        if product is None:
            raise ProtocolError(f"{self} times {other}")
        if self.width != other.width:
            raise ProtocolError(f"{self.width} and {other.width} columns")
        return replace(self, kind=product)

    def __add__(self, delta: Any) -> Pair:
        assert self.kind == "dp"
        if (delta.name, delta.rows) != ("delta", self.query):
            raise ProtocolError(f"{delta} for {self}")
        return Pair("dp - delta", self.query, self.key, width=self.width)


@dataclass(frozen=True)
class Loaded(Anything):
    """What a thread has read of a tile."""

    name: str
    rows: Rows
    columns: Range = field(default=None, compare=False)


NEVER = Pair("never computed", (-1, -1), (-1, -1))
NEVER_READ = Loaded("never read", (-1, -1))


@dataclass(frozen=True)
class Sum(Anything):
    """64 rows of dQ, dK or dV: the pairs that were added up, of which columns."""

    pairs: tuple[Pair, ...]
    column: int = 0
    width: int | None = None
    """Columns; None if the source does not say."""
    first: int | None = None
    """The first column of the tile in shared memory that they come from, likewise."""

    @property
    def shape(self) -> Any:
        return ANYTHING if self.width is None else (64, self.width)

    def __mul__(self, _: Any) -> Sum:
        return self


@dataclass(frozen=True)
class Zeros(Anything):
    """Where sums begin."""

    shape: tuple[int, int]


def pairs_of(x: Any) -> tuple[Pair, ...]:
    """Those of a sum; none of zeros."""
    return x.pairs if isinstance(x, Sum) else ()


class SharedTile(Tile):
    """A buffer whose ``holds`` is a tensor's name and rows, or P or dS and its queries."""

    type = ANYTHING
    holds: Any
    column: int | None
    """The first column that it holds, of 64, if it is a panel."""

    def __init__(self, machine: BackwardMachine) -> None:
        super().__init__()
        self.machine = machine
        self.is_fenced = True
        self.column = None

    def load(self, _: Any) -> Any:
        if self.holds is None:
            return NEVER_READ
        name, rows = self.holds
        return name if isinstance(name, Pair) else Loaded(name, rows)

    def store(self, x: Pair) -> None:
        self.machine.role.pause()
        self.holds, self.is_fenced = (x, x.query), False
        self.machine.unfenced[self.machine.role].append(self)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> SharedBuffers:
        return SharedBuffers([self], [1])._reinterpret(dtype, shape, layout)

    @property
    def tiles(self) -> list[SharedTile]:
        return [self]

    @property
    def range(self) -> Range:
        """The columns of a panel, or of a tile beside panels."""
        if self.column is not None:
            return self.column, 64
        beside = self.machine.has_panels and self.holds and self.holds[0] in ("v", "do")
        return (0, self.machine.value_width) if beside else None


@dataclass
class PanelPair:
    """Two panels as one tile."""

    tiles: list[SharedTile]

    def permute(self, _: Any) -> PanelPair:
        return self

    @property
    def holds(self) -> Any:
        one, other = self.tiles
        if one.holds is None or other.holds is None:
            return None
        if (one.holds, one.column, other.column) != (other.holds, 0, 64):
            raise ProtocolError(f"{one.holds} and {other.holds} as one tile")
        return one.holds

    @property
    def range(self) -> Range:
        return 0, 128


@dataclass(frozen=True)
class Part:
    """64 columns of a tile of keys, in units of 64."""

    tile: SharedTile
    column: int


@dataclass(frozen=True)
class Slice:
    """Some columns of a tile, or of a part of one."""

    tile: Any
    columns: Range

    def permute(self, _: Any) -> Slice:
        return self

    def load(self, layout: Any) -> Loaded:
        return replace(self.tile.load(layout), columns=self.columns)


def columns(tile: Any, first: int, number: Any) -> Any:
    """As tiles.columns: of a tile in registers all that it has."""
    if not isinstance(number, int):
        return tile
    if isinstance(tile, Loaded):
        if tile.columns not in (None, (first, number)):
            raise ProtocolError(f"columns {first}, {number} of {tile}")
        return replace(tile, columns=(first, number))
    return Slice(tile, (first, number))


class SharedBuffers(Buffers):
    """Several tiles, also as their parts, or several barriers."""

    def __init__(self, parts: list[Any], shape: list[int]) -> None:
        super().__init__(list, 0)
        self.parts, self.shape = parts, shape

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> SharedBuffers:
        if 2 * shape[0] <= len(self.parts):
            pairs = [PanelPair(self.parts[2 * i : 2 * i + 2]) for i in range(shape[0])]
            return SharedBuffers(pairs, shape)
        each = shape[0] // len(self.parts)
        if each == 1:
            return SharedBuffers(self.parts, shape)
        return SharedBuffers([Part(x, i) for x in self.parts for i in range(each)], shape)


class BackwardMachine(Machine):
    """All programs of a call; what they stored and added."""

    def __init__(
        self, seed: int, grid: int, at: Callable[[str, list[int]], tuple[str, Rows]]
    ) -> None:
        super().__init__(seed, (0, 0), grid)
        self.at = at
        self.width = 0
        self.value_width = 0
        """Columns of values that matmuls take, and ``width`` those of keys."""
        self.starts: list[tuple[int, int]] = []
        """Of the sequences' queries and keys."""
        self.has_panels = False
        """Whether queries and keys lie in panels."""
        self.head_dims: dict[str, int] = {}
        """Columns of dk and dv in memory."""
        self.widths: dict[tuple[str, int], int] = {}
        """Columns of the head dim; and of the parts of sums, by kind and first column."""
        self.programs: list[list[Role]] = []
        self.numbers: dict[int, int] = defaultdict(int)
        self.seen: dict[tuple[Role, int], int] = {}
        self.added: dict[int, list[Sum]] = defaultdict(list)
        self.gradients: dict[tuple[str, int, int, int], tuple[Pair, ...]] = {}
        self.unfenced: dict[Role, list[SharedTile]] = defaultdict(list)

    def warp_specialize(self, partitions: list[Any], *_: Any) -> None:
        self.programs.append(
            [Role(self, function, arguments) for function, arguments in partitions]
        )

    def allocate_shared_memory(self, dtype: Any, shape: list[int], _: Any) -> Any:
        if isinstance(dtype, str):
            barriers = [Barrier() for _ in range(shape[0])]
            return barriers[0] if len(shape) == 1 else SharedBuffers(barriers, shape)
        if len(shape) == 1:
            return SharedTile(self)
        return SharedBuffers([SharedTile(self) for _ in range(shape[0])], shape)

    def async_copy_global_to_shared(
        self, name: Any, coordinates: list[int], barrier: Barrier, tile: Any, pred: bool = True
    ) -> None:
        self.role.pause()
        tile.holds = None

        def land() -> None:
            tile.holds = self.at(name.name, coordinates)
            if self.has_panels and name.name in ("q", "k"):
                tile.column = coordinates[3]
            barrier.bytes -= name.block_type.nbytes
            barrier.settle()

        self.copies.append(land)

    def fence(self) -> None:
        self.role.pause()
        for tile in self.unfenced.pop(self.role, []):
            tile.is_fenced = True

    def load(self, place: Any, **_: Any) -> int:
        """A number; who reads one again waits until it is another, so that deadlocks show."""
        if isinstance(place, Place):
            return place.numbers[place.offset]
        role = self.role
        last = self.seen.get((role, place))
        role.pause(lambda: self.numbers[place] != last)
        self.seen[role, place] = self.numbers[place]
        return self.numbers[place]

    def atomic_xchg(self, place: int, number: int, **_: Any) -> None:
        self.role.pause()
        self.numbers[place] = number

    def warpgroup_mma(self, a: Any, b: Any, c: Any, **_: Any) -> Any:
        self.role.pause()
        before = len(self.role.matmuls)
        result = self.product(a, b, c)
        for matmul in self.role.matmuls[before:]:
            matmul.result = result
        return result

    def check_over(self, x: Any) -> None:
        if any(matmul.result is x for matmul in self.role.matmuls):
            raise ProtocolError(f"{x} is read before the wait for its matmul")

    def product(self, a: Any, b: Any, c: Any) -> Any:
        of_a, of_b = (x.columns if isinstance(x, Slice | Loaded) else None for x in (a, b))
        of_a, of_b = (
            x.range if isinstance(x, SharedTile | PanelPair) else columns
            for x, columns in ((a, of_a), (b, of_b))
        )
        first, width = of_b or (None, None)
        a, b = (x.tile if isinstance(x, Slice) else x for x in (a, b))
        column = b.column if isinstance(b, Part) else (first or 0) // 64
        b = b.tile if isinstance(b, Part) else b
        tiles = [tile for x in (a, b) if isinstance(x, SharedTile | PanelPair) for tile in x.tiles]
        left = (a.name, a.rows) if isinstance(a, Loaded) else getattr(a, "holds", a)
        is_there = left is not None and b.holds is not None and all(x.is_fenced for x in tiles)
        if isinstance(a, SharedTile) and b.holds and b.holds[0] == "k":
            # dQ of the turn before is computed in the first turn, too, and not used.
            is_there = is_there and a.holds[0].kind == "ds"
            if not is_there:
                self.role.matmuls.append(Matmul([]))
                return Sum((NEVER,))
        elif left is not None and b.holds is None:
            # Nor are scores behind the last turn.
            self.role.matmuls.append(Matmul([]))
            return NEVER
        if not is_there:
            raise ProtocolError("a matmul reads what is not there, or not yet fenced")
        self.role.matmuls.append(Matmul([(tile, tile.holds) for tile in tiles if tile.holds]))
        name, rows = b.holds
        if isinstance(left, tuple) and isinstance(left[0], str):
            kind = {("k", "q"): "s", ("v", "do"): "dp"}.get((left[0], name))
            if kind is None:
                raise ProtocolError(f"scores of {left} and {name}")
            if of_a != of_b:
                raise ProtocolError(f"columns {of_a} of {left} and {of_b} of {name}")
            pair = Pair(kind, rows, left[1], width=width or 0)
            if isinstance(c, Pair) and (c.query, c.key) != (pair.query, pair.key):
                raise ProtocolError(f"{pair} is added to {c}")
            if isinstance(c, Pair):
                return replace(c, width=c.width + pair.width)
            return pair + c if isinstance(c, Loaded) else pair
        pair = left[0] if isinstance(left, tuple) else left
        wanted = {"k": ("ds", pair.key), "q": ("ds", pair.query), "do": ("p", pair.query)}
        if wanted[name] != (pair.kind, rows):
            raise ProtocolError(f"{pair} times {name} {rows}")
        pairs = *pairs_of(c), pair
        if isinstance(c, Sum) and None not in (c.width, width) and c.width != width:
            raise ProtocolError(f"{width} columns are added to {c.width}")
        if isinstance(c, Zeros) and width not in (None, c.shape[1]):
            raise ProtocolError(f"{width} columns are added to {c.shape[1]}")
        return Sum((NEVER,) if NEVER in pairs else pairs, column, width, first)

    def probabilities(self, s: Pair, lse: Loaded, *arguments: Any) -> Pair:
        self.check_over(s)
        if s.kind != "s" or (lse.name, lse.rows) != ("lse", s.query):
            raise ProtocolError(f"{lse} for {s}")
        if s.width != self.width:
            raise ProtocolError(f"scores of {s.width} columns of {self.width}")
        key, query = arguments[:2]
        if (s.query[1] - query, s.key[1] - key) not in self.starts:
            raise ProtocolError(f"{s} is masked as of key {key} and query {query}")
        return Pair("p", s.query, s.key, is_masked=arguments[8], width=self.value_width)

    def slope_of_cap(self, p: Pair, lse: Loaded, _: float) -> Pair:
        if (p.kind, lse.name, lse.rows) != ("p", "lse", p.query):
            raise ProtocolError(f"{lse} for {p}")
        return Pair("slope", p.query, p.key, width=p.width)

    def add_tile(self, place: int, x: Sum, is_first: bool) -> None:
        self.role.pause()
        self.check_over(x)
        if NEVER in pairs_of(x):
            raise ProtocolError("what was never computed is added")
        if is_first != (not self.added[place]):
            raise ProtocolError(f"{x} is added before, or after, the first one")
        if place < KEY_SUMS:
            self.check_width("dq", x.column, x)
        self.added[place].append(Sum(pairs_of(x), x.column if isinstance(x, Sum) else 0))

    def check_width(self, kind: str, column: int, x: Any) -> None:
        wanted = self.widths.get((kind, column))
        if isinstance(x, Sum) and None not in (x.width, wanted) and x.width != wanted:
            raise ProtocolError(f"{x.width} columns of {kind} from {column} on for {wanted}")

    def with_sums(self, x: Sum, place: int, before: int, is_divided: bool) -> Sum:
        self.role.pause()
        # Sums to which nobody has added are not zero.
        if before == 0 and not is_divided:
            raise ProtocolError("sums are read before anybody has added to them")
        return Sum((*(pair for one in self.added[place] for pair in one.pairs), *pairs_of(x)))

    def store_gradient(
        self, x: Any, rows: Any, first: int, column: int, head_dim: int, *_: Any
    ) -> None:
        key = rows.pointer, rows.head, rows.start + first, column
        self.check_over(x)
        if head_dim != self.head_dims[rows.pointer]:
            raise ProtocolError(f"{head_dim} columns of {rows.pointer}")
        if first < rows.length:
            self.check_width("dk, dv", column, x)
            if isinstance(x, Sum) and x.first not in (None, column):
                raise ProtocolError(f"columns from {x.first} on are stored from {column} on")
            if key in self.gradients:
                raise ProtocolError(f"{key} is stored twice")
            self.gradients[key] = pairs_of(x)


class BackwardLanguage(Language):
    """``gl`` of the backward kernel."""

    int64 = "int64"
    SwizzledSharedLayout = ANYTHING
    broadcast = staticmethod(lambda a, b: (a, b))
    abs = staticmethod(abs)
    zeros = staticmethod(lambda shape, *_: Zeros(tuple(shape)))  # type: ignore[assignment]

    def __init__(self, machine: BackwardMachine) -> None:
        super().__init__(machine)
        self.load, self.atomic_xchg = machine.load, machine.atomic_xchg  # type: ignore[method-assign]


@dataclass(kw_only=True, frozen=True)
class Call:
    """A call of one sequence, or of a packed batch, and how it is divided."""

    q_len: int
    kv_len: int
    """Of the longest sequence."""
    cu_seqlens: tuple[list[int], list[int]] | None
    """Of queries and keys of a packed batch."""
    num_heads: int
    group_size: int
    num_members: int
    """Query heads of a program."""
    causal: bool
    mask: str
    """The constant MASK, and ``edges`` its window, prefix_len and shift."""
    edges: tuple[int, int, int]
    unmasked: bool
    order: str
    """The constant ORDER, and ``order_count`` and ``heads_at_once`` what it counts."""
    order_count: int
    heads_at_once: int
    programs: int
    at_once: int
    """Programs that run at the same time."""
    columns: int
    """In shared memory: 64, 128, or 256 of the wide kernel, and of sums of the narrow one."""
    main: int
    """Columns of the head dim that a matmul takes, of 64 in shared memory 16, 32, or 64."""
    tail: int
    """Columns of the head dim that a second matmul takes; 0 for none."""
    softcap: float
    apart: bool
    """This and the next one: not of the wide kernel, nor of the narrow one."""
    rolled: bool
    narrow: bool = False
    """Whether values have 128 columns beside keys of 192: of the narrow kernel."""

    @property
    def shared(self) -> bool:
        """Whether programs add up dK and dV."""
        return self.num_members < self.group_size or self.order in ("bands", "halves", "sections")


def run_call(call: Call, seed: int, edit: tuple[str, str] | None = None) -> BackwardMachine:
    """The machine after all programs of a call.

    Args:
        edit: a line of the kernel's source, and what to put in its place.
    """
    # Triton exists for Linux alone, and who imports this file may have to skip.
    from kernels.flash.hopper import (
        backward,
        backward_narrow,
        backward_order,
        backward_sharing,
        backward_wide,
        schedule,
        tiles,
    )

    starts = call.cu_seqlens[0] if call.cu_seqlens else [0, call.q_len]
    lines = [
        (start + 128 * n) // 128 * 128 if call.cu_seqlens else 0 for n, start in enumerate(starts)
    ]
    num_tokens = starts[-1], call.cu_seqlens[1][-1] if call.cu_seqlens else call.kv_len
    padded = [(n + 128 * len(starts)) // 128 * 128 for n in num_tokens]

    def at(name: str, coordinates: list[int]) -> tuple[str, Rows]:
        if name != "statistics":
            return name, (coordinates[1], coordinates[2])
        line, column = coordinates
        sequence = max(n for n in range(len(starts) - 1) if lines[n] <= column)
        row = starts[sequence] + column - lines[sequence]
        return ("lse", "delta")[line // call.num_heads], (line % call.num_heads, row)

    machine = BackwardMachine(seed, call.programs, at)
    machine.width = call.main + call.tail
    machine.starts = list(zip(*call.cu_seqlens, strict=True)) if call.cu_seqlens else [(0, 0)]
    machine.has_panels = call.narrow
    machine.value_width = 128 if call.narrow else machine.width
    head_dim = machine.width if call.columns == 256 else 96
    machine.head_dims = {"dk": head_dim, "dv": 128 if call.narrow else head_dim}
    if call.columns == 256:
        machine.widths = {("dk, dv", 0): 128, ("dk, dv", 128): machine.width - 128}
    else:
        machine.widths = {
            ("dq", 0): min(call.main, 64),
            ("dq", 1): call.tail or 64,
            ("dk, dv", 0): call.main,
            ("dk, dv", call.main): call.tail,
        }
    same = lambda x, *_: x  # noqa: E731
    names: dict[str, Any] = {
        "gl": BackwardLanguage(machine),
        "mbarrier": machine,
        "tma": machine,
        "warpgroup_mma": machine.warpgroup_mma,
        "warpgroup_mma_wait": machine.warpgroup_mma_wait,
        "fence_async_shared": machine.fence,
        "columns": columns,
        "opaque": same,
        "number_of_thread": same,
        "probabilities": machine.probabilities,
        "slope_of_cap": machine.slope_of_cap,
        "add_tile": machine.add_tile,
        "add_tile_by_thread": lambda place, _, x, is_first: machine.add_tile(place, x, is_first),
        "with_sums": machine.with_sums,
        "store_rows": machine.store_gradient,
    }
    names |= tile_names()
    structures: tuple[str, ...] = ("Inputs", "Heads", "Turns", "Gradients", "Program")
    names |= {name: getattr(backward_order, name) for name in structures}
    names["Sharing"] = backward_sharing.Sharing
    edits = edit, (".to(gl.int64)", "")
    load(names, tiles, ("offsets", "sequence", "sequence_of_program"), *edits)
    places: tuple[str, ...] = ("place_in_order", "place_in_batch", "place_in_bands")
    places += ("in_band", "in_section", "lines_before", "turn_of", "tile_of")
    turns = ("turns_of_keys", "bounds_of_loops", "programs_before", "start_scores")
    turns += ("program_of", "turns_of_program", "rows_of_gradients")
    load(names, backward_order, (*places, *turns), *edits)
    load(
        names,
        backward_order,
        ("wait_until_open", "open_turns", "close_turns", "open_sums", "close_sums"),
        *edits,
    )
    load(names, backward_sharing, ("sharing_of", "give"), *edits)
    kernel: ModuleType = backward
    constants: tuple[Any, ...] = 4 if call.columns == 64 else 2, call.columns == 64
    constants += (call.apart, call.rolled, call.unmasked, call.order, call.shared, False)
    constants += (96, call.columns, call.main, call.tail, call.causal, call.mask, call.softcap)
    functions: tuple[str, ...] = (
        "after",
        "start_gradient",
        "dq_tile",
        "add_last_dq",
        "half_turn",
        "flash_backward",
    )
    structures = ("Shared", "Views", "HalfTurn", "Progress")
    if call.columns == 256:
        kernel = backward_wide
        constants = 2, head_dim, 256, call.main, call.tail
        functions = (
            "start_dq",
            "start_keys",
            "start_values",
            "turn_of_scores",
            "turn_of_gradients",
            "flash_backward_wide",
        )
        structures = ("Shared", "Views", "Turn", "Progress")
    if call.narrow:
        kernel = backward_narrow
        constants = schedule.NARROW_BACKWARD.stages, head_dim, 128, 256, 128
        functions = ("copy_panels", "start_scores", "dq_tile", "half_turn", "flash_backward_narrow")
        structures = ("Shared", "Views", "HalfTurn", "Progress")
        names["PANELS"] = backward_narrow.PANELS.value
    if call.columns == 256:
        constants += call.causal, call.mask, call.softcap, call.order, call.shared, False
    names |= {name: getattr(kernel, name) for name in structures}
    load(names, kernel, ("produce", "take_turns", "accumulate", *functions), *edits)
    offsets = [Place(x) for x in call.cu_seqlens] if call.cu_seqlens else [ANYTHING, ANYTHING]
    for program in range(call.programs):
        machine.program = program, 0
        names[functions[-1]](
            *(Descriptor(name) for name in ("q", "do", "k", "v", "statistics")),
            *(0, 0, KEY_SUMS, KEY_COUNTS, "dk", "dv", *offsets, *[0] * 6),
            *(len(starts) - 1, call.num_heads, call.group_size, call.num_members),
            *(call.heads_at_once, call.order_count, call.q_len, call.kv_len),
            *(call.num_heads, *padded, *call.edges, ANYTHING, ANYTHING),
            *(*constants, call.cu_seqlens is not None, 4),
        )
    machine.run(machine.programs, call.at_once)
    return machine
