"""No pickle that comes from another rank runs code, and torch's store has one address."""

from __future__ import annotations

import collections
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from agents import free_port
from conftest import ROOT
from fault_folders import GUARD_S
from ranks import RankError, on_ranks

from harness.bench.outcome import Outcome
from harness.run.nodes import outcomes
from harness.run.nodes.outcomes import OutcomeError, decode_outcome, gather_outcomes
from harness.run.nodes.plain_objects import restrict_object_collectives
from harness.run.nodes.store import group_arguments


class Bomb:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def full_outcome(rank: int) -> Outcome:
    return Outcome(
        rank=rank,
        clocks={"forward": "host"},
        samples_ms={"forward": [0.5] * (1 + 1000 * rank), "backward": [float("nan")]},
        memory={"source": "rss", "peak_rss_bytes": 1 << 40},
        check=None if rank else {"passed": True, "worst": float("inf")},
        notes={"text": "\ud800 é", "nested": [{"a": [None, 1, 2.5]}]},
    )


@contextmanager
def restricted() -> Iterator[None]:
    """A worker's reading of objects, in a process that other tests use as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_unpickler", c10d._unpickler)
        restrict_object_collectives()
        yield


def outcomes_of_all(group: dist.ProcessGroup) -> list[str]:
    return [repr(found) for found in gather_outcomes(full_outcome(dist.get_rank(group)), group)]


def bomb_among_outcomes(group: dist.ProcessGroup, path: Path) -> str:
    """Rank 1 joins the gathering of outcomes as a stranger with torch's own means would."""
    if dist.get_rank(group) == 1:
        found: list[Any] = [None] * dist.get_world_size(group)
        with pytest.MonkeyPatch.context() as patch:
            # It does not read what it gets, which is no pickle.
            patch.setattr(c10d, "_tensor_to_object", lambda *_: None)
            dist.all_gather_object(found, Bomb(path), group=group)
        return "sent"
    try:
        return repr(gather_outcomes(full_outcome(0), group))
    except OutcomeError as error:
        return str(error)


def length_among_outcomes(group: dist.ProcessGroup, length: int) -> str:
    if dist.get_rank(group) == 1:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(lengths, torch.tensor([length]), group=group)
        return "sent"
    try:
        return repr(gather_outcomes(full_outcome(0), group))
    except OutcomeError as error:
        return str(error)


def bomb_among_objects(group: dist.ProcessGroup, path: Path) -> str:
    rank = dist.get_rank(group)
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        with restricted():
            dist.all_gather_object(found, Bomb(path) if rank else "mine", group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return repr(found)


def objects_of_all(group: dist.ProcessGroup, value: Any) -> Any:
    found: list[Any] = [None] * dist.get_world_size(group)
    with restricted():
        dist.all_gather_object(found, value, group=group)
    return found


class TestOutcomes:
    def test_all_ranks_receive_all_of_them(self) -> None:
        expected = [repr(full_outcome(rank)) for rank in range(3)]
        assert on_ranks(3, outcomes_of_all) == [expected] * 3

    def test_a_pickle_among_them_is_not_read(self, tmp_path: Path) -> None:
        said, _ = on_ranks(2, bomb_among_outcomes, tmp_path / "made")
        assert said.startswith("rank 1 sent no outcome")
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize("length", [-1, 0, outcomes.OUTCOME_BYTES + 1, 1 << 62])
    def test_a_length_that_no_outcome_has(self, length: int) -> None:
        said, _ = on_ranks(2, length_among_outcomes, length)
        assert said == f"rank 1 announced an outcome of {length} bytes"

    @pytest.mark.parametrize(
        "changes",
        [
            *({"rank": "1"}, {"rank": 0}, {"status": 5}, {"error": []}, {"samples_ms": []}),
            *({"samples_ms": {"forward": ["x"]}}, {"clocks": {"forward": 1}}, {"more": 1}),
            *({"checking_s": "x"}, {"notes": None}),
        ],
    )
    def test_a_wrongly_typed_one(self, changes: dict[str, Any]) -> None:
        with pytest.raises(OutcomeError, match="rank 1 sent"):
            decode_outcome(json.dumps(asdict(full_outcome(1)) | changes).encode(), 1)

    @pytest.mark.parametrize(
        "data", [b"", b"5", b"[]", b"{}", b"\xff", b"[" * 100_000, b"9" * 5000, b"\0" * 8]
    )
    def test_no_outcome(self, data: bytes) -> None:
        with pytest.raises(OutcomeError, match="rank 1 sent"):
            decode_outcome(data, 1)


class TestObjects:
    def test_a_pickle_that_names_a_function_is_refused(self, tmp_path: Path) -> None:
        """By every collective of objects in a worker, whoever calls it."""
        for said in on_ranks(2, bomb_among_objects, tmp_path / "made"):
            assert said.startswith("UnpicklingError: a rank sent an object of posix.mkdir")
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize(
        "value",
        [
            {"a": [1, 2.5, None, True, "x", b"y", (1,), {2}, frozenset({3}), 1j]},
            collections.OrderedDict(a=1),
            [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
        ],
    )
    def test_plain_values_arrive(self, value: Any) -> None:
        assert on_ranks(2, objects_of_all, value) == [[value, value]] * 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
    def test_tensors_arrive(self, dtype: torch.dtype) -> None:
        value = {0: {"exp_avg": torch.arange(6).reshape(2, 3).to(dtype).T}}
        for found in on_ranks(2, objects_of_all, value):
            for state in found:
                assert state[0]["exp_avg"].dtype == dtype
                assert torch.equal(state[0]["exp_avg"], value[0]["exp_avg"])

    def test_a_pickle_inside_a_tensors_storage_is_refused(self, tmp_path: Path) -> None:
        """By itself torch reads the bytes of a storage as a pickle that may name anything."""
        with pytest.raises(RankError, match=r"UnpicklingError: .*weights_only"):
            on_ranks(2, nested_bomb, tmp_path / "made")
        assert not (tmp_path / "made").exists()

    def test_workers_restrict_them(self) -> None:
        code = (
            "import sys, harness.run.workers.worker as w\n"
            "import torch.distributed.distributed_c10d as c10d\n"
            "w.dist.init_process_group = lambda *a, **k: print(c10d._unpickler.__name__)\n"
            "w.dist.new_group = lambda *a, **k: None\n"
            "import argparse\n"
            "values = dict(rank=0, local_rank=0, ranks_on_host=2, world_size=2, device='cpu')\n"
            "values |= dict(caches='x', vote_timeout_s=1.0, collective_timeout_s=1.0)\n"
            "values |= dict(rendezvous='file:///x')\n"
            "w.Worker(argparse.Namespace(**values), channel=None)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == "PlainUnpickler\n"


class Nested:
    """What a storage's pickle looks like, with another pickle in place of its bytes."""

    def __init__(self, inner: bytes) -> None:
        self.inner = inner

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.storage._load_from_bytes, (self.inner,)


def nested_bomb(group: dist.ProcessGroup, path: Path) -> str:
    return repr(objects_of_all(group, Nested(pickle.dumps(Bomb(path)))))


def test_the_store_listens_on_one_address() -> None:
    timeout = timedelta(seconds=GUARD_S)
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    arguments = group_arguments(rendezvous, rank=0, world_size=1, timeout=timeout)
    store = arguments["store"]
    store.set("key", "value")
    assert store.get("key") == b"value"
    port = int(rendezvous.rpartition(":")[2])
    listening = psutil.Process().net_connections("tcp")
    assert {item.laddr.ip for item in listening if item.laddr and item.laddr.port == port} == {
        "127.0.0.1"
    }
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=GUARD_S)


def test_a_group_meets_through_the_store(tmp_path: Path) -> None:
    """Two processes, as the ranks of a group over two hosts do."""
    code = (
        "import sys; from datetime import timedelta; import torch, torch.distributed as dist\n"
        "from harness.run.nodes.store import group_arguments\n"
        "rank, where = int(sys.argv[1]), sys.argv[2]\n"
        f"timeout = timedelta(seconds={GUARD_S})\n"
        "found = group_arguments(where, rank=rank, world_size=2, timeout=timeout)\n"
        "dist.init_process_group('gloo', **found)\n"
        "x = torch.tensor([rank + 1]); dist.all_reduce(x); print(int(x))\n"
        "dist.destroy_process_group()\n"
    )
    where = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen([*command, str(rank), where], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [process.communicate(timeout=GUARD_S)[0] for process in ranks] == ["3\n", "3\n"]


def test_nobody_else_reads_pickles() -> None:
    """What sends objects reads them restricted; nothing else in a worker reads a pickle."""
    allowed = {
        "harness/bench/bench.py": {"all_gather_object"},
        "parallel/data/elementwise_optimizer.py": {"all_gather_object"},
        "parallel/data/sharded_optimizer.py": {"all_gather_object"},
        "parallel/context/transports/peer_memory.py": {"all_gather_object"},
        "parallel/context/bound.py": {"all_gather_object"},
        "harness/run/nodes/plain_objects.py": {"torch.load"},
    }
    words = ("all_gather_object", "gather_object", "broadcast_object", "scatter_object")
    words += ("send_object", "recv_object", "torch.load", "pickle.load", "cloudpickle", "dill")
    for package in ("harness", "kernels", "models", "parallel"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8").replace("all_gather_object", "all-objects")
            found = {word for word in words if word in text}
            found |= {"all_gather_object"} if "all-objects" in text else set()
            assert found <= allowed.get(path.relative_to(ROOT).as_posix(), set()), path
