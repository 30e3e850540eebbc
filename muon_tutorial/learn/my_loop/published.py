"""Lesson 16: where two published projects, read at these commits, implement four ideas of this course."""

from __future__ import annotations

from ..course.series import rows

SOURCES = {
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/b5bcd76c66d0acb1a08b176d9639425bc55e0b2a/",
    "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/",
}
IDEAS = {
    "owner": "decides which rank orthogonalizes which matrix, the costly ones spread evenly",
    "bucket": "says which matrices travel together",
    "way_back": "brings what was computed to those who keep the parameters",
    "momentum": "decides which rank keeps a matrix's momentum",
}
_NAMES = """\
torchtitan | DistMuon._momentum | torchtitan/distributed/flex_shard/dist_muon.py#L569 | momentum
    | It is made like the gradient, a DTensor: each rank keeps the momentum of its own shard.
torchtitan | _assign_balanced_owner_ranks | torchtitan/distributed/flex_shard/dist_muon.py#L992 | owner
    | It balances temporary owners, within a bucket and over all of them in order.
torchtitan | _RedistributionBucketPlan.compute_to_storage_schedule
    | torchtitan/distributed/flex_shard/_optimizer_reshard_schedule.py#L761 | way_back
    | It is an all_to_all from owners to shards, planned beside the one that goes out.
torchtitan | BucketConfig | torchtitan/distributed/flex_shard/optimizer_reshard.py#L252 | bucket
    | It groups and orders parameters by their names.
Megatron-LM | LayerWiseDistributedOptimizer.allgather_params
    | megatron/core/optimizer/layer_wise_optimizer.py#L817 | way_back
    | Owners send finished parameters to all. It is the older way: newer layouts gather the buffer.
Megatron-LM | LayerWiseDistributedOptimizer.set_bucket_layerwise_params_list
    | megatron/core/optimizer/layer_wise_optimizer.py#L764 | bucket
    | It says, for each bucket of the gradients, which rank's parameters are in it.
Megatron-LM | LayerWiseDistributedOptimizer.shard_params
    | megatron/core/optimizer/layer_wise_optimizer.py#L614 | momentum
    | It leaves a rank's optimizer its own parameters only: the owner keeps all of the momentum.
Megatron-LM | LayerWiseDistributedOptimizer._compute_per_buffer_param_layout
    | megatron/core/optimizer/layer_wise_optimizer.py#L196 | owner
    | It gives each matrix, the costliest first, to the rank with the least work so far. (It cuts the
    buckets, too.)
"""
NAMES = tuple(rows(_NAMES))
"""Functions and classes: project, name, place, idea of this course, and what it does."""


def say_published() -> str:
    """The four ideas, and for each how both projects use it: name, purpose and link."""
    lines = []
    for idea, what in IDEAS.items():
        lines.append(f"{idea.replace('_', ' ')}: {what}")
        for project, symbol, place, _, does in (each for each in NAMES if each[3] == idea):
            lines += [f"  {project}, {symbol}", f"    {does}", f"    {SOURCES[project]}{place}"]
    return "\n".join(lines)
