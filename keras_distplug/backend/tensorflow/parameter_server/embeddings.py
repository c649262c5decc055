"""Embedding tables on parameter servers, optionally split by rows over several servers.

Upstream bugs (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; no known issue for either):

- Keras' `take` reads the whole table before it selects rows, so that every step transfers all of it
  to the worker: with 256 MB, a step took a hundred times as long.
- With TensorFlow's `variable_partitioner`, Keras gets a `ShardedVariable` and treats it as a single
  variable: "'ShardedVariable' object has no attribute 'handle'" in the first gradient computation.

Here, rows are looked up on the server that holds them. If a table is split, the layer has one Keras
variable per part, with numbers of rows that differ by at most one. TensorFlow distributes the parts
round-robin over the servers, and places their optimizer slots on the same servers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.embedding_tables import Table, merge_parts, part_name
from keras_distplug.backend.tensorflow.runtime.models import list_layers, list_optimizers
from keras_distplug.backend.tensorflow.runtime.patching import Upstream, override
from keras_distplug.backend.tensorflow.runtime.workers import get_resolver, is_scheduled
from keras_distplug.core.errors import ModelError
from keras_distplug.core.log import announce

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")

_TABLE = "_embeddings"
_SUMMED = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_OF_WHOLES = ("Adafactor", "Lamb", "Muon")
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@contextmanager
def split(min_shard_bytes: int | None) -> Iterator[None]:
    """Splits the tables of layers that are built within the `with` block under
    ParameterServerStrategy.

    Args:
        min_shard_bytes: The minimum size of a part in bytes, as in TensorFlow's
            `MinSizePartitioner`. There are at most as many parts as servers. None splits no table.
    """
    stock = keras.layers.Embedding.build

    def build(layer: keras.layers.Embedding, input_shape: Any = None) -> None:
        count = _count_parts(layer, tf.distribute.get_strategy(), min_shard_bytes)
        if count == 1 or layer.built:
            stock(layer, input_shape)
        else:
            _build(layer, count)

    with _UPSTREAM.patched(keras.layers.Embedding, "build", build):
        yield


def require_split(model: keras.Model, min_shard_bytes: int | None) -> None:
    """Checks that no table of an existing model should have been split.

    Raises:
        ModelError: If `model` has such a table.
    """
    for layer in list_layers(model):
        strategy = model.distribute_strategy
        if not _is_split(layer) and _count_parts(layer, strategy, min_shard_bytes) > 1:
            raise ModelError(
                f"The embedding table of layer {layer.name!r} is larger than min_shard_bytes="
                f"{min_shard_bytes}, but can no longer be split over the parameter servers, "
                f"because the model {model.name!r} was created inside the strategy's scope. Pass a "
                "function that builds and compiles the model, `distributed_fit(build, ...)`, or "
                "create the model outside the scope."
            )


def adapt(model: keras.Model) -> None:
    """Makes the layers of `model` look up rows on their servers, and makes methods that read or set
    the values of the model and its optimizers use whole tables. Call it again for newly built
    layers."""
    layers = list_layers(model)
    for layer in layers:
        if type(layer) is keras.layers.Embedding and layer.built and "call" not in vars(layer):
            _UPSTREAM.patch(layer, "call", _make_lookup(layer, [layer._embeddings]))
    if not any(map(_is_split, layers)):
        return
    for each in (model, *layers):
        _see_wholes(each)
    for optimizer in list_optimizers(model).values():
        if "save_own_variables" not in vars(optimizer):
            _UPSTREAM.patch(optimizer, "save_own_variables", _saving(_variable_getter(optimizer)))
            _UPSTREAM.patch(optimizer, "load_own_variables", _loading(optimizer))


def refuse_unsupported(model: keras.Model, refuse: Callable[[str, str, str], None]) -> None:
    """Calls `refuse` with the unsupported feature, the reason and a remedy."""
    if getattr(model.distribute_strategy.extended, "_variable_partitioner", None) is not None:
        refuse(
            "is under a strategy with a variable_partitioner",
            "Keras cannot train the variables that the partitioner creates",
            "Remove it, and pass min_shard_bytes to `distributed_fit`.",
        )
    tables = [layer for layer in list_layers(model) if _is_split(layer)]
    for layer in tables:
        if layer.lora_rank or layer.quantization_mode is not None:
            refuse(
                f"has LoRA or quantization in layer {layer.name!r}",
                "a split table supports neither",
                "Omit min_shard_bytes.",
            )
        regularizer = layer.embeddings_regularizer
        if regularizer is not None and type(regularizer) not in _SUMMED:
            refuse(
                f"has {type(regularizer).__name__} in layer {layer.name!r}",
                "it would be applied to every part of a table separately",
                "Use L1, L2 or L1L2, or omit min_shard_bytes.",
            )
    for optimizer in list_optimizers(model).values() if tables else ():
        why = "every part of a table would be treated as a separate variable"
        if optimizer.clipnorm:
            remedy = "Use global_clipnorm, or omit min_shard_bytes."
            refuse("clips gradients by clipnorm", why, remedy)
        if (name := type(optimizer).__name__) in _OF_WHOLES:
            refuse(f"has {name}", why, "Use another optimizer, or omit min_shard_bytes.")


def _count_parts(layer: Any, strategy: tf.distribute.Strategy, min_shard_bytes: int | None) -> int:
    # A subclass may use the table in any way.
    if not (type(layer) is keras.layers.Embedding and min_shard_bytes and is_scheduled(strategy)):
        return 1
    servers = len(get_resolver(strategy).cluster_spec().as_dict()["ps"])
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes, servers
    )
    shape = tf.TensorShape([layer.input_dim, layer.output_dim])
    return int(partitioner(shape, tf.as_dtype(layer.variable_dtype))[0])


def _is_split(layer: keras.Layer) -> bool:
    return isinstance(vars(layer).get(_TABLE), Table)


def _build(layer: keras.layers.Embedding, count: int) -> None:
    def make(dtype: Any) -> tf.Tensor:
        """Initializes the whole table: a seeded initializer would give all parts the same rows."""
        with tf.device(_CHIEF):  # the chief has enough memory, as it also saves whole tables
            shape = (layer.input_dim, layer.output_dim)
            return tf.convert_to_tensor(layer.embeddings_initializer(shape, dtype=dtype))

    initial = functools.cache(make)

    def initial_rows(begin: int, end: int) -> Callable[..., tf.Tensor]:
        def initializer(shape: Any, dtype: Any = None) -> tf.Tensor:
            with tf.device(_CHIEF):
                # Keras also calls this within a graph, whose tensors cannot be used outside.
                return (initial if tf.executing_eagerly() else make)(dtype)[begin:end]

        return initializer

    each, rest = divmod(layer.input_dim, count)
    parts, begin = [], 0
    for number in range(count):
        size = each + (number < rest)  # as `tf.nn.embedding_lookup` expects
        parts.append(
            layer.add_weight(
                shape=(size, layer.output_dim),
                initializer=initial_rows(begin, begin + size),
                name=part_name("embeddings", number),
                regularizer=layer.embeddings_regularizer,
                constraint=layer.embeddings_constraint,
            )
        )
        begin += size
    initial.cache_clear()
    [table] = merge_parts(parts)
    override(layer, _TABLE, table)
    _UPSTREAM.patch(layer, "call", _make_lookup(layer, parts))
    _UPSTREAM.patch(layer, "save_own_variables", _saving(lambda: [table]))
    _UPSTREAM.patch(layer, "load_own_variables", lambda store: table.assign(store["0"]))
    _see_wholes(layer)
    layer.built = True
    announce(f"the embedding table of layer {layer.name!r} is split over {count} parameter servers")


def _make_lookup(
    layer: keras.layers.Embedding, parts: list[keras.Variable]
) -> Callable[[Any], tf.Tensor]:
    stock = layer.call

    def look_up(indices: tf.Tensor) -> tf.Tensor:
        indices = tf.where(indices < 0, indices + layer.input_dim, indices)  # as in Keras
        return tf.nn.embedding_lookup([part.value for part in parts], indices)

    def call(inputs: Any) -> Any:
        if layer.lora_enabled:
            return stock(inputs)
        if isinstance(inputs, tf.SparseTensor):
            inputs = tf.sparse.to_dense(inputs)
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        rows = tf.ragged.map_flat_values(look_up, inputs)
        return keras.ops.cast(rows, layer.compute_dtype)

    return call


def _see_wholes(owner: keras.Layer) -> None:
    def set_weights(weights: Any) -> None:
        variables = merge_parts(owner.weights)
        if len(weights) != len(variables):
            raise ValueError(
                f"Expected {len(variables)} weights of {owner.name!r}. Received: {len(weights)}"
            )
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    _UPSTREAM.patch(
        owner, "get_weights", lambda: [each.numpy() for each in merge_parts(owner.weights)]
    )
    _UPSTREAM.patch(owner, "set_weights", set_weights)


def _variable_getter(optimizer: keras.optimizers.Optimizer) -> Callable[[], list[Any]]:
    return lambda: merge_parts(optimizer.variables)


def _saving(variables: Callable[[], list[Any]]) -> Callable[[Any], None]:
    def save_own_variables(store: Any) -> None:
        for number, variable in enumerate(variables()):
            store[str(number)] = variable.numpy()

    return save_own_variables


def _loading(optimizer: keras.optimizers.Optimizer) -> Callable[[Any], None]:
    stock = optimizer.load_own_variables

    def load_own_variables(store: Any) -> None:
        variables = merge_parts(optimizer.variables)
        if len(store.keys()) != len(variables):
            stock(store)  # warns
            return
        for number, variable in enumerate(variables):
            variable.assign(store[str(number)])

    return load_own_variables
