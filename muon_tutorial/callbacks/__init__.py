"""``DistributedConfig``: three functions, which a user or a helper provides.

``config``                the record itself
``create_configs``        the helpers: from process groups, from a DeviceMesh, for DTensors
``helper_functions``      the assign, gather and redistribute functions of these configs
``callback_step``         the step that calls a user's functions, one parameter after the other
``check_user_functions``  checks of what a user's functions return
"""
