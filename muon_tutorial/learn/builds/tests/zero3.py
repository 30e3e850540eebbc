import gc
import threading
import time

import torch
from torch.func import functional_call

from muon_tutorial.learn import builds


class Layer(torch.nn.Linear):
    meets = False

    def forward(self, x):
        if self.meets:
            n = NUMBERS[self.in_features]
            meet(f"layer {n}, forward", f"gather {n + 1}, forward")
            time.sleep(0.2)  # in which no gather should begin
            early = n == 0 and begun("gather 2, forward").is_set() and not begun("layer 2, forward").is_set()
            assert not early, "gather 2 begins while layer 0 computes"
            x = Backward.apply(x, n)
        return super().forward(x).tanh()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        meet(f"layer {ctx.n}, backward", f"gather {ctx.n - 1}, backward")
        return gradient, None


def model(bias=True):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(*shape, bias) for shape in ((8, 12), (12, 16), (16, 5))))


def is_whole(tensor):
    return sorted(tensor.shape) in ([8, 12], [12, 16], [5, 16])


def not_whole(saved):
    assert not is_whole(saved), "a whole weight waits for backward"
    return saved


def whole_weights():
    gc.collect()
    return sum(issubclass(type(it), torch.Tensor) and is_whole(it) for it in gc.get_objects())


def three_steps(rank, ranks, dtype=torch.float32):
    import zero3  # yours: shard, whole

    alone, most_whole = model(), whole_weights()
    mine = zero3.shard(model()) if dtype == torch.float32 else zero3.shard(model(), dtype=dtype)
    most = sum(p.numel() for p in alone.parameters()) / ranks + 6  # six tensors may be padded
    slow, fast = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (alone, mine))
    for step in range(3):
        assert sum(p.numel() for p in mine.parameters()) <= most, "a rank keeps too much"
        torch.manual_seed(step)
        x = torch.randn(ranks, 6, 8)
        with torch.autograd.graph.saved_tensors_hooks(not_whole, lambda saved: saved):
            loss = mine(x[rank]).square().mean()
        assert whole_weights() <= most_whole, "after forward, a rank still holds a whole weight"
        loss.backward()
        travelled = {name: w + (w.to(dtype) - w).detach() for name, w in alone.named_parameters()}
        functional_call(alone, travelled, x.flatten(0, 1)).square().mean().backward()
        del travelled
        for optimizer in (slow, fast):
            optimizer.step()
            optimizer.zero_grad()
    return alone, mine


def compare(alone, mine):
    import zero3

    look = "Compare whole() before the three steps, then each .grad after one backward: a mean over ranks."
    builds.same(zero3.whole(mine), dict(alone.named_parameters()), look, within=1e-5)


def the_weights_of_one_process_and_a_part_on_each_rank(rank, ranks):
    compare(*three_steps(rank, ranks))


def all_of_it_travels_on_your_ring(rank, ranks):
    nets = []
    sent = builds.messages(lambda: nets.extend(three_steps(rank, ranks)))
    assert all(to == (rank + 1) % ranks for to, entries in sent), "not on the ring"
    around = sum(entries for to, entries in sent) / (ranks - 1) / sum(p.numel() for p in nets[1].parameters())
    assert around == 3 * 3, f"in three steps a part travels around the ring {around} times, not 9"


NUMBERS = {8: 0, 12: 1, 16: 2}
events: dict[str, threading.Event] = {}


def begun(name):
    return events.setdefault(name, threading.Event())  # the same for all threads


def meet(mine, other):
    """Mark ``mine`` as begun, and wait until ``other`` has begun, too."""
    begun(mine).set()
    assert begun(other).wait(10), f"{other}: not under way during {mine}"


def the_next_gather_is_under_way_while_a_layer_computes(rank, ranks):
    ring, net, gathered, Layer.meets = builds.ring, model(bias=False), set(), True
    number_of = {-(-layer.weight.numel() // ranks): NUMBERS[layer.in_features] for layer in net}
    for edge in ("layer -1, forward", "gather 3, forward", "layer 3, backward", "gather -1, backward"):
        begun(edge).set()

    def gather(piece, *at, whole=ring.all_gather, **named):
        n = number_of[piece.numel()]
        way, before = ("backward", n + 1) if n in gathered else ("forward", n - 1)
        gathered.add(n)
        meet(f"gather {n}, {way}", f"layer {before}, {way}")
        return whole(piece, *at, **named)

    ring.all_gather = gather
    import zero3

    zero3.shard(net)(torch.randn(6, 8)).sum().backward()


def weights_travel_in_bfloat16_and_are_kept_in_float32(rank, ranks):
    ring, dtypes = builds.ring, set()

    def gather(piece, *at, whole=ring.all_gather, **named):
        dtypes.add(piece.dtype)
        return whole(piece, *at, **named)

    ring.all_gather = gather
    alone, mine = three_steps(rank, ranks, torch.bfloat16)
    assert dtypes == {torch.bfloat16}, f"weights travel in {dtypes}"
    compare(alone, mine)


if __name__ == "__main__":
    builds.run(
        the_weights_of_one_process_and_a_part_on_each_rank,
        all_of_it_travels_on_your_ring,
        the_next_gather_is_under_way_while_a_layer_computes,
        weights_travel_in_bfloat16_and_are_kept_in_float32,
        uses=("ring",),
    )
