"""Instruments in the training step of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas import gates, optimizers, share
from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached
from keras_distplug.backend.tensorflow.runtime.patching import override
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled
from keras_distplug.backend.tensorflow.trainer import adapt
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.step.replica_step import ReplicaStep, tracing


class StepInstrument:
    """Base class for measuring or deciding something in every training step of a model.

    Derive from it, override the hooks you need, and pass it to `instrument_step` in a callback's
    `set_model`. The hooks are called while Keras traces the step, once in each replica: build
    TensorFlow operations there. To use a value in Python, call `tf.py_function` or
    `tf.numpy_function` in `before` or `after`.

    Example:

    ```python
    class LargestGradient(kd.StepInstrument):
        def __init__(self):
            self.largest = 0.0

        def after_gradients(self, step, optimizer, gradients):
            step.carried["largest gradient"] = step.norm(gradients)
            return gradients

        def after(self, step, logs):
            tf.py_function(self._note, [step.carried["largest gradient"]], [])

        def _note(self, norm):
            self.largest = max(self.largest, float(norm))
    ```
    """

    decides = False  # True if it implements `allows`; such instruments run after the others

    def signature(self) -> Hashable:
        """Returns what the traced operations depend on; the step is traced again if it changes."""
        return ()

    def before(self, step: ReplicaStep, batch: Any) -> Any:
        """Returns the batch to train on, usually `batch`.

        Args:
            step: The step of this replica.
            batch: The replica's part of the global batch, as Keras passes it to `train_step`.
        """
        return batch

    def after_gradients(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        """Returns the replica's gradients that enter the all-reduce, usually `gradients`.

        With `jit_compile=True`, XLA compiles this hook's operations.

        Args:
            step: The step of this replica.
            optimizer: The optimizer that will apply the gradients.
            gradients: The replica's own gradients: one per variable, `None` for a variable without
                a gradient.
        """
        return gradients

    def after_sum(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        """Returns the gradients that the optimizer applies, usually `gradients`.

        Args:
            step: The step of this replica.
            optimizer: The optimizer that will apply the gradients.
            gradients: The sums over all replicas: one per variable, `None` for a variable without
                a gradient.
        """
        return gradients

    def allows(
        self,
        step: ReplicaStep,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        """Returns a boolean scalar, identical on all replicas: false skips the update.

        If the update is skipped, the step's other assignments are undone, too. Return
        `None` to abstain.

        Args:
            step: The step of this replica.
            optimizer: The optimizer that is about to apply the gradients.
            own: The replica's own gradients: one per variable, `None` for a variable without one.
            summed: Their sums over all replicas.
            variables: The variables to update.
        """
        return None

    def after(self, step: ReplicaStep, logs: Any) -> None:
        """Called at the end of the step.

        Args:
            step: The step of this replica.
            logs: The return value of `train_step`: usually a dictionary of metrics.
        """


Kind = TypeVar("Kind", bound=StepInstrument)


def instrument_step(model: keras.Model, instrument: StepInstrument) -> None:
    """Adds an instrument to every training step of the `fit` that is starting.

    Call it in a callback's `set_model`, because Keras builds the step before `on_train_begin`. The
    instrument is removed after this `fit`.

    Example:

    ```python
    class Measures(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            self.instrument = LargestGradient()
            kd.instrument_step(model, self.instrument)
    ```

    Not available under ParameterServerStrategy, whose workers cannot call this process's Python.

    Args:
        model: A compiled model.
        instrument: A `StepInstrument`.

    Raises:
        ConfigurationError: If `instrument` is not a `StepInstrument`, or under
            ParameterServerStrategy.
    """
    if not isinstance(instrument, StepInstrument):
        raise ConfigurationError(
            "Expected `instrument` to be a keras_distplug.StepInstrument. Received: "
            f"{instrument!r}. Pass an instance of a subclass of StepInstrument."
        )
    if is_scheduled(model.distribute_strategy):
        raise ConfigurationError(
            "Expected a model whose steps run in this process. Received: one under "
            "ParameterServerStrategy, whose workers cannot call this process's Python. Do "
            "not add the instrument under this strategy."
        )
    StepInstrumentation.of(model).use(instrument)


class StepInstrumentation(gates.Gate):
    """The instruments in the training step of one model during `fit`.

    An update that an instrument does not allow is not applied on any replica. The step's other
    assignments (metrics, the statistics of BatchNormalization) are reverted within the step. The
    batch and the random numbers of its layers are consumed nevertheless.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._shared: dict[Callable[..., StepInstrument], StepInstrument] = {}
        self._requested: list[StepInstrument] = []  # for the `fit` that is starting
        self._installed: list[StepInstrument] = []
        self._traced: list[tuple[int, Hashable]] = []  # the signatures of the installed ones
        self._is_installed = False
        self._history: Any = None  # of the current `fit`
        self.stock: dict[str, Any] = {}  # the model's own methods, by name

    @classmethod
    def of(cls, model: keras.Model) -> StepInstrumentation:
        """Returns the instrumentation of `model`, after adapting the model."""
        found = attached(adapt(model), cls)
        if found is None:
            attach(model, found := cls(model))
        return found

    def shared(self, make: Callable[[keras.Model], Kind]) -> Kind:
        """Returns the instrument that all callbacks share; `make` creates it on the first call."""
        if make not in self._shared:
            self._shared[make] = make(self.model)
        return self._shared[make]  # type: ignore[return-value]

    def use_shared(self, make: Callable[[keras.Model], Kind]) -> Kind:
        self.use(instrument := self.shared(make))
        return instrument

    def is_used(self, instrument: StepInstrument) -> bool:
        """True if the instrument is enabled for the `fit` that is starting."""
        return instrument in self._requested

    def use(self, instrument: StepInstrument) -> None:
        """Enables it for the `fit` that is starting. Call it from a callback's `set_model`."""
        if instrument not in self._requested:
            self._requested = sorted([*self._requested, instrument], key=lambda each: each.decides)
        self._install()

    def use_none(self) -> None:
        """Disables all instruments. Call it if `set_model` was not called by `fit`."""
        self._requested = []

    def retrace(self) -> None:
        self.model.train_function = None
        Touched.of(self.model).draws.keep()

    # Installation for one `fit`

    def _install(self) -> None:
        model = self.model
        if any(each.decides for each in (*self._requested, *self._installed)):
            gates.never_record_assignments(models.list_seeds(model))
            if models.is_placed(model):
                gates.record_assignments([*model.non_trainable_variables, *model.metrics_variables])
        for optimizer in models.list_optimizers(model).values():
            optimizers.add_gate(optimizer)
            gates.set_gate(optimizer, self)
        own = self._replacements()
        if self._is_installed:
            # The script may have assigned another `train_step` in the meantime.
            own = {name: each for name, each in own.items() if vars(model).get(name) != each}
            if not own:
                return
        for name, each in own.items():
            self.stock[name] = getattr(model, name)
            override(model, name, each)
        self.retrace()
        self._is_installed = True

    def _replacements(self) -> dict[str, Any]:
        """Returns the methods that replace the model's."""
        return {
            "train_step": self._train_step,
            "compute_loss": self._compute_loss,
            "make_train_function": self._make_train_function,
        }

    def _uninstall(self) -> None:
        for name, own in self._replacements().items():
            if vars(self.model).get(name) == own:
                override(self.model, name, self.stock[name])
        for optimizer in models.list_optimizers(self.model).values():
            gates.set_gate(optimizer, None)
        self.retrace()
        self._is_installed = False
        self._installed, self._traced = [], []

    def _make_train_function(self, force: bool = False) -> Any:
        """Called by Keras in every `fit`, after the callbacks' `set_model`."""
        requested, self._requested = self._requested, []
        history = getattr(self.model, "history", None)
        if not requested and history is self._history and models.is_in_fit(self.model):
            requested = self._installed  # called by a callback within the same `fit`
        self._history = history
        if not requested:
            self._uninstall()
            return self.model.make_train_function(force)
        self._install()  # covers new optimizers
        signatures = [(id(each), each.signature()) for each in requested]
        if signatures != self._traced:
            self._installed, self._traced, force = requested, signatures, True
            self.retrace()
        with _not_compiled(self.model):
            return self.stock["make_train_function"](force)

    # The step

    def _train_step(self, batch: Any) -> Any:
        is_compiled = self.model.jit_compile
        step = ReplicaStep(batch, is_compiled)
        for each in self._installed:
            step.batch = each.before(step, step.batch)
        if not is_compiled:
            found = self._run_step(step)
        else:
            # XLA cannot call Python, so it only compiles the inner part of the step. A `partial` is
            # counted separately: TensorFlow would take the traces of several models for retracing
            # of one function.
            inside = functools.partial(self._run_inner_step)
            compiled = tf.function(inside, jit_compile=True, reduce_retracing=True, autograph=False)
            found, step.carried = compiled(step.batch)
        for name in [
            name for name, each in step.carried.items() if not _are_in_current_graph(each)
        ]:
            del step.carried[name]  # belongs to a function within the step
        for each in self._installed:
            each.after(step, found)
        return found

    def _run_inner_step(self, batch: Any) -> tuple[Any, Any]:
        step = ReplicaStep(batch, is_compiled=True)
        return self._run_step(step), step.carried

    def _run_step(self, step: ReplicaStep) -> Any:
        with tracing.at(step), gates.recorded_assignments() as assigned:
            found = self.stock["train_step"](step.batch)
            together = share.current()
            if together is None:
                step.undo_if_skipped(assigned)
            else:
                together.at_end.append(functools.partial(step.undo_if_skipped, assigned))
        return found

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.stock["compute_loss"](*args, **kwargs)
        step = tracing.now
        if step is not None and loss is not None:
            step.note_loss(loss)
        return loss

    # The gate of optimizers

    def mark(self, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]) -> Sequence[Any]:
        step = tracing.now
        if step is not None and any(gradient is not None for gradient in own):
            for each in self._installed:
                own = each.after_gradients(step, optimizer, own)
        return own

    def received(
        self, optimizer: keras.optimizers.Optimizer, summed: Sequence[Any]
    ) -> Sequence[Any]:
        step = tracing.now
        if step is not None and any(gradient is not None for gradient in summed):
            for each in self._installed:
                summed = each.after_sum(step, optimizer, summed)
        return summed

    def opens(
        self,
        optimizer: keras.optimizers.Optimizer,
        own: Sequence[Any],
        summed: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> tf.Tensor | None:
        step = tracing.now
        if step is None or all(gradient is None for gradient in summed):
            return None
        answers = [each.allows(step, optimizer, own, summed, variables) for each in self._installed]
        allowed = [each for each in answers if each is not None]
        if not allowed:
            return None
        allows = allowed[0] if len(allowed) == 1 else tf.reduce_all(tf.stack(allowed))
        step.allowed.append(allows)
        return allows

    def reverts(self) -> bool:
        step = tracing.now
        return (
            step is not None
            and not step.is_compiled
            and not step.is_in_function
            and self._is_step_of_keras()
        )

    def _is_step_of_keras(self) -> bool:
        """True if the step is Keras' own, which computes nothing with the new weights."""
        module = getattr(self.stock["train_step"], "__module__", None) or ""
        if not module.startswith("keras_distplug."):
            return False  # a callback has replaced it within this `fit`
        own = {
            "train_step": Touched.of(self.model).steps["train_step"],
            "compute_metrics": self.model.compute_metrics,
        }
        return all(
            getattr(each, "__func__", None) is getattr(keras.Model, name)
            for name, each in own.items()
        )


def _are_in_current_graph(values: Any) -> bool:
    return all(map(gates.is_here, tf.nest.flatten(values)))


@contextmanager
def _not_compiled(model: keras.Model) -> Iterator[None]:
    before = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = before
