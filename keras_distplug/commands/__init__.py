"""What `keras-distplug` tells and does about a directory of checkpoints. One command a file.

commands -> {storage, core}; only `export` needs more, because it makes Keras models.
"""
