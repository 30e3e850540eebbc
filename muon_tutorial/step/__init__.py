"""One optimizer step, in seven phases: generators that ask for collectives.

``step``                the core: the seven phases of a bucket, one after the other, and the step over a plan
``agreement``           all ranks agree on gradients, hyperparameters and calls before anything changes
``early_reduction``     phase 1 of a bucket, while backward still runs
``reduce_gradients``    phase 1: averages each gradient on the ranks that store a part of it
``momentum``            updates the momentum; says which part of it each rank stores
``orthogonalize``       phases 2 to 6: gathers whole matrices, runs Newton–Schulz, and sends updates back
``sum_gram_matrices``   phases 3 to 5 for matrices that stay cut: iterates on their Gram matrices
``write_parameters``    weight decay and step; phase 7: sends parameters back to the model
``clipping``            clips all gradients by their common norm
``rank_bucket``         one bucket on one rank: its parameters, and their boxes, computed once
``parameter_state``     a parameter with its group and its optimizer state
``unreduced_gradient``  a gradient that refuses to be clipped before it is averaged
``single_process``      the step in one process, with whole matrices and without collectives
"""
