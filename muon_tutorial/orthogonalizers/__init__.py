"""Newton–Schulz recipes by name, as alternatives to "stock", which computes like ``torch.optim.Muon``."""
