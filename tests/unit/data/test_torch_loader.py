"""Data sets of torch, and streams, as sources of the step loop."""

import gc
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from recipes.core.data import sampling, torch_loader
from recipes.core.data.sampling import GlobalBatches
from recipes.core.data.torch_loader import LoadedBatch, SkippedSample, StreamLoader, TorchLoader
from recipes.core.errors import InputError, RunError
from tests import helpers

CPU = torch.device("cpu")
# batches of 6, 6, 5 and 5
COUNT = 22
BATCH = 6
Found = list[tuple[int, int, int, list[float]]]


class Numbers(Dataset[Any]):
    """Sample i: itself, and random numbers of the three global generators."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"i": i, "drawn": (torch.rand(()), random.random(), np.random.rand())}


class Doubled(Numbers):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return super().__getitem__(2 * i)


class Unsteady(Numbers):
    reads = 0

    def __getitem__(self, i: int) -> dict[str, Any]:
        self.reads += 1
        return {"i": i, "drawn": self.reads}


class Hanging(Numbers):
    """Its file has the process that reads a sample."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __getitem__(self, i: int) -> Any:
        self.mark.write_text(str(os.getpid()))
        time.sleep(60)


class Missing(Numbers):
    def __getitem__(self, i: int) -> Any:
        raise SkippedSample("the same", "is gone", -1)


class Faulty(Numbers):
    def __getitem__(self, i: int) -> Any:
        if i == 1:
            raise InputError("sample 1: is damaged: remove it")
        return 1 // i


def stream(epoch: int) -> Iterator[int]:
    return iter(range(COUNT))


def batches(rank: int = 0, ranks: int = 1, count: int = COUNT) -> GlobalBatches:
    return GlobalBatches(count, BATCH, 5, rank, ranks)


def of_set(part: GlobalBatches, workers: int) -> TorchLoader:
    return TorchLoader(Numbers(), part, num_workers=workers, device=CPU)


def of_stream(part: GlobalBatches, workers: int) -> StreamLoader:
    return StreamLoader(
        stream, part, num_workers=workers, device=CPU, transform=Numbers().__getitem__
    )


def rows(loader: TorchLoader | StreamLoader, epoch: int, first_batch: int = 0) -> Found:
    """Epoch, batch, sample and its random numbers, of each sample."""
    parts = list(loader.epoch(epoch, first_batch))
    for part in parts:
        assert part.indices.tolist() == part.data["i"].tolist()
    return [
        (part.epoch, part.batch, int(i), [float(value[n]) for value in part.data["drawn"]])
        for part in parts
        for n, i in enumerate(part.data["i"])
    ]


@pytest.mark.parametrize("make", [of_set, of_stream])
@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (3, 0),
        (2, 2),
    ],
)
def test_samples_and_their_random_numbers_are_those_of_one_rank(
    make: Any, ranks: int, workers: int
) -> None:
    whole = make(batches(), 0)
    parts = [make(batches(rank, ranks), workers) for rank in range(ranks)]
    for epoch in range(2):
        alone = rows(whole, epoch)
        together = [row for part in parts for row in rows(part, epoch)]
        assert sorted(together) == sorted(alone)
        assert sorted(i for _, _, i, _ in alone) == list(range(COUNT))
        assert len({tuple(numbers) for *_, numbers in alone}) == COUNT
        for part in parts:
            assert rows(part, epoch, 2) == [row for row in rows(part, epoch) if row[1] >= 2]
    assert [row[3] for row in rows(whole, 0)] != [row[3] for row in rows(whole, 1)]
    of_another_seed = rows(make(GlobalBatches(COUNT, BATCH, 6, 0, 1), 0), 0)
    assert not {tuple(row[3]) for row in rows(whole, 0)} & {
        tuple(row[3]) for row in of_another_seed
    }
    if make is of_set:
        assert [row[2] for row in rows(whole, 0)] != [row[2] for row in rows(whole, 1)]


def test_a_shard_of_any_structure_is_cut_into_pieces() -> None:
    (part, *_) = of_set(batches(), 0).epoch(0)
    pieces = part.pieces(4)
    assert [type(piece) for piece in pieces] == [LoadedBatch] * 4
    assert [len(piece.data["drawn"][2]) for piece in pieces] == [2, 2, 1, 1]
    assert [len(piece.indices) for piece in pieces] == [2, 2, 1, 1]
    assert torch.cat([piece.data["i"] for piece in pieces]).equal(part.indices)


@pytest.mark.parametrize("make", [of_set, of_stream])
def test_a_rank_without_samples_gets_an_empty_batch(make: Any) -> None:
    last = batches(6, 7)
    assert [len(part.data["i"]) for part in make(last, 0).epoch(0)] == [0] * 4


def test_reading_here_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    of_numpy = np.random.get_state()[1].tolist()
    rows(of_set(batches(), 0), 0)
    rows(of_stream(batches(), 0), 0)
    assert torch.get_rng_state().equal(of_torch)
    assert random.getstate() == of_python
    assert np.random.get_state()[1].tolist() == of_numpy


def test_an_evaluation_reads_this_ranks_part_in_order() -> None:
    loader = of_set(batches(), 2)
    numbers = Numbers()
    part = sampling.share(COUNT, 1, 3)
    for _ in range(2):
        read = [batch["i"].tolist() for batch in loader.in_order(numbers, part, 4)]
        assert read == [[8, 9, 10, 11], [12, 13, 14]]


def test_the_random_numbers_of_an_evaluation_are_not_those_of_an_epoch() -> None:
    loader = of_set(batches(), 0)
    numbers = Numbers()
    drawn = []
    for _ in range(2):
        [read] = loader.in_order(numbers, slice(COUNT), COUNT)
        drawn.append(torch.stack(read["drawn"]).T.tolist())
    assert numbers.epoch == torch_loader.EVALUATION
    assert drawn[0] == drawn[1]
    for epoch in range(2):
        assert not [row for row in rows(loader, epoch) if row[3] in drawn[0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluations_of_two_sets_read_each_its_own(workers: int) -> None:
    loader = of_set(batches(), workers)
    for dataset, expected in (
        (Numbers(), [[0, 1], [2, 3]]),
        (Doubled(), [[0, 2], [4, 6]]),
        (Numbers(), [[0, 1], [2, 3]]),
    ):
        batches_of_set = loader.in_order(dataset, slice(4), 2)
        assert [batch["i"].tolist() for batch in batches_of_set] == expected


@pytest.fixture
def forks() -> Iterator[None]:
    """Workers that are forks of this process: they have its stderr and its changed constants."""
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(usual, force=True)


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_sample_is_one_line(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    loader = of_set(batches(), workers)
    with pytest.raises(InputError, match=r"^sample 1: is damaged: remove it$"):
        list(loader.in_order(Faulty(), slice(1, 2), 4))
    if workers:
        with pytest.raises(
            RunError, match=r"^ZeroDivisionError: .*zero \(.*test_torch_loader\.py, line \d+\)$"
        ):
            list(loader.in_order(Faulty(), slice(2), 2))
        assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("forks")
def test_an_error_in_a_worker_mentions_a_small_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loader, "LITTLE_SHM", 1 << 60)
    with pytest.raises(
        RunError, match=r"line \d+\); /dev/shm has only \d+ MB free: in a container, use --shm-size"
    ):
        list(of_set(batches(), 1).in_order(Faulty(), slice(2), 2))


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    process: Any = multiprocessing.current_process()
    monkeypatch.delitem(process._config, "tempdir", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_tmpdir_that_is_too_long_for_sockets_is_refused(
    short_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = f"{short_folder}/".ljust(75, "x")
    Path(longest).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", longest)
    assert len(rows(of_set(batches(), 1), 0)) == COUNT
    monkeypatch.setattr(tempfile, "tempdir", f"{longest}x")
    of_set(batches(), 0)
    for make in (of_set, of_stream):
        with pytest.raises(
            InputError,
            match=r"^TMPDIR=.*x: too long for .*: set TMPDIR to a folder of at most 75 bytes",
        ):
            make(batches(), 1)


def test_a_set_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match="has 22 samples"):
        of_set(batches(count=20), 0)
    with pytest.raises(InputError, match="the stream has fewer than 24 samples"):
        rows(of_stream(batches(count=24), 0), 0)


def test_a_set_that_does_not_repeat_is_reported_once() -> None:
    lines: list[str] = []
    make = partial(TorchLoader, device=CPU, warn=lines.append)
    make(Numbers(), batches(), num_workers=0)
    make(Unsteady(), batches(rank=1, ranks=2), num_workers=0)
    assert lines == []
    numbers = Unsteady()
    make(numbers, batches(), num_workers=1)
    assert [line[:45] for line in lines] == ["dataset[0] differs between two reads with the"]
    assert numbers.reads == 0  # a file that this process opened would be shared with the workers


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([0.0]), torch.tensor([math.nan]), False),
        (torch.tensor([math.inf]), torch.tensor([torch.finfo().max]), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), True),
        (torch.zeros(2), None, True),  # no number of it can be compared
        ("a", "b", False),
    ],
)
def test_two_reads_of_a_value_are_compared(first: Any, second: Any, expected: bool) -> None:
    assert torch_loader._equal(first, second) is expected


def test_the_workers_end_with_their_loader() -> None:
    others = multiprocessing.active_children()  # of tests before this one
    loader = of_set(batches(), 2)
    rows(loader, 0)
    workers = [worker for worker in multiprocessing.active_children() if worker not in others]
    assert len(workers) == 2
    del loader
    gc.collect()
    for worker in workers:
        worker.join()
    # DataLoader kills workers that it cannot tell to end
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_worker_that_hangs_ends_with_its_rank(tmp_path: Path) -> None:
    mark = tmp_path / "pid"

    def read() -> None:
        loader = TorchLoader(Hanging(mark), batches(1, 2), num_workers=1, device=CPU)
        list(loader.epoch(0))

    rank = multiprocessing.get_context("fork").Process(target=read)
    rank.start()
    pid = helpers.wait_until(lambda: mark.exists() and mark.read_text(), 20, "a read")
    rank.kill()
    rank.join()
    helpers.wait_for_the_end_of([int(pid)], 10)


def test_a_sample_that_is_skipped_again_counts_once() -> None:
    lines: list[str] = []
    loader = TorchLoader(Missing(), batches(1, 2), num_workers=0, device=CPU, warn=lines.append)
    assert {int(label) for part in loader.epoch(0) for label in part.data} == {-1}
    assert lines == ["'the same' cannot be read (is gone) and is skipped"]
    assert loader.skipped == {"the same"}
    loader.skipped |= {f"of another epoch {n}" for n in range(torch_loader.MOST_SKIPPED)}
    assert list(loader.epoch(1))  # they do not count again


def test_texts_cannot_be_cut_into_pieces() -> None:
    make = partial(
        TorchLoader, num_workers=0, device=CPU, collate=lambda samples: ["text"] * len(samples)
    )
    (part, *_) = make(Numbers(), batches()).epoch(0)
    assert part.pieces(1) == [part]
    with pytest.raises(InputError, match="accumulate=2: str cannot be divided"):
        part.pieces(2)


def test_workers_that_are_spawned_can_unpickle_what_they_need() -> None:
    loader = StreamLoader(stream, batches(), num_workers=1, device=CPU)
    needed = (of_set(batches(), 1)._training.dataset, loader, torch_loader.unchanged)
    assert pickle.loads(pickle.dumps(needed))


def test_a_worker_that_is_killed_while_it_passes_on_a_batch_is_named() -> None:
    """torch's handler of SIGCHLD raises the error that names it, after the error of its socket."""

    def ended(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal")

    def batches() -> Iterator[object]:
        yield 1
        raise ConnectionResetError

    before = signal.signal(signal.SIGCHLD, ended)
    worker = subprocess.Popen(["sleep", "0.2"])
    try:
        with pytest.raises(RuntimeError, match="is killed by signal"):
            list(torch_loader._results(batches()))
    finally:
        signal.signal(signal.SIGCHLD, before)
        worker.wait()
