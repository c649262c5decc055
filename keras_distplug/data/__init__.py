"""Input that can be resumed at any batch."""
