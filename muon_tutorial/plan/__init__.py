"""The plan: pure data about matrices, ranks and moves. A plan holds no tensors and no process groups.

``grid``         ranks in named axes
``layout``       placements, boxes, hops and routes
``matrix``       a matrix: its shape, and how axes cut it
``bucket``       matrices packed into a flat buffer; the master plan, ``DistMeta``
``exchange``     layouts of flat buffers, and the packed exchange between two of them
``assign``       assigns matrices to ranks
``rounds``       which matrices are worked on at the same time
``strategies``   builders that turn matrices and a grid into a plan
``supported_shardings``  which strategies support FSDP2, and which only tensor parallelism
"""
