"""The optimizers that users construct.

``muon``               ``Muon``, a ``torch.optim.Optimizer``
``muon_with_adamw``    ``MuonWithAdamW``: two optimizers, used like one
``split_parameters``   decides which of a model's parameters go to Muon
``fused_weights``      finds the matrices in a fused weight, such as q, k and v
``split_table``    the result of ``split_parameters``: groups for both optimizers, and a table
``make_steps``         makes an optimizer's steps, one for each mesh that its parameters lie on
``config_steps``       makes the steps of an optimizer with a ``DistributedConfig``
``load_state``         prepares a saved state for loading: matches parameters by name, checks its contents
``other_packages``     converts momentum from and to the formats of other packages
``auto_recipes``       chooses a recipe for each shape if ``orthogonalize="auto"``
``combined_state``     shows the states and the groups of two optimizers as one
``audit``              records an optimizer's steps; ``update_verdict`` judges the recorded updates

``guard/`` holds the checks that protect ranks from each other, and an optimizer from the code around it.
"""
