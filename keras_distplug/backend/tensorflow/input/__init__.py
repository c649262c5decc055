"""Keras' and TensorFlow's reading of data."""
