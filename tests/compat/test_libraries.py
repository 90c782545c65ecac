"""Models of other libraries, as they are, train as on one device. `make test-compat` installs the libraries.

They are imported where they are used, so that `make test`, which leaves these tests out, does not need them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import oracle
import pytest
import torch
from oracle import Case
from torch import nn

pytestmark = [pytest.mark.compat, pytest.mark.timeout(300)]

several_ranks = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Warnings of a library about itself are no errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(world_size: int, cases: list[tuple[Any, ...]]) -> None:
    oracle.check_all(world_size, cases, timeout=250)  # the libraries take long to import


# -- knowledge graphs: torch_geometric ----------------------------------------------------------------

NODES, RELATIONS = 13, 4
KGE = ("TransE", "ComplEx", "DistMult", "RotatE")


def kge(world_size: int, name: str, sparse: bool, optimizer: str) -> Case:
    """`model.loss(...)`, which does not pass through `forward`; its negative samples are made from the batch."""

    def model() -> nn.Module:
        with as_it_is():
            import torch_geometric.nn

        made = getattr(torch_geometric.nn, name)(NODES, RELATIONS, hidden_channels=4, sparse=sparse).double()
        made.random_sample = lambda head, rel, tail: ((head + 1) % NODES, rel, (tail + 3) % NODES)
        return made

    def optimizers(model: Any) -> Any:
        if optimizer == "SparseAdam":
            tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.sparse]
            rest = [p for p in model.parameters() if all(p is not t for t in tables)]
            made = [torch.optim.SparseAdam(tables, lr=0.05, eps=1e-3)]
            return [*made, torch.optim.Adam(rest, lr=0.05, eps=1e-3)] if rest else made
        return getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, eps=1e-3)

    generator = torch.Generator().manual_seed(1)

    def batch(size: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randint(n, (size,), generator=generator) for n in (NODES, RELATIONS, NODES))

    return Case(
        model=model,
        optimizers=optimizers,
        batches=[[batch(3 + rank) for rank in range(world_size)] for _ in range(4)],
        loss=lambda model, batch: model.loss(*batch),
        tolerance=TOLERANCE,
    )


@several_ranks
def test_torch_geometric(world_size: int) -> None:
    kinds = [(True, "Adagrad"), (True, "SparseAdam"), (False, "Adam")]
    check(world_size, [(kge, name, *kind) for name in KGE for kind in kinds])


# -- language models: transformers --------------------------------------------------------------------

VOCABULARY, LENGTH = 23, 6


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def gpt2_with_checkpoints() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": LENGTH}
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def bert_untied() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def t5() -> nn.Module:
    """One table for encoder, decoder and output; tables of relative positions."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


MODELS = (gpt2, gpt2_with_checkpoints, bert, bert_untied, t5)


def transformer(world_size: int, make: Any, optimizer: str) -> Case:
    def model() -> nn.Module:
        with as_it_is():
            return make().double().train()

    generator = torch.Generator().manual_seed(1)
    batches = [
        [torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(world_size)] for _ in range(3)
    ]
    options = {"AdamW": {"eps": 1e-3}, "SGD": {"momentum": 0.9}}[optimizer]
    return Case(
        model=model,
        optimizers=lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options),
        batches=batches,
        loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
        between=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        tolerance={torch.float64: 1e-6, torch.float32: 1e-6},  # their losses are computed in float32
    )


@several_ranks
def test_transformers(world_size: int) -> None:
    optimizers = ("AdamW", "SGD") if world_size == 2 else ("AdamW",)
    check(world_size, [(transformer, make, optimizer) for make in MODELS for optimizer in optimizers])
