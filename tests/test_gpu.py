"""The same code on CUDA devices, over NCCL: `make test-gpu`. As many ranks as there are devices, up to 4."""

from __future__ import annotations

import oracle
import pytest
import ranks
import test_exactness
import torch

import parallax

pytestmark = pytest.mark.gpu

NUM_DEVICES = min(torch.cuda.device_count(), ranks.MAX_WORLD_SIZE)
WORLD_SIZES = list(range(1, NUM_DEVICES + 1)) or [1]  # without a device, one test fails and says so


def on_device(world_size: int, architecture: str, optimizer: str, sparse: bool, dtype: torch.dtype) -> oracle.Case:
    """On the ranks and in the test process, which is rank 0 of one."""
    case = test_exactness.recommender(world_size, architecture, optimizer, sparse, dtype)
    device = torch.device("cuda", parallax.rank())
    make_model = case.model
    case.model = lambda: make_model().to(device)
    case.batches = [[tuple(t.to(device) for t in batch) for batch in step] for step in case.batches]
    return case


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("architecture", test_exactness.ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_optimizers(world_size: int, architecture: str, dtype: torch.dtype) -> None:
    assert torch.cuda.is_available(), "no CUDA device here"
    cases = [(on_device, architecture, *c, dtype) for c in test_exactness.COMBINATIONS]
    oracle.check_all(world_size, cases, backend="nccl")


def wrong_id() -> None:
    device = torch.device("cuda", parallax.rank())
    model = torch.nn.Embedding(10, 4, device=device)
    parallax.distribute(model)
    for number in range(4):
        wrong = number == 2 and parallax.rank() == parallax.world_size() - 1
        model(torch.tensor([1, 10 if wrong else 2], device=device)).sum().backward()


if NUM_DEVICES > 1:  # with one, there is nobody else to tell

    @pytest.mark.parametrize("world_size", range(2, NUM_DEVICES + 1))
    def test_an_id_out_of_range(world_size: int) -> None:
        outcomes = ranks.run(world_size, wrong_id, expect_errors=True, backend="nccl")
        assert [o.error for o in outcomes] == ["PeerError"] * (world_size - 1) + ["IndexError"]
        assert "'weight'" in outcomes[-1].text
