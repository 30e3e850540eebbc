"""``DistributedConfig``: a user's own three functions, or those of a helper.

``config``            the record itself
``helpers``           ``create_processgroup_config``, ``create_devicemesh_config``, ``create_dtensor_config``
``helper_functions``  what a helper's config assigns, gathers and redistributes with
``callback_step``     the step that calls a user's functions, one parameter after the other
``check_answers``     what the functions return is checked
"""
