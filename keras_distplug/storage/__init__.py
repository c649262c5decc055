"""Storage of checkpoints and other files. This package does not import TensorFlow.

Public API for a custom store, registered with `keras_distplug.register_store`: `Files`, the
interface to implement; `Traits`, its performance characteristics; `check_store`, which tests it;
and `open_files`.
"""

from keras_distplug.storage.contract import check_store
from keras_distplug.storage.files import Files, Traits, open_files

__all__ = ["Files", "Traits", "check_store", "open_files"]
