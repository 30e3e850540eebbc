"""Describes tensors as the plan's matrices, with cuts from placements, groups and attributes.

``describe_matrices``    an optimizer's parameters as a strategy's matrices
``dtensor_placements``   turns a DTensor's placements into cuts
``tensor_parallel``      how tensor parallelism cut plain parameters
``process_groups``       parameters cut over process groups that cross at this rank
``mesh_parameters``      the parameters on each mesh, from DTensors or process groups
"""
