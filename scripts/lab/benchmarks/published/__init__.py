"""Published figures about distributed Muon, and this package's figures for the same quantities.

``claims.json`` lists the published figures, each with its source and the function that computes our figure.
``claim`` reads them, and ``scripts/published.py`` compares them. The functions are sorted by subject:
``of_bytes``, ``of_work``, ``of_updates``, ``of_seconds`` and ``of_report_001``. ``devices`` describes
hardware that has no machine file of its own.
"""
