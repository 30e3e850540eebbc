"""Predicts the seconds of a step: simulates it with the costs that a small file gives for the machine.

``models`` finds the model to plan for: a public one, a ``config.json`` or a function. ``model_configs``,
``transformers_models`` and ``module_shapes`` read its sizes; ``model_shape`` says what one pipeline stage
holds.

``machine`` holds the costs of computing and sending, and ``calibrate`` measures them on this machine.
``compute_seconds`` adds up what a walk computes. ``timed_world`` walks the package's own step for all ranks
without data, and keeps a clock for each rank.

``step_cost`` estimates a step on thousands of ranks: ``rank_walks`` walks one rank of each kind
(``walks_by_length`` computes a walk from others that differ from it only in sizes), and ``clocks`` keeps one
clock for all ranks that do the same work. ``recommend`` compares strategies and chooses one.

``timeline`` holds a step that a timed world predicted or ``step_recorder`` recorded; ``timeline_cases``
defines the steps that are both predicted and recorded.
"""
