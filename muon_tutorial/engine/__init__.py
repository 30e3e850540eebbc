"""What a generator may ask of a world, and in which order. Knows no process group.

``collective``   requests: plain records
``hops``         one change of placement, or one exchange
``pieces``       a bucket's matrices one by one, where no flat buffer is needed
``travel``       a tensor travels a route, hop by hop; back along its inverse
``order``        several buckets in flight, in an order that follows from the plan alone
"""
