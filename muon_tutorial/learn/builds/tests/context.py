import gc

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from muon_tutorial.learn import builds

HEADS, TOKENS = 2, 4  # tokens of each rank


def in_order(rank, ranks, tokens):
    return torch.arange(tokens).chunk(ranks)[rank]


def cut(rank, ranks, causal, place=in_order):
    """What ``attention`` gets; torch's output and gradients for this rank's tokens; a key of each rank."""
    torch.manual_seed(0)
    tokens = TOKENS * ranks
    q, k, factors = torch.randn(3, HEADS, tokens, tokens, dtype=torch.float64)
    q[1] *= 500  # exp of such scores overflows
    whole = q, k, torch.eye(tokens, dtype=q.dtype).repeat(HEADS, 1, 1)  # so a token's output is its weights
    out = scaled_dot_product_attention(*(x.requires_grad_() for x in whole), is_causal=causal)
    at = [place(each, ranks, tokens) for each in range(ranks)]
    right = [x.detach()[:, at[rank]] for x in (out, *torch.autograd.grad(out, whole, factors), factors)]
    blocks = [x.detach()[:, at[rank]].requires_grad_() for x in whole]
    return (*blocks, rank, ranks, *([at] if causal else [])), right, k[0, ::TOKENS, 0].tolist()


def same(rank, name, found, right):
    # block by block, the same terms are added up in another order, so the last of 16 digits may differ
    assert found is not None and found.shape == right.shape, f"{name} is {found}"
    off = (found - right).abs() / (1 + right.abs())
    h, i, j = map(int, torch.unravel_index(off.argmax(), off.shape))
    numbers = f"{found[h, i, j]:.3g}, and {right[h, i, j]:.3g} is right"
    assert off.max() < 1e-9, f"rank {rank}, head {h}, its token {i}: {name} {j} is {numbers}"


def attend(rank, ranks, causal=True, pairs=None, blocks=None, backward=False, place=in_order):
    """Compare with torch, also the work: ``pairs`` of blocks multiplied, ``blocks`` of k and v sent."""
    import context  # yours: attention, positions

    given, (right, *gradients, factors), marks = cut(rank, ranks, causal, place)
    torch.use_deterministic_algorithms(True, warn_only=True)  # clears new memory, where old keys may stand

    def work():
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            out = context.attention(*given)
        same(rank, "the weight of token", out, right)
        found = counter.get_total_flops() / (4 * TOKENS * given[0].numel())
        assert found <= (pairs or ranks), f"rank {rank} multiplies for {found} pairs of blocks, not {pairs}"
        if backward:
            out.backward(factors)

    def held():
        tensors = [it for it in gc.get_objects() if issubclass(type(it), torch.Tensor) and it.dim()]
        found = [of for of in range(ranks) if any((it == marks[of]).any() for it in tensors)]
        assert len({*found, rank}) <= 3, f"rank {rank} holds keys of ranks {found} at once"

    if not blocks:
        return work()
    sent = builds.messages(work, held)
    found = sum(entries for to, entries in sent) / (2 * given[0].numel())
    assert all(to == (rank + 1) % ranks for to, entries in sent), f"rank {rank} sends past the next rank"
    assert found <= blocks, f"rank {rank} sends {found} blocks of k and v, and {blocks} would do"
    for name, x, its in zip("qkv" * backward, given, gradients):
        same(rank, f"{name}'s gradient in column", x.grad, its)
    return f"({blocks} blocks, {blocks * 16 * given[0].numel():,} bytes from each rank)"


def the_softmax_of_the_whole(rank, ranks):
    attend(rank, ranks, causal=False)


def no_token_looks_ahead_and_no_rank_multiplies_in_vain(rank, ranks):
    attend(rank, ranks, pairs=rank + 1)
    return f"(pairs of blocks on each rank: {list(range(1, ranks + 1))})"


def keys_travel_and_no_rank_keeps_them(rank, ranks):
    return attend(rank, ranks, causal=False, blocks=ranks - 1)


def gradients_come_home(rank, ranks):
    attend(rank, ranks, causal=False, blocks=3 * ranks - 2, backward=True)
    return attend(rank, ranks, blocks=3 * ranks - 2, backward=True)


def each_rank_multiplies_equally_much(rank, ranks):
    import context

    attend(rank, ranks, pairs=(ranks + 1) / 2, place=context.positions)
    return f"(pairs of blocks on each rank: {[(ranks + 1) / 2] * ranks})"


if __name__ == "__main__":
    builds.run(
        the_softmax_of_the_whole,
        no_token_looks_ahead_and_no_rank_multiplies_in_vain,
        keys_travel_and_no_rank_keeps_them,
        gradients_come_home,
        each_rank_multiplies_equally_much,
        ranks=(2, 5),
    )
