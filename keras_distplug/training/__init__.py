"""What a run is: its input, and its state at one instant."""
