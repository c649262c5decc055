"""Entries of model configs that no version of Keras writes. Imports neither Keras nor
TensorFlow."""

from __future__ import annotations

from typing import Any

ELEMENTS = 100  # in the checkpoint
HUGE = 10**12


def function(module: Any, name: Any, registered: Any = "function") -> dict[str, Any]:
    return {
        "module": module, "class_name": "function", "config": name, "registered_name": registered
    }  # fmt: skip


def made(module: Any, name: Any, registered: Any = None, **config: Any) -> dict[str, Any]:
    return {
        "module": module, "class_name": name, "config": config, "registered_name": registered
    }  # fmt: skip


def layer(name: str, **config: Any) -> dict[str, Any]:
    return made("keras.layers", name, **config)


def metric(name: str, **config: Any) -> dict[str, Any]:
    return made("keras.metrics", name, **config)


def nested(entry: Any, depth: int) -> Any:
    for _ in range(depth):
        entry = [entry]
    return entry


_NAMES = [
    ("keras.utils", "get_file"),
    ("keras.src.utils.file_utils", "get_file"),
    ("keras.utils", "FeatureSpace"),
    ("keras.utils", "PyDataset"),
    ("keras.utils", "model_to_dot"),
    ("keras.saving", "load_model"),
    ("keras.saving", "deserialize_keras_object"),
    ("keras.models", "load_model"),
    ("keras.models", "model_from_json"),
    ("keras.src.saving.saving_api", "load_model"),
    ("keras.src.saving.saving_lib", "H5IOStore"),
    ("keras.src.legacy.saving.legacy_h5_format", "load_model_from_hdf5"),
    ("keras.src.utils.python_utils", "func_load"),
    ("keras.config", "enable_unsafe_deserialization"),
    ("keras.visualization", "plot_image_gallery"),
    ("keras.export", "ExportArchive"),
    ("keras.src.export.tfsm_layer", "TFSMLayer"),
    ("keras.callbacks", "CSVLogger"),
    ("keras.callbacks", "ModelCheckpoint"),
    ("keras.callbacks", "RemoteMonitor"),
    ("keras.callbacks", "LambdaCallback"),
    ("keras.src.callbacks.tensorboard", "TensorBoard"),
    ("keras.datasets", "mnist"),
    ("keras.src.datasets.mnist", "load_data"),
    ("keras.applications", "ResNet50"),
    ("keras.src.applications.resnet", "ResNet50"),
    ("keras.preprocessing", "image_dataset_from_directory"),
    ("keras.wrappers", "SKLearnClassifier"),
    ("keras.tree", "map_structure"),
    ("keras.backend", "clear_session"),
    ("keras.distribution", "initialize"),
    ("keras.ops", "cond"),
    ("keras.ops", "custom_gradient"),
    ("keras.src.ops.core", "vectorized_map"),
    ("keras.random", "uniform"),
    ("keras.activations", "deserialize"),
    ("keras.losses", "get"),
    ("keras.layers", "serialize"),
    ("keras", "Function"),
    ("keras.src.ops.function", "Function"),
    ("keras", "Operation"),
    ("keras", "Variable"),
    ("keras", "StatelessScope"),
    ("keras", "device"),
    ("keras", "layers"),
    ("keras.src", "backend"),
    ("keras._tf_keras.keras.layers", "Dense"),
    ("keras.src.layers.layer", "Metric"),  # imported there
    ("keras.src.layers.no_such_file", "Dense"),
    ("keras.layers", "NoSuchLayer"),
    ("keras.layers", "__class__"),
    ("keras.layers", "__builtins__"),
    ("keras.layers.", "Dense"),
    ("keras..layers", "Dense"),
    ("keras/layers", "Dense"),
    (".keras.layers", "Dense"),
    ("..layers", "Dense"),
    ("keras.layers\n", "Dense"),
    ("keras.src.layers.__init__", "Dense"),
    ("keras.layers", "Dense\n"),
    ("keras.layers", "..utils.get_file"),
    ("keras", "utils.get_file"),
    ("", "Dense"),
    ("builtins", "eval"),
    ("builtins", "exec"),
    ("builtins", "print"),
    ("builtins", "get_file"),
    ("builtins", "__import__"),
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("pathlib", "Path"),
    ("pickle", "loads"),
    ("importlib", "import_module"),
    ("antigravity", "Layer"),
    ("numpy", "load"),
    ("tensorflow", "print"),
    ("tensorflow.python.ops.io_ops", "read_file"),
    ("keras_hub.models", "Backbone"),
    ("keras_distplug.cli", "main"),
    ("own", "Own"),
]

# Names that an imported user module might define or register, if there were one.
FORGED_NAMES: dict[str, Any] = {
    **{f"class {name!r} of {module!r}": made(module, name) for module, name in _NAMES},
    **{
        f"function {name!r} of {module!r}": function(module, name)
        for module, name in _NAMES
        if (module, name) != ("keras", "layers")
    },
    "a registered name that isn't": made("own", "Own", "own>Own"),
    "a registered function that isn't": function("own", "own>loss", "own>loss"),
    "a class as a function": function("builtins", "MeanSquaredError"),
    "a function as a class": made("keras.activations", "relu"),
    "a function of a module": function("keras.activations", "relu"),
    "a function without a module": function(None, "relu"),
    "no module": made(None, "get_file"),
}

# Entries that are refused before the user's modules are imported, whatever those define.
FORGED: dict[str, Any] = {
    # Code
    "Lambda": layer("Lambda", function=function("builtins", "relu")),
    "Lambda of keras.src": made("keras.src.layers.core.lambda_layer", "Lambda"),
    "Lambda without a module": made(None, "Lambda"),
    "Lambda that is said to be registered": made("keras.layers", "Lambda", "own>Lambda"),
    "lambda": {"class_name": "__lambda__", "config": {"code": "4wEA"}},
    "lambda of a value": {"class_name": "__lambda__", "config": {"value": ["4wEA", None, None]}},
    "TypeSpec": {"class_name": "__typespec__", "config": []},
    "TFSMLayer": layer("TFSMLayer", filepath="/tmp/model"),
    "torch": layer("TorchModuleWrapper"),
    "jax": layer("JaxLayer", call_fn="x"),
    "flax": layer("FlaxLayer", variables={}),
    # Wrong types
    "numbers for names": {"module": 1, "class_name": 2, "config": {}},
    "a list for a class": made("keras.layers", ["Dense"]),
    "a dictionary for a class": made("keras.layers", {"class_name": "Dense"}),
    "None for a class": made("keras.layers", None),
    "NaN for a class": made("keras.layers", float("nan")),
    "a list for a module": made(["keras.layers"], "Dense"),
    "a number for a module": made(10**400, "Dense"),
    "true for a module": made(True, "Dense"),
    "a list for a registered name": made("keras.layers", "Dense", ["own>Own"]),
    "a number for a registered name": made("keras.layers", "Dense", 1),
    "a list for a function": function("builtins", ["relu"]),
    "None for a function": function("builtins", None),
    "a dictionary for a function": function("builtins", {"relu": 1}),
    "a number for a function": function("builtins", 10**400),
    # Files
    "a vocabulary in a file": layer("StringLookup", vocabulary="/etc/passwd"),
    "a vocabulary of integers in a file": layer("IntegerLookup", vocabulary="words.txt"),
    "a vocabulary of texts": layer("TextVectorization", vocabulary="../../words.txt"),
    "a vocabulary at a URL": layer("StringLookup", vocabulary="http://203.0.113.1/words.txt"),
    "a vocabulary in a bucket": layer("StringLookup", vocabulary="gs://bucket/words.txt"),
    "a file of a layer": layer("Dense", filepath="/etc/passwd"),
    # Sizes of weights
    "many units": layer("Dense", units=100_000_000),
    "units of 10**400": layer("Dense", units=10**400),
    "units of 10**5000": layer("Dense", units=10**5000),
    "units as a float": layer("Dense", units=1e12),
    "infinite units": layer("Dense", units=float("inf")),
    "units that are no number": layer("Dense", units=float("nan")),
    "negative units": layer("Dense", units=-5),
    "units in a list": layer("Dense", units=[HUGE]),
    "units of an LSTM": layer("LSTM", units=HUGE),
    "units of a cell": layer("RNN", cell=layer("GRUCell", units=HUGE)),
    "units in a wrapper": layer("Bidirectional", layer=layer("LSTM", units=HUGE)),
    "units in a model": made("keras", "Sequential", layers=[layer("Dense", units=HUGE)]),
    "a large embedding": layer("Embedding", input_dim=HUGE, output_dim=1),
    "a wide embedding": layer("Embedding", input_dim=1, output_dim=HUGE),
    "many filters": layer("Conv2D", filters=10**9, kernel_size=3),
    "filters of a ConvLSTM": layer("ConvLSTM2D", filters=HUGE, kernel_size=3),
    "a large kernel": layer("Conv1D", filters=1, kernel_size=HUGE),
    "a kernel of two large sizes": layer("Conv2D", filters=1, kernel_size=[10**6, 10**6]),
    "a deep kernel": layer("DepthwiseConv2D", kernel_size=1, depth_multiplier=HUGE),
    "a separable kernel": layer("SeparableConv1D", filters=1, kernel_size=[HUGE]),
    "many heads": layer("MultiHeadAttention", num_heads=HUGE, key_dim=1),
    "large keys": layer("MultiHeadAttention", num_heads=1, key_dim=HUGE),
    "large values": layer("MultiHeadAttention", num_heads=1, key_dim=1, value_dim=HUGE),
    "large groups": layer("GroupQueryAttention", head_dim=HUGE),
    "many queries": layer("GroupQueryAttention", head_dim=1, num_query_heads=HUGE),
    "a rank of LoRA": layer("Dense", units=1, lora_rank=HUGE),
    "private units": made("keras.src.layers.core.dense", "Dense", units=HUGE),
    "units without a module": made(None, "Dense", units=HUGE),
    # Sizes of other things
    "a large input": layer("InputLayer", batch_shape=[None, HUGE]),
    "an input of many large sizes": layer("InputLayer", batch_shape=[None, 10**5, 10**5, 10**5]),
    "an input of NaN": layer("InputLayer", batch_shape=[None, float("nan")]),
    "an input of a fraction": layer("InputLayer", batch_shape=[None, HUGE + 0.5]),
    "many sizes of 10**400": layer("InputLayer", batch_shape=[10**400] * 1000),
    "an old large input": layer("Dense", units=1, batch_input_shape=[None, HUGE]),
    "a large input of a layer": layer("Dense", units=1, input_shape=[HUGE]),
    "a large Reshape": layer("Reshape", target_shape=[HUGE]),
    "a large EinsumDense": layer("EinsumDense", equation="ab,bc->ac", output_shape=[HUGE]),
    "a build config": {
        **layer("Dense", units=1), "build_config": {"input_shape": [None, HUGE]}
    },
    "build configs": {
        **layer("MultiHeadAttention", num_heads=1, key_dim=1),
        "build_config": {"shapes_dict": {"query_shape": [None, 4, HUGE]}},
    },
    "a large KerasTensor": {
        "class_name": "__keras_tensor__",
        "config": {"shape": [None, HUGE], "dtype": "float32", "keras_history": ["a", 0, 0]},
    },
    "many repetitions": layer("RepeatVector", n=HUGE),
    "a large padding": layer("ZeroPadding2D", padding=[[HUGE, 0], [0, 0]]),
    "a large cropping": layer("Cropping1D", cropping=[HUGE, 0]),
    "a large UpSampling": layer("UpSampling2D", size=[10**6, 10**6]),
    "a large Resizing": layer("Resizing", height=HUGE, width=2),
    "a large CenterCrop": layer("CenterCrop", height=2, width=HUGE),
    "a large pool": layer("MaxPooling1D", pool_size=HUGE),
    "large strides": layer("Conv1D", filters=1, kernel_size=1, strides=HUGE),
    "a large dilation": layer("Conv1D", filters=1, kernel_size=1, dilation_rate=HUGE),
    "many tokens": layer("CategoryEncoding", num_tokens=HUGE, output_mode="multi_hot"),
    "many words": layer("TextVectorization", max_tokens=HUGE),
    "long texts": layer("TextVectorization", output_sequence_length=HUGE),
    "long n-grams": layer("TextVectorization", ngrams=HUGE),
    "many unknown words": layer("StringLookup", vocabulary=["a"], num_oov_indices=HUGE),
    "many Mel bins": layer("MelSpectrogram", num_mel_bins=HUGE),
    "a long transform": layer("STFTSpectrogram", fft_length=HUGE),
    "many thresholds": metric("AUC", num_thresholds=HUGE),
    "many thresholds of recall": metric("PrecisionAtRecall", recall=0.5, num_thresholds=HUGE),
    "many classes": metric("MeanIoU", num_classes=10**6),
    "a Repeat": made("keras.src.ops.numpy", "Repeat", repeats=HUGE),
    "a Pad": made("keras.src.ops.numpy", "Pad", pad_width=[[0, HUGE]]),
    # Data
    "an array of long texts": {
        "class_name": "__numpy__", "config": {"value": ["a"], "dtype": "U1000000000"}
    },
    "an array of long bytes": {
        "class_name": "__numpy__", "config": {"value": ["a"], "dtype": "S1000000000"}
    },
    "an array of a subarray type": {
        "class_name": "__numpy__", "config": {"value": [1], "dtype": "(10000,10000)f8"}
    },
    "an array of a list of types": {
        "class_name": "__numpy__", "config": {"value": [1], "dtype": [["a", "f8", [HUGE]]]}
    },
    "an array without a type": {"class_name": "__numpy__", "config": {"value": [1]}},
    "an array without a dictionary": {"class_name": "__numpy__", "config": [1]},
    "a tensor of a wrong type": {
        "class_name": "__tensor__", "config": {"value": 1, "dtype": "variant"}
    },
    "an object after data": {
        "class_name": "__numpy__",
        "config": {"value": [1], "dtype": "int32"},
        "layers": [layer("Lambda")],
    },
    "an object in data": {
        "class_name": "__numpy__", "config": {"value": [layer("Lambda")], "dtype": "int32"}
    },
    "an object in bytes": {"class_name": "__bytes__", "config": {"value": layer("Lambda")}},
    "an object in a tuple": {"class_name": "__tuple__", "config": [layer("Lambda")]},
    "an object in a slice": {
        "class_name": "__slice__", "config": {"start": layer("Lambda"), "stop": 1, "step": 1}
    },
    "an object in the history of a tensor": {
        "class_name": "__keras_tensor__",
        "config": {"shape": [1], "dtype": "int32", "keras_history": [layer("Lambda"), 0, 0]},
    },
    "an object after a function": {**function("builtins", "relu"), "then": layer("Lambda")},
    "an object in an argument": layer("Dense", units=1, kernel_initializer=layer("Lambda")),
    "an object in an unknown argument": layer("Dense", units=1, x={"y": [{"z": layer("Lambda")}]}),
    "an object in a compile config": {
        **made("keras", "Sequential", layers=[]),
        "compile_config": {"metrics": [[{"a": [layer("Lambda")]}]]},
    },
    "an object in a node": {
        **layer("Dense", units=1), "inbound_nodes": [{"args": [], "kwargs": {"x": layer("Lambda")}}]
    },
    "an object in a mapping of dtypes": made(
        "keras.dtype_policies", "DTypePolicyMap", policy_map={"a": layer("Lambda")}
    ),
    "lists in lists": nested(1, 2000),
    "objects in objects": layer("Wrapper", layer=nested(layer("Dense", units=1), 200)),
    "sizes in sizes": layer("Reshape", target_shape=nested(1, 900)),
}  # fmt: skip
