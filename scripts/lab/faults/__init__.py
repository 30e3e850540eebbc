"""The fault campaign: breaks real runs on purpose, and reports how each of them ended.

``draw_cases`` picks cases, reproducibly. ``data_faults`` breaks data and settings, and ``in_rank`` runs ranks
with such faults. ``strikes`` ends or stops processes, and ``tampering`` damages checkpoints. ``judge`` turns
the observations into a verdict; results are compared with the oracle, ``torch.optim.Muon`` in one process.
``campaign`` runs all cases, and ``scripts/faults.py`` writes the table.

The campaign uses the package's public surface and its launching; nothing in the package imports the campaign.
"""
