"""What others published about distributed Muon, and what this package says of the same.

``claim`` is one published figure with its source and the function that computes our side of it; ``table``
puts all of them beside each other. The claims stand by what they are about: ``of_bytes``, ``of_work``,
``of_updates``, ``of_seconds`` and ``of_report_001``. ``devices`` makes machines of hardware that has no file
of its own.
"""
