"""``DistributedConfig``: three functions, which a user or a helper provides.

``config`` has the record itself. ``create_configs`` has the helpers, which make configs from process groups,
from a DeviceMesh or for DTensors, and the functions of these configs. ``callback_step`` is the step that
calls a user's functions, one parameter after the other, and ``check_user_functions`` checks what these
functions return.
"""
