"""Input that can be continued at any batch."""
