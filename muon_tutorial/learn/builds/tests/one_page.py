import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from muon_tutorial.learn import builds

LOOK = "Compare g, m, X and Y of this step with those of torch.optim.Muon: which is the first to differ?"


def optimizer(params, *grid):
    from one_page import DistributedMuon  # yours

    return DistributedMuon(params, init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp")))


def alone(rank, dp, tp):
    torch.manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape)) for shape in ((12, 8), (9, 14), (5, 16))]
    cuts = (0, 1, 0)
    own = [lambda x, cut=cut: x.chunk(tp, cut)[rank % tp] for cut in cuts]
    pieces = [nn.Parameter(its(w.detach()).clone()) for its, w in zip(own, matrices)]
    muon = optimizer([(p, tuple(w.shape), cut) for p, w, cut in zip(pieces, matrices, cuts)], dp, tp)
    stock = torch.optim.Muon(matrices, lr=0.02)
    for step in range(3):
        torch.manual_seed(step)
        for its, piece, w in zip(own, pieces, matrices):
            grads = torch.randn(dp, *w.shape)
            w.grad = grads.sum(0) / dp
            piece.grad += its(grads[rank // tp])
        stock.step()
        muon.step()
        right = {f"step {step}, piece {n}": its(w) for n, (its, w) in enumerate(zip(own, matrices))}
        builds.same(pieces, right, LOOK)
    wholes = muon.weights, muon.gather_over_dp(muon.momentum)
    for n, (matrix, its, w) in enumerate(zip(muon.matrices, own, matrices)):
        right = {f"piece {n}": its(w), f"momentum {n}": its(stock.state[w]["momentum_buffer"])}
        builds.same([muon.own_piece(matrix, whole) for whole in wholes], right, LOOK)
    return muon


def in_one_process(rank, ranks):
    alone(rank, 1, 1)


def each_rank_keeps_its_part_of_the_momentum(rank, ranks):
    muon = alone(rank, ranks, 1)
    kept, whole = (tensor.untyped_storage().nbytes() for tensor in (muon.momentum, muon.weights))
    assert kept * ranks <= whole, "a rank keeps too much"


def on_a_grid(rank, ranks):
    alone(rank, 2, 2)


def on_your_zero3(rank, ranks):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((8, 12), (12, 16), (16, 6))))

    mine, whole = builds.zero3.shard(model()), model()
    shapes = [tuple(w.shape) for w in whole.parameters()]
    parts = list(mine.parameters())
    pieces = [nn.Parameter(p.detach().view(-1, shape[1])) for p, shape in zip(parts, shapes)]
    muon = optimizer([(piece, shape, 0) for piece, shape in zip(pieces, shapes)], 1, ranks)
    stock = torch.optim.Muon(whole.parameters(), lr=0.02)
    for part, piece in zip(parts, pieces):  # the same memory, in the module and in the optimizer
        part.data, part.grad = piece.data.view(part.shape), piece.grad.view(part.shape)
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(ranks, 6, 8)
        for each in x:
            (whole(each).square().mean() / ranks).backward()
        mine(x[rank]).square().mean().backward()
        stock.step()
        muon.step()
        stock.zero_grad()
        right = {f"step {step}, weight {name}": w for name, w in whole.named_parameters()}
        builds.same(builds.zero3.whole(mine), right, LOOK)


if __name__ == "__main__":  # sums over ranks have at most two terms, so their order does not matter
    builds.run(in_one_process, ranks=(1,))
    builds.run(each_rank_keeps_its_part_of_the_momentum, ranks=(2,))
    builds.run(on_a_grid, ranks=(4,))
    builds.run(on_your_zero3, ranks=(2,), uses=("ring", "zero3"))
