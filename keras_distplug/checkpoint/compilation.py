"""Which variables a model trains and how it is compiled, which callbacks may change in mid-run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.replicas import compile_config, touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.checkpoint import changed_settings
from keras_distplug.checkpoint.layer_settings import of_layers
from keras_distplug.core.errors import OtherRunError

_KEY = "training"  # in `Manifest.how_built`
_OPTIMIZER = "optimizer"  # the one that the model is compiled with


def settings_of(model: keras.Model) -> Mapping[str, Any]:
    """Returns what a script decides about a model's training, for `changed_settings.compare`."""
    return {"compiled": compile_config.config(model), "layers": of_layers(model)}


def started_with(how_built: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the script that made a checkpoint."""
    start: Mapping[str, Any] = how_built[_KEY]["start"] if _KEY in how_built else {}
    return start


class Compilation:
    """Keeps it, for one `fit`. To be made before anything is changed.

    A script that is started again makes its model as it did at first. What callbacks have changed
    since is then done once more. Where the script itself has changed, it is right.

    Args:
        model: The model in training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._identity = compile_config.identity(model)
        self._start = {
            **settings_of(model),
            "frozen": compile_config.frozen(model),
            "fit": changed_settings.of_fit(),
        }
        self._touched = touched.Touched.of(model)
        self._is_fitted = False  # whether the optimizer trains what the script has changed that to

    def note_trace(self) -> None:
        """To be called when the training step is traced, which is when freezing takes effect."""
        self._touched.frozen = compile_config.frozen(self._model)

    def take(self) -> dict[str, Any]:
        """The part of `Manifest.how_built` that tells how it is now."""
        is_new = compile_config.identity(self._model) is not self._identity
        now = {
            "frozen": self._touched.frozen or compile_config.frozen(self._model),
            "is_new": is_new,
            "compiled": compile_config.config(self._model) if is_new else None,
            "start": self._start,
        }
        return {_KEY: now}

    def is_of_this_script(self, how_built: Mapping[str, Any]) -> bool:
        """Did the run start with a model like this one?"""
        start = how_built[_KEY]["start"] if _KEY in how_built else self._start
        return start["frozen"] == self._start["frozen"] and compile_config.are_alike(
            start["compiled"], self._start["compiled"]
        )

    def changes(self, how_built: Mapping[str, Any]) -> list[changed_settings.Change]:
        """What the script sets otherwise than the one that made a checkpoint."""
        return changed_settings.compare(started_with(how_built), self._start)

    def take_up(self, how_built: Mapping[str, Any], where: str) -> None:
        """Does to the built model what callbacks have done until a checkpoint.

        Args:
            how_built: From the manifest. Its optimizers are built afterwards.
            where: The run, for errors.

        Raises:
            OtherRunError: If a callback has compiled it with what cannot be made again.
        """
        there = how_built.get(_KEY)
        if there is not None and self.is_of_this_script(how_built):
            compile_config.freeze(self._model, there["frozen"])
            if there["is_new"]:
                self._compile_like(there["compiled"], where)
        if self._is_fitted:
            return  # to this script
        built = models.optimizer_targets(self._model).get(_OPTIMIZER)
        if built is not None and built != _places(how_built).get(_OPTIMIZER, built):
            self._renew_optimizer()

    def _compile_like(self, config: compile_config.Config | None, where: str) -> None:
        if config is not None and compile_config.are_alike(
            compile_config.config(self._model), config
        ):
            return
        try:
            if config is None:
                raise ValueError("Keras cannot tell what it was")
            compile_config.compile_like(self._model, config)
        except Exception as error:
            raise OtherRunError(
                f"In the middle of the run in {where} a callback compiled the model anew, with "
                f"something that cannot be made again from the checkpoint ({error}). Compile the "
                "model with it before `fit`, or give resume=False to start a new run; nothing was "
                "changed."
            ) from error

    def _renew_optimizer(self) -> keras.optimizers.Optimizer:
        is_first = compile_config.identity(self._model) is self._identity
        old = compile_config.renew_optimizer(self._model)
        if is_first:  # no callback has done it
            self._identity = compile_config.identity(self._model)
        return old

    def fit_optimizer(self, how_built: Mapping[str, Any]) -> str | None:
        """Lets the optimizer train what the script trains now, after the checkpoint's values were
        restored. Its slots for variables that were trained before are kept.

        Returns:
            What has changed, in words; None if nothing has.
        """
        if _KEY not in how_built or self.is_of_this_script(how_built):
            return None
        weights, frozen = self._model.weights, set(how_built[_KEY]["frozen"]["weights"])
        before = {place for place in range(len(weights)) if place not in frozen}
        now = {place for place, weight in enumerate(weights) if weight.trainable}
        if now == before or set(_places(how_built).get(_OPTIMIZER, ())) != before:
            return None
        old = self._renew_optimizer()
        self._is_fitted = True
        models.build_optimizers(self._model, {_OPTIMIZER: sorted(now)})
        compile_config.copy_slots(old, self._model.optimizer)
        said = [
            f"{', '.join(weights[place].path for place in sorted(places))} {what}"
            for places, what in (
                (now - before, "is trained now, which the optimizer starts with empty slots"),
                (before - now, "is trained no more"),
            )
            if places
        ]
        return "; ".join(said)


def _places(how_built: Mapping[str, Any]) -> dict[str, list[int]]:
    """Of the model's weights that its optimizers train."""
    return {
        name: [target for target in targets if isinstance(target, int)]
        for name, targets in how_built["optimizers"].items()
    }
