"""One optimizer step, in the phases of the blueprint: generators that ask for collectives.

``step``                the heart: the seven phases of a bucket, one after the other, and the step over a plan
``agreement``           all ranks agree, before anything changes, on gradients, hyperparameters and calls
``early_reduction``     phase 1 of a bucket, while backward still runs
``reduce_gradients``    phase 1: from each rank's gradients to the averaged ones that it stores
``momentum``            momentum is updated; which part of it each rank stores
``orthogonalize``       phases 2 to 6: to the whole matrix, Newton–Schulz, and back
``write_parameters``    weight decay and step; phase 7: parameters back to where the model holds them
``clipping``            the norm of all gradients together
``rank_bucket``         one bucket on one rank: parameters beside the plan's geometry, worked out once
``parameter_state``     a parameter with its group and its optimizer state
``single_process``      the same phases where every matrix is whole: nothing travels
"""
