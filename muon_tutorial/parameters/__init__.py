"""Describes parameters as the plan's matrices, and reads how they are cut.

``describe_matrices``    describes an optimizer's parameters as matrices; refuses what is none
``tensor_parallel``      finds how tensor parallelism has cut plain parameters
``dtensor_placements``   turns a DTensor's placements into cuts
``process_groups``       finds how process groups have cut parameters
``mesh_parameters``      sorts parameters by mesh, from DTensors or process groups
"""
