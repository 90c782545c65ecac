"""What was measured on these machines before: small texts in files of the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from pathlib import Path


def _path(kind: str, key: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parallax"
    return folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read(kind: str, key: str, max_age: float = math.inf) -> str | None:
    """What `write` has kept, `max_age` seconds ago at most; None if there is nothing, or it cannot be read."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        path = _path(kind, key)
        if time.time() - path.stat().st_mtime <= max_age:
            return path.read_text()
    return None


def write(kind: str, key: str, text: str) -> None:
    """Keeps `text`, if the cache can be written."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(path)
