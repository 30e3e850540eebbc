"""What a step will take, in seconds: a machine as a small file, and a world that answers with clocks.

``models`` finds the model that a plan is asked for: a public one, a ``config.json`` or a function. Its sizes
are read by ``model_configs``, ``transformers_models`` and ``module_shapes``; ``model_shape`` says what one
pipeline stage holds.

``machine`` is what computing and sending cost; ``work`` reads off a walk what it computes; ``timed_world``
walks the package's own step for all ranks without data and keeps a clock for each; ``calibrate`` measures
this machine.

``planner`` estimates a step on thousands of ranks: ``rank_walks`` walks one rank of each kind, ``clocks``
keeps the time of all that differ. ``report`` compares strategies, and searches for better options.

``timeline`` is one record for what a timed world says of a step and for what ``step_recorder`` noted of a
real one, for the steps of ``timeline_cases``.
"""
