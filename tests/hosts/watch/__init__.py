"""A folder for ``PYTHONPATH``: whatever process finds it there and runs a recipe is watched."""
