"""The language model of the Parallax paper (arXiv 1808.02621): LSTM, projection, sampled softmax.

A plain `nn.Module` for one device. Most of its weights are in three tables with a row per word, and a training
step looks up the rows of the words at hand: those of the input in the embedding, those of the targets and of
some sampled words in the softmax's weight and bias. No table is ever multiplied whole.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class LanguageModel(nn.Module):
    """Predicts each next token. Calling it gives the training loss; `perplexity` is exact.

    Tokens are numbered by frequency, the most frequent 0.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding_dim: int = 128,
        hidden_dim: int = 256,
        projection_dim: int = 128,
        num_samples: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        # sparse=True is as for one device: without it, each step would rewrite whole tables for a few rows.
        self.embedding = nn.Embedding(vocab_size, embedding_dim, sparse=True)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, proj_size=projection_dim, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.softmax_weight = nn.Embedding(vocab_size, projection_dim, sparse=True)
        self.softmax_bias = nn.Embedding(vocab_size, 1, sparse=True)
        self.sampler = LogUniformSampler(vocab_size, num_samples)
        nn.init.uniform_(self.embedding.weight, -1.0, 1.0)
        nn.init.normal_(self.softmax_weight.weight, std=1 / math.sqrt(projection_dim))
        nn.init.zeros_(self.softmax_bias.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sampled softmax's loss per token, to train with.

        Args:
            x, y: tokens and the tokens that follow them, int64, shape (batch, time).
        """
        targets = y.flatten()
        samples, num_draws = self.sampler.draw()
        candidates = torch.cat([targets, samples])
        # All rows are looked up before any is used: on several workers they come in one exchange.
        embedded = self.embedding(x)
        weight = self.softmax_weight(candidates)
        bias = self.softmax_bias(candidates).squeeze(1)

        hidden = self.hidden(embedded)
        num_targets = len(targets)
        target_logits = (hidden * weight[:num_targets]).sum(1) + bias[:num_targets]
        sample_logits = hidden @ weight[num_targets:].T + bias[num_targets:]
        # Samples are compared as if all words were there as often as they are in the sample.
        target_logits = target_logits - self.sampler.log_expected_count(targets, num_draws)
        sample_logits = sample_logits - self.sampler.log_expected_count(samples, num_draws)
        sample_logits = sample_logits.masked_fill(samples == targets[:, None], -math.inf)
        logits = torch.cat([target_logits[:, None], sample_logits], dim=1)
        return F.cross_entropy(logits, torch.zeros_like(targets))

    def hidden(self, embedded: torch.Tensor) -> torch.Tensor:
        """The state that each next token is predicted from, shape (batch * time, projection)."""
        output, _ = self.lstm(self.dropout(embedded))
        return self.dropout(output).flatten(0, 1)

    @torch.no_grad()
    def perplexity(self, x: torch.Tensor, y: torch.Tensor, *, chunk: int = 256) -> float:
        """exp of the mean loss per token, with the softmax over the whole vocabulary.

        Args:
            x, y: as in `forward`.
            chunk: tokens to compute at a time, each with a logit per word.
        """
        was_training = self.training
        self.eval()
        every_word = torch.arange(self.softmax_weight.num_embeddings, device=x.device)
        # Lookups here too: where rows are spread over workers, this fetches each once.
        embedded, weight, bias = self.embedding(x), self.softmax_weight(every_word), self.softmax_bias(every_word)
        hidden, targets, transposed = self.hidden(embedded), y.flatten(), weight.T
        total = 0.0
        for start in range(0, len(targets), chunk):
            logits = torch.addmm(bias.squeeze(1), hidden[start : start + chunk], transposed)
            total += float(F.cross_entropy(logits, targets[start : start + chunk], reduction="sum"))
        self.train(was_training)
        return math.exp(total / len(targets))


class LogUniformSampler(nn.Module):
    """Distinct words, drawn with P(word) = log((word + 2) / (word + 1)) / log(vocab_size + 1).

    That is about how often words occur if they are numbered by frequency (Zipf's law).
    """

    def __init__(self, vocab_size: int, num_samples: int) -> None:
        super().__init__()
        if not 0 < num_samples < vocab_size:
            raise ValueError(f"num_samples: expected 1 to vocab_size - 1 = {vocab_size - 1}, got {num_samples}")
        self.vocab_size, self.num_samples = vocab_size, num_samples
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def draw(self) -> tuple[torch.Tensor, int]:
        """(`num_samples` distinct words, int64; the number of draws that it took to get so many)."""
        device = self._device.device
        draws = words = torch.empty(0, dtype=torch.int64, device=device)
        while len(words) < self.num_samples:
            log = torch.rand(2 * self.num_samples, dtype=torch.float64, device=device) * math.log(self.vocab_size + 1)
            more = (log.exp() - 1).long().clamp_(max=self.vocab_size - 1)
            draws = torch.cat([draws, more])
            words, which = draws.unique(return_inverse=True)
        number = torch.arange(len(draws), device=device)
        first = torch.full_like(words, len(draws)).scatter_reduce_(0, which, number, "amin")
        num_draws = int(first.sort().values[self.num_samples - 1]) + 1
        return words[first < num_draws], num_draws

    def log_expected_count(self, words: torch.Tensor, num_draws: int) -> torch.Tensor:
        """log of the probability that a word is among the samples after so many draws."""
        word = words.double()
        p = ((word + 2) / (word + 1)).log() / math.log(self.vocab_size + 1)
        return torch.log(-torch.expm1(num_draws * torch.log1p(-p))).float()
