"""A solution of lesson 07's build: attention over a sequence that is cut among ranks. Keys travel."""

from __future__ import annotations

import torch

from muon_tutorial.learn.builds.reference.ring import pass_on


def compare(q, k, at, rank, source):
    """Which tokens of two blocks see each other (rows, columns), and these tokens' scores."""
    sees = at[rank][:, None] >= at[source] if at else torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    rows, columns = sees.any(1), sees.any(0)
    scores = q[:, rows] @ k[:, columns].mT / q.shape[-1] ** 0.5
    return rows, columns, scores.masked_fill(~sees[rows][:, columns], -torch.inf)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, rank, ranks, at=None):
        block, out = torch.stack((k, v)), torch.zeros_like(q)
        norm = torch.full_like(q[..., :1], -torch.inf)  # log of the softmax's denominator, so far
        for turn in range(ranks):
            block = pass_on(block, rank, ranks) if turn else block
            rows, columns, scores = compare(q, block[0], at, rank, (rank - turn) % ranks)
            before = norm[:, rows]
            norm[:, rows] = now = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
            came = (scores - now).exp() @ block[1][:, columns]
            out[:, rows] = out[:, rows] * (before - now).exp() + came
        ctx.save_for_backward(q, k, v, out, norm)
        ctx.where = rank, ranks, at
        return out

    @staticmethod
    def backward(ctx, d_out):
        (q, k, v, out, norm), (rank, ranks, at) = ctx.saved_tensors, ctx.where
        mean, d_q, block = (d_out * out).sum(-1, keepdim=True), torch.zeros_like(q), torch.stack((k, v))
        d_block = torch.zeros_like(block)  # travels with its block, and then one rank further: home
        for turn in range(ranks):
            if turn:
                block, d_block = pass_on(block, rank, ranks), pass_on(d_block, rank, ranks)
            rows, columns, scores = compare(q, block[0], at, rank, (rank - turn) % ranks)
            weights, d_rows = (scores - norm[:, rows]).exp(), d_out[:, rows]
            d_scores = weights * (d_rows @ block[1][:, columns].mT - mean[:, rows]) / q.shape[-1] ** 0.5
            d_q[:, rows] += d_scores @ block[0][:, columns]
            d_block[0][:, columns] += d_scores.mT @ q[:, rows]
            d_block[1][:, columns] += weights.mT @ d_rows
        return d_q, *pass_on(d_block, rank, ranks), None, None, None


attention = RingAttention.apply


def positions(rank, ranks, tokens):
    pieces = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[-1 - rank]))
