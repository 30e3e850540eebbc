"""Worlds answer the requests of generators.

``build_mesh``     makes a DeviceMesh, from a grid or from process groups
``live``           real processes, through torch.distributed
``local``          all ranks in one process, one collective at a time
``shadow``         one rank on its own, without data: lists the requests that it would make
``compare_plans``  ranks compare their plans, line by line
``processor``      describes the processor of this process
"""
