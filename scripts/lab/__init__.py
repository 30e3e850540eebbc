"""The lab: code that measures and tests the optimizer and the course; it is not in the wheel.

``benchmarks``         what a step costs, measured and predicted, compared with published figures
``faults``             the fault campaign, which breaks real runs on purpose and judges how each ended
``report_001``         a published report, checked against its own traces
``quality``            how far from orthogonal a result is, for matrices of known singular values
``torch_collectives``  the collectives of DDP, FSDP2 and other parts of torch, recorded like the package's own
``kernel_counters``    bytes sent, as the kernel counts them

The lab imports the optimizer and the course, and neither imports the lab. Run its scripts from a checkout:
each puts the checkout on ``sys.path``, and ``launch()`` passes that path on to the ranks.
"""
