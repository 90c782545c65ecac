"""Trains the language model of `model.py`: a program for one device, but for three lines.

`python train.py` runs it on one device. README.md says how the same file trains on many; each worker then has
batches of --batch-size sequences of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from corpus import Corpus, CorpusError, Windows, epochs, load_corpus, spread
from model import LanguageModel
from progress import Training
from torch.utils.data import DataLoader

import parallax

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def main(args: argparse.Namespace) -> None:
    quieten_torch()
    corpus = load_corpus(args.corpus, args.vocab_size, data=args.data)
    model, optimizer, loader = build(args, corpus)
    parallax.distribute(model, optimizer)
    loader = parallax.shard(loader)
    device = default_device()
    held_out = [t.to(device) for t in spread(Windows(corpus.held_out, args.seq_len), args.eval_tokens)]

    training = Training(
        steps=args.steps,
        minutes=args.minutes,
        words_per_step=args.batch_size * args.seq_len * WORLD_SIZE,
        show=RANK == 0,
    )
    training.say(f"{corpus}; {WORLD_SIZE} worker(s) on {device.type}")

    def evaluate() -> None:
        if RANK == 0:
            with training.paused():
                perplexity = model.perplexity(*held_out)
            training.say(f"step {training.num_steps:,}: perplexity on held-out text {perplexity:,.1f}")

    with training:
        evaluate()
        for inputs, targets in epochs(loader):
            optimizer.zero_grad()
            loss = model(inputs.to(device), targets.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.lstm.parameters(), args.clip)
            optimizer.step()
            training.step(loss.item())
            if training.over:
                break
            if training.num_steps % args.eval_every == 0:
                evaluate()
        evaluate()
    training.say(f"{training.num_steps:,} steps, {training.words_per_second:,.0f} words/s")


def build(args: argparse.Namespace, corpus: Corpus) -> tuple[LanguageModel, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(args.seed)
    model = LanguageModel(
        corpus.vocab_size,
        embedding_dim=args.embedding_dim,
        hidden_dim=args.hidden,
        projection_dim=args.projection,
        num_samples=args.samples,
        dropout=args.dropout,
    ).to(default_device())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr, initial_accumulator_value=args.initial_accumulator)
    loader = DataLoader(Windows(corpus.train, args.seq_len), args.batch_size, shuffle=True, drop_last=True)
    return model, optimizer, loader


def default_device() -> torch.device:
    """A GPU for each worker of this machine, else the CPU."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def quieten_torch() -> None:
    """Two warnings that say nothing about this program: of COO gradients, and of nn.LSTM's fast path."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported with oneDNN")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains an LSTM language model with a sampled softmax.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--corpus",
        default="stdlib",
        help="'stdlib' (the running Python's own library, read as text), 'gcide' (a dictionary, see --data), "
        "or a text file",
    )
    text.add_argument("--data", type=Path, metavar="FOLDER", help="where Debian's package dict-gcide was unpacked")
    text.add_argument("--vocab-size", type=int, default=50_000, help="most words to tell apart; the rest is <unk>")
    text.add_argument("--eval-tokens", type=int, default=5_000, help="held-out tokens that perplexity is taken on")

    size = parser.add_argument_group("model")
    size.add_argument("--embedding-dim", type=int, default=128, help="width of the embedding table")
    size.add_argument("--hidden", type=int, default=256, help="cells of the LSTM")
    size.add_argument("--projection", type=int, default=128, help="width of the LSTM's output and the softmax table")
    size.add_argument("--samples", type=int, default=512, help="words sampled for the softmax in each step")
    size.add_argument("--dropout", type=float, default=0.0, help="before and after the LSTM")

    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, default=32, help="sequences of a step, on each worker")
    training.add_argument("--seq-len", type=int, default=20, help="tokens of a sequence")
    training.add_argument("--lr", type=float, default=0.2, help="Adagrad's learning rate")
    training.add_argument(
        "--initial-accumulator", type=float, default=1e-3, help="where Adagrad's sums of squares start"
    )
    training.add_argument("--clip", type=float, default=0.3, help="largest norm of the LSTM's gradient")
    training.add_argument("--seed", type=int, default=0, help="of weights, samples and dropout")
    training.add_argument("--eval-every", type=int, default=200, metavar="STEPS", help="steps between perplexities")
    end = training.add_mutually_exclusive_group()
    end.add_argument("--steps", type=int, help="steps to take, instead of --minutes")
    end.add_argument("--minutes", type=float, default=2.0, help="minutes to train")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main(parse_args())
    except CorpusError as error:
        sys.exit(f"train.py: {error}")
