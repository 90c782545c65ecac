"""The language model of examples/lm: a plain program plus three lines, a corpus, and a demo."""

from __future__ import annotations

import gzip
import importlib
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import parallax

EXAMPLE = Path(__file__).parents[1] / "examples" / "lm"
SMALL = ["--vocab-size=500", "--embedding-dim=16", "--hidden=32", "--projection=16", "--samples=20", "--batch-size=8"]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for module in ("corpus", "model", "progress", "train"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load("corpus", monkeypatch)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("model", monkeypatch)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40,000 words of sentences from a small grammar."""
    rng = random.Random(0)
    nouns, verbs = [f"noun{i}" for i in range(60)], [f"verb{i}" for i in range(40)]
    sentences = (f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)} ." for _ in range(7000))
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("\n".join(sentences))
    return path


def run(command: list[str | Path], folder: Path) -> str:
    """Runs a Python program to its good end, warnings being errors; returns what it printed."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def perplexities(output: str) -> list[float]:
    return [float(p.replace(",", "")) for p in re.findall(r"perplexity on held-out text ([\d.,]+\d)", output)]


class TestTrain:
    def test_three_lines_make_it_distributed(self) -> None:
        lines = [line.strip() for line in (EXAMPLE / "train.py").read_text().splitlines()]
        assert [line for line in lines if "parallax" in line] == [
            "import parallax",
            "parallax.distribute(model, optimizer)",
            "loader = parallax.shard(loader)",
        ]
        for other in ("model.py", "progress.py"):
            assert "import parallax" not in (EXAMPLE / other).read_text()

    def test_without_them_it_is_a_plain_program_that_does_the_same(
        self, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = tmp_path / "plain"
        shutil.copytree(EXAMPLE, plain, ignore=shutil.ignore_patterns("__pycache__", "demo.py"))
        lines = (EXAMPLE / "train.py").read_text().splitlines(keepends=True)
        (plain / "train.py").write_text("".join(line for line in lines if "parallax" not in line))
        options = [*SMALL, f"--corpus={text}", "--steps=60", "--eval-every=30"]
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

        def run_here(folder: Path) -> list[float]:
            """In this process, as starting Python and torch takes longer than all else."""
            with monkeypatch.context() as here, warnings.catch_warnings():
                warnings.simplefilter("error")
                here.syspath_prepend(str(folder))
                here.setattr(sys, "argv", [str(folder / "train.py"), *options])
                for module in ("corpus", "model", "progress"):
                    here.delitem(sys.modules, module, raising=False)
                if folder == plain:
                    here.setitem(sys.modules, "parallax", None)  # to import it is an error
                runpy.run_path(str(folder / "train.py"), run_name="__main__")
            return perplexities(capsys.readouterr().out)

        try:
            start, middle, end = run_here(plain)
            assert end < middle < start
            assert end < 0.3 * start
            assert run_here(EXAMPLE) == [start, middle, end]
        finally:
            parallax.shutdown()
            torch.sparse.check_sparse_tensor_invariants.enable()  # as in all tests; the program does not

    @pytest.mark.programs
    def test_trains_on_two_workers(self, tmp_path: Path, text: Path) -> None:
        options = [*SMALL, f"--corpus={text}", "--steps=40", "--eval-every=20"]
        output = run(["-m", "parallax.cli", "run", "--nproc", "2", EXAMPLE / "train.py", *options], tmp_path)
        assert "2 worker(s)" in output
        start, middle, end = perplexities(output)  # told once, by rank 0, which takes it alone
        assert end < middle < start
        assert end < 0.3 * start


@pytest.mark.timeout(120)
@pytest.mark.programs
def test_demo(tmp_path: Path, text: Path) -> None:
    options = [*SMALL, f"--corpus={text}", "--seconds=2", "--compare-steps=4"]
    output = run(["-m", "parallax.cli", "run", "--nproc", "2", EXAMPLE / "demo.py", *options], tmp_path)
    assert "plan for 2 workers, architecture hybrid" in output
    assert re.search(r"softmax_weight.weight +\d+x16 +lookup .* sharded", output)
    before, after = re.search(r"perplexity before\D+([\d.,]+)\D+perplexity after\D+([\d.,]+)", output).groups()
    assert float(after.replace(",", "")) < float(before.replace(",", ""))
    _gather, dense, hybrid = map(float, re.search(r"  together +│" + r" +([\d.]+) KiB │" * 3, output).groups())
    assert hybrid < dense


class TestCorpus:
    def test_tokens_are_numbered_by_frequency(self, corpus: ModuleType) -> None:
        tokens, counts, words = corpus.tokenise(["a b, a", "it's a b"])
        assert words == ["a", "b", "</s>", ",", "it's"]
        assert counts.tolist() == [3, 2, 2, 1, 1]
        assert [words[t] for t in tokens] == ["a", "b", ",", "a", "</s>", "it's", "a", "b", "</s>"]

    def test_rare_words_become_unk_which_has_its_own_rank(self, corpus: ModuleType, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_text("a " * 9 + "b " * 5 + "c " * 2 + "x y z ")
        cut = corpus.load_corpus(str(path), 4, held_out=0.0)
        assert cut.words == ["a", "b", "<unk>", "c"]  # </s>, x, y and z occur four times together
        assert np.bincount(cut.train).tolist() == [9, 5, 4, 2]
        assert cut.num_distinct == 7
        whole = corpus.load_corpus(str(path), 100, held_out=0.0)
        assert set(whole.words) == {"a", "b", "c", "x", "y", "z", "</s>", "<unk>"}

    def test_the_cache_gives_the_same_and_follows_the_content(
        self, corpus: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "text.txt"
        path.write_text("one two two")
        first = corpus.load_corpus(str(path), 10)
        real, calls = corpus.tokenise, []
        monkeypatch.setattr(corpus, "tokenise", lambda documents: calls.append(1) or real(documents))
        again = corpus.load_corpus(str(path), 10)
        assert not calls
        assert again.words == first.words
        assert again.train.tolist() == first.train.tolist()
        path.write_text("one two three")
        assert "three" in corpus.load_corpus(str(path), 10).words
        assert calls
        assert not list((tmp_path / "cache").rglob("unfinished*"))

    def test_windows(self, corpus: ModuleType) -> None:
        windows = corpus.Windows(np.arange(11, dtype=np.int32), 5)
        assert len(windows) == 2
        assert [t.tolist() for t in windows[1]] == [[5, 6, 7, 8, 9], [6, 7, 8, 9, 10]]
        x, y = corpus.spread(windows, 1000)
        assert x.shape == y.shape == (2, 5)

    def test_a_text_that_is_too_short_is_an_error(self, corpus: ModuleType) -> None:
        with pytest.raises(corpus.CorpusError, match="too short: a window needs 21 held-out tokens"):
            corpus.spread(corpus.Windows(np.arange(20, dtype=np.int32), 20), 1000)
        with pytest.raises(corpus.CorpusError, match="too short: it does not fill one batch"):
            next(corpus.epochs([]))

    def test_gcide_is_read_without_its_markup(self, corpus: ModuleType, tmp_path: Path) -> None:
        path = tmp_path / corpus.GCIDE
        path.parent.mkdir(parents=True)
        entry = r"Cat \Cat\, n. [OE. [AS.] catt.] An animal of the {Felis} family. [1913 Webster]"
        with gzip.open(path, "wt") as file:
            file.write(f"{entry}\n\nToo short\n\n{entry}\n")
        text = corpus.load_corpus("gcide", 100, data=tmp_path, held_out=0.0)
        words = [text.words[t] for t in text.train]
        assert " ".join(words) == "Cat , n . An animal of the Felis family . </s>"

    def test_missing_texts_say_what_to_do(self, corpus: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(corpus.CorpusError, match=r"apt-get download dict-gcide\n.*dpkg-deb -x"):
            corpus.load_corpus("gcide", 100, data=tmp_path)
        with pytest.raises(corpus.CorpusError, match="expected 'stdlib', 'gcide' or the path of a text file"):
            corpus.load_corpus(str(tmp_path / "nothing.txt"), 100)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
class TestModel:
    def test_samples_are_distinct_and_as_frequent_as_the_correction_says(self, model: ModuleType) -> None:
        torch.manual_seed(0)
        sampler = model.LogUniformSampler(50, 10)
        num_trials = 4000
        seen, expected = torch.zeros(50), torch.zeros(50)
        for _ in range(num_trials):
            samples, num_draws = sampler.draw()
            assert samples.unique().tolist() == sorted(samples.tolist())
            assert len(samples) == 10
            seen[samples] += 1
            expected += sampler.log_expected_count(torch.arange(50), num_draws).exp()
        # Four standard errors. Stopping at ten makes the expectation itself a little off.
        torch.testing.assert_close(seen / num_trials, expected / num_trials, atol=4 * 0.5 / num_trials**0.5, rtol=0.05)

    def test_with_nearly_all_words_sampled_the_loss_is_the_full_one(self, model: ModuleType) -> None:
        torch.manual_seed(0)
        lm = model.LanguageModel(200, embedding_dim=8, hidden_dim=16, projection_dim=8, num_samples=199)
        x, y = torch.randint(200, (64, 10)), torch.randint(200, (64, 10))
        with torch.no_grad():
            full = F.cross_entropy(lm.hidden(lm.embedding(x)) @ lm.softmax_weight.weight.T, y.flatten())
            sampled = torch.stack([lm(x, y) for _ in range(50)]).mean()
        assert lm.perplexity(x, y, chunk=7) == pytest.approx(math.exp(full), rel=1e-5)
        assert float(sampled) == pytest.approx(float(full), rel=0.01)

    def test_gradients_reach_the_looked_up_rows_only(self, model: ModuleType) -> None:
        lm = model.LanguageModel(1000, embedding_dim=8, hidden_dim=16, projection_dim=8, num_samples=20)
        x, y = torch.tensor([[1, 2]]), torch.tensor([[2, 3]])
        lm(x, y).backward()
        assert lm.embedding.weight.grad.coalesce().indices().flatten().tolist() == [1, 2]
        assert len(lm.softmax_weight.weight.grad.coalesce().indices().flatten()) <= 22

    def test_more_samples_than_words_is_an_error(self, model: ModuleType) -> None:
        with pytest.raises(ValueError, match="num_samples: expected 1 to vocab_size - 1 = 9, got 10"):
            model.LogUniformSampler(10, 10)
