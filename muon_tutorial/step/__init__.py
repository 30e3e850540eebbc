"""One optimizer step, in seven phases: generators that ask for collectives.

``step``                the core: the seven phases of a bucket, one after the other, and the step over a plan
``agreement``           all ranks agree on gradients, hyperparameters and calls before anything changes
``early_reduction``     phase 1 of a bucket, while backward still runs
``reduce_gradients``    phase 1: from each rank's gradients to the averaged ones that it stores
``momentum``            momentum is updated; which part of it each rank stores
``orthogonalize``       phases 2 to 6: gather the whole matrix, Newton–Schulz, and back
``gram``                phases 3 to 5 for matrices that stay cut: iterate on their Gram matrices
``write_parameters``    weight decay and step; phase 7: parameters back to where the model holds them
``clipping``            the norm of all gradients together
``rank_bucket``         one bucket on one rank: parameters with the plan's geometry, computed once
``parameter_state``     a parameter with its group and its optimizer state
``unreduced_gradient``  a gradient that refuses to be clipped before it is averaged
``single_process``      the same phases with whole matrices in one process: nothing travels
"""
