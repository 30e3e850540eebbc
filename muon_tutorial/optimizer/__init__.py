"""The optimizers that users construct.

``muon``               ``Muon``, a ``torch.optim.Optimizer``
``muon_with_adamw``    ``MuonWithAdamW``: two optimizers behind the face of one
``split_parameters``   which of a model's parameters go to Muon
``parameter_split``    its answer: groups, lists, and a table of who steps what and why
``compare_replicas``   ranks begin with the same values, and are told when they do not hold them any more
``make_steps``         from an optimizer's parameters to its steps: which plan, on which mesh
"""
