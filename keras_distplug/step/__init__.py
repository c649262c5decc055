"""What is measured and decided within a training step."""
