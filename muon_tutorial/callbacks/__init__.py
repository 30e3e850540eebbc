"""``DistributedConfig``: a user's own three functions, or those of a helper.

``config``                the record itself, and the functions of a helper's config
``create_configs``        the helpers: from process groups, from a DeviceMesh, for DTensors
``callback_step``         the step that calls a user's functions, one parameter after the other
"""
