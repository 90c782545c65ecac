"""Data-parallel training of unmodified PyTorch models with sparse parameters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallax.api import distribute as distribute
    from parallax.api import explain as explain
    from parallax.api import no_sync as no_sync
    from parallax.api import reduce as reduce
    from parallax.api import shutdown as shutdown
    from parallax.api import traffic as traffic
    from parallax.api import weight as weight
    from parallax.comm import DisagreementError as DisagreementError
    from parallax.comm import ParallaxError as ParallaxError
    from parallax.comm import PeerError as PeerError
    from parallax.comm import rank as rank
    from parallax.comm import world_size as world_size
    from parallax.config import Config as Config
    from parallax.data import shard as shard
    from parallax.plan import Placement as Placement
    from parallax.plan import Plan as Plan
    from parallax.plan import Use as Use
    from parallax.profiling import Traffic as Traffic
    from parallax.verification import Report as Report
    from parallax.verification import verify as verify
else:
    # What is public, by file; imported when it is used, because PyTorch takes seconds and `parallax --help` needs none.
    _FILES = {
        "api": ["distribute", "explain", "no_sync", "reduce", "shutdown", "traffic", "weight"],
        "comm": ["DisagreementError", "ParallaxError", "PeerError", "rank", "world_size"],
        "config": ["Config"],
        "data": ["shard"],
        "plan": ["Placement", "Plan", "Use"],
        "profiling": ["Traffic"],
        "verification": ["Report", "verify"],
    }
    _FILE_OF = {name: file for file, names in _FILES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _FILE_OF:
            raise AttributeError(f"module 'parallax' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"parallax.{_FILE_OF[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_FILE_OF})
