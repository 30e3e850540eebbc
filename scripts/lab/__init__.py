"""The lab: what proves things about the optimizer and the course, outside the wheel.

``benchmarks``         what a step costs, measured and predicted, and what others published of the same
``faults``             the fault campaign: breaks real runs on purpose, and judges how each ended
``report_001``         a published report, checked from its own traces
``quality``            how far from orthogonal a result is, on matrices of known singular values
``torch_collectives``  the collectives of any optimizer, recorded as those of the package are
``kernel_counters``    bytes sent, as the kernel counts them

It imports both other houses, and neither imports it. Run its scripts from a checkout: each of them puts the
checkout on ``sys.path``, and ``launch()`` hands that path on to the ranks.
"""
