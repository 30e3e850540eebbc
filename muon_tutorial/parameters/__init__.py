"""From tensors to the plan's matrices: how each is cut, from placements, groups and attributes.

``describe_matrices``    an optimizer's parameters as a strategy's matrices
``dtensor_placements``   a DTensor's placements become cuts
``tensor_parallel``      how tensor parallelism cut plain parameters
``process_groups``       parameters cut over process groups that cross at this rank
``mesh_parameters``      the parameters on each mesh, as DTensors tell, or process groups
"""
