"""`shard`: each rank's part of the data.

The epoch's order is the same on all ranks and is cut into global batches; a rank takes its slice of each, so
that the ranks' batches in rank order, put together, are the batch of one device. Nothing is padded and
nothing is left out: where the last global batch is short, some ranks have a smaller batch or one batch less.

From the bottom up: `Cut` and `SharedRandom` are told which rank they are for; `RankSampler` and `RankStream`
put them inside a DataLoader; `Sharded` and its subclasses ask for rank and world size when a loop starts,
which may be long after `shard` was called, and tell the runtime about the loop.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from parallax import comm, runtime
from parallax.foresight import Foresight

NUM_WATCHED = 3
"""Batches of a loop before one is read ahead."""


def shard(data: Any, *, split_batches: bool = False, seed: int = 0) -> Any:
    """This rank's part of `data`; with one worker, exactly `data`.

    Args:
        data: what all ranks have alike, one of

            - a DataLoader over a map-style dataset. Step k takes the next world size * batch_size samples of
              the epoch's order and rank r the r-th batch_size of them; a last, incomplete global batch is
              spread evenly (with drop_last: dropped). A batch sampler of another class than torch's
              BatchSampler gives whole batches: rank r takes the batches number k * world size + r.
            - a DataLoader over an IterableDataset: the same cut, in each loader worker's stream of samples.
              Every rank reads all samples and keeps its own.
            - a DataLoader with batch_size=None, or any other iterable, once or many times iterable: rank r
              takes the items number k * world size + r.
            - a DataLoader whose sampler is distributed already (it has `num_replicas` and `rank`) or whose
              dataset came from `shard`: left as it is.
            - a Dataset. The result is a Dataset with every world-size-th sample, starting at number rank. It
              does not watch loops: where ranks may run out of data at different times, shard the DataLoader
              (which may be a loader over this result).
        split_batches: the loader's batches are global ones, of which each rank takes its slice.
        seed: decides the order of shuffling loaders when there is more than one worker.

    Random orders are drawn anew in each epoch from `seed` and the epoch's number (see `set_epoch`), and from
    the initial seed of the loader's `generator` if it has one, which must then be the same on all ranks.
    While a sampler (of any class) or iterable dataset is at work, torch's, Python's and numpy's global
    generators are in states set for it alone: all ranks get the same order, and their own random numbers
    stay untouched. One that has a generator of another kind must seed it alike on all ranks.

    Returns:
        A Dataset for a Dataset; else an iterable with `len()` and `set_epoch(epoch)` that has the attributes
        of `data`. Looping over it to the end keeps this rank serving the others until all have ended.

    Raises:
        TypeError: `data` is nothing of the above.
        ValueError: split_batches without a batch size, or with one below the world size (raised when a loop
            starts or `len()` is asked).
    """
    if isinstance(data, (Sharded, DatasetPart, IterablePart)):
        return data
    if isinstance(data, DataLoader):
        if _has_own_shards(data):
            return Sharded(data)
        if split_batches and data.batch_sampler is None:
            raise ValueError(
                "parallax.shard: split_batches=True needs a batch size, the DataLoader has batch_size=None"
            )
        return ShardedLoader(data, split_batches, seed)
    if split_batches:
        raise ValueError(
            f"parallax.shard: split_batches=True needs a DataLoader with a batch size, got {type(data).__name__}"
        )
    if isinstance(data, IterableDataset):
        return IterablePart(data)
    if isinstance(data, Dataset):
        return DatasetPart(data)
    if isinstance(data, Iterable):
        return ShardedIterable(data)
    raise TypeError(
        f"parallax.shard: expected a DataLoader, a Dataset or an iterable of batches, "
        f"got {type(data).__name__}: {data!r}"
    )


# -- which samples ----------------------------------------------------------------------------------


def share(num_samples: int, rank: int, world_size: int) -> slice:
    """Where `rank`'s part of a global batch lies: parts as even as possible, the first ranks' one longer."""
    size, rest = divmod(num_samples, world_size)
    start = rank * size + min(rank, rest)
    return slice(start, start + size + (rank < rest))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a sequence of items becomes one rank's parts, one for each step that has something for it."""

    rank: int
    world_size: int

    block_size: int | None = None
    """Items in a global batch, at least world_size. None: the items are batches already."""

    drop_last: bool = False
    """Whether a last block of fewer than block_size items is left out."""

    split: bool = False
    """Without block_size: whether each item is split over the ranks. Otherwise they take turns."""

    def blocks(self, items: Iterable[Any]) -> Iterable[Any]:
        """The global batches, the same on all ranks."""
        return items if self.block_size is None else BatchSampler(items, self.block_size, self.drop_last)

    def parts(self, blocks: Iterable[Any]) -> Iterator[Any]:
        """This rank's part of each global batch.

        Raises:
            ValueError: there is another block after one with fewer items than ranks, which would leave ranks
                without a batch in the middle of the epoch.
        """
        if self.block_size is None and not self.split:
            yield from itertools.islice(blocks, self.rank, None, self.world_size)
            return
        short = None
        for block in map(list, blocks):
            if short is not None:
                raise ValueError(
                    f"parallax.shard: split_batches=True with world size {self.world_size}, but a batch "
                    f"before the last has {short} samples; it needs one for each rank"
                )
            if part := block[share(len(block), self.rank, self.world_size)]:
                yield part
            if len(block) < self.world_size:
                short = len(block)

    def num_parts(self, num_items: int) -> int:
        """How many parts `num_items` items give; if they are split, provided that each is long enough."""
        if self.block_size is None and self.split:
            return num_items
        full, rest = divmod(num_items, self.block_size or self.world_size)
        return full + (self.rank < rest and not self.drop_last)


class SharedRandom:
    """Random numbers that come out the same on all ranks, without touching those of the program.

    While `steps` takes a step, the global generators (torch's on the CPU, Python's, numpy's) and `generators`
    are in states that follow from `key` alone; in between they are the program's.
    """

    def __init__(self, key: str, generators: Iterable[torch.Generator] = ()) -> None:
        number = _hash(key)
        self._sources: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        self._states: list[Any] = [
            torch.Generator().manual_seed(number).get_state(),
            random.Random(number).getstate(),
            np.random.RandomState(number % 2**32).get_state(),
        ]
        for g in generators:
            self._sources.append((g.get_state, g.set_state))
            # not g's current state: an epoch's order must not depend on how the program got there
            own = torch.Generator(g.device).manual_seed(_hash(f"{key}/{g.initial_seed()}"))
            self._states.append(own.get_state())

    def steps(self, items: Iterable[Any], num_ahead: int = 1) -> Iterator[Any]:
        """The items of `items`, made with the shared random numbers, `num_ahead` at a time."""
        with self._installed():
            iterator = iter(items)
        while True:
            with self._installed():
                made = list(itertools.islice(iterator, num_ahead))
            if not made:
                return
            yield from made

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        outside = [get() for get, _ in self._sources]
        self._set(self._states)
        try:
            yield
        finally:
            self._states = [get() for get, _ in self._sources]
            self._set(outside)

    def _set(self, states: list[Any]) -> None:
        for (_, set_state), state in zip(self._sources, states, strict=True):
            set_state(state)


def _hash(key: str) -> int:
    return random.Random(key).getrandbits(63)


def count_samples(batch: Any) -> int | None:
    """The leading dimension of the first tensor or array in nested tuples, mappings and lists, else the
    length of the first list, else None."""
    tensors = (x for x in _leaves(batch) if isinstance(x, (torch.Tensor, np.ndarray)) and x.ndim)
    lists = (x for x in _leaves(batch, into_lists=False) if isinstance(x, list))
    first = next(itertools.chain(tensors, lists), None)
    return None if first is None else len(first)


def _ids(batch: Any) -> list[torch.Tensor]:
    """Tensors of a batch that may hold ids."""
    whole = (torch.int64, torch.int32)
    return [x for x in _leaves(batch) if isinstance(x, torch.Tensor) and x.dtype in whole and x.dim()]


def _memory(batch: Any) -> set[int]:
    """Addresses of what a batch is made of."""
    found = set()
    for x in _leaves(batch):
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            found.add(x.data_ptr())
        elif isinstance(x, np.ndarray):
            found.add(x.ctypes.data)
        elif not isinstance(x, (str, bytes, int, float, type(None))):
            found.add(id(x))
    return found - {0}  # of what is empty


def _with_next(batches: Iterator[Any], wanted: Callable[[], bool]) -> Iterator[tuple[Any, Any]]:
    """Each batch with the one after it; None: it is the last, or not read yet.

    A batch is only read ahead if that cannot change the one before: data that fill the same memory again would. So the
    first ones are read one by one, and compared.
    """
    first = []
    for batch in itertools.islice(batches, NUM_WATCHED):
        first.append(batch)
        yield batch, None
    places = [place for batch in first for place in _memory(batch)]
    apart = len(set(places)) == len(places)
    first.clear()
    if not apart or not wanted():
        yield from ((batch, None) for batch in batches)
        return
    end = object()
    batch = next(batches, end)
    while batch is not end:
        try:
            following = next(batches, end)
        except Exception:
            yield batch, None
            raise
        yield batch, None if following is end else following
        batch = following


def _leaves(batch: Any, into_lists: bool = True) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple) or (isinstance(batch, list) and into_lists):
        for item in batch:
            yield from _leaves(item, into_lists)
    else:
        yield batch


# -- inside a DataLoader ----------------------------------------------------------------------------


class RankSampler(Sampler[Any]):
    """One rank's part of what a sampler or batch sampler gives in an epoch."""

    def __init__(self, sampler: Iterable[Any], cut: Cut, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self.sampler, self.cut, self.seed, self.generators = sampler, cut, seed, generators
        # Exchanging the generators' states costs 0.2 ms, most of it numpy's. torch's samplers do not look at
        # what the training does meanwhile, so they can be asked for many batches at once.
        self.num_ahead = 64 if type(sampler).__module__ == "torch.utils.data.sampler" else 1
        self.epoch = 0
        self.sizes: collections.deque[int | None] = collections.deque()
        """Samples in each batch that the newest iterator has given, for the reader to take out in turn."""

    def __iter__(self) -> Iterator[Any]:
        # Bound here, not at the first step: loader iterators may be alive side by side.
        self.sizes = collections.deque()
        return self._draw(SharedRandom(f"{self.seed}/{self.epoch}", self.generators), self.sizes)

    def _draw(self, randomness: SharedRandom, sizes: collections.deque[int | None]) -> Iterator[Any]:
        blocks = randomness.steps(self.cut.blocks(self.sampler), self.num_ahead)
        for part in self.cut.parts(blocks):
            sizes.append(len(part) if isinstance(part, list) else None)
            yield part


class RankStream(IterableDataset[Any]):
    """One rank's part of an iterable dataset. It stands for the dataset in the loader's workers, where user
    code may read and set the dataset's attributes (a `worker_init_fn` that divides the work does)."""

    def __init__(self, dataset: Iterable[Any], cut: Cut, seed: int) -> None:
        epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see new epochs
        vars(self).update(_dataset=dataset, _cut=cut, _seed=seed, _epoch=epoch)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        randomness = SharedRandom(f"{self._seed}/{int(self._epoch)}/{worker.id if worker else 0}")
        parts = self._cut.parts(randomness.steps(self._cut.blocks(self._dataset)))
        return parts if self._cut.block_size is None else itertools.chain.from_iterable(parts)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset" or name.startswith("__"):  # while this is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


# -- what shard returns -----------------------------------------------------------------------------


class Sharded:
    """Data that is read rank by rank already; its loops are watched."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._foresight = Foresight()

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = comm.rank(), comm.world_size()
        if world_size == 1:
            return iter(self._data)
        return _watched(*self._start(rank, world_size), self._foresight)

    def __len__(self) -> int:
        """Number of batches on this rank."""
        rank, world_size = comm.rank(), comm.world_size()
        return len(self._data) if world_size == 1 else self._len(rank, world_size)

    def set_epoch(self, epoch: int) -> None:
        """The next loop is epoch number `epoch` (from 0) and the ones after it follow, e.g. to resume. Passed
        on to samplers and datasets that have a `set_epoch` of their own."""
        for each in (self._data, getattr(self._data, "dataset", None), *_samplers(self._data)):
            if callable(own := getattr(each, "set_epoch", None)):
                own(epoch)

    def _start(self, rank: int, world_size: int) -> tuple[Iterator[Any], Callable[[Any], int | None]]:
        """An iterator over this rank's batches, and what counts the samples of each as it is handed out."""
        return iter(self._data), count_samples

    def _len(self, rank: int, world_size: int) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        if name == "_data" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)


def _watched(batches: Iterator[Any], count: Callable[[Any], int | None], foresight: Foresight) -> Iterator[Any]:
    run = runtime.current()
    if run is None:
        yield from batches
        return
    loop, whole = run.begin_loop(), False
    try:
        for batch, following in _with_next(batches, lambda: run.looks_ahead):
            if (num_samples := count(batch)) is not None:
                run.batch(loop, num_samples)
            run.foresee(foresight, _ids(batch), None if following is None else _ids(following))
            yield batch
        whole = True
    finally:
        run.end_batches(loop, early=not whole)
    run.drain()  # not in a finally: a loop that breaks off or fails has not run out of data


class ShardedIterable(Sharded):
    """Batches from any iterable: the ranks take turns."""

    def _start(self, rank: int, world_size: int) -> tuple[Iterator[Any], Callable[[Any], int | None]]:
        return Cut(rank=rank, world_size=world_size).parts(iter(self._data)), count_samples

    def _len(self, rank: int, world_size: int) -> int:
        return Cut(rank=rank, world_size=world_size).num_parts(len(self._data))


class ShardedLoader(Sharded):
    """A DataLoader's twin for one rank: the same options, its own samples."""

    def __init__(self, loader: DataLoader[Any], split_batches: bool, seed: int) -> None:
        super().__init__(loader)
        self._split_batches, self.seed = split_batches, seed
        self._epoch = 0
        self._twin: DataLoader[Any] | None = None
        self._twin_cut: Cut | None = None

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._epoch = epoch

    def whole(self) -> Iterator[Any]:
        """A loop over all batches, in the same order on all ranks; it is not watched."""
        return self._start(0, 1)[0]

    def num_batches(self, rank: int) -> int:
        """What `len()` is on `rank`."""
        return self._len(rank, comm.world_size())

    def _start(self, rank: int, world_size: int) -> tuple[Iterator[Any], Callable[[Any], int | None]]:
        cut = self._cut(rank, world_size)
        if self._twin is None or self._twin_cut != cut:
            self._twin, self._twin_cut = _twin(self._data, cut, self.seed), cut
        twin, epoch = self._twin, self._epoch
        self._epoch += 1
        if isinstance(twin.dataset, RankStream):
            twin.dataset.begin_epoch(epoch)
            return iter(twin), count_samples
        sampler: Any = twin.sampler if twin.batch_sampler is None else twin.batch_sampler
        sampler.epoch = epoch
        batches = iter(twin)
        sizes = sampler.sizes  # a worker's batch comes long after the sampler gave it: counts wait here

        def count(batch: Any) -> int | None:
            known = sizes.popleft() if sizes and twin.in_order else None
            return count_samples(batch) if known is None else known

        return batches, count

    def _len(self, rank: int, world_size: int) -> int:
        return self._cut(rank, world_size).num_parts(len(_source(self._data)))

    def _cut(self, rank: int, world_size: int) -> Cut:
        batching = self._data.batch_sampler
        if type(batching) is not BatchSampler:  # batch_size=None, or batches made by a rule of their own
            return Cut(rank=rank, world_size=world_size, split=self._split_batches)
        size = batching.batch_size
        if self._split_batches and size < world_size:
            raise ValueError(
                f"parallax.shard: split_batches=True splits each batch over the ranks, but batch_size={size} "
                f"is less than the world size {world_size}"
            )
        block_size = size if self._split_batches else size * world_size
        return Cut(rank=rank, world_size=world_size, block_size=block_size, drop_last=batching.drop_last)


def _source(loader: DataLoader[Any]) -> Any:
    """What a loader's `Cut` is applied to: samples, indices, or batches of indices."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    batching = loader.batch_sampler
    if batching is None:
        return loader.sampler
    return batching.sampler if type(batching) is BatchSampler else batching


def _twin(loader: DataLoader[Any], cut: Cut, seed: int) -> DataLoader[Any]:
    # A copy, not a new DataLoader(...): it keeps every option, and a subclass's class and attributes.
    twin = copy.copy(loader)
    changes: dict[str, Any] = {"_iterator": None}  # where persistent workers are kept
    generators = _generators(loader)
    if isinstance(loader.dataset, IterableDataset):
        changes["dataset"] = RankStream(loader.dataset, cut, seed)
        if cut.block_size is not None:
            own = share(cut.block_size, cut.rank, cut.world_size)
            changes["batch_sampler"] = BatchSampler(loader.sampler, own.stop - own.start, drop_last=False)
    else:
        key = "sampler" if loader.batch_sampler is None else "batch_sampler"
        changes[key] = RankSampler(_source(loader), cut, seed, generators)
    if loader.generator is not None:  # here it only seeds workers, whose augmentations should differ by rank
        number = _hash(f"{seed}/{loader.generator.initial_seed()}/rank {cut.rank}")
        changes["generator"] = torch.Generator(loader.generator.device).manual_seed(number)
    vars(twin).update(changes)  # DataLoader's own __setattr__ refuses
    return twin


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, and those that they wrap."""
    found: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        inner = getattr(loader, name, None)
        if inner is not None and not any(inner is each for each in found):
            found += [inner, *_samplers(inner)]
    return found


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    found = (getattr(owner, "generator", None) for owner in (loader, *_samplers(loader)))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _has_own_shards(loader: DataLoader[Any]) -> bool:
    dataset: Any = loader.dataset
    while dataset is not None:  # down through wrappers like torch's Subset
        if isinstance(dataset, (DatasetPart, IterablePart)):
            return True
        dataset = getattr(dataset, "dataset", None)
    return any(hasattr(each, "num_replicas") and hasattr(each, "rank") for each in _samplers(loader))


# -- datasets ---------------------------------------------------------------------------------------


class _Part:
    """What the two dataset views share: `dataset`, and the rank and world size to read it for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._place: tuple[int, int] | None = None

    def _rank_and_world_size(self) -> tuple[int, int]:
        return self._place or (comm.rank(), comm.world_size())

    def __getstate__(self) -> dict[str, Any]:
        # a loader's spawned worker has no process group to ask
        place = self._rank_and_world_size()
        return {**vars(self), "_place": place if place[1] > 1 else None}


class DatasetPart(_Part, Dataset[Any]):
    """The samples number rank, rank + world size, ... of a map-style dataset; lengths may differ by one."""

    def __len__(self) -> int:
        return len(self._indices())

    def __getitem__(self, i: int) -> Any:
        return self.dataset[self._indices()[i]]

    def __getitems__(self, positions: list[int]) -> list[Any]:
        indices = self._indices()
        chosen = [indices[i] for i in positions]
        if callable(fetch := getattr(self.dataset, "__getitems__", None)):
            return fetch(chosen)
        return [self.dataset[i] for i in chosen]

    def _indices(self) -> range:
        rank, world_size = self._rank_and_world_size()
        return range(rank, len(self.dataset), world_size)


class IterablePart(_Part, IterableDataset[Any]):
    """The samples number rank, rank + world size, ... of an iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = self._rank_and_world_size()
        return itertools.islice(iter(self.dataset), rank, None, world_size)

    def __len__(self) -> int:
        rank, world_size = self._rank_and_world_size()
        return len(range(rank, len(self.dataset), world_size))
