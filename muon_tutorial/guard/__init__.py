"""Checks that protect ranks from each other, and an optimizer from its host. Steps also run without checks.

A host is the code around the optimizer: a training loop, or a library such as Lightning, Accelerate or FSDP.
"""
