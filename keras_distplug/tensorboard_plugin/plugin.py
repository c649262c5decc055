"""The plugin that serves the tab to TensorBoard."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from tensorboard.util import tb_logging
from werkzeug import wrappers

from keras_distplug import page
from keras_distplug.core.errors import CheckpointError, ConfigurationError
from keras_distplug.runlog.log_files import find
from keras_distplug.storage.files import Files
from keras_distplug.tensorboard_plugin.watched import Answer, Watched, answer

NAME = "distplug"
_FIND_SECS = 30.0  # between searches for runs in a store, which take a request per folder
_logger = tb_logging.get_logger()


class Loader(base_plugin.TBLoader):  # type: ignore[misc]
    """Creates the plugin. TensorBoard finds it through the entry point `tensorboard_plugins`."""

    def load(self, context: base_plugin.TBContext) -> Plugin:
        return Plugin(context)

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Changes no flags: sampling does not apply, because no data come from event files."""


class Plugin(base_plugin.TBPlugin):  # type: ignore[misc]
    plugin_name = NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._folders = list_folders(context.flags)
        self._watched: dict[str, Watched] = {}
        self._found: dict[str, tuple[float, list[tuple[Files, str]]]] = {}  # in stores
        self._told: set[tuple[str, str]] = set()  # warnings that were logged

    def get_plugin_apps(self) -> Mapping[str, Callable[..., Any]]:
        return {"/index.js": self._module, "/runs": self._runs, "/run": self._run}

    def is_active(self) -> bool:
        return any(True for _ in self._logs({}))

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="Distplug")

    # How

    def _logs(self, failed: dict[str, str]) -> Iterator[Watched]:
        """Yields all runs, and adds the errors of folders that cannot be listed to `failed`."""
        for name, folder in self._folders.items():
            try:
                for files, path in self._find(name, folder, failed):
                    label = _label(name, path)
                    if label not in self._watched:
                        self._watched[label] = Watched(label, files, path)
                    yield self._watched[label]
            except ConfigurationError as error:
                failed[name] = str(error)

    def _find(self, name: str, folder: str, failed: dict[str, str]) -> Iterator[tuple[Files, str]]:
        looked_s, known = self._found.get(folder, (0.0, []))
        if known and time.monotonic() - looked_s < _FIND_SECS:
            yield from known
            return
        failures: list[str] = []

        def fail(path: str, error: CheckpointError) -> None:
            failures.append(path)
            failed[_label(name, path)] = str(error)

        found = []
        for each in find(folder, fail):
            found.append(each)
            yield each
        if found and not failures and not found[0][0].traits.is_near:
            self._found[folder] = time.monotonic(), found

    @wrappers.Request.application  # type: ignore[arg-type]
    def _module(self, request: wrappers.Request) -> Any:
        return http_util.Respond(request, page.module(), "text/javascript")

    @wrappers.Request.application  # type: ignore[arg-type]
    def _runs(self, request: wrappers.Request) -> Any:
        """Sends the headlines of all runs."""
        now = time.time()
        failed: dict[str, str] = {}
        shown: list[Mapping[str, Any]] = []
        for watched in self._logs(failed):
            try:
                shown.append(watched.headline(now))
            except Exception as error:  # noqa: BLE001
                # A run that cannot be shown, for whatever reason, must not hide the others.
                failed[watched.label] = self._failure(watched, error)
        shown += [{"name": name, "error": error} for name, error in failed.items()]
        shown.sort(key=lambda run: str(run["name"]))
        return _respond(request, answer(shown), now)

    @wrappers.Request.application  # type: ignore[arg-type]
    def _run(self, request: wrappers.Request) -> Any:
        """Sends the details of the run `name`."""
        now = time.time()
        name = request.args.get("name", "")
        watched = self._watched.get(name)
        if watched is None:
            watched = {each.label: each for each in self._logs({})}.get(name)
        if watched is None:
            return http_util.Respond(request, f"There is no run {name!r}.", "text/plain", code=404)
        try:
            found = watched.details(now)
        except Exception as error:  # noqa: BLE001
            found = answer({"name": name, "error": self._failure(watched, error)})
        return _respond(request, found, now)

    def _failure(self, watched: Watched, error: Exception) -> str:
        what = f"{type(error).__name__}: {error}"
        if (watched.label, what) not in self._told:
            _logger.warning("The run %r cannot be shown.", watched.label, exc_info=error)
        self._told.add((watched.label, what))
        return what


def list_folders(flags: argparse.Namespace) -> dict[str, str]:
    """Returns the folders and URLs of `--logdir` and `--logdir_spec` by their names."""
    if getattr(flags, "logdir", ""):
        return {"": flags.logdir}
    found = {}
    for number, spec in enumerate((getattr(flags, "logdir_spec", "") or "").split(",")):
        # As in TensorBoard: `name:path`, except for paths and URLs that contain a colon.
        name, colon, path = spec.partition(":")
        is_path = spec.startswith("/") or os.path.splitdrive(spec)[0] or path.startswith("//")
        is_named = colon and not is_path
        if spec:
            found[name if is_named else str(number)] = path if is_named else spec
    return found


def _label(name: str, path: str) -> str:
    return "/".join(part for part in (name, path) if part)


def _respond(request: wrappers.Request, found: Answer, now: float) -> Any:
    """Sends the page's data, unless the browser has it already; and the server's time."""
    headers = [("ETag", found.version), ("X-Now", str(now))]
    if request.headers.get("If-None-Match") == found.version:
        return _NotModified(status=304, headers=[*headers, *_NOT_MODIFIED_HEADERS])
    return http_util.Respond(request, found.text, "application/json", headers=headers)


_NOT_MODIFIED_HEADERS = (
    ("Content-Type", "application/json"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache, must-revalidate"),
)


class _NotModified(wrappers.Response):
    """Keeps the `Content-Type`, which TensorBoard 3 will require of every response; Werkzeug
    removes it from those without a body."""

    def get_wsgi_headers(self, environ: Any) -> Any:
        headers = super().get_wsgi_headers(environ)
        headers["Content-Type"] = self.headers["Content-Type"]
        return headers
