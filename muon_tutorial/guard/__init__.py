"""What protects ranks from each other, and an optimizer from its hosts; a step can be taken without it.

``guard``               the state machine: one entry before a step, one after, one to ready gradients
``fingerprint``         what all ranks must have alike in a step, as text
``check_groups``        types and ranges of what a group says; gradients and shapes that cannot be stepped
``changed_gradients``   gradients that were written to between ``ready_gradients()`` and ``step()``
``changed_parameters``  parameters and state that a host has replaced, moved, recut or set anew
``current_steps``       the steps of now, made anew where a host has changed what they were made for
``compare_replicas``    ranks that hold the same compare it, before the first step and at times
``grad_scaler``         under ``GradScaler`` all ranks skip a step, or none
``momentum_slice``      a rank's slice of the momentum says in a saved state that it is no replica
"""
