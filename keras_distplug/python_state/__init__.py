"""The state of Python objects: finding their values, tracking changes, saving and restoring."""
