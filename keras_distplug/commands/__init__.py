"""The commands of `keras-distplug` for a directory of checkpoints, with one module each.

commands -> {storage, runlog, core}; `export` and `replay` also build Keras models.
"""
