"""The optimizers that users construct.

``muon``               ``Muon``, a ``torch.optim.Optimizer``
``muon_with_adamw``    ``MuonWithAdamW``: two optimizers behind the face of one
``split_parameters``   which of a model's parameters go to Muon
``parameter_split``    its answer: groups, lists, and a table of who steps what and why
``make_steps``         from an optimizer's parameters to its steps: which plan, on which mesh
``load_state``         what a load makes of a saved state: parameters by name, complete groups
``auto_recipes``       ``orthogonalize="auto"``: which recipe each shape takes
``pair_state``         the state and the groups of two optimizers as one

What protects ranks from each other and an optimizer from its hosts is ``guard/``'s.
"""
