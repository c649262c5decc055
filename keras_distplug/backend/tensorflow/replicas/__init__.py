"""What one replica, or several together, compute in a step."""
