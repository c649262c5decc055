"""What the callbacks of all features share."""
