"""Reads a cloud's notices about this machine, without acting on them. Does not need TensorFlow.

Not verified on a real machine of any cloud: the tests run against mock servers that answer as the
clouds' documentation describes.
"""
