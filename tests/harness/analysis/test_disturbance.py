"""What disturbed a measurement: alarms on sound noise, and what is planted in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from records import make_record

from harness.analysis.disturbance import MEANINGS, drifts, is_bimodal, of_record, of_samples
from harness.analysis.frame import build_frame
from harness.bench.host_load import LoadWatch
from harness.store.record import Record, Round

SERIES = 1000


def noise(num_samples: int, relative: float) -> np.ndarray:
    random = np.random.default_rng([num_samples, int(1e4 * relative)])
    return np.exp(random.normal(0, relative, (SERIES, num_samples)))


class TestSamples:
    @pytest.mark.parametrize("relative", [0.01, 0.05])
    @pytest.mark.parametrize("num_samples", [5, 10, 20, 50, 100, 200])
    def test_sound_noise_raises_no_alarm(self, num_samples: int, relative: float) -> None:
        words = of_samples(list(noise(num_samples, relative)))
        alarms = [found for found in words if set(found) - {"spread"}]
        assert len(alarms) < 0.02 * SERIES
        if relative == 0.01:
            assert not any("spread" in found for found in words)

    @pytest.mark.parametrize(("num_samples", "least"), [(10, 0.7), (20, 0.95), (100, 1.0)])
    def test_two_levels(self, num_samples: int, least: float) -> None:
        """Half of the samples 8% slower, in no order."""
        slow = np.random.default_rng(7).random((SERIES, num_samples)) < 0.5
        assert is_bimodal(noise(num_samples, 0.01) * (1 + 0.08 * slow)).mean() >= least

    @pytest.mark.parametrize("change", [0.1, -0.1])
    @pytest.mark.parametrize(("num_samples", "least"), [(10, 0.7), (20, 0.99), (100, 1.0)])
    def test_a_slope(self, num_samples: int, least: float, change: float) -> None:
        slope = 1 + change * np.linspace(0, 1, num_samples)
        assert drifts(noise(num_samples, 0.01) * slope).mean() >= least

    def test_slow_passes_here_and_there_are_not_a_level(self) -> None:
        slow = np.random.default_rng(8).random((SERIES, 50)) < 0.05
        assert is_bimodal(noise(50, 0.01) * (1 + slow)).mean() < 0.02

    def test_words_stand_by_series_of_any_length(self) -> None:
        rising = list(np.linspace(1, 2, 12))
        assert of_samples([[1.0] * 12, rising, [], [3.0], [1.0, 2.0, 1.0, 2.0, 1.0]]) == [
            [],
            ["drift", "spread"],
            [],
            [],
            ["spread"],
        ]


class TestRecords:
    def of_rounds(self, *ranks: dict[str, Any]) -> Record:
        record = make_record()
        record.round_states = [
            Round(started_at=f"2026-01-0{day}", process=0, ranks=[rank])
            for day, rank in enumerate(ranks, 1)
        ]
        return record

    @pytest.mark.parametrize(
        ("clocks", "words"),
        [((1980, 1900), []), ((1980, 1700), ["throttled"]), ((1500, None), [])],
    )
    def test_clocks_apart_between_rounds(self, clocks: tuple[Any, ...], words: list[str]) -> None:
        states = [{"before": {"sm_clock_mhz": clock}, "after": {}} for clock in clocks]
        assert of_record(self.of_rounds(*states)) == words

    @pytest.mark.parametrize(
        ("load", "words"),
        [
            ({"other_cpu_share": 0.05, "device_processes": []}, []),
            ({"other_cpu_share": 0.2}, ["busy"]),
            ({"device_processes": [{"memory_bytes": None}]}, ["busy"]),
            ({"at_start": {"device_processes": [{"memory_bytes": 1}]}}, ["busy"]),
            ({}, []),
        ],
    )
    def test_other_work(self, load: dict[str, Any], words: list[str]) -> None:
        assert of_record(self.of_rounds({"load": {}}, {"load": load})) == words

    def test_the_watch_says_what_the_rule_reads(self) -> None:
        load = LoadWatch(torch.device("cpu")).load() | {"other_cpu_share": 0.0}
        assert "other_cpu_share" in LoadWatch(torch.device("cpu")).load()
        assert of_record(self.of_rounds({"load": load})) == []
        assert of_record(self.of_rounds({"load": load | {"other_cpu_share": 0.5}})) == ["busy"]

    def test_an_idle_device_rests_at_low_clocks(self) -> None:
        idle = {"sm_clock_mhz": 345, "throttle_reasons": ["gpu_idle"]}
        state = {"before": idle, "after": {"sm_clock_mhz": 1980, "throttle_reasons": []}}
        assert of_record(self.of_rounds(state)) == []

    def test_old_records_do_not_say(self) -> None:
        assert of_record(make_record()) == []

    def test_in_the_frame_by_phase(self) -> None:
        rising = [1.0 + 0.01 * index for index in range(30)]
        state = [{"before": {}, "after": {"throttle_reasons": ["hw_slowdown"]}}]
        frame = build_frame(
            [
                make_record(samples_ms={"forward": [rising], "backward": [[1.0] * 30]}),
                make_record(status="failed", message="no", seed=2),
                make_record(samples_ms={"forward": [rising]}, device_state=state, seed=3),
            ]
        )
        words = dict(zip(zip(frame["seed"], frame["phase"], strict=True), frame["disturbed"],
                         strict=True))  # fmt: skip
        assert words[0, "forward"] == ["drift", "spread"]
        assert words[0, "backward"] == []
        assert words[3, "forward"] == ["throttled", "drift", "spread"]
        assert [found for (seed, _), found in words.items() if seed == 2] == [[]] * 4
        assert list(MEANINGS)[:2] == ["busy", "throttled"]
