"""A folder for ``PYTHONPATH``: every process that finds it there and runs a recipe is watched."""
