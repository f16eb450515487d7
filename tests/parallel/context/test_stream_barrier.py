"""Barriers of memory operations: streams of several ranks, stepped in random order."""

from __future__ import annotations

import random

import pytest

from parallel.context.transports.stream_barrier import StreamBarrier, num_words


class Streams:
    """A stream of each rank, whose memory operations are run one by one in random order."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self.words = [0] * (num_ranks * num_words(num_ranks))
        self.barriers = [
            StreamBarrier(rank, num_ranks, lambda of, word: of * num_words(num_ranks) + word)
            for rank in range(num_ranks)
        ]

    def run(self, queues: list[list[tuple[int, bool, int, int]]]) -> bool:
        """Run what is queued, as (round, waits, address, value); False if all wait for ever.

        Fails if a rank ends a round before all have begun it.
        """
        position, begun = [0] * len(queues), [-1] * len(queues)
        while True:
            able = []
            for rank, queue in enumerate(queues):
                if position[rank] < len(queue):
                    _, waits, address, value = queue[position[rank]]
                    if not waits or self.words[address] >= value:
                        able.append(rank)
            if not able:
                return all(at == len(queue) for at, queue in zip(position, queues, strict=True))
            rank = self._random.choice(able)
            number, waits, address, value = queues[rank][position[rank]]
            begun[rank] = number
            if not waits:
                self.words[address] = value
            position[rank] += 1
            queue = queues[rank]
            if position[rank] == len(queue) or queue[position[rank]][0] != number:
                assert min(begun) >= number, "a rank went on before all had come"


def operations_of(barrier: StreamBarrier, number: int) -> list[tuple[int, bool, int, int]]:
    return [(number, o.waits, o.address, o.value) for o in barrier.take_turn()]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_rank_goes_on_before_all_have_come(num_ranks: int) -> None:
    for seed in range(100):
        streams = Streams(num_ranks, seed)
        queues = [
            [step for number in range(6) for step in operations_of(barrier, number)]
            for barrier in streams.barriers
        ]
        assert streams.run(queues), "a lost word"
        assert not any(streams.words), "the next barrier would not wait"


@pytest.mark.parametrize("num_barriers", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_captured_pass_can_be_replayed(
    num_ranks: int, num_barriers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph repeats the very operations, also behind passes that were launched one by one."""
    for seed in range(50):
        streams = Streams(num_ranks, seed)
        passes: list[list[tuple[int, bool, int, int]]] = []
        for barrier in streams.barriers:
            steps: list[tuple[int, bool, int, int]] = []

            def enqueue(stream: int, barrier: StreamBarrier = barrier, steps: list = steps) -> None:
                steps += operations_of(barrier, len(steps))

            monkeypatch.setattr(barrier, "enqueue", enqueue)
            for _ in range(num_barriers):
                barrier.enqueue(0)
            barrier.settle(0)
            passes.append(steps)
        length = max(number for number, *_ in passes[0]) + 1
        replayed = [
            [(number + again * length, *rest) for again in range(3) for number, *rest in steps]
            for steps in passes
        ]
        assert streams.run(replayed), "a lost word"
        assert not any(streams.words)
