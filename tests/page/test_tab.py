"""The tab in use: choices are kept, and the page is up to date."""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import logged
from support.browser import browsed
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers
from werkzeug.serving import make_server

from keras_distplug.core.event_lines import to_line
from keras_distplug.tensorboard_plugin import plugin as plugin_module
from keras_distplug.tensorboard_plugin.plugin import Loader

DRIVER = Path(__file__).with_name("tab.js")
PAGE = '<!doctype html><body><iframe src="frame" width="1200" height="900"></iframe>'
FRAME = '<!doctype html><body><script type="module" src="start.js"></script>'
START = 'import * as tab from "./index.js"; tab.render();'


class Site:
    """TensorBoard's responses, with ways to change the runs."""

    def __init__(self, folder: Path) -> None:
        fits, supervised, end = logged.fits(4, 100)
        self.now = end + 1000  # a dead run stays dead later
        self.log = folder / "a" / "log" / "0.jsonl"
        *before, self.news = fits[0].entries[:90]
        others = [b"".join(map(to_line, fit.entries)) for fit in fits[2::2]]
        self._put(self.log, b"".join(map(to_line, before)))
        for number, lines in enumerate(others):
            self._put(self.log.with_name(f"{number + 1}.jsonl"), lines)
        for number, fit in enumerate(fits):
            self._put(folder / f"b/log/{number}.jsonl", b"".join(map(to_line, fit.entries)))
        told = b"".join(map(to_line, supervised))
        self._put(folder / "b/log/supervisor-j.jsonl", told)
        flags = SimpleNamespace(logdir=str(folder), logdir_spec="")
        self._apps = Loader().load(base_plugin.TBContext(flags=flags)).get_plugin_apps()
        self._texts = {"/": PAGE, "/frame": FRAME}
        self._scripts = {"/start.js": START, "/driver.js": DRIVER.read_text()}
        self._is_broken = False
        self._asked: list[str] = []

    @staticmethod
    def _put(path: Path, lines: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lines)

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        request = wrappers.Request(environ)
        return self._answer(request)(environ, start)

    def _answer(self, request: wrappers.Request) -> Any:
        path = request.path
        if path == "/runs" and self._is_broken:
            return http_util.Respond(request, "it is down", "text/plain", code=500)
        if path in self._apps:
            self._asked.append(request.full_path.rstrip("?"))
            return self._apps[path]
        if path in self._texts:
            driver = '<script src="driver.js"></script>' * (path == "/")
            # With the content security policy of TensorBoard's pages.
            return http_util.Respond(request, self._texts[path] + driver, "text/html")
        if path in self._scripts:
            return http_util.Respond(request, self._scripts[path], "text/javascript")
        if path == "/news":
            with open(self.log, "ab") as file:
                file.write(to_line(self.news))
        elif path == "/later":
            self.now += 3600
        elif path in ("/break", "/mend"):
            self._is_broken = path == "/break"
        return http_util.Respond(request, json.dumps(self._asked), "application/json")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Site]]:
    served = Site(tmp_path / "runs")
    monkeypatch.setattr(plugin_module, "time", SimpleNamespace(time=lambda: served.now))
    server = make_server("localhost", 0, served, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}/", served
    server.shutdown()
    thread.join()
    server.server_close()


def test_tab_in_use(site: tuple[str, Site], tmp_path: Path) -> None:
    dom, console = browsed(site[0], tmp_path, secs=120)
    found = re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    assert found is not None, f"it waits for ever; {console}"
    said = json.loads(html.unescape(found[1]))
    assert "error" not in said, said
    # The run with the newest message is shown, and only that one is requested.
    assert said["first"]["rows"] == 2
    assert said["first"]["pressed"] == ["run b", "zoom all", "heat compute"]
    assert said["asked"] == ["/index.js", "/runs", "/run?name=b"]
    assert said["chosen"]["pressed"] == ["run a", "zoom all", "heat input"]
    assert said["chosen"]["chart"].startswith("input of every replica")
    # An update does not move the keyboard focus.
    assert said["news"]["pressed"] == ["run a", "zoom all", "heat input"]
    assert said["news"]["focused"] == "heat input"
    assert int(said["news"]["step"]) > int(said["chosen"]["step"])
    assert said["shift"] < 0.01
    # Ages grow without updates, and without a redraw.
    assert said["later"]["mark"] == "the same"
    assert all("1 h " in age for age in said["later"]["ages"])
    assert "1 h " in said["later"]["card"]
    assert said["problem"] == "This is not up to date: 500: it is down"
    assert said["light"] == ["light", "rgb(255, 255, 255)"]
    assert said["dark"] == ["dark", "rgb(27, 27, 31)"]
    complaints = [line for line in console.splitlines() if "500 (" not in line]
    assert complaints == []
