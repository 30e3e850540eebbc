import time

import torch
import torch.distributed as dist

from muon_tutorial.learn import builds


class Layer(torch.nn.Linear):
    pause = 0.0

    def forward(self, x):
        assert x.shape == (5, 6), f"a stage computes {tuple(x.shape)}, and not a micro-batch"
        time.sleep(self.pause)
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(self.pause))
        return y


def each_stage_gets_its_gradient(rank, ranks, pause=0.0):
    import pipeline  # yours: step

    torch.manual_seed(0)
    micro, stages = 2 * ranks, [Layer(6, 6, dtype=torch.float64) for _ in range(ranks)]
    batches = list(torch.randn(micro, 5, 6, dtype=torch.float64))
    for batch in batches:
        torch.nn.Sequential(*stages)(batch).square().sum().backward()
    stage, Layer.pause = stages[rank], pause
    right = {f"the gradient of stage {rank}'s {name}": p.grad for name, p in stage.named_parameters()}
    stage.zero_grad()
    given = batches if rank == 0 else [None] * micro
    dist.barrier()
    begin = time.perf_counter()
    sent = builds.messages(lambda: pipeline.step(stage, given, rank, ranks))
    dist.barrier()
    took, due = time.perf_counter() - begin, micro * ((rank > 0) + (rank < ranks - 1))
    assert len(sent) == due, f"rank {rank} sends {len(sent)} messages, and not {due}"
    look = f"Each of {micro} micro-batches adds to it: print what comes back for the first."
    builds.same([p.grad for p in stage.parameters()], right, look, within=1e-9)
    return 1 - 2 * micro * pause / took if pause else None


def stages_compute_at_the_same_time(rank, ranks):
    idle, predicted = each_stage_gets_its_gradient(rank, ranks, pause=0.3), (ranks - 1) / (3 * ranks - 1)
    assert idle < predicted + 0.1, f"ranks wait for each other: idle {idle:.0%}, and {predicted:.0%} would do"
    return f"(idle {idle:.0%}, predicted {predicted:.0%})"


if __name__ == "__main__":
    builds.run(each_stage_gets_its_gradient, stages_compute_at_the_same_time)
