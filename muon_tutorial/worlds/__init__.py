"""What answers requests.

``live``      real processes, through torch.distributed
``local``     all ranks in one process, one collective at a time
``shadow``    one rank on its own, without data: what it would ask for
``compare``   ranks compare their plans, line by line
``processor`` what a process computes on
"""
