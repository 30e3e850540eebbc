"""Lesson 16: where four ideas of this course are in two published sources, read at these commits; no code."""

from __future__ import annotations

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
_FLEX = "torchtitan/distributed/flex_shard"
_LAYER_WISE = "megatron/core/optimizer/layer_wise_optimizer.py"
_CLASS = "LayerWiseDistributedOptimizer"
NAMES = (
    (
        "torchtitan", "DistMuon._momentum", f"{_FLEX}/dist_muon.py", 569, "momentum",
        "It is made like the gradient, a DTensor: each rank keeps the momentum of its own shard.",
    ),
    (
        "torchtitan", "_assign_balanced_owner_ranks", f"{_FLEX}/dist_muon.py", 992, "owner",
        "It balances temporary owners, within a bucket and over all of them in order.",
    ),
    (
        "torchtitan", "_RedistributionBucketPlan.compute_to_storage_schedule",
        f"{_FLEX}/_optimizer_reshard_schedule.py", 761, "way_back",
        "It is an all_to_all from owners to shards, planned beside the one that goes out.",
    ),
    (
        "torchtitan", "BucketConfig", f"{_FLEX}/optimizer_reshard.py", 252, "bucket",
        "It groups and orders parameters by their names.",
    ),
    (
        "Megatron-LM", f"{_CLASS}.allgather_params", _LAYER_WISE, 817, "way_back",
        "Owners send finished parameters to all. It is the older way: newer layouts gather the buffer.",
    ),
    (
        "Megatron-LM", f"{_CLASS}.set_bucket_layerwise_params_list", _LAYER_WISE, 764, "bucket",
        "It says, for each bucket of the gradients, which rank's parameters are in it.",
    ),
    (
        "Megatron-LM", f"{_CLASS}.shard_params", _LAYER_WISE, 614, "momentum",
        "It leaves a rank's optimizer its own parameters only: the owner keeps all of the momentum.",
    ),
    (
        "Megatron-LM", f"{_CLASS}._compute_per_buffer_param_layout", _LAYER_WISE, 196, "owner",
        "It gives each matrix, the costliest first, to the rank with the least work so far. (It cuts the "
        "buckets, too.)",
    ),
)  # fmt: skip
"""Functions and classes: project, name, file, line, idea of this course, and what it does."""


def say_published() -> str:
    """The four ideas, and for each how both projects use it: name, purpose and link."""
    lines = []
    for idea, what in IDEAS.items():
        lines.append(f"{idea.replace('_', ' ')}: {what}")
        for project, symbol, file, line, _, does in (each for each in NAMES if each[4] == idea):
            lines += [f"  {project}, {symbol}", f"    {does}", f"    {SOURCES[project]}{file}#L{line}"]
    return "\n".join(lines)
