"""Where bytes go. No TensorFlow here.

Public for those who register a store with `keras_distplug.register_store`: `Files`, what a store
has to implement; `Traits`, how it is best used; `check_store`, which tests it; and `open_files`.
"""

from keras_distplug.storage.contract import check_store
from keras_distplug.storage.files import Files, Traits, open_files

__all__ = ["Files", "Traits", "check_store", "open_files"]
