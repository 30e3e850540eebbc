"""Solutions of the builds, as a reader may write them. The lessons explain them."""
