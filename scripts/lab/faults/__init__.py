"""The fault campaign: breaks real runs on purpose, and reports how each of them ended.

``draw`` picks cases, reproducibly. ``data_faults`` breaks data and settings, and ``in_rank`` lets ranks step
with them; ``strikes`` ends or stops processes, ``tampering`` writes to checkpoints, and ``starters`` goes
through ``torchrun`` and the command line. ``preempted`` sends signals at random times, and ``nodes`` takes a
node or its link away. ``judge`` turns the observations into a verdict; its oracle is
``torch.optim.Muon`` in one process. ``campaign`` runs it all, and ``scripts/faults.py`` writes the table.

It uses the package's public surface and its launching; nothing in the package imports it.
"""
