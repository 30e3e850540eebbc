"""Newton–Schulz by name: other ways to the same update, beside the one with ``torch.optim.Muon``'s bits.

``named``      the recipes by name, with their errors, and what a drop-in is
``recipe``     what a way consists of, as plain data; refuses what could explode
``squares``    a polynomial of a matrix as a few squarings
``iterate``    the iterations: on the matrix, or on its Gram matrix
``products``   products into memory that is there; symmetric ones compute half
``workspace``  that memory
``choices``    what ``"auto"`` chose for each shape, as text
``calibration`` which is the fastest for a shape here
"""
