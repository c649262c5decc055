"""Tables of embeddings on parameter servers, and those whose rows are split over several.

What is wrong upstream (Keras 3.10 to 3.15, TensorFlow 2.18 to 2.21; no issue of either is known):

- `take` of Keras reads all of a table before it takes rows of it, and in each step all of it goes
  to the worker: with 256 MB, a step took a hundred times as long.
- TensorFlow's `variable_partitioner` gives Keras a `ShardedVariable`, which it takes for a single
  one: "'ShardedVariable' object has no attribute 'handle'", as soon as there is a gradient.

Here rows are looked up where they are. Where a table is split, a layer has a Keras variable for
each part, each with as many rows as the others, or one less. TensorFlow places one after the other
on the next server, and what optimizers keep of it beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.embedding_tables import Table, part_name, wholes
from keras_distplug.backend.tensorflow.runtime.models import layers_of, optimizers_of
from keras_distplug.backend.tensorflow.runtime.patching import Upstream, override
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, resolver_of
from keras_distplug.core.errors import ModelError
from keras_distplug.core.log import announce

_UPSTREAM = Upstream(keras="3.10 to 3.15", tensorflow="2.18 to 2.21")

_TABLE = "_embeddings"
_SUMMED = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_OF_WHOLES = ("Adafactor", "Lamb", "Muon")
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"


@contextmanager
def split(min_shard_bytes: int | None) -> Iterator[None]:
    """Splits the tables of layers that are made and built meanwhile under ParameterServerStrategy.

    Args:
        min_shard_bytes: Those larger than this, as `MinSizePartitioner` of TensorFlow has it, into
            as many parts as there are servers at most. None leaves all whole.
    """
    stock = keras.layers.Embedding.build

    def build(layer: keras.layers.Embedding, input_shape: Any = None) -> None:
        count = _parts_for(layer, tf.distribute.get_strategy(), min_shard_bytes)
        if count == 1 or layer.built:
            stock(layer, input_shape)
        else:
            _build(layer, count)

    with _UPSTREAM.patched(keras.layers.Embedding, "build", build):
        yield


def require_split(model: keras.Model, min_shard_bytes: int | None) -> None:
    """
    Raises:
        ModelError: If `model`, which is there already, has a table that should have been split.
    """
    for layer in layers_of(model):
        strategy = model.distribute_strategy
        if not _is_split(layer) and _parts_for(layer, strategy, min_shard_bytes) > 1:
            raise ModelError(
                f"The table of layer {layer.name!r} is larger than min_shard_bytes="
                f"{min_shard_bytes}, but the model {model.name!r} was made inside the strategy's "
                "scope before that was known. Pass a function that builds and compiles the model, "
                "`distributed_fit(build, ...)`, or make the model outside the scope."
            )


def adapt(model: keras.Model) -> None:
    """Makes layers of `model` look up rows where they are, and what takes or gives values of it, or
    its optimizers, see whole tables. Call it again for what was built since."""
    layers = layers_of(model)
    for layer in layers:
        if type(layer) is keras.layers.Embedding and layer.built and "call" not in vars(layer):
            _UPSTREAM.patch(layer, "call", _lookup(layer, [layer._embeddings]))
    if not any(map(_is_split, layers)):
        return
    for each in (model, *layers):
        _see_wholes(each)
    for optimizer in optimizers_of(model).values():
        if "save_own_variables" not in vars(optimizer):
            _UPSTREAM.patch(optimizer, "save_own_variables", _saving(_variables_of(optimizer)))
            _UPSTREAM.patch(optimizer, "load_own_variables", _loading(optimizer))


def refuse_what_stays_wrong(model: keras.Model, refuse: Callable[[str, str, str], None]) -> None:
    """Calls `refuse` with what is wrong, why, and what helps."""
    if getattr(model.distribute_strategy.extended, "_variable_partitioner", None) is not None:
        refuse(
            "is under a strategy with a variable_partitioner",
            "Keras cannot train the variables that it makes",
            "Leave it out, and give `distributed_fit` min_shard_bytes.",
        )
    tables = [layer for layer in layers_of(model) if _is_split(layer)]
    for layer in tables:
        if layer.lora_rank or layer.quantization_mode is not None:
            refuse(
                f"has LoRA or a quantization in layer {layer.name!r}",
                "a table that is split has neither",
                "Leave min_shard_bytes out.",
            )
        regularizer = layer.embeddings_regularizer
        if regularizer is not None and type(regularizer) not in _SUMMED:
            refuse(
                f"has {type(regularizer).__name__} in layer {layer.name!r}",
                "it would get each part of a table by itself",
                "Use L1, L2 or L1L2, or leave min_shard_bytes out.",
            )
    for optimizer in optimizers_of(model).values() if tables else ():
        why = "each part of a table would be taken for a variable of its own"
        if optimizer.clipnorm:
            remedy = "Use global_clipnorm, or leave min_shard_bytes out."
            refuse("clips gradients by clipnorm", why, remedy)
        if (name := type(optimizer).__name__) in _OF_WHOLES:
            refuse(f"has {name}", why, "Use another optimizer, or leave min_shard_bytes out.")


def _parts_for(layer: Any, strategy: tf.distribute.Strategy, min_shard_bytes: int | None) -> int:
    # One derived of it may use the table in any way.
    if not (type(layer) is keras.layers.Embedding and min_shard_bytes and is_scheduled(strategy)):
        return 1
    servers = len(resolver_of(strategy).cluster_spec().as_dict()["ps"])
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes, servers
    )
    shape = tf.TensorShape([layer.input_dim, layer.output_dim])
    return int(partitioner(shape, tf.as_dtype(layer.variable_dtype))[0])


def _is_split(layer: keras.Layer) -> bool:
    return isinstance(vars(layer).get(_TABLE), Table)


def _build(layer: keras.layers.Embedding, count: int) -> None:
    def make(dtype: Any) -> tf.Tensor:
        """An initializer has a seed, and would give all parts the same rows."""
        with tf.device(_CHIEF):  # which has room for it: it saves it as a whole, too
            shape = (layer.input_dim, layer.output_dim)
            return tf.convert_to_tensor(layer.embeddings_initializer(shape, dtype=dtype))

    initial = functools.cache(make)

    def initial_rows(begin: int, end: int) -> Callable[..., tf.Tensor]:
        def initializer(shape: Any, dtype: Any = None) -> tf.Tensor:
            with tf.device(_CHIEF):
                # Keras also asks within a graph, out of which no tensor leads.
                return (initial if tf.executing_eagerly() else make)(dtype)[begin:end]

        return initializer

    each, rest = divmod(layer.input_dim, count)
    parts, begin = [], 0
    for number in range(count):
        size = each + (number < rest)  # as `tf.nn.embedding_lookup` has it
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
    [table] = wholes(parts)
    override(layer, _TABLE, table)
    _UPSTREAM.patch(layer, "call", _lookup(layer, parts))
    _UPSTREAM.patch(layer, "save_own_variables", _saving(lambda: [table]))
    _UPSTREAM.patch(layer, "load_own_variables", lambda store: table.assign(store["0"]))
    _see_wholes(layer)
    layer.built = True
    announce(f"the table of layer {layer.name!r} is split over {count} parameter servers")


def _lookup(
    layer: keras.layers.Embedding, parts: list[keras.Variable]
) -> Callable[[Any], tf.Tensor]:
    stock = layer.call

    def look_up(indices: tf.Tensor) -> tf.Tensor:
        indices = tf.where(indices < 0, indices + layer.input_dim, indices)  # as Keras has it
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
        variables = wholes(owner.weights)
        if len(weights) != len(variables):
            raise ValueError(
                f"Expected {len(variables)} weights of {owner.name!r}. Received: {len(weights)}"
            )
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    _UPSTREAM.patch(owner, "get_weights", lambda: [each.numpy() for each in wholes(owner.weights)])
    _UPSTREAM.patch(owner, "set_weights", set_weights)


def _variables_of(optimizer: keras.optimizers.Optimizer) -> Callable[[], list[Any]]:
    return lambda: wholes(optimizer.variables)


def _saving(variables: Callable[[], list[Any]]) -> Callable[[Any], None]:
    def save_own_variables(store: Any) -> None:
        for number, variable in enumerate(variables()):
            store[str(number)] = variable.numpy()

    return save_own_variables


def _loading(optimizer: keras.optimizers.Optimizer) -> Callable[[Any], None]:
    stock = optimizer.load_own_variables

    def load_own_variables(store: Any) -> None:
        variables = wholes(optimizer.variables)
        if len(store.keys()) != len(variables):
            stock(store)  # warns
            return
        for number, variable in enumerate(variables):
            variable.assign(store[str(number)])

    return load_own_variables
