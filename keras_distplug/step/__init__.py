"""Measurements and decisions within a training step."""
