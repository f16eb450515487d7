"""Runs the Hopper forward kernels' own source on a model of a multiprocessor, without numbers.

:mod:`gluon_backward_model` does so with the backward kernel.

What is modelled is who waits for whom. Barriers know the parity of their phase, as the hardware's
do; copies and matmuls are finished later than they are asked for; and a kernel's roles run
in an order drawn at random between any two of these steps. Tiles carry the name of their tensor
and their first row, so that who reads too early, or writes too early, is found out.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any


class ProtocolError(AssertionError):
    """A deadlock, a tile read before it came, or one overwritten while it was read."""


class _Stopped(BaseException):
    """Ends the roles that are left over once one has failed."""


class Anything:
    """A tensor, layout or type of no interest: all that is done with it gives it again."""

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __getattr__ = __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = _same
    __sub__ = __rsub__ = __truediv__ = __eq__ = __and__ = __lt__ = __ge__ = _same


ANYTHING = Anything()


class Barrier:
    """An mbarrier: counts arrivals and bytes, and tells how many phases are over modulo two."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phases = 0

    def arrive(self) -> None:
        self.missing -= 1
        if self.missing < 0:
            raise ProtocolError("more arrivals than the barrier counts")
        self.settle()

    def settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phases += 1
            self.missing = self.count

    def is_over(self, parity: int) -> bool:
        return self.phases % 2 != parity


@dataclass
class Tile:
    """A buffer in shared memory."""

    holds: tuple[str, int, int] | None = None
    """Tensor, first row and first column; None before the first copy and while one is under way."""
    shape = dtype = ANYTHING

    def permute(self, _: Any) -> Tile:
        return self


class Buffers:
    """The result of ``allocate_shared_memory``: several tiles, or several barriers."""

    dtype = type = ANYTHING

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self.parts = [make() for _ in range(count)]

    def index(self, i: int) -> Any:
        return self.parts[i]

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Buffers:
        assert shape[0] == len(self.parts)
        return self


@dataclass
class Matmul:
    """One wgmma under way, and what its operands in shared memory held when it began."""

    operands: list[tuple[Tile, tuple[str, int, int]]]
    result: Any = None

    def finish(self) -> None:
        for tile, held in self.operands:
            if tile.holds != held:
                raise ProtocolError(f"{held} was overwritten by {tile.holds} under a matmul")


@dataclass
class Scores(Anything):
    """S or P of a tile of queries and one of keys."""

    query: int
    key: int
    masked_as: int | None = None
    """The key tile whose visible keys were left, if a mask was applied."""
    columns: tuple[int, ...] = ()
    """The first column of each tile, or panel, whose products were added up."""

    def to(self, _: Any) -> Scores:
        return self


@dataclass
class Output(Anything):
    """o of one tile of queries: the scores that were multiplied into it."""

    parts: list[Scores]


class Role:
    """A warp, or a warpgroup, as a thread that runs only when it is told to."""

    def __init__(self, machine: Machine, function: Callable[..., None], arguments: Any) -> None:
        self.machine = machine
        self.ready: Callable[[], bool] = lambda: True
        self.resume = threading.Semaphore(0)
        self.is_done = False
        self.matmuls: list[Matmul] = []
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)

    def _run(self, function: Callable[..., None], arguments: Any) -> None:
        self.resume.acquire()
        try:
            if not self.machine.error:
                function(*arguments)
        except _Stopped:
            pass
        except BaseException as error:
            self.machine.error = self.machine.error or error
        self.is_done = True
        self.machine.back.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run, and comes back some time after ``ready``."""
        self.ready = ready
        self.machine.back.release()
        self.resume.acquire()
        if self.machine.error:
            raise _Stopped


class Machine:
    """One program of the kernel; ``stored`` is what it wrote, by consumer's first row."""

    def __init__(self, seed: int, program: tuple[int, int], grid: int) -> None:
        self.random = random.Random(seed)
        self.program, self.grid = program, grid
        self.back = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.copies: list[Callable[[], None]] = []
        self.current: Role | None = None
        self.stored: dict[int, list[Scores]] = {}

    def warp_specialize(self, partitions: list[Any], *_: Any) -> None:
        """Runs all roles to their end, or raises what the first one to fail did."""
        self.run([[Role(self, function, arguments) for function, arguments in partitions]], 1)

    def run(self, programs: list[list[Role]], at_once: int) -> None:
        """Runs the roles of all programs, of which ``at_once`` run, and which start in order."""
        waiting, running = list(programs), list[Role]()
        # How often each gets its turn differs by run: a role far behind is what goes wrong.
        weights = {role: self.random.choice((1, 4, 16)) for roles in programs for role in roles}
        copying = self.random.choice((1, 4, 16))
        places = at_once
        while waiting or running:
            while waiting and places:
                places -= 1
                running += waiting[0]
                for role in waiting.pop(0):
                    role.thread.start()
            able = [r for r in running if self.error or r.ready()]
            if not able and not self.copies:
                self.error = ProtocolError("deadlock")
                continue
            chances = [weights[role] for role in able] + [copying] * bool(self.copies)
            chosen = self.random.choices([*able, None][: len(chances)], chances)[0]
            if chosen is None:
                self.copies.pop(self.random.randrange(len(self.copies)))()
                continue
            self.current = chosen
            chosen.resume.release()
            self.back.acquire()
            if chosen.is_done:
                running.remove(chosen)
                own = next(roles for roles in programs if chosen in roles)
                places += all(role.is_done for role in own)
                if self.error:
                    waiting.clear()
        if self.error:
            raise self.error
        if self.copies:
            raise ProtocolError("the program ends while a copy is under way")

    @property
    def role(self) -> Role:
        assert self.current is not None
        return self.current

    # mbarrier

    MBarrierLayout = ANYTHING

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def expect(self, barrier: Barrier, bytes_: int, pred: bool = True) -> None:
        self.role.pause()
        if not pred:
            return
        barrier.bytes += bytes_
        barrier.arrive()

    def arrive(self, barrier: Barrier, pred: bool = True) -> None:
        if pred:
            self.role.pause()
            barrier.arrive()

    def wait(self, barrier: Barrier, parity: int, pred: bool = True) -> None:
        assert parity in (0, 1)
        if pred:
            self.role.pause(lambda: barrier.is_over(parity))

    # tma

    def async_copy_global_to_shared(
        self, name: Any, coordinates: list[int], barrier: Barrier, tile: Tile, pred: bool = True
    ) -> None:
        self.role.pause()
        if not pred:
            return
        tile.holds = None

        def land() -> None:
            tile.holds = (name.name, coordinates[2], coordinates[3])
            barrier.bytes -= name.block_type.nbytes
            barrier.settle()

        self.copies.append(land)

    # warpgroup_mma

    def warpgroup_mma(self, a: Any, b: Tile, c: Any, **_: Any) -> Any:
        self.role.pause()
        tiles = [x for x in (a, b) if isinstance(x, Tile)]
        for tile in tiles:
            if tile.holds is None:
                raise ProtocolError("a matmul reads a tile that is not there")
        self.role.matmuls.append(Matmul([(tile, tile.holds) for tile in tiles if tile.holds]))
        assert b.holds is not None
        name, row, column = b.holds
        if isinstance(a, Tile):
            assert a.holds is not None
            if (a.holds[0], name, a.holds[2]) != ("q", "k", column):
                raise ProtocolError(f"scores of {a.holds} and {b.holds}")
            if not isinstance(c, Scores):
                return Scores(query=a.holds[1], key=row, columns=(column,))
            if (c.query, c.key) != (a.holds[1], row):
                raise ProtocolError(f"scores of {a.holds} and {b.holds} are added to {c}")
            return replace(c, columns=(*c.columns, column))
        if name != "v" or a.key != row:
            raise ProtocolError(f"probabilities of keys {a.key} times {b.holds}")
        before = c.parts if isinstance(c, Output) else []
        return Output(parts=[*before, a])

    def warpgroup_mma_wait(self, pending: int, deps: list[Any]) -> Any:
        self.role.pause()
        while len(self.role.matmuls) > pending:
            self.role.matmuls.pop(0).finish()
        return deps[0] if len(deps) == 1 else deps

    # what the kernel does with numbers

    def store_rows(self, o: Any, rows: Any, first_row: int, *_: Any) -> None:
        q_len = rows.length
        parts = o.parts if isinstance(o, Output) else []
        if first_row < 0:
            raise ProtocolError(f"stores rows from {first_row} on")
        if first_row < q_len:
            if first_row in self.stored:
                raise ProtocolError(f"stores rows from {first_row} on twice")
            self.stored[first_row] = parts

    # gluon.language

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def num_programs(self, axis: int) -> int:
        return (self.grid, self.program[1] + 1)[axis]

    def allocate_shared_memory(self, dtype: Any, shape: list[int], _: Any) -> Buffers:
        return Buffers(Barrier if isinstance(dtype, str) else Tile, shape[0])


class Language:
    """``gl``: integers are Python's, tensors are Anything."""

    int64, int32, float32, constexpr = "int64", ANYTHING, ANYTHING, ANYTHING
    static_range = range
    max = full = zeros = sum = exp2 = log2 = arange = store = ANYTHING
    SliceLayout = NVMMADistributedLayout = DotOperandLayout = NVMMASharedLayout = ANYTHING

    def __init__(self, machine: Machine) -> None:
        self.program_id, self.num_programs = machine.program_id, machine.num_programs
        self.allocate_shared_memory = machine.allocate_shared_memory
        self.warp_specialize = machine.warp_specialize

    def static_assert(self, condition: bool) -> None:
        assert condition

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def minimum(self, a: int, b: int) -> int:
        return min(a, b)

    def maximum(self, a: int, b: int) -> int:
        return max(a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return (a if condition else b) if isinstance(condition, bool) else ANYTHING

    def convert_layout(self, x: Any, _: Any) -> Any:
        return x

    def load(self, place: Place) -> int:
        return place.numbers[place.offset]


@dataclass
class Place:
    """A pointer to numbers that the kernel reads."""

    numbers: list[int]
    offset: int = 0

    def __add__(self, step: int) -> Place:
        return Place(self.numbers, self.offset + step)


class Descriptor:
    """A descriptor of q, k or v; the unit of bytes is one copy."""

    dtype = layout = ANYTHING

    def __init__(self, name: str) -> None:
        self.name = name
        self.block_type = type("Block", (), {"nbytes": 1, "shape": [1]})


def tile_names() -> dict[str, Any]:
    """Constants and structures of the kernels' tiles."""
    from kernels.flash.hopper import tiles

    numbers: tuple[str, ...] = ("ROWS", "CONSUMERS", "PROGRAM_ROWS", "PANEL_COLUMNS")
    numbers += ("CONSUMER_REGISTERS", "CONSUMER_REGISTERS_OF_THREE")
    numbers += ("LN_2", "LOG2_E", "MINUS_INFINITY", "ZERO")
    names = {name: getattr(tiles, name).value for name in numbers}
    structures = ("Sequence", "Rows", "Edges", "KeyTiles")
    return names | {name: getattr(tiles, name) for name in structures}


def load(
    names: dict[str, Any],
    module: ModuleType,
    functions: Iterable[str],
    *edits: tuple[str, str] | None,
) -> None:
    """Add functions of a kernel to ``names``, in Python that finds there what it calls.

    Args:
        edits: a line of their source, and what to put in its place.
    """
    for function in functions:
        source = textwrap.dedent(inspect.getsource(getattr(module, function).fn))
        source = source[source.index("def ") :]
        for edit in filter(None, edits):
            source = source.replace(*edit)
        exec("from __future__ import annotations\n" + source, names)


def run_program(
    *,
    seed: int,
    program: int,
    grid: int,
    q_len: int,
    kv_len: int,
    consumers: int,
    tiles: int,
    key_tile: int,
    stages: int,
    tail: int,
    panels: int = 1,
    causal: bool,
    mask: str = "plain",
    edges: tuple[int, int, int] = (0, 0, 0),
    cu_seqlens: tuple[list[int], list[int]] | None = None,
    edit: tuple[str, str] | None = None,
) -> dict[int, list[Scores]]:
    """The results of one program: for each consumer's first row, the scores that made up its o.

    Args:
        consumers: 1 for the kernel of small programs.
        key_tile: keys of a key tile.
        tail: columns of the head dim that a second matmul takes; 0 for none.
        panels: of queries and keys; with three values are narrower, not of small programs.
        mask: the constant MASK, and ``edges`` its window, prefix_len and shift.
        cu_seqlens: of queries and keys of a packed batch, whose longest have q_len and kv_len.
        edit: a line of the kernel's source, and what to put in its place.
    """
    # Triton exists for Linux alone, and who imports this file may have to skip.
    from kernels.flash.hopper import forward as hopper_forward
    from kernels.flash.hopper import forward_small as hopper_small
    from kernels.flash.hopper import forward_tile as hopper_tile
    from kernels.flash.hopper import tiles as hopper_tiles

    machine = Machine(seed, (program, 0), grid)
    names: dict[str, Any] = {
        "gl": Language(machine),
        "mbarrier": machine,
        "tma": machine,
        "warpgroup_mma": machine.warpgroup_mma,
        "warpgroup_mma_wait": machine.warpgroup_mma_wait,
        "store_rows": machine.store_rows,
        "columns": lambda tile, *_: tile,
        "masked": lambda s, tile, *_: replace(s, masked_as=tile),
        "row_sums_by_thread": ANYTHING,
        "LAZY_COLUMNS": hopper_tile.LAZY_COLUMNS.value,
        "rescale": lambda o, *_: o,
        "raise_reference": lambda *_: (ANYTHING, ANYTHING, ANYTHING),
        "softmax_step": lambda s, *_: (s, ANYTHING),
        "to_words": lambda p, *_: p,
        "from_words": lambda words, *_: words,
    }
    names |= tile_names()
    names |= {name: getattr(hopper_tile, name) for name in ("Inputs", "Head", "Outputs")}
    names |= {name: getattr(hopper_forward, name) for name in ("Shared", "Progress")}
    of_tiles = ("sequence", "sequence_of_program", "offsets", "key_tiles")
    load(names, hopper_tiles, of_tiles, edit)
    shared: tuple[str, ...] = (
        "place_in_order",
        "place_in_batch",
        "query_tile",
        "panels_at",
        "start_scores",
    )
    shared += ("start_values", "finish")
    load(names, hopper_tile, shared, edit, (".to(gl.int64)", ""))
    constants: tuple[int, ...] = key_tile, stages, 96, 128, 64, tail
    if consumers == 1:
        names |= {name: getattr(hopper_small, name) for name in ("Places", "Progress")}
        load(
            names,
            hopper_small,
            ("fill", "start_old_values", "advance", "flash_forward_small"),
            edit,
        )
    else:
        load(names, hopper_forward, ("produce", "advance", "consume", "flash_forward"), edit)
        columns = (128, 192, 128, 128, 64) if panels > 1 else (96, 128, 128, 64, tail)
        constants = key_tile, stages, consumers, tiles, *columns, panels
    starts = [Place(numbers) for numbers in cu_seqlens] if cu_seqlens else [ANYTHING, ANYTHING]
    batch_size = len(cu_seqlens[0]) - 1 if cu_seqlens else 1
    arguments = (
        *(Descriptor(name) for name in "qkv"),
        *(ANYTHING, ANYTHING, *starts, 0, 0, 0),
        *(batch_size, 1, 1, 1, q_len, kv_len, 0, *edges, ANYTHING),
        *(*constants, causal, mask, 0.0, cu_seqlens is not None, 4),
    )
    if consumers == 1:
        machine.warp_specialize([(names["flash_forward_small"], arguments)])
    else:
        names["flash_forward"](*arguments)
    return machine.stored
