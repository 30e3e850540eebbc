"""The requests that a generator may make of a world, and their order. Knows no process group.

``collective``   requests: plain records
``hops``         one change of placement, or one exchange
``pieces``       a bucket's boxes, matrix by matrix, if no flat buffer is needed
``travel``       moves a tensor along a route, hop by hop, and back along the inverse
``order``        several buckets in flight, in an order that depends only on the plan
"""
