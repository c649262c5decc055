"""What touches names that Keras, TensorFlow and other back ends do not export."""
