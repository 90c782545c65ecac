"""Text for the language model: from files on disk to windows of token numbers.

Three corpora, none of which is downloaded here: the standard library of the running Python, read as text; any
text file; and GCIDE, a dictionary that Debian packages. A corpus is tokenised once and kept in a cache folder
under a name that follows from its content, so several workers may start at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import os
import re
import shutil
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")  # noqa: RUF001, the other apostrophe
"""A word, with apostrophes inside it, or one other visible character."""

END = "</s>"
UNKNOWN = "<unk>"

GCIDE = Path("usr/share/dictd/gcide.dict.dz")
GCIDE_HELP = """{path} is not there. GCIDE is in Debian's package dict-gcide (15 MB); get it without installing it by

    mkdir -p {data} && cd {data}
    apt-get download dict-gcide
    dpkg-deb -x dict-gcide_*.deb .

and give that folder: --data {data}"""


class CorpusError(Exception):
    """The text is not there, or too short."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text in numbers. Words are numbered from the most frequent (0) to the least frequent."""

    name: str
    train: np.ndarray
    """Token numbers in reading order, int32."""
    held_out: np.ndarray
    """Token numbers of text that is not in `train`, int32."""
    words: Sequence[str]
    """The word of each number; one of them is "<unk>", which stands for all words outside the vocabulary."""
    num_distinct: int
    """Distinct words in the text, before the vocabulary was cut."""

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @property
    def num_tokens(self) -> int:
        return len(self.train) + len(self.held_out)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_tokens:,} tokens, {self.num_distinct:,} distinct, vocabulary {self.vocab_size:,}"
        )


class Windows(Dataset):
    """Pairs (x, y) of `length` token numbers each: y are the tokens that follow those of x."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = torch.from_numpy(tokens), length

    def __len__(self) -> int:
        return max((len(self.tokens) - 1) // self.length, 0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def spread(windows: Windows, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """About `num_tokens` tokens, as (x, y) of shape (windows, length), from all over the text."""
    if not len(windows):
        raise CorpusError(f"the text is too short: a window needs {windows.length + 1} held-out tokens")
    num_windows = max(min(num_tokens // windows.length, len(windows)), 1)
    x, y = zip(*(windows[i * len(windows) // num_windows] for i in range(num_windows)), strict=True)
    return torch.stack(x), torch.stack(y)


def epochs(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of one epoch after the other, without an end."""
    empty = False
    while not empty:
        empty = True
        for batch in loader:
            empty = False
            yield batch
    raise CorpusError("the text is too short: it does not fill one batch")


def load_corpus(source: str, vocab_size: int, *, data: Path | None = None, held_out: float = 0.02) -> Corpus:
    """Reads a corpus, from the cache if it was read before.

    Args:
        source: "stdlib", "gcide" or the path of a text file.
        vocab_size: most words to tell apart, "<unk>" and "</s>" included.
        data: the folder in which GCIDE was unpacked.
        held_out: fraction of the tokens, at the end, to hold out of training.
    """
    documents = _documents(source, data)
    tokens, counts, words = _cached(documents)
    new_number, kept = _cap(counts, words, vocab_size)
    cut = int(len(tokens) * (1 - held_out))
    return Corpus(
        name=source,
        train=new_number[tokens[:cut]],
        held_out=new_number[tokens[cut:]],
        words=kept,
        num_distinct=len(words),
    )


# -- reading ----------------------------------------------------------------------------------------


def _documents(source: str, data: Path | None) -> list[str]:
    """The texts of a corpus, in an order that has nothing to do with their names.

    What is held out is the end of the corpus, which should not be all the files whose names begin with z.
    """
    if source == "stdlib":
        documents = _standard_library()
    elif source == "gcide":
        documents = _gcide(data or Path())
    else:
        path = Path(source).expanduser()
        if not path.is_file():
            raise CorpusError(f"--corpus {source}: expected 'stdlib', 'gcide' or the path of a text file")
        return [path.read_text("utf-8", errors="replace")]
    return sorted(documents, key=lambda text: hashlib.md5(text.encode(), usedforsecurity=False).digest())


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    installed = {"site-packages", "dist-packages"}
    files = [f for f in root.rglob("*.py") if not installed & set(f.relative_to(root).parts)]
    return [f.read_bytes().decode("utf-8", errors="replace") for f in files]


def _gcide(data: Path) -> list[str]:
    """The entries of the GNU Collaborative International Dictionary of English, without its markup."""
    path = data.expanduser() / GCIDE
    if not path.is_file():
        raise CorpusError(GCIDE_HELP.format(path=path, data=data if data != Path() else "gcide"))
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    text = re.sub(r"\\[^\\\n]{1,80}\\", "", text)  # \pronunciation\
    for _ in range(2):
        text = re.sub(r"\[[^\[\]]{0,400}\]", "", text)  # [source] and [etymology [of this]]
    text = re.sub(r"[{}]", "", text)  # {cross-reference}
    entries = dict.fromkeys(" ".join(entry.split()) for entry in re.split(r"\n\s*\n", text))
    return [entry for entry in entries if entry.count(" ") >= 3]


# -- tokens -----------------------------------------------------------------------------------------


def tokenise(documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Numbers all tokens, the most frequent word 0.

    Returns:
        (tokens as int32, each document closed by "</s>"; how often each word occurs; the words)
    """
    number: defaultdict[str, int] = defaultdict(lambda: len(number))
    pieces = [np.fromiter(map(number.__getitem__, [*TOKEN.findall(d), END]), dtype=np.int32) for d in documents]
    tokens = np.concatenate(pieces)
    counts = np.bincount(tokens, minlength=len(number))
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(number), dtype=np.int32)
    rank[order] = np.arange(len(number), dtype=np.int32)
    words = list(number)
    return rank[tokens], counts[order], [words[i] for i in order]


def _cap(counts: np.ndarray, words: Sequence[str], vocab_size: int) -> tuple[np.ndarray, list[str]]:
    """(new number of each old one, words by new number) for the `vocab_size - 1` most frequent words.

    All others become "<unk>", which gets the place that its frequency gives it: the sampler of the softmax
    takes numbers for ranks.
    """
    if vocab_size < 2:
        raise CorpusError(f"--vocab-size: expected at least 2, got {vocab_size}")
    num_kept = min(vocab_size - 1, len(words))
    place = int(np.searchsorted(-counts[:num_kept], -counts[num_kept:].sum(), side="right"))
    new_number = np.full(len(words), place, dtype=np.int32)
    new_number[:num_kept] = np.arange(num_kept)
    new_number[place:num_kept] += 1
    return new_number, [*words[:place], UNKNOWN, *words[place:num_kept]]


# -- the cache --------------------------------------------------------------------------------------


def _cached(documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """`tokenise`, remembered on disk; the tokens are mapped from there, so that workers share the memory."""
    digest = hashlib.sha256(TOKEN.pattern.encode())
    for document in documents:
        digest.update(document.encode() + b"\0")
    folder = _cache_folder() / digest.hexdigest()[:32]
    with _only_one_worker(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _store(folder, *tokenise(documents))
    words = (folder / "words.txt").read_text("utf-8").split("\n")
    return np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "counts.npy"), words


def _store(folder: Path, tokens: np.ndarray, counts: np.ndarray, words: Sequence[str]) -> None:
    """Writes under another name and renames: what lies under `folder` is complete, whoever else writes it."""
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    try:
        np.save(unfinished / "tokens.npy", tokens)
        np.save(unfinished / "counts.npy", counts)
        (unfinished / "words.txt").write_text("\n".join(words), "utf-8")
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _only_one_worker(lock: Path) -> Iterator[None]:
    """The other workers wait for the first one's tokens instead of making them too."""
    try:
        import fcntl
    except ImportError:  # not on Windows, where each worker may have to do the work
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "parallax-lm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
