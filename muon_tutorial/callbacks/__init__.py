"""``DistributedConfig``: three functions, which a user or a helper provides, and the step that calls them."""
