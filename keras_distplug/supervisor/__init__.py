"""Keeps a group of local workers running until the job is complete. Never loads TensorFlow."""
