"""The only code that uses private names of Keras, TensorFlow and other backends."""
