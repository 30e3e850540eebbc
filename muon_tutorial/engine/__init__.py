"""The requests that a generator may make of a world, and their order. This folder knows no process group.

``collective``       the requests, as plain records
``hop_collectives``  which collective each change of placement asks for, and each exchange
``padding``          uneven pieces, padded to equal length for a collective, and unpadded
``pieces``           a bucket's boxes, matrix by matrix, if no flat buffer is needed
``travel``           moves a tensor along a route, hop by hop
``sum_over_grid``    sums a few numbers over all ranks
``order``            several buckets in flight, in an order that depends only on the plan
"""
