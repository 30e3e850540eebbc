"""Solutions of the builds, as a reader may write them. The lessons say why they are so."""
