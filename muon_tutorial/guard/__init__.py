"""Checks that protect ranks from each other, and an optimizer from its host; steps also work without them.

A host is the code around the optimizer: a training loop, or a library such as Lightning, Accelerate or FSDP.

``guard``               the state machine: one entry before a step, one after, one to ready gradients
``fingerprint``         what must be the same on all ranks in a step, as text
``check_groups``        types and ranges of a group's settings; shapes that cannot be stepped
``changes``             parameters, state and gradients that a host has replaced, moved or written to
``current_steps``       the current steps, rebuilt when a host has changed what they were made for
``compare_replicas``    ranks compare their copies of parameters and state, or take the first rank's
``gradient_hooks``      marks gradients that are not averaged yet, and can send them during backward
``momentum_slice``      marks a rank's slice of the momentum in a saved state, which is not a replica
"""
