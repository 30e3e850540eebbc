"""Published figures about distributed Muon, and this package's figures for the same quantities.

``claim`` is one published figure with its source and the function that computes our side of it; ``table``
compares all of them. The claims are sorted by subject: ``of_bytes``, ``of_work``, ``of_updates``,
``of_seconds`` and ``of_report_001``. ``devices`` describes hardware that has no machine file of its own.
"""
