"""Newton–Schulz recipes by name, as alternatives to "stock", which computes like ``torch.optim.Muon``.

``named``               the recipes by name, with their errors, and which of them can replace stock
``checked_recipe``      what a recipe consists of, as plain data; refuses recipes that could explode
``completed_squares``   a polynomial of a matrix as a few squarings
``iterate``             the iterations: on the matrix, or on its Gram matrix
``gram``                the iteration on a Gram matrix that is summed over ranks
``packed_symmetric``    one triangle of a symmetric matrix, packed
``full_float32``        keeps fp32 products in fp32
``symmetric_products``  products into existing memory; about half of a large symmetric product is computed
``workspace``           the memory that iterations reuse
``choices``             what ``"auto"`` chose for each shape, as text
``calibration``         which recipe is the fastest for a shape on this machine
"""
