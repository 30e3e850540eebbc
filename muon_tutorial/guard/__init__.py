"""Checks that protect ranks from each other, and an optimizer from its host. Steps also run without checks.

A host is the code around the optimizer: a training loop, or a library such as Lightning, Accelerate or FSDP.

``guard``                  the checks before and after each step, as a state machine
``same_on_all_ranks``      the texts that must be the same on all ranks in a step
``check_hyperparameters``  types and ranges of a group's settings
``check_clipping``          which gradients cannot be averaged or clipped together
``check_strategy``         refuses DDP, shared memory and recipes that do not fit the strategy
``changed_parameters``     finds parameters, state and gradients that a host has replaced, moved or changed
``current_steps``          the current steps, made anew when a host has changed their parameters
``compare_replicas``       ranks compare their copies of parameters and state, or take the first rank's
``gradient_hooks``         marks gradients that are not averaged yet, and can send them during backward
``gradient_warnings``      warns of missing gradients, and of another optimizer's that are not averaged
``momentum_slice``         marks a rank's slice of the momentum in a saved state
"""
