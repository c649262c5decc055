"""Models, callbacks, the trainer and TensorFlow's runtime, beyond their public names."""
