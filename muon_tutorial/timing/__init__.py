"""What a step will take, in seconds: a machine as a small file, and a world that answers with clocks.

``machine`` is what computing and sending cost; ``work`` reads off a walk what it computes; ``timed_world``
walks the package's own step for all ranks without data and keeps a clock for each; ``calibrate`` measures
this machine.
"""
