"""Runs the command line with `python -m keras_distplug`."""

import sys

from keras_distplug.cli import main

if __name__ == "__main__":
    sys.exit(main())
