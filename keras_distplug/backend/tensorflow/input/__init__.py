"""How Keras and TensorFlow read data."""
