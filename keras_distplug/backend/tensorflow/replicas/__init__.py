"""Computations of a step on one replica or across several."""
