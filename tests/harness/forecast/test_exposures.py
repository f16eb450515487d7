"""What communication adds to steps: on the device, and on the host, in either pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from harness import forecast
from harness.forecast import communication, extract, schedule
from harness.forecast.calibration import Exposure
from harness.forecast.exposures import exposures
from harness.forecast.law import Observation
from harness.forecast.machines import Machine
from harness.forecast.measured import MeasuredStep
from tests.harness.forecast.test_forecast_machines import attention_row, case, split
from tests.harness.forecast.test_told_by_steps import measured

WAITS: dict[str, Any] = {"batch_size": 1, "seq_len": 128}
BUSY: dict[str, Any] = {"precision": "bf16", "batch_size": 8, "seq_len": 2048}


@pytest.fixture(scope="module")
def h200() -> Machine:
    return forecast.machine("h200")


def replicas(model: str, strategy: str, **options: Any) -> Any:
    return case(model, parallel={"name": strategy, "dp": 2}, **options)


def alone(machine: Machine, one: Any, host: str | None = None) -> dict[str, float]:
    """Milliseconds of the phases without communication."""
    phases = machine.enqueued(one)
    return schedule.predict(phases, (), machine.host_us(host), 0.0, 1.0, set()).phases_ms


def longer(phases_ms: dict[str, float], **added_ms: float) -> dict[str, float]:
    return {name: ms + added_ms.get(name, 0.0) for name, ms in phases_ms.items()}


class TestExposures:
    """What measured steps of replicas tell."""

    def test_a_host_gathers_parameters_in_the_forward_pass(self, h200: Machine) -> None:
        one = replicas("small", "fsdp", **WAITS)
        step = measured(one, longer(alone(h200, one), forward=5.0, backward=3.0))
        (found,) = exposures(h200, [step])
        each = communication.num_tensors(one) / 1e3
        host_us = h200.host_us()
        assert found.visible is None
        assert found.forward_launches is not None
        assert found.launches is not None
        assert found.forward_launches * each * host_us["forward"] == pytest.approx(5, rel=0.01)
        assert found.launches * each * host_us["backward"] == pytest.approx(3, rel=0.01)

    @pytest.mark.parametrize(("shown", "expected"), [(0.4, 0.6), (2.0, 1.4)])
    def test_what_is_usual_is_one_more_step(
        self, h200: Machine, shown: float, expected: float
    ) -> None:
        cool, step, _ = self.shown(h200, shown)
        (found,) = exposures(cool, [step])
        assert found.visible == pytest.approx(expected, rel=0.02)

    def test_a_step_that_waits_for_a_strategys_work_tells_nothing(self, h200: Machine) -> None:
        """Others that wait tell how much work that is."""
        waiting, busy = replicas("small", "fsdp", **WAITS), replicas("xl", "fsdp", **BUSY)
        phases_ms = alone(h200, busy)
        share = communication.num_tensors(waiting) / communication.num_tensors(busy)
        host_ms = 1.2 * phases_ms["forward"] * share
        first = measured(waiting, longer(alone(h200, waiting), forward=host_ms))
        second = measured(busy, longer(phases_ms, forward=0.5 * phases_ms["forward"]))
        assert exposures(h200, [second])[0].visible is not None
        assert exposures(h200, [first, second])[0].visible is None

    def test_communication_behind_the_backward_pass_is_not_its_hosts(self, h200: Machine) -> None:
        one = replicas("small", "fsdp", **WAITS)
        phases_ms = longer(alone(h200, one), backward=3.0)
        found = [
            exposures(h200, [measured(one, phases)])[0].launches
            for phases in (phases_ms, {**phases_ms, "communication": 4.0})
        ]
        assert found[0] == pytest.approx(found[1])

    def test_what_one_rank_takes_longer_is_not_communication(self, h200: Machine) -> None:
        exchanged, found = 0.0, []
        for longer_ms in (0.0, 5.0):
            cool, step, exchanged = self.shown(h200, 2.0)
            one = case("xl", **BUSY)
            twin = measured(one, longer(alone(cool, one), backward=longer_ms))
            (told,) = exposures(cool, [step, twin])
            assert told.visible is not None
            found.append(told.visible)
        # The median of what it shows and of what is usual.
        assert found[0] - found[1] == pytest.approx(5.0 / exchanged / 2, rel=0.02)

    def test_a_strategy_of_which_nothing_is_told_stays_unmeasured(self, h200: Machine) -> None:
        cool, step, _ = self.shown(h200, 2.0)
        assert exposures(cool, [replace(step, row={"disturbed": ["spread"]})]) == []

    def shown(self, machine: Machine, share: float) -> tuple[Machine, MeasuredStep, float]:
        """A machine without load, a step that shows so much of its communication, and that."""
        one = replicas("xl", "ddp_bucketed", **BUSY)
        cool = Machine(replace(machine.calibration, factors={"load": 0.0}))
        exchanged = sum(ms for _, ms, _ in communication.gradient_traffic(cool, one))
        step = measured(one, longer(alone(cool, one), backward=share * exchanged))
        return cool, step, exchanged

    def test_work_in_the_forward_pass_makes_that_pass_wait(self, h200: Machine) -> None:
        one = replicas("small", "fsdp", **WAITS)

        def forward_ms(launches: float | None) -> float:
            told = Exposure(
                strategy="fsdp",
                matmul="bfloat16",
                visible=1.0,
                launches=0.0,
                forward_launches=launches,
            )
            machine = Machine(replace(h200.calibration, exposures=(told,)))
            return machine.step(one).phases_ms["forward"]

        added = 10 * communication.num_tensors(one) * h200.host_us()["forward"] / 1e3
        assert forward_ms(10.0) - forward_ms(None) == pytest.approx(added)


class TestSplitHost:
    """The host's time for passes of split attention."""

    @pytest.mark.parametrize(("host_ms", "expected"), [(1.3, [1.3]), (None, [])])
    def test_calls_tell_it(self, host_ms: float | None, expected: list[float]) -> None:
        row = attention_row(name="zigzag", transport="symmetric")
        row |= {"cp": 2, "host_ms": host_ms}
        found = extract.from_frame(pd.DataFrame([row]), {})
        names = ["split_host/zigzag/symmetric/forward"] if expected else []
        assert list(found) == names
        assert [item.ms for items in found.values() for item in items] == expected
        assert all(item.shapes == ((2.0,),) for items in found.values() for item in items)

    @pytest.mark.parametrize(
        ("name", "ranks", "ms"),
        [
            # Keys of four ranks come in twice as many parts as of two.
            ("zigzag", 2, 1.0),
            ("zigzag", 4, 2.0),
            # Of two numbers of ranks the closer one tells.
            ("ring", 8, 6.0),
            # Heads are exchanged, and keys gathered, once.
            ("ulysses", 4, 1.5),
            ("llama3", 4, 0.5),
            # Of others all tell, and groups of ranks hand keys on.
            ("ulysses_ring", 2, 1.0),
            ("ulysses_ring", 8, 6.0),
        ],
    )
    def test_it_grows_with_parts_that_come_in_turns(
        self, h200: Machine, name: str, ranks: int, ms: float
    ) -> None:
        told = {
            ("zigzag", "symmetric"): {2: 1.0},
            ("ring", "symmetric"): {2: 1.0, 4: 3.0},
            ("ulysses", "all_to_all"): {2: 1.5},
            ("llama3", "all_gather"): {2: 0.5},
        }
        observations = {
            f"split_host/{scheme}/{transport}/forward": tuple(
                Observation(shapes=((float(number),),), ms=each, source=0)
                for number, each in times.items()
            )
            for (scheme, transport), times in told.items()
        }
        known = {
            key: items
            for key, items in h200.calibration.observations.items()
            if not key.startswith("split_host/")
        }
        machine = Machine(replace(h200.calibration, observations={**known, **observations}))
        one = split(name, ranks)
        found = communication._launches_of_keys(machine, one, "forward")
        assert found * machine.host_us()["forward"] / 1e3 == pytest.approx(ms)
        # The backward pass was not measured.
        assert communication._launches_of_keys(machine, one, "backward") == 48 * (
            2 if name in ("ulysses", "llama3") else ranks
        )

    def test_a_measured_transport_tells_before_others(self, h200: Machine) -> None:
        one = split("zigzag", 2)
        attention: Any = one.attention
        sent = replace(one, attention=replace(attention, transport="send_recv"))
        exact = h200.split_host_ms(sent, "forward")[2]
        every = h200.split_host_ms(one, "forward")[2]
        assert 0 < len(exact) < len(every)

    def test_rings_of_four_ranks_wait_for_their_hosts(self, h200: Machine) -> None:
        """As on H200s, where a step of medium with 32,768 tokens took 240 ms by zigzag."""
        options = {"seq_len": 32768, "batch_size": 1}
        steps = [
            h200.step(
                case("medium", "bf16", attention={"name": name}, parallel=parallel, **options)
            )
            for name in ("zigzag", "ulysses")
            for parallel in [{"name": "none", "cp": 4}]
        ]
        assert steps[0].waiting_ms > 3 * steps[1].waiting_ms
