from __future__ import annotations

from collections.abc import Iterator

import pytest
import ranks
import torch

torch.set_num_threads(1)  # ranks have one thread; so has what they are compared with
torch.sparse.check_sparse_tensor_invariants.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with these marks run when asked for (`-m gpu`), and are left out, not skipped, otherwise."""
    for mark in ("gpu", "compat", "programs", "cluster"):
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and mark not in config.getoption("markexpr"):
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    yield
    ranks.close()
