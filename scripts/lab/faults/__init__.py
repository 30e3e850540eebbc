"""The fault campaign: breaks real runs on purpose, and says how each of them ended.

``kinds`` lists what can be broken and ``draw`` picks cases from it, reproducibly. ``in_rank`` breaks data and
settings while processes live, ``strikes`` ends or stops processes, ``tampering`` writes to checkpoints,
``starters`` goes through ``torchrun`` and the command line; ``preempted`` sends signals at random times, and
``nodes`` takes a node or its link away. ``judge`` turns what was seen into a verdict; its
oracle is ``torch.optim.Muon`` in one process. ``campaign`` puts them together, ``report`` writes the table.

It knows the package's public surface and its launching; nothing in the package knows it.
"""
