"""A model's trainable variables and how it is compiled, which callbacks may change mid-run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.replicas import compile_config, touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.checkpoint import changed_settings
from keras_distplug.checkpoint.layer_settings import get_layer_settings
from keras_distplug.core.errors import OtherRunError

_KEY = "training"  # in `Manifest.how_built`
_OPTIMIZER = "optimizer"  # the one the model is compiled with


def get_settings(model: keras.Model) -> Mapping[str, Any]:
    """Returns the settings of a model's training made by the script, for `changed_settings`."""
    return {"compiled": compile_config.config(model), "layers": get_layer_settings(model)}


def start_settings(how_built: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the script that made a checkpoint."""
    start: Mapping[str, Any] = how_built[_KEY]["start"] if _KEY in how_built else {}
    return start


class Compilation:
    """Tracks them during one `fit`. Must be created before anything is changed.

    A restarted script makes its model as it did at first; changes that callbacks made later are
    then repeated. If the script itself has changed, the script's version applies.

    Args:
        model: The model in training.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._identity = compile_config.identity(model)
        self._start = {
            **get_settings(model),
            "frozen": compile_config.frozen(model),
            "fit": changed_settings.fit_settings(),
        }
        self._touched = touched.Touched.of(model)
        self._is_fitted = False  # True once the optimizer is adapted to the script's changes

    def note_trace(self) -> None:
        """Must be called when the training step is traced, which is when freezing takes effect."""
        self._touched.frozen = compile_config.frozen(self._model)

    def take(self) -> dict[str, Any]:
        """Returns the part of `Manifest.how_built` that describes the current compilation."""
        is_new = compile_config.identity(self._model) is not self._identity
        now = {
            "frozen": self._touched.frozen or compile_config.frozen(self._model),
            "is_new": is_new,
            "compiled": compile_config.config(self._model) if is_new else None,
            "start": self._start,
        }
        return {_KEY: now}

    def matches_script(self, how_built: Mapping[str, Any]) -> bool:
        """Returns True if the run started with a model like this one."""
        start = how_built[_KEY]["start"] if _KEY in how_built else self._start
        return start["frozen"] == self._start["frozen"] and compile_config.are_alike(
            start["compiled"], self._start["compiled"]
        )

    def changes(self, how_built: Mapping[str, Any]) -> list[changed_settings.Change]:
        """Returns the settings that differ from those of the script that made a checkpoint."""
        return changed_settings.compare(start_settings(how_built), self._start)

    def reapply(self, how_built: Mapping[str, Any], where: str) -> None:
        """Repeats on the built model the changes that callbacks had made before a checkpoint.

        Args:
            how_built: The manifest's entry. Its optimizers are built afterwards.
            where: The run's location, for errors.

        Raises:
            OtherRunError: If a callback compiled the model with objects that cannot be rebuilt.
        """
        there = how_built.get(_KEY)
        if there is not None and self.matches_script(how_built):
            compile_config.freeze(self._model, there["frozen"])
            if there["is_new"]:
                self._compile_like(there["compiled"], where)
        if self._is_fitted:
            return  # adapted to this script
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
                raise ValueError("Keras cannot serialize the arguments of its `compile` call")
            compile_config.compile_like(self._model, config)
        except Exception as error:
            raise OtherRunError(
                f"A callback recompiled the model during the run in {where}, with objects that "
                f"cannot be rebuilt from the checkpoint ({error}). Compile the model with them "
                "before `fit`, or pass resume=False to start a new run. Nothing was changed."
            ) from error

    def _renew_optimizer(self) -> keras.optimizers.Optimizer:
        is_first = compile_config.identity(self._model) is self._identity
        old = compile_config.renew_optimizer(self._model)
        if is_first:  # no callback has recompiled it
            self._identity = compile_config.identity(self._model)
        return old

    def fit_optimizer(self, how_built: Mapping[str, Any]) -> str | None:
        """Adapts the optimizer to the variables that the script trains now, after the checkpoint's
        values were restored. Its slots for variables that were trained before are kept.

        Returns:
            A description of the changes; None without changes.
        """
        if _KEY not in how_built or self.matches_script(how_built):
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
        lines = [
            f"{', '.join(weights[place].path for place in sorted(places))} {what}"
            for places, what in (
                (now - before, "now trained, with empty optimizer slots"),
                (before - now, "no longer trained"),
            )
            if places
        ]
        return "; ".join(lines)


def _places(how_built: Mapping[str, Any]) -> dict[str, list[int]]:
    """Returns the indices of the weights that every optimizer trains, by the optimizer's name."""
    return {
        name: [target for target in targets if isinstance(target, int)]
        for name, targets in how_built["optimizers"].items()
    }
