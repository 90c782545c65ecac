"""Each rank's part of the data: `parallax.data`. "Rank 1 of 4" is asked for in this one process."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from parallax import comm, runtime
from parallax.data import Cut, RankSampler, SharedRandom, count_samples, shard, share

WORLD_SIZES = (2, 3, 4)


class FakeRuntime:
    """Writes down what a loop tells it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.foreseen: list[Any] = []

    def begin_loop(self) -> int:
        self.calls.append("begin")
        return 2

    def batch(self, loop: int, num_samples: int) -> None:
        self.calls.append(num_samples)

    looks_ahead = False

    def foresee(self, foresight: Any, batch: Any, following: Any) -> None:
        self.foreseen.append((batch, following))

    def end_batches(self, loop: int, *, early: bool) -> None:
        self.calls.append("left" if early else "end")

    def drain(self) -> None:
        self.calls.append("drain")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(runtime, "current", lambda: fake)
    return fake


def test_a_batch_is_read_ahead_when_each_has_memory_of_its_own(
    run: FakeRuntime, become: Callable[[int, int], None]
) -> None:
    run.looks_ahead = True
    become(0, 2)
    read: list[int] = []

    def batches(make: Callable[[int], Any]) -> Iterator[Any]:
        for k in range(12):
            read.append(k)
            yield make(k)

    ahead = []
    for k, batch in enumerate(shard(batches(lambda k: (torch.full((2,), k), "text", 1)))):
        assert batch[0].tolist() == [2 * k, 2 * k]
        ahead.append(read[-1] // 2 - k)
    assert ahead == [0, 0, 0, 1, 1, 0]
    following = [None if later is None else later[0].tolist() for _, later in run.foreseen]
    assert following == [None, None, None, [8, 8], [10, 10], None]


def test_batches_that_share_memory_are_read_one_by_one(run: FakeRuntime, become: Callable[[int, int], None]) -> None:
    run.looks_ahead = True
    become(0, 2)
    buffer = torch.zeros(2, dtype=torch.int64)
    for kind in (lambda: buffer, lambda: buffer.numpy(), lambda: [buffer[:1], buffer[1:]]):
        batches = (buffer.fill_(k) is None or kind() for k in range(12))
        for k, batch in enumerate(shard(batches)):
            assert int(batch[0][0] if isinstance(batch, list) else batch[0]) == 2 * k
    assert all(later is None for _, later in run.foreseen)


def test_an_error_of_the_next_batch_comes_after_this_one(run: FakeRuntime, become: Callable[[int, int], None]) -> None:
    run.looks_ahead = True

    def read() -> Iterator[torch.Tensor]:
        for _ in range(5):
            yield torch.zeros(2)
        raise OSError("no more disk")

    become(0, 2)
    batches = iter(shard(batch for batch in read() for _ in range(2)))
    assert len([next(batches) for _ in range(5)]) == 5
    with pytest.raises(OSError, match="no more disk"):
        next(batches)


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process rank r of N."""

    def become(rank: int, world_size: int) -> None:
        monkeypatch.setattr(comm, "rank", lambda: rank)
        monkeypatch.setattr(comm, "world_size", lambda: world_size)

    become(0, 1)
    return become


@pytest.fixture
def on_ranks(become: Callable[[int, int], None]) -> Callable[..., list[Any]]:
    """`read(shard(make()))` as each rank of N in turn, by default the list of its batches."""

    def on_ranks(world_size: int, make: Callable[[], Any], read: Callable[[Any], Any] = list, **options: Any) -> list:
        results = []
        for rank in range(world_size):
            become(rank, world_size)
            results.append(read(shard(make(), **options)))
        return results

    return on_ranks


def numbers(batch: Any) -> list[int]:
    """The sample numbers in a batch, whatever its form."""
    if isinstance(batch, torch.Tensor):
        return batch.flatten().tolist()
    return [n for item in batch for n in numbers(item)] if isinstance(batch, (list, tuple)) else [batch]


def all_numbers(per_rank: list[list[Any]]) -> list[int]:
    return sorted(n for batches in per_rank for batch in batches for n in numbers(batch))


def global_batches(per_rank: list[list[Any]]) -> list[list[int]]:
    """Step by step, the ranks' batches put together in rank order."""
    num_steps = max(len(batches) for batches in per_rank)
    return [[n for batches in per_rank for b in batches[k : k + 1] for n in numbers(b)] for k in range(num_steps)]


def epochs(num: int) -> Callable[[Any], list[list[Any]]]:
    return lambda loader: [list(loader) for _ in range(num)]


class Numbers(IterableDataset):
    """0..n-1, divided over the loader's workers."""

    def __init__(self, n: int, sized: bool = False) -> None:
        self.n = n
        if sized:
            self.__class__ = SizedNumbers

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, self.n, worker.num_workers) if worker else range(self.n))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.n


# -- the pure core ----------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 8))
def test_share_is_like_array_split(num_samples: int, world_size: int) -> None:
    items = list(range(num_samples))
    ours = [items[share(num_samples, r, world_size)] for r in range(world_size)]
    assert ours == [part.tolist() for part in np.array_split(items, world_size)]


@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 8), st.booleans())
def test_cut_into_blocks(num_items: int, world_size: int, extra: int, drop_last: bool) -> None:
    block_size = world_size + extra
    cuts = [Cut(rank=r, world_size=world_size, block_size=block_size, drop_last=drop_last) for r in range(world_size)]
    per_rank = [list(cut.parts(cut.blocks(range(num_items)))) for cut in cuts]
    assert [len(parts) for parts in per_rank] == [cut.num_parts(num_items) for cut in cuts]
    if num_items:
        expected = list(BatchSampler(range(num_items), block_size, drop_last))
        assert global_batches(per_rank) == expected
    sizes = [[len(parts[k]) if k < len(parts) else 0 for parts in per_rank] for k in range(len(per_rank[0]))]
    assert all(max(s) - min(s) <= 1 and s == sorted(s, reverse=True) for s in sizes)


@given(st.integers(0, 60), st.integers(1, 5))
def test_cut_in_turns(num_items: int, world_size: int) -> None:
    cuts = [Cut(rank=r, world_size=world_size) for r in range(world_size)]
    per_rank = [list(cut.parts(cut.blocks(range(num_items)))) for cut in cuts]
    assert all(
        list(parts) == list(range(num_items))[cut.rank :: world_size] for cut, parts in zip(cuts, per_rank, strict=True)
    )
    assert [len(parts) for parts in per_rank] == [cut.num_parts(num_items) for cut in cuts]


def test_cut_reads_no_further_than_asked() -> None:
    cut = Cut(rank=1, world_size=2, block_size=4)
    parts = cut.parts(cut.blocks(iter(int, 1)))  # endless
    assert next(parts) == [0, 0]


def test_shared_random_numbers_are_the_same_everywhere_and_leave_the_program_alone() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw() -> Iterator[tuple]:
        while True:
            yield (
                torch.rand(()).item(),
                random.random(),
                np.random.rand(),
                torch.rand((), generator=generator).item(),
            )

    def program() -> tuple:
        return (
            torch.rand(()).item(),
            random.random(),
            np.random.rand(),
            torch.rand((), generator=generator).item(),
        )

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    seed(5)
    alone = [program() for _ in range(3)]
    seed(5)
    generator.manual_seed(3)
    steps = SharedRandom("key", [generator]).steps(draw())
    interleaved = [(next(steps), program()) for _ in range(3)]
    assert [outside for _, outside in interleaved] == alone
    assert generator.initial_seed() == 3
    seed(6)
    steps = SharedRandom("key", [generator]).steps(draw())
    assert [next(steps) for _ in range(3)] == [inside for inside, _ in interleaved]
    assert next(SharedRandom("other key", [generator]).steps(draw())) != interleaved[0][0]


def test_shared_random_is_put_away_when_a_step_fails() -> None:
    def fail() -> Iterator[int]:
        torch.rand(5)
        raise OSError("disk")
        yield

    state = torch.get_rng_state()
    with pytest.raises(OSError, match="disk"):
        list(SharedRandom("key").steps(fail()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("batch", "num_samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.tensor(7), {"a": "x", "b": (torch.zeros(4, 1), torch.zeros(9))}], 4),
        (np.zeros((2, 5)), 2),
        (["a", "b", "c"], 3),
        ((["a", "b"], [1, 2]), 2),
        ([[1, 2, 3], [4]], 2),
        ({"text": ["a", "b"]}, 2),
        (torch.zeros(0, 2), 0),
        ([], 0),
        ("abc", None),
        (7, None),
    ],
)
def test_count_samples(batch: Any, num_samples: int | None) -> None:
    assert count_samples(batch) == num_samples


# -- DataLoader, map-style --------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_samples", [0, 1, 3, 5, 12, 23])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_together_are_one_device(on_ranks: Any, world_size: int, num_samples: int, drop_last: bool) -> None:
    def loader(batch_size: int = 2) -> DataLoader:
        return DataLoader(range(num_samples), batch_size=batch_size, drop_last=drop_last)

    per_rank = on_ranks(world_size, loader)
    assert global_batches(per_rank) == [numbers(b) for b in loader(2 * world_size)]
    assert on_ranks(world_size, loader, len) == [len(batches) for batches in per_rank]


@pytest.mark.parametrize("drop_last", [False, True])
def test_split_batches_divides_the_batch(on_ranks: Any, drop_last: bool) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(17), batch_size=5, drop_last=drop_last)

    per_rank = on_ranks(3, loader, split_batches=True)
    assert [len(rank[0]) for rank in per_rank] == [2, 2, 1]
    assert global_batches(per_rank) == [numbers(b) for b in loader()]
    assert on_ranks(3, loader, len, split_batches=True) == [len(batches) for batches in per_rank]


def test_split_batches_below_the_world_size_is_an_error(become: Any) -> None:
    become(1, 4)
    sharded = shard(DataLoader(range(9), batch_size=3), split_batches=True)
    with pytest.raises(ValueError, match="batch_size=3 is less than the world size 4"):
        list(sharded)


@pytest.mark.parametrize("data", [[1, 2], range(3), Numbers(3), DataLoader(range(3), batch_size=None)])
def test_split_batches_without_a_batch_size_is_an_error(data: Any) -> None:
    with pytest.raises(ValueError, match="split_batches=True needs a"):
        shard(data, split_batches=True)


def test_case_25_one_rank_has_a_batch_more(on_ranks: Any) -> None:
    per_rank = on_ranks(2, lambda: DataLoader(range(5), batch_size=2))
    assert [[numbers(b) for b in batches] for batches in per_rank] == [[[0, 1], [4]], [[2, 3]]]


def test_case_24_each_epoch_is_everything_once_in_a_new_order(on_ranks: Any) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(10), batch_size=2, shuffle=True)

    def orders(**options: Any) -> list[list[list[int]]]:
        torch.manual_seed(random.getrandbits(30))  # ranks and runs may be in any state
        by_rank = on_ranks(2, loader, epochs(3), **options)
        return [global_batches([rank[e] for rank in by_rank]) for e in range(3)]

    first = orders()
    for epoch in first:
        assert sorted(numbers(epoch)) == list(range(10))
        assert [len(step) for step in epoch] == [4, 4, 2]
    assert first[0] != first[1] != first[2] != first[0]
    assert orders(seed=0) == first
    assert orders(seed=1) != first


def test_case_24_evaluation_counts_each_sample_once(on_ranks: Any) -> None:
    assert sum(on_ranks(2, lambda: DataLoader(range(5), batch_size=2), lambda x: sum(len(b) for b in x))) == 5


def test_fewer_samples_than_ranks(on_ranks: Any, run: FakeRuntime) -> None:
    per_rank = on_ranks(4, lambda: DataLoader(range(2), batch_size=8, shuffle=True))
    assert sorted(numbers(per_rank[0]) + numbers(per_rank[1])) == [0, 1]
    assert per_rank[2:] == [[], []]
    assert run.calls == ["begin", 1, "end", "drain"] * 2 + ["begin", "end", "drain"] * 2


def test_set_epoch_resumes(become: Any) -> None:
    become(1, 2)
    loader = shard(DataLoader(range(12), batch_size=2, shuffle=True))
    third = [list(map(numbers, loader)) for _ in range(3)][2]
    again = shard(DataLoader(range(12), batch_size=2, shuffle=True))
    again.set_epoch(2)
    assert list(map(numbers, again)) == third
    assert list(map(numbers, again)) == list(map(numbers, loader))


def test_the_order_follows_from_the_seed_of_a_generator(on_ranks: Any) -> None:
    def orders(number: int) -> list:
        generator = torch.Generator().manual_seed(number)

        def loader() -> DataLoader:
            torch.rand(random.randrange(9), generator=generator)  # only its seed matters, not its state
            return DataLoader(range(10), batch_size=2, shuffle=True, generator=generator)

        per_rank = on_ranks(2, loader)
        assert all_numbers(per_rank) == list(range(10))
        return [numbers(batches) for batches in per_rank]

    assert orders(1) == orders(1) != orders(2)


class Shuffled(Sampler):
    """Draws with Python's and numpy's global generators."""

    def __iter__(self) -> Iterator[int]:
        order = random.sample(range(12), 12)
        yield from (order[i] for i in np.random.permutation(12))

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SubsetRandomSampler(range(12)),
        lambda: SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(4)),
        lambda: WeightedRandomSampler([1.0] * 12, 12, replacement=False),
        lambda: list(range(12)),
        Shuffled,
    ],
)
def test_samplers_give_all_ranks_the_same_order(on_ranks: Any, sampler: Callable[[], Any]) -> None:
    per_rank = on_ranks(3, lambda: DataLoader(range(12), batch_size=2, sampler=sampler()))
    assert all_numbers(per_rank) == list(range(12))
    assert [len(batches) for batches in per_rank] == [2, 2, 2]


def test_samples_drawn_with_replacement_are_one_devices(on_ranks: Any) -> None:
    sampler = WeightedRandomSampler(torch.rand(50), 12)
    per_rank = on_ranks(3, lambda: DataLoader(range(50), batch_size=2, sampler=sampler))
    one_device = RankSampler(sampler, Cut(rank=0, world_size=1, block_size=6), seed=0)
    assert global_batches(per_rank) == list(one_device)


def test_the_programs_random_numbers_are_not_touched(become: Any) -> None:
    become(0, 2)
    loader = shard(DataLoader(range(12), batch_size=2, sampler=Shuffled()))
    plain = DataLoader(range(12), batch_size=2)

    def draws(batches: Any) -> list[tuple]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        iterator = iter(batches)
        return [(torch.rand(()).item(), random.random(), np.random.rand(), next(iterator))[:3] for _ in range(2)]

    assert draws(loader) == draws(plain)


class ByLength(Sampler):
    """A batch sampler of its own kind: batches of different sizes, in random order."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        ends = np.cumsum(self.sizes)
        for i in torch.randperm(len(ends)).tolist() if self.sizes[-1] > 1 else range(len(ends)):
            yield list(range(ends[i] - self.sizes[i], ends[i]))

    def __len__(self) -> int:
        return len(self.sizes)


def test_batch_samplers_give_whole_batches(on_ranks: Any) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(19), batch_sampler=ByLength(2, 7, 3, 3, 4))

    per_rank = on_ranks(2, loader)
    assert all_numbers(per_rank) == list(range(19))
    assert sorted(len(b) for batches in per_rank for b in batches) == [2, 3, 3, 4, 7]
    assert [len(batches) for batches in per_rank] == on_ranks(2, loader, len) == [3, 2]


def test_batch_samplers_batches_split(on_ranks: Any) -> None:
    def loader() -> DataLoader:
        return DataLoader(range(13), batch_sampler=ByLength(5, 3, 4, 1))

    per_rank = on_ranks(2, loader, split_batches=True)
    assert global_batches(per_rank) == [list(range(5)), [5, 6, 7], [8, 9, 10, 11], [12]]
    assert [len(batches) for batches in per_rank] == [4, 3]


def test_a_split_batch_too_small_for_the_ranks_is_an_error_on_all(become: Any) -> None:
    for rank in range(3):
        become(rank, 3)
        loader = shard(DataLoader(range(7), batch_sampler=ByLength(2, 4, 1)), split_batches=True)
        with pytest.raises(ValueError, match="world size 3, but a batch before the last has 2 samples"):
            list(loader)


def test_torchs_own_batch_sampler_is_like_a_batch_size(on_ranks: Any) -> None:
    per_rank = on_ranks(2, lambda: DataLoader(range(7), batch_sampler=BatchSampler(RandomSampler(range(7)), 2, False)))
    assert all_numbers(per_rank) == list(range(7))
    assert [[len(b) for b in batches] for batches in per_rank] == [[2, 2], [2, 1]]


def test_batch_size_none_takes_turns(on_ranks: Any, run: FakeRuntime) -> None:
    blocks = torch.arange(14).view(7, 2)
    per_rank = on_ranks(2, lambda: DataLoader(TensorDataset(blocks), batch_size=None))
    assert all_numbers(per_rank) == list(range(14))
    assert [len(batches) for batches in per_rank] == [4, 3]
    # bulk reads: the sampler gives lists of indices
    make = lambda: DataLoader(blocks, batch_size=None, sampler=BatchSampler(range(7), 2, False))  # noqa: E731
    run.calls.clear()
    assert [[len(b) for b in batches] for batches in on_ranks(2, make)] == [[2, 2], [2, 1]]
    assert run.calls == ["begin", 2, 2, "end", "drain", "begin", 2, 1, "end", "drain"]


class Tagged(DataLoader):
    def __init__(self, data: Any, tag: str) -> None:  # not DataLoader's signature
        super().__init__(data, batch_size=2, collate_fn=list)
        self.tag = tag

    def __iter__(self) -> Iterator[Any]:
        return ((self.tag, batch) for batch in super().__iter__())


def test_subclasses_and_attributes_are_kept(become: Any) -> None:
    become(1, 2)
    loader = shard(Tagged(range(8), "x"))
    assert list(loader) == [("x", [2, 3]), ("x", [6, 7])]
    assert (loader.tag, loader.batch_size, loader.dataset, loader.collate_fn) == ("x", 2, range(8), list)
    with pytest.raises(AttributeError, match="colour"):
        _ = loader.colour


def test_iterators_side_by_side(become: Any) -> None:
    become(0, 2)
    data = DataLoader(range(12), batch_size=2, shuffle=True)
    one_by_one = [list(map(numbers, loader)) for loader in [shard(data)] for _ in range(2)]
    loader = shard(data)
    together = list(zip(loader, loader, strict=True))
    assert [[numbers(pair[i]) for pair in together] for i in range(2)] == one_by_one


def time_first(samples: list) -> torch.Tensor:
    return torch.tensor([[s] * 9 for s in samples]).T


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_workers_and_counts(become: Any, run: FakeRuntime, persistent: bool) -> None:
    """Batches are prefetched and collated to (9, batch): counts come from the indices, in the right order."""
    become(0, 2)
    loader = shard(
        DataLoader(range(15), 2, shuffle=True, num_workers=2, collate_fn=time_first, persistent_workers=persistent)
    )
    first = [numbers(b[0]) for b in loader]
    assert run.calls == ["begin", 2, 2, 2, 2, "end", "drain"]
    run.calls.clear()
    become(1, 2)
    other = shard(loader._data)
    both = first + [numbers(b[0]) for b in other]
    assert run.calls == ["begin", 2, 2, 2, 1, "end", "drain"]
    assert sorted(numbers(both)) == list(range(15))
    become(0, 2)
    assert [numbers(b[0]) for b in loader] != first


def test_generators_of_loader_workers_differ_by_rank(become: Any) -> None:
    data = DataLoader(range(8), batch_size=2, generator=torch.Generator().manual_seed(1))
    seeds = []
    for rank in range(2):
        become(rank, 2)
        loader = shard(data)
        list(loader)
        seeds.append(loader._twin.generator.initial_seed())
    assert seeds[0] != seeds[1]
    assert data.generator.initial_seed() == 1


# -- what the runtime is told -----------------------------------------------------------------------


def test_a_whole_loop_is_watched(become: Any, run: FakeRuntime) -> None:
    become(1, 2)
    told = []
    for batch in shard(DataLoader(range(7), batch_size=2)):
        told.append((len(batch), list(run.calls)))
    assert told == [(2, ["begin", 2]), (1, ["begin", 2, 1])]
    assert run.calls == ["begin", 2, 1, "end", "drain"]


def test_a_loop_left_early_does_not_drain(become: Any, run: FakeRuntime) -> None:
    become(0, 2)
    for _ in shard(DataLoader(range(8), batch_size=2)):
        break
    assert run.calls == ["begin", 2, "left"]


class Broken(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> int:
        if i == 4:
            raise OSError("disk")
        return i


def test_an_error_of_the_data_goes_through(become: Any, run: FakeRuntime) -> None:
    become(0, 2)
    with pytest.raises(OSError, match="disk"):
        list(shard(DataLoader(Broken(), batch_size=2)))
    assert run.calls == ["begin", 2, "left"]


def test_without_a_runtime_loops_are_plain(on_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", lambda: None)
    assert all_numbers(on_ranks(2, lambda: DataLoader(range(5), batch_size=2))) == list(range(5))


# -- one worker, and who is left alone --------------------------------------------------------------


def test_one_worker_is_the_plain_program(become: Any, run: FakeRuntime) -> None:
    data = DataLoader(range(10), batch_size=3, shuffle=True)
    loader = shard(data)

    def read(batches: Any) -> tuple:
        torch.manual_seed(8)
        return list(map(numbers, batches)), list(map(numbers, batches)), torch.rand(()).item(), len(batches)

    assert read(loader) == read(data)
    assert read(shard([[1], [2]])) == read([[1], [2]])
    assert run.calls == []


def test_rank_and_world_size_are_asked_for_late(become: Any) -> None:
    loader, dataset = shard(DataLoader(range(4), batch_size=1)), shard(TensorDataset(torch.arange(4)))
    assert (len(loader), len(dataset)) == (4, 4)
    become(1, 2)
    assert (len(loader), len(dataset), [numbers(b) for b in loader]) == (2, 2, [[1], [3]])


class OwnSampler(Sampler):
    num_replicas, rank, epoch = 2, 1, 0

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, 1, 3])

    def __len__(self) -> int:
        return 3

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("wrap", ["sampler", "batch_sampler", "nested"])
def test_distributed_samplers_are_left_alone(become: Any, run: FakeRuntime, wrap: str) -> None:
    become(1, 2)
    own = OwnSampler()
    options = {
        "sampler": {"sampler": own, "batch_size": 2},
        "batch_sampler": {"batch_sampler": BatchSampler(own, 2, False)},
        "nested": {"batch_sampler": BatchSampler(BatchSampler(own, 1, False), 2, False), "collate_fn": list},
    }[wrap]
    loader = shard(DataLoader(TensorDataset(torch.arange(4)) if wrap != "nested" else _Bulk(), **options))
    assert numbers(list(loader)) == [0, 1, 3]
    assert len(loader) == 2
    assert run.calls == ["begin", 2, 1, "end", "drain"]
    loader.set_epoch(2)
    assert numbers(list(loader)) == [2, 1, 3]


class _Bulk(Dataset):
    def __getitem__(self, indices: list[int]) -> list[int]:
        return indices


def test_torchs_distributed_sampler(on_ranks: Any, become: Any) -> None:
    def make() -> DataLoader:
        sampler = DistributedSampler(range(10), num_replicas=2, rank=comm.rank(), shuffle=True)
        return DataLoader(range(10), batch_size=2, sampler=sampler)

    assert all_numbers(on_ranks(2, make)) == list(range(10))


def test_sharding_twice_is_sharding_once(become: Any, run: FakeRuntime) -> None:
    become(1, 2)
    loader, items, dataset = shard(DataLoader(range(8))), shard([1, 2]), shard(TensorDataset(torch.arange(8)))
    assert (shard(loader), shard(items), shard(dataset)) == (loader, items, dataset)
    for part in (dataset, Subset(dataset, range(4))):
        run.calls.clear()
        assert numbers(list(shard(DataLoader(part, batch_size=3)))) == [1, 3, 5, 7]
        assert run.calls == ["begin", 3, 1, "end", "drain"]


# -- iterable datasets ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_samples", [0, 1, 5, 12, 23])
@pytest.mark.parametrize("drop_last", [False, True])
def test_iterable_ranks_together_are_one_device(
    on_ranks: Any, world_size: int, num_samples: int, drop_last: bool
) -> None:
    def loader(batch_size: int = 2) -> DataLoader:
        return DataLoader(Numbers(num_samples, sized=True), batch_size=batch_size, drop_last=drop_last)

    per_rank = on_ranks(world_size, loader)
    assert global_batches(per_rank) == [numbers(b) for b in loader(2 * world_size)]
    assert on_ranks(world_size, loader, len) == [len(batches) for batches in per_rank]


def test_iterable_split_batches(on_ranks: Any) -> None:
    per_rank = on_ranks(3, lambda: DataLoader(Numbers(17), batch_size=5), split_batches=True)
    assert global_batches(per_rank) == [numbers(b) for b in DataLoader(Numbers(17), batch_size=5)]


def test_iterable_without_a_length(become: Any) -> None:
    become(0, 2)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(shard(DataLoader(Numbers(9), batch_size=2)))


def test_iterable_with_loader_workers(on_ranks: Any, run: FakeRuntime) -> None:
    per_rank = on_ranks(2, lambda: DataLoader(Numbers(22), batch_size=2, num_workers=2))
    assert all_numbers(per_rank) == list(range(22))
    plain = [numbers(b) for b in DataLoader(Numbers(22), batch_size=4, num_workers=2)]
    assert global_batches(per_rank)[:4] == plain[:4]  # to where a worker runs dry
    assert run.calls == ["begin", 2, 2, 2, 2, 2, 2, "end", "drain", "begin", 2, 2, 2, 2, 1, 1, "end", "drain"]


class ShuffledNumbers(Numbers):
    def __iter__(self) -> Iterator[int]:
        items = list(super().__iter__())
        random.shuffle(items)
        return iter(items)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_in_random_order(on_ranks: Any, num_workers: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(ShuffledNumbers(12), 2, num_workers=num_workers, persistent_workers=num_workers > 0)

    by_rank = on_ranks(2, loader, epochs(2))
    orders = [global_batches([rank[e] for rank in by_rank]) for e in range(2)]
    assert [sorted(numbers(order)) for order in orders] == [list(range(12))] * 2
    assert orders[0] != orders[1]


class Range(IterableDataset):
    """The example of torch's documentation: `worker_init_fn` divides the work by setting attributes."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def divide(worker_id: int) -> None:
    dataset: Any = get_worker_info().dataset
    middle = (dataset.start + dataset.end) // 2
    dataset.start, dataset.end = ((dataset.start, middle), (middle, dataset.end))[worker_id]


def test_worker_init_fn_divides_the_dataset(on_ranks: Any) -> None:
    per_rank = on_ranks(2, lambda: DataLoader(Range(0, 10), num_workers=2, worker_init_fn=divide))
    assert all_numbers(per_rank) == list(range(10))


def test_iterable_batch_size_none_takes_turns(on_ranks: Any, run: FakeRuntime) -> None:
    per_rank = on_ranks(2, lambda: DataLoader(Range(0, 5), batch_size=None))
    assert [numbers(batches) for batches in per_rank] == [[0, 2, 4], [1, 3]]
    assert run.calls == ["begin", "end", "drain"] * 2


# -- datasets and other iterables -------------------------------------------------------------------


def test_datasets_are_datasets(on_ranks: Any) -> None:
    data = TensorDataset(torch.arange(7))
    parts = on_ranks(3, lambda: data, lambda part: [part, len(part), [numbers(part[i]) for i in (0, 1, -1)]])
    assert all(isinstance(part, Dataset) and part.dataset is data for part, *_ in parts)
    assert [rest for _, *rest in parts] == [[3, [[0], [3], [6]]], [2, [[1], [4], [4]]], [2, [[2], [5], [5]]]]


def test_datasets_end_where_they_should(become: Any) -> None:
    become(1, 2)
    part = shard(TensorDataset(torch.arange(5)))
    with pytest.raises(IndexError):
        part[2]


class Fetching(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [100 + i for i in indices]


def test_datasets_fetch_many_at_once(on_ranks: Any) -> None:
    read = lambda part: numbers(list(DataLoader(part, batch_size=3)))  # noqa: E731
    assert on_ranks(2, Fetching, read) == [[100, 102, 104], [101, 103, 105]]
    assert on_ranks(2, lambda: TensorDataset(torch.arange(6)), read) == [[0, 2, 4], [1, 3, 5]]


def test_a_dataset_sent_to_a_process_keeps_its_rank(become: Any) -> None:
    become(1, 2)
    sent = pickle.dumps([shard(TensorDataset(torch.arange(4))), shard(Range(0, 4))])
    become(0, 1)  # as in a spawned loader worker
    mapped, streamed = pickle.loads(sent)
    assert (len(mapped), numbers(mapped[0]), list(streamed)) == (2, [1], [1, 3])


def test_iterable_datasets_are_iterable_datasets(on_ranks: Any) -> None:
    parts = on_ranks(2, lambda: Numbers(5, sized=True), lambda part: (part, list(part), list(part), len(part)))
    assert all(isinstance(part, IterableDataset) for part, *_ in parts)
    assert [rest for _, *rest in parts] == [[[0, 2, 4], [0, 2, 4], 3], [[1, 3], [1, 3], 2]]


def test_iterables_take_turns(on_ranks: Any, run: FakeRuntime) -> None:
    batches = [torch.full((n,), n) for n in range(1, 6)]
    assert [numbers(b) for b in on_ranks(2, lambda: batches)] == [[1, 3, 3, 3] + [5] * 5, [2, 2] + [4] * 4]
    assert run.calls == ["begin", 1, 3, 5, "end", "drain", "begin", 2, 4, "end", "drain"]
    assert on_ranks(2, lambda: batches, len) == [3, 2]
    assert on_ranks(2, lambda: iter([10, 11, 12])) == [[10, 12], [11]]


def test_lists_can_be_read_again(on_ranks: Any) -> None:
    assert on_ranks(2, lambda: [1, 2, 3], epochs(2)) == [[[1, 3], [1, 3]], [[2], [2]]]


def test_a_generator_has_no_length(become: Any) -> None:
    become(0, 2)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(shard(i for i in range(3)))


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a DataLoader, a Dataset or an iterable of batches, got int: 3"):
        shard(3)
