"""`distributed_fit`: its parts, connected in the order in which data flows."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import keras
import tensorflow as tf

from keras_distplug import startup
from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.parameter_server import embeddings
from keras_distplug.backend.tensorflow.runtime import context, keras_backend, models, versions
from keras_distplug.callbacks import chief_only
from keras_distplug.callbacks.watchdog import require_made
from keras_distplug.checkpoint import same_start
from keras_distplug.checkpoint.backup_and_restore import BackupAndRestore
from keras_distplug.checkpoint.cadence import SaveFreq
from keras_distplug.checkpoint.settings import RESUMING, Resuming, merged
from keras_distplug.cluster import agreement, peers, roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import advise, announce
from keras_distplug.data import carry, contents, feed, own_fit, progress
from keras_distplug.default_callbacks import defaults
from keras_distplug.strategies.placement import Blueprint, Origin, Placement, place, require_usable

_P = ParamSpec("_P")
_T = TypeVar("_T")
_GIVEN = "_given"
_ONLY_FED = ("sample_weight", "class_weight", "validation_split")
_OPTIONS = {
    "directory": None,
    "save_freq": "auto",
    "storage_options": None,
    "resume": True,
    **vars(RESUMING),
}
_FED = (*_ONLY_FED, "validation_data", "batch_size", "shuffle", "epochs")


def _with_given(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Also passes the arguments of `fit` that the caller gave, by name.

    A model's own `fit` may have other defaults than Keras', so only given arguments are forwarded.
    """
    signature = inspect.signature(function)
    ours = {name for name, each in signature.parameters.items() if each.kind is each.KEYWORD_ONLY}

    @functools.wraps(function)
    def with_given(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop("own_arguments", {})
        of_fit = {name: given[name] for name in given if name not in {"model", "callbacks", *ours}}
        return function(*args, **{**kwargs, _GIVEN: of_fit})  # type: ignore[arg-type]

    return with_given


@_with_given
def distributed_fit(
    model: keras.Model | Callable[[], keras.Model],
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int = 1,
    *,
    strategy: str | tf.distribute.Strategy = "auto",
    directory: str | os.PathLike[str] | None = None,
    save_freq: SaveFreq = "auto",
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = True,
    resuming: Resuming = RESUMING,
    deterministic: bool = False,
    min_shard_bytes: int | None = None,
    **own_arguments: Any,
) -> keras.callbacks.History:
    """Runs `model.fit` on all devices and workers, and resumes where it stopped.

    Example:

    ```python
    history = kd.distributed_fit(model, ds, epochs=10, directory="runs/mnist")
    ```

    If the class of the model has its own `fit`, such as the tasks of KerasHub, that `fit` is called
    with the given arguments: `x` may then be texts, for example. The data that it passes to Keras'
    `fit` is resumed and distributed, in the order of plain Keras.

    Args:
        model: A compiled model created outside any strategy's scope; one created inside the scope
            of the strategy to use; or a function without arguments that builds and compiles one. A
            model from outside is rebuilt inside the scope, and receives the trained weights and the
            optimizer state afterwards. The trained model under its strategy is `history.model`.
        x: A `tf.data.Dataset`, a `keras.utils.PyDataset` or a torch `DataLoader` of *global*
            batches, a generator of them, a function without arguments that returns one of these, a
            function of a `tf.distribute.InputContext` that returns a dataset, or arrays. With
            parameter servers, every worker reads arrays and datasets repeatedly: in its own orders
            if they are shuffled, and otherwise its share of the batches. A function of an
            `InputContext` is called for every worker, and data from Python code is refused. The
            logger `keras_distplug.advice` suggests improvements to a pipeline once.
        y: See `Model.fit`.
        batch_size: The number of samples in a *global* batch of arrays, which is split over the
            replicas. Defaults to 32.
        epochs: The total number of epochs, over all restarts. Defaults to 1.
        verbose: See `Model.fit`. Only the chief prints a progress bar. Other workers print nothing
            with `"auto"` and 1, and a line per epoch with 2. Defaults to `"auto"`.
        callbacks: See `Model.fit`. The callbacks of `defaults(directory)` are added unless a
            `keras_distplug.BackupAndRestore` is among them. All workers run all callbacks; only the
            chief writes the files of Keras' `ModelCheckpoint`, `CSVLogger` and `TensorBoard`, as
            with `chief_only`.
        validation_split: See `Model.fit`.
        validation_data: See `Model.fit`.
        shuffle: See `Model.fit`. Every epoch has its own order, which is the same on every worker
            and in an interrupted run. Defaults to `True`.
        class_weight: See `Model.fit`.
        sample_weight: See `Model.fit`.
        initial_epoch: See `Model.fit`. The position of a stored run has precedence.
        steps_per_epoch: See `Model.fit`.
        validation_steps: See `Model.fit`.
        validation_batch_size: See `Model.fit`.
        validation_freq: See `Model.fit`.
        strategy: One of `"one_device"`, `"mirrored"`, `"central_storage"`, `"multi_worker"` and
            `"parameter_server"`, or a `tf.distribute.Strategy`. Defaults to `"auto"`: the name
            given to `init`, if any; `"parameter_server"` in a cluster with 'ps' tasks;
            `"multi_worker"` with several workers (TF_CONFIG, Slurm and so on); `"mirrored"` with
            several GPUs; else `"one_device"`.
        directory: The folder of the training, or a URL such as `s3://bucket/runs/mnist`. Defaults
            to the folder of `defaults()`.
        save_freq: See `defaults`. Defaults to `"auto"`.
        storage_options: See `BackupAndRestore`. Defaults to `None`.
        resume: `False` starts a new run next to the existing ones. Defaults to `True`.
        resuming: The changes to the script that are permitted since the checkpoint, and the initial
            values of a new run. The fields, such as `allow_data_change=True`, are also accepted as
            arguments. Defaults to `Resuming()`.
        deterministic: `True` makes TensorFlow compute the same bits in every run on
            machines of this kind (`tf.config.experimental.enable_op_determinism`), for the rest of
            the process. On CPUs, results are usually the same without it; on GPUs, they are not.
            Stateful functions of a pipeline, such as those with `tf.random.uniform`, then run
            sequentially, and some operations are slower, or refused if not deterministic.
            Needs `keras.utils.set_random_seed(seed)` before the model is made. Defaults to `False`.
        min_shard_bytes: The minimum size of a part, in bytes, if tables of `Embedding` layers are
            split by rows over parameter servers, as TensorFlow's `MinSizePartitioner` does (its own
            default is 262,144). Checkpoints and saved files contain whole tables, so the number of
            servers may change; the chief needs memory for a whole table. Other variables, and
            tables of subclasses of `Embedding`, are not split. clipnorm, Adafactor, Lamb, Muon and
            LoRA are refused. No effect under other strategies. Defaults to `None`: every table is
            whole, on one server.
        own_arguments: Additional arguments of the model's own `fit`.

    Returns:
        Keras' `History`, complete across restarts, or what the model's own `fit` returns.

    Raises:
        ConfigurationError: If an argument or the environment is invalid, before training starts.
            Its subclasses are `ClusterError`, `ModelError` and `DataError`.
        OtherRunError: If `directory` contains the run of another model, or of other data.
    """
    given: dict[str, Any] = own_arguments.pop(_GIVEN)  # arguments of `fit`
    resuming = _get_resuming(resuming, own_arguments, given)
    versions.check()
    keras_backend.warn_of_distribution()
    peers.watch()
    if deterministic:
        _enable_determinism()
    _require_bytes(min_shard_bytes)
    if isinstance(model, keras.Model) or not callable(model):
        require_usable(model, "passed as `model`", own_arguments)
    facts = _shared_facts(model, strategy, given)  # joining may reset TensorFlow
    joined = _join(model, strategy, given)
    role = agreement.get_role(joined.strategy)
    if role.world_size > 1:
        same_start.require_same(agreement.get_channel(role), facts)
    placement = place(joined.origin, joined.strategy, own_arguments, min_shard_bytes)
    trainer.adapt(placement.model)
    data = contents.fingerprint_given(*map(joined.arguments.get, ("x", "y", "sample_weight")))
    options = {
        "directory": directory,
        "save_freq": save_freq,
        "storage_options": storage_options,
        "resume": resume,
        **vars(resuming),
    }
    run = _open_run(callbacks, placement.model, data, options)
    with run.backup.hold.given_up_on_failure():
        train = _feed(placement, run, joined.arguments)
        with embeddings.split(min_shard_bytes):  # layers that the first batch builds
            history: keras.callbacks.History = train()
    if run.backup.model is None:
        own_fit.warn_of_lost_callbacks(placement.model)
    placement.write_back()
    return history


def _shared_facts(
    model: keras.Model | Callable[[], keras.Model],
    strategy: str | tf.distribute.Strategy,
    arguments: Mapping[str, Any],
) -> same_start.Facts:
    """Returns what all workers must have in common, before the model is placed."""
    is_model = isinstance(model, keras.Model)
    is_chosen = not isinstance(strategy, str) or (is_model and models.is_placed(model))
    if not is_chosen and roles.from_environment(os.environ).world_size == 1:
        return {}
    of_model = same_start.describe_compiled_model(model) if is_model else {}
    return {
        **same_start.describe_process(),
        **of_model,
        **same_start.describe_fit_arguments(arguments),
    }


def _get_resuming(
    resuming: Resuming, own_arguments: dict[str, Any], given: dict[str, Any]
) -> Resuming:
    """Moves the fields of `Resuming` from the arguments of a model's own `fit`."""
    single = {name: own_arguments.pop(name) for name in Resuming.names() & own_arguments.keys()}
    for name in single:
        del given[name]
    return merged("resuming", Resuming, resuming, single)


def _enable_determinism() -> None:
    if context.global_seed() is None:
        raise ConfigurationError(
            "deterministic=True needs a seed for random values, including the initial weights. "
            "Received: none. Call `keras.utils.set_random_seed(1)` at the top of the script."
        )
    tf.config.experimental.enable_op_determinism()


def _require_bytes(min_shard_bytes: int | None) -> None:
    is_number = isinstance(min_shard_bytes, int) and not isinstance(min_shard_bytes, bool)
    if min_shard_bytes is not None and not (is_number and min_shard_bytes > 0):
        raise ConfigurationError(
            "Expected `min_shard_bytes` to be a number of bytes, at least 1, or None. Received: "
            f"{min_shard_bytes!r}"
        )


@dataclass(frozen=True)
class _Joined:
    """The strategy, and the model and the arguments of `fit` as they can be used under it."""

    strategy: tf.distribute.Strategy
    origin: Origin
    arguments: dict[str, Any]


def _join(
    model: keras.Model | Callable[[], keras.Model],
    strategy: str | tf.distribute.Strategy,
    arguments: dict[str, Any],
) -> _Joined:
    """Joins the cluster, if there is one. Restarts TensorFlow if it was used too early for that."""
    if not isinstance(strategy, str | tf.distribute.Strategy):
        raise ConfigurationError(
            "Expected `strategy` to be a name or a tf.distribute.Strategy. Received: "
            f"{strategy!r} of type {type(strategy).__name__}."
        )
    if isinstance(model, keras.Model) and models.is_placed(model):
        own = model.distribute_strategy
        if strategy in ("auto", startup.get_name(own)) or strategy is own:
            return _Joined(own, model, arguments)
        raise ConfigurationError(
            f"The model {model.name!r} was made inside the scope of {type(own).__name__}, but "
            f"strategy={strategy!r} is a different one. "
            "Omit `strategy`, or make the model outside any scope."
        )
    if isinstance(strategy, str):
        if startup.needs_fresh_context(strategy):
            return _restart(model, arguments)
        strategy = startup.join(strategy)
    moves = isinstance(model, keras.Model) and startup.get_name(strategy) != "one_device"
    origin = Blueprint.of(model, is_revived=False) if moves else model
    return _Joined(strategy, origin, arguments)


def _restart(model: keras.Model | Callable[[], keras.Model], arguments: dict[str, Any]) -> _Joined:
    """Restarts TensorFlow to join the cluster, and transfers the model and the data."""
    is_model = isinstance(model, keras.Model)
    origin = Blueprint.of(model, is_revived=True) if is_model else model
    unpack = carry.pack(arguments)
    context.reset()
    joined = _Joined(startup.join("auto"), origin, unpack())
    announce(
        "TensorFlow was restarted to join the cluster. The arguments of `distributed_fit` were "
        "transferred; other models, tensors and datasets created earlier are no longer usable. To "
        "avoid this, call `keras_distplug.init()` at the top of the script"
    )
    return joined


@dataclass(frozen=True)
class _OpenRun:
    """The run to train, and this worker's role in it."""

    role: Role
    callbacks: list[keras.callbacks.Callback]
    backup: BackupAndRestore  # the callback that keeps the run
    seed: int  # of shuffled orders, the same on every worker


def _open_run(
    callbacks: Sequence[keras.callbacks.Callback] | None,
    model: keras.Model,
    data: Mapping[str, str],
    options: Mapping[str, Any],
) -> _OpenRun:
    """Adds the callbacks of `defaults`, and opens the run that they keep."""
    role = agreement.get_role(model.distribute_strategy)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ConfigurationError(
            "Expected `callbacks` to be a list. Received: a `CallbackList`. Pass the same "
            "callbacks as a list, `callbacks=[...]`."
        )
    given = keras.tree.flatten(callbacks) if callbacks else []
    require_made(given)
    if not any(isinstance(each, BackupAndRestore) for each in given):
        given = [*given, *defaults(**options)]
    elif own := [name for name in options if options[name] != _OPTIONS[name]]:
        raise ConfigurationError(
            f"{', '.join(f'`{name}`' for name in own)} of `distributed_fit` cannot be combined "
            "with a BackupAndRestore among the callbacks (`keras_distplug.defaults()` returns "
            "one). Pass the same settings to BackupAndRestore or `defaults()`, where the directory "
            "is the first argument, or omit that callback."
        )
    own = [
        chief_only.for_role(each, role) if chief_only.writes_files(each) else each for each in given
    ]
    backups = [each for each in own if isinstance(each, BackupAndRestore)]
    backup = min(backups, key=lambda each: each.defers)  # the user's own
    return _OpenRun(role, own, backup, seed=backup.open_run(model, data).record.seed)


def _feed(
    placement: Placement, run: _OpenRun, arguments: Mapping[str, Any]
) -> Callable[[], keras.callbacks.History]:
    """Returns the call of the model's `fit` on resumable data, and announces that data."""
    model = placement.model
    is_quiet = arguments.get("verbose", "auto") == "auto" and not run.role.is_chief
    others = {**arguments, "callbacks": run.callbacks}
    x, y = others.pop("x", None), others.pop("y", None)
    if callable(make := others.get("validation_data")):
        others["validation_data"] = make()
    advice: tuple[str, ...] = ()
    if models.has_own_fit(model):
        fit = own_fit.prepare(model, feed.made(x), y, others, is_silent=is_quiet)
        progress.take_over_early(model, run.seed)
        description = f"what {own_fit.get_name(model)} makes of its arguments"
    else:
        fed = feed.feed(
            x,
            y,
            model=model,
            seed=run.seed,
            workers=run.role.world_size,
            **{name: others[name] for name in _FED if name in others},
        )
        others = {name: value for name, value in others.items() if name not in _ONLY_FED}
        others |= {"validation_data": fed.validation_data, "shuffle": False}
        others |= {"verbose": 0} if is_quiet else {}
        fit = functools.partial(model.fit, fed.x, **others)
        description, advice = fed.description, fed.advice
    if run.role.is_chief:
        announce(f"input: {description}")
        for line in advice:
            advise(f"advice: {line}")
    return fit
