"""Code shared by the callbacks of all features."""
