"""Keeps a group of local worker processes alive until the job is done. Never loads TensorFlow."""
