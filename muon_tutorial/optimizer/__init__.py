"""The optimizers that users construct.

``muon``               ``Muon``, a ``torch.optim.Optimizer``
``muon_with_adamw``    ``MuonWithAdamW``: two optimizers, used like one
``split_parameters``   which of a model's parameters go to Muon
``parameter_split``    the result: groups, lists, and a table of which optimizer steps what, and why
``make_steps``         from an optimizer's parameters to its steps: which plan, on which mesh
``load_state``         prepares a saved state for loading: matches parameters by name, completes groups
``auto_recipes``       ``orthogonalize="auto"``: which recipe each shape takes
``pair_state``         the state and the groups of two optimizers as one

``guard/`` holds the checks that protect ranks from each other, and an optimizer from the code around it.
"""
