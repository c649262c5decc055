"""What TensorBoard asks for."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from tensorboard.util import tb_logging
from werkzeug import wrappers

from keras_distplug import page
from keras_distplug.core.errors import DistplugError
from keras_distplug.core.summary import summary
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.run_log import Reader, find
from keras_distplug.tensorboard_plugin.folders import folders_of

NAME = "distplug"
_logger = tb_logging.get_logger()
_LOOK_SECS = 30.0  # between looks at checkpoints


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """Makes the plugin; TensorBoard finds it by the entry point `tensorboard_plugins`."""

    def load(self, context: base_plugin.TBContext) -> Plugin:
        return Plugin(context)

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Nothing of ours is sampled, for nothing of it is in TensorBoard's files."""


class Plugin(base_plugin.TBPlugin):  # type: ignore[misc]
    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._folders = folders_of(context.flags)
        self._readers: dict[tuple[str, str], Reader] = {}
        self._states: dict[tuple[str, str], tuple[float, Mapping[int, str] | None]] = {}
        self._told: set[str] = set()  # what was said of runs that cannot be shown

    def get_plugin_apps(self) -> Mapping[str, Callable[..., Any]]:
        return {"/index.js": self._module, "/runs": self._runs}

    def is_active(self) -> bool:
        return any(True for _ in self._logs())

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Distplug")

    # How

    def _logs(self) -> Any:
        for name, folder in self._folders.items():
            try:
                for files, path in find(folder):
                    yield name, files, path
            except (DistplugError, OSError):
                continue  # it may come to be there

    def _states_of(self, key: tuple[str, str], files: Files) -> Mapping[int, str] | None:
        """Of the checkpoints of a run; not looked at each time."""
        looked_s, states = self._states.get(key, (-math.inf, None))
        if time.monotonic() - looked_s > _LOOK_SECS:
            folder, _, name = key[1].rpartition("/")
            try:
                states = survey.states(open_files(files.where(folder)), name)
            except (DistplugError, OSError):
                states = None  # a log beside no run, or nothing that can be read
            self._states[key] = time.monotonic(), states
        return states

    @wrappers.Request.application  # type: ignore[arg-type]
    def _module(self, request: wrappers.Request) -> Any:
        return http_util.Respond(request, page.module(), "text/javascript")

    @wrappers.Request.application  # type: ignore[arg-type]
    def _runs(self, request: wrappers.Request) -> Any:
        shown, now = [], time.time()
        for name, files, path in self._logs():
            label = "/".join(part for part in (name, path) if part)
            try:
                shown.append(self._run(label, files, path, now))
            except Exception as error:
                # One run that cannot be shown, for whatever reason, hides no other one.
                shown.append({"name": label, "error": f"{type(error).__name__}: {error}"})
                if label not in self._told:
                    _logger.warning("The run %r cannot be shown.", label, exc_info=True)
                self._told.add(label)
        text = json.dumps(shown, allow_nan=False)
        return http_util.Respond(request, text, "application/json")

    def _run(self, label: str, files: Files, path: str, now: float) -> dict[str, Any]:
        key = files.where(), path
        reader = self._readers.setdefault(key, Reader(files, path))
        run = summary(label, *reader.read(), now, self._states_of(key, files))
        del run["now"]  # so that nothing is drawn anew while there is no news
        return run
