"""Machines whose steps are predicted: laws fitted to a calibration, and the sum of a step."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from harness.cases.case import Case
from harness.cases.compilation import CUDA_GRAPH_MODES, Compile
from harness.cases.hardware import hardware_named
from harness.forecast import clocks, communication, operations, schedule, terms
from harness.forecast.attending import Attending, key_of
from harness.forecast.calibration import FOLDER, Calibration, read, write
from harness.forecast.law import Features, Law
from harness.forecast.masks import computes_all
from harness.forecast.matmul import matmul_features
from harness.forecast.network import Network, network
from harness.forecast.operations import Operation, Sizes
from harness.forecast.prediction import StepPrediction
from harness.forecast.schedule import Exchange, Phase, Piece
from harness.predictions import training

KINDS = ("autocast", "low", "float32")
"""Number formats of elementwise kernels, each closest to its neighbours."""

UNMEASURED_ERROR = 0.12
"""Log error of elementwise time that was measured in another number format."""

_TYPICAL: dict[str, Sequence[float]] = {
    "matmul": (0.002, 0.0012, 0.0015, 0.00025),
    "elementwise": (0.001, 0.00025),
    "copy": (0.001, 0.00025),
    "optimizer": (0.001, 0.00025),
    "collective": (0.05, 0.003),
}
"""Milliseconds a launch, 1e9 FLOPs, wave and MB on current GPUs: how terms compare where one or
two shapes were measured, which give the scale."""

GAPS, GAP_ERROR = "gaps between kernels", 0.3
"""The part, and its standard error."""

CAPTURED_GAP, CAPTURED_GAP_ERROR = 0.3, 1.0
"""What a CUDA graph leaves of it, as on an H100, and its standard error, where no step tells."""

CAPTURED_NOTE = (
    "no captured step calibrates a prediction: pauses between its kernels are the share of "
    "launched ones that they are on another machine"
)

NOTICEABLE_DISTANCE = 2.0
"""Doublings beyond the closest measured shape that a note mentions."""

ATTENTION, MATMULS, LOSS = "attention", "matmuls", "loss"
UNFUSED = (ATTENTION, MATMULS)
"""Parts that a compiler leaves to libraries or measures as they are."""

UNMEASURED_COMPILED = 0.45
"""What a compiler leaves of the time of other kernels, where no step tells."""

COMPILED_LAUNCHES = 0.3
"""What it leaves of launches: of some 50 of a block's forward pass, some 15."""

COMPILED_HOST, GRAPHS_HOST = 0.5, 0.27
"""What it leaves of the host's time, where no step tells: guards, autograd and arguments take
nearly as long as the launches saved, and CUDA graphs are replayed block by block. Of a small
model's steps on an H100 0.62 to 0.97 of a pass, and 0.18 to 0.37; on an H200 0.55 at most."""


PASSES = ("forward", "backward")

HERE = "here"
SWEEP = "calibration"
RESULTS = Path("results/local")


def machine(name: str, results: Path | None = None) -> Machine:
    """The machine of a calibration in ``conf/machine``, or ``here``.

    Args:
        results: the folder that holds this machine's sweep of the calibration, for ``here``;
            that of a sweep that names none if left out.

    Raises ValueError in one line where there is none.
    """
    if name == HERE:
        return Machine(_here(results or RESULTS))
    files = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    hardware = hardware_named(name)
    same = (known for known in files if hardware and hardware_named(known) == hardware)
    known = name if name in files else next(same, None)
    if known is None:
        raise ValueError(
            f"machine={name}: no calibration, so that no time can be predicted; there is one of "
            f"{', '.join(files)}"
        )
    return Machine(read(files[known]))


def _here(results: Path) -> Calibration:
    """The calibration of this machine's sweep, fitted once and kept beside it."""
    folder = results / "sweeps" / SWEEP
    kept, plan = folder / "machine.json", folder / "plan.json"
    if not plan.is_file():
        raise ValueError(
            f"machine={HERE}: {folder} holds no calibration; run attnbench sweeps={SWEEP} first"
        )
    if kept.is_file() and kept.stat().st_mtime >= plan.stat().st_mtime:
        with contextlib.suppress(ValueError):  # of another version
            return read(kept)
    # Late: it reads records, which takes pandas, and makes a machine of what it finds.
    from harness.forecast import build

    write(build.build(HERE, results, sweep=SWEEP), kept)
    return read(kept)


def is_captured(case: Case) -> bool:
    """Whether a case's kernels are replayed from CUDA graphs."""
    return bool(getattr(case.task, "cuda_graph", False))


def at_full_clocks(
    phases: Sequence[Phase], exchanged: Sequence[Exchange], host_us: Mapping[str, float]
) -> float:
    """Milliseconds of a step as its device or its host takes them, by which its load goes."""
    visible_ms = sum(one.visible_ms for one in exchanged)
    device_ms = sum(phase.device_ms for phase in phases) + visible_ms
    return max(device_ms, sum(host_us[phase.name] * phase.enqueued / 1e3 for phase in phases))


def _slowed(phase: Phase, cost: float, error: float) -> Phase:
    """A phase that takes longer by a share of its time, if it is a pass."""
    if phase.name not in PASSES:
        return phase
    ms = cost * phase.device_ms
    return replace(
        phase,
        parts={**phase.parts, clocks.SLOWED: ms},
        errors={**phase.errors, clocks.SLOWED: error * ms},
    )


def compiled_launches_name(compiling: Compile) -> str:
    """The factor of a calibration that is the host's share of one scope and kind of launch."""
    kind = "graphs" if compiling.mode in CUDA_GRAPH_MODES else "launches"
    return f"compiled_{kind}/{compiling.scope}"


def tensors_of(sizes: Sizes) -> int:
    """Parameters that are tensors of their own: nine a block, and three beside blocks."""
    return 9 * sizes.num_layers + 3


class Machine:
    """Predicts training steps on machines of one kind.

    Args:
        between: the network of machines with several hosts; the default of conf/network.
        compute: rate of products and attention beside the calibrated device's, for one like it.
        bandwidth: of device memory, likewise.
    """

    def __init__(
        self,
        calibration: Calibration,
        between: Network | None = None,
        *,
        compute: float = 1.0,
        bandwidth: float = 1.0,
    ) -> None:
        self._compute, self._bandwidth = compute, bandwidth
        self.calibration = calibration
        self.network = network() if between is None else between
        self.name = calibration.name
        self.device_memory_bytes = calibration.device_memory_bytes
        self.gpus_per_host = calibration.gpus_per_host
        self._laws: dict[str, Law | None] = {}
        self.attending = Attending(
            self.law,
            calibration.observations,
            calibration.factors,
            is_elsewhere=calibration.name != HERE,
        )
        self._passes: dict[object, Piece] = {}
        self._known_phases: dict[tuple[object, ...], tuple[list[Phase], set[str]]] = {}
        self._fastest = clocks.fastest(calibration)
        self.exchanges = communication.Known()
        self._host_us: dict[str | None, Mapping[str, float]] = {}
        self._ranks: dict[str, list[int]] = {}
        self._split_host: dict[str, dict[int, list[float]]] = {}

    def law(self, name: str) -> Law | None:
        """A law by its name; None where nothing was measured for it."""
        if name not in self._laws:
            observed = self.calibration.observations.get(name)
            law = Law(self.features(name), observed, self.typical(name)) if observed else None
            self._laws[name] = law
        return self._laws[name]

    def typical(self, name: str) -> Sequence[float] | None:
        """Coefficients of the law of the same kernels in the format that was measured most."""
        match name.split("/"):
            case ["matmul", _]:
                alike = [law for law in self.calibration.observations if law.startswith("matmul/")]
            case ["elementwise", _, which]:
                alike = [f"elementwise/{kind}/{which}" for kind in KINDS]
            case _:
                return _TYPICAL.get(name.split("/")[0])
        observed = self.calibration.observations
        most = max(alike, key=lambda law: len(set(observed.get(law, ()))))
        if most == name or not observed.get(most):
            return _TYPICAL[name.split("/")[0]]
        law = self.law(most)
        return None if law is None else list(law.coefficients)

    def features(self, name: str) -> Features:
        """Terms of a law by its name."""
        match name.split("/"):
            case ["matmul", dtype]:
                size = 2 if dtype.endswith("16") else 4
                return matmul_features(self.calibration.num_sms, size)
            case ["attention", backend, *_]:
                keeps = computes_all(backend)
                return terms.attention_with_scores if keeps else terms.attention
            case ["collective", *_]:
                return terms.collective
        return terms.bandwidth

    def why_not(self, case: Case) -> str | None:
        """Why this calibration has no time of a case's attention, in one line; else None."""
        _, note = self.attending.backend(case)
        return None if note is None else f"{self.name}: {note}"

    def step(self, case: Case, *, host: str | None = None) -> StepPrediction:
        """The time of a case of task=train_step.

        Args:
            host: one that the calibration names, where it is known; else the middle of them.
        """
        notes = set[str]()
        phases = self._phases(case, notes)
        passes = sum(phase.device_ms for phase in phases[:2])
        exchanged = communication.of_case(self, case, passes) if case.world_size > 1 else ()
        if is_captured(case):
            # The graphs hold what ranks exchange as well.
            exchanged = tuple(replace(one, launches=0.0) for one in exchanged)
        step_ms = at_full_clocks(phases, exchanged, self.host_us(host))
        phases = self.under_load(phases, self.load(case, step_ms), notes)
        known = any(one.host == host for one in self.calibration.hosts)
        tokens = case.batch_size * case.seq_len * case.parallel.dp
        return schedule.predict(
            phases,
            exchanged,
            self.host_us(host),
            self.host_error(known=known),
            tokens,
            notes,
            self.network.straggling(case.world_size),
        )

    def enqueued(self, case: Case) -> list[Phase]:
        """The kernels and launches of each phase on one rank, at full clocks, without
        communication."""
        return self._phases(case, set())

    def load(self, case: Case, step_ms: float) -> float:
        """How far a step of so many milliseconds at full clocks lowers them, 0 to 1."""
        fastest = self._fastest.get(case.precision.peak)
        # A rate that is given for a like device is what its power limit leaves.
        if fastest is None or self._compute != 1:
            return 0.0
        return clocks.load(clocks.flops(case) / step_ms, fastest)

    def under_load(self, phases: list[Phase], load: float, notes: set[str]) -> list[Phase]:
        """The phases, of which passes take longer by what load costs."""
        if not load:
            return phases
        cost, error = self.calibration.factors.get("load"), clocks.ERROR
        if cost is None:
            cost, error = clocks.USUAL, clocks.UNMEASURED_ERROR
            notes.add(clocks.UNMEASURED_NOTE)
        return [_slowed(phase, cost * load, error) for phase in phases]

    def _phases(self, case: Case, notes: set[str]) -> list[Phase]:
        """Those of one replica, which strategies that hold as much of the optimizer share."""
        sizes = operations.sizes_of(case)
        key = (
            *(sizes, *key_of(case), case.parallel.optimizer_state_share, is_captured(case)),
            *(part and part.label for part in (case.checkpoint, case.compile)),
        )
        if key not in self._known_phases:
            self.attending.keep(case)
            found = set[str]()
            self._known_phases[key] = self._new_phases(case, sizes, found), found
        phases, found = self._known_phases[key]
        notes |= found
        return phases

    def _new_phases(self, case: Case, sizes: Sizes, notes: set[str]) -> list[Phase]:
        mode = getattr(case.task, "mode", "train_step")
        phases = [self._pass(case, sizes, "forward", notes)]
        if mode != "forward":
            whole = self._pass(case, sizes, "backward", notes)
            recomputed = self._recomputed(case, phases[0])
            phases.append(whole if recomputed is None else whole.joined(recomputed))
            if case.checkpoint is not None:
                scope, layers = case.checkpoint.scope, sizes.num_layers
                phases = [self._checkpointed(phase, scope, layers) for phase in phases]
        if mode == "train_step":
            phases.append(self._optimizer(case, sizes))
        if mode == "forward":
            ratio = self.calibration.factors.get("no_grad", 1.0)
            phases = [replace(phases[0], enqueued=ratio * phases[0].enqueued)]
        factors = self.calibration.factors
        gap_us, error = factors.get("gap_us", 0.0), GAP_ERROR
        if is_captured(case):
            # One launch a phase, of which each is a graph.
            phases = [replace(phase, enqueued=1.0) for phase in phases]
            if "captured_gap_us" in factors:
                gap_us = factors["captured_gap_us"]
            else:
                notes.add(CAPTURED_NOTE)
                gap_us, error = CAPTURED_GAP * gap_us, CAPTURED_GAP_ERROR
        return [self._with_gaps(phase, gap_us, error) for phase in phases]

    def _with_gaps(self, phase: Phase, gap_us: float, error: float) -> Phase:
        """The device's pause between one kernel and the next.

        Args:
            error: its relative standard error.
        """
        ms = gap_us * phase.launches / 1e3
        return replace(
            phase,
            parts={**phase.parts, GAPS: ms},
            errors={**phase.errors, GAPS: error * ms},
        )

    def host_us(self, host: str | None = None) -> Mapping[str, float]:
        """Microseconds a launch by phase: of a host that the calibration names, or the middle."""
        if host not in self._host_us:
            self._host_us[host] = self._calibrated_host_us(host)
        return self._host_us[host]

    def _calibrated_host_us(self, host: str | None) -> dict[str, float]:
        hosts = self.calibration.hosts
        known = [one for one in hosts if one.host == host]
        chosen = known or [one for one in hosts if one.bound] or hosts
        if not chosen:
            return dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        return {
            "forward": median(one.forward_us for one in chosen),
            "backward": median(one.backward_us for one in chosen),
            "optimizer": median(one.optimizer_us for one in chosen),
        }

    def between_hosts_ms(self, case: Case) -> float:
        """The part of a step's gradients and parameters that is longer than inside a host."""
        total = 0.0
        for name, size in training.traffic_bytes(case).items():
            messages = communication.num_messages(case, size)
            one = size / messages
            ranks, stride = case.parallel.predicted_ranks(name)
            # Ranks of one weight are neighbours; those that hold the same part are tp apart.
            stride *= case.parallel.tp
            both, _ = communication.collective_ms(self, name, ranks, one, stride=stride)
            local = min(ranks, max(1, self.network.gpus_per_host // stride))
            inside, _ = communication.collective_ms(self, name, local, one, stride=stride)
            total += messages * (both - inside)
        return total

    def split_host_ms(self, case: Case, phase: str) -> dict[int, list[float]]:
        """The host's milliseconds for a pass of a scheme of split attention, by number of ranks.

        Of the case's transport, if that was measured; else of all of the scheme; else of all.
        """
        exact = communication.split_host_law(case, phase)
        if exact not in self._split_host:
            self._split_host[exact] = self._measured_split_host_ms(exact, phase)
        return self._split_host[exact]

    def _measured_split_host_ms(self, exact: str, phase: str) -> dict[int, list[float]]:
        observed = self.calibration.observations
        kind, scheme, _, _ = exact.split("/")
        found: dict[int, list[float]] = defaultdict(list)
        for first in (exact, f"{kind}/{scheme}/", f"{kind}/"):
            for name in observed:
                if name.startswith(first) and name.endswith(f"/{phase}"):
                    for one in observed[name]:
                        found[int(one.shapes[0][0])].append(one.ms)
            if found:
                break
        return found

    def measured_ranks(self, collective: str, ranks: int) -> list[int]:
        """Numbers of ranks on which a collective operation was measured, the closest first."""
        if collective not in self._ranks:
            prefix = f"collective/{collective}/"
            names = [name for name in self.calibration.observations if name.startswith(prefix)]
            self._ranks[collective] = [int(name.removeprefix(prefix)) for name in names]
        return sorted(self._ranks[collective], key=lambda number: abs(number - ranks))

    def host_error(self, *, known: bool) -> float:
        """Standard log error of the time to enqueue a step."""
        hosts = [one for one in self.calibration.hosts if one.bound]
        speeds = [math.log(one.forward_us + one.backward_us) for one in hosts]
        if known or len(speeds) < 2:
            return 0.08
        middle = sum(speeds) / len(speeds)
        return max(0.08, math.sqrt(sum((x - middle) ** 2 for x in speeds) / (len(speeds) - 1)))

    def _pass(self, case: Case, sizes: Sizes, phase: str, notes: set[str]) -> Phase:
        key = (phase, sizes)
        if key not in self._passes:
            summed = operations.forward(sizes) if phase == "forward" else operations.backward(sizes)
            self._passes[key] = self._summed(summed)
        piece = self._passes[key]
        attended = self.attending.layers(case, phase)
        one = attended.time
        notes |= piece.notes | attended.notes
        if one.distance > NOTICEABLE_DISTANCE:
            notes.add(f"attention is {one.distance:.1f} doublings from what was measured")
        ms, layers = one.ms / self._compute, sizes.num_layers
        plain = Phase(
            name=phase,
            parts={**piece.parts, ATTENTION: ms},
            errors={**piece.errors, ATTENTION: ms * one.error},
            launches=piece.launches + layers * attended.launches,
            enqueued=piece.launches + layers * attended.enqueued,
            last_ms=self._last_ms(sizes, piece) if phase == "forward" else 0.0,
        )
        return self._compiled(case, plain, notes)

    def _last_ms(self, sizes: Sizes, forward: Piece) -> float:
        """The head and the loss, which the device has before it when its host is done."""
        head = self._summed([operations.head(sizes)])
        return sum(head.parts.values()) + forward.parts.get(LOSS, 0.0)

    def _compiled(self, case: Case, eager: Phase, notes: set[str]) -> Phase:
        """What torch.compile leaves of a pass: fewer bytes and launches between products."""
        compiling = case.compile
        if compiling is None or compiling.scope == "none":
            return eager
        factors = self.calibration.factors
        left = factors.get(f"compiled/{compiling.scope}/{eager.name}")
        if left is None:
            notes.add(f"compile={compiling.scope} was not measured")
            left = UNMEASURED_COMPILED
        scale = {name: 1.0 if name in UNFUSED else left for name in eager.parts}
        kept = self.compiled_launches(compiling, eager.name)
        return Phase(
            name=eager.name,
            parts={name: scale[name] * ms for name, ms in eager.parts.items()},
            errors={
                name: scale[name] * error + (0 if name in UNFUSED else 0.2 * eager.parts[name])
                for name, error in eager.errors.items()
            },
            launches=COMPILED_LAUNCHES * eager.launches,
            enqueued=kept * eager.enqueued,
            last_ms=eager.last_ms,
        )

    def compiled_launches(self, compiling: Compile, phase: str) -> float:
        """What torch.compile leaves of the host's time of a pass."""
        usual = GRAPHS_HOST if compiling.mode in CUDA_GRAPH_MODES else COMPILED_HOST
        return self.calibration.factors.get(f"{compiled_launches_name(compiling)}/{phase}", usual)

    def _summed(self, found: Iterable[Operation]) -> Piece:
        parts: dict[str, float] = defaultdict(float)
        errors: dict[str, float] = defaultdict(float)
        notes = set[str]()
        launches = 0.0
        for item in found:
            law, error = self._law_of(item)
            launches += item.count * item.launches
            if law is None:
                notes.add(f"{item.part} were not measured")
                continue
            one = law(item.shape)
            rate = self._compute if item.part == MATMULS else self._bandwidth
            ms = item.count * one.ms / rate
            parts[item.part] += ms
            errors[item.part] += ms * max(error, one.error)
            if one.distance > NOTICEABLE_DISTANCE and item.part == "matmuls":
                notes.add("matmuls are far from the measured shapes")
        return Piece(parts=dict(parts), errors=dict(errors), launches=launches, notes=notes)

    def _law_of(self, item: Operation) -> tuple[Law | None, float]:
        """An operation's law and the least error of its time, perhaps of another format."""
        law = self.law(item.law)
        if law is not None:
            return law, 0.0
        match item.law.split("/"):
            case ["elementwise", _, name]:
                laws = [self.law(f"elementwise/{kind}/{name}") for kind in KINDS]
                found = next((one for one in laws if one is not None), None)
                return found or self.law("copy"), UNMEASURED_ERROR
            case ["matmul", "float16"]:
                return self.law("matmul/bfloat16"), 0.0
        return self.law("copy"), UNMEASURED_ERROR

    def _recomputed(self, case: Case, whole: Phase) -> Phase | None:
        """What the backward pass computes again of the forward pass."""
        if case.checkpoint is None:
            return None
        share = 1 / case.checkpoint.blocks
        kept: tuple[str, ...] = ("loss", "embedding")
        if case.checkpoint.scope == "selective":
            kept += (MATMULS,)
            # Of scores in memory, all but two products is computed again: nearly their whole time.
            if not case.attention.keeps_scores(replace(case.attention_problem, needs_grad=True)):
                kept += (ATTENTION,)
        return Phase(
            name="backward",
            parts={name: share * ms for name, ms in whole.parts.items() if name not in kept},
            errors={name: share * ms for name, ms in whole.errors.items() if name not in kept},
            launches=share * whole.launches,
            enqueued=share * whole.enqueued,
        )

    def _checkpointed(self, phase: Phase, scope: str, layers: int) -> Phase:
        """A phase whose host also decides on what to keep, block by block."""
        more = self.calibration.factors.get(f"checkpointed/{scope}/{phase.name}", 0.0)
        return replace(phase, enqueued=phase.enqueued + more * layers)

    def _optimizer(self, case: Case, sizes: Sizes) -> Phase:
        scaled = case.precision.grad_scaler
        size = 2 if case.precision.parameters.endswith("16") else 4
        share = case.parallel.optimizer_state_share
        item = operations.optimizer(sizes, size, share, scaled=scaled)
        piece = self._summed([item])
        return Phase(
            name="optimizer",
            parts=piece.parts,
            errors=piece.errors,
            launches=item.launches,
            # The fused optimizer lists every tensor in Python, and launches all its kernels then.
            enqueued=tensors_of(sizes),
            last_ms=sum(piece.parts.values()),
        )

    def memory_bytes(self, case: Case) -> float:
        """Predicted peak bytes on one rank."""
        return training.footprint(case).peak
