"""What the folders of a run's checkpoints hold, remembered by the process that writes the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, is_object_store, list_recursively
from keras_distplug.storage.layout import Place
from keras_distplug.storage.manifest import Shard

_NOTHING: frozenset[str] = frozenset()


class Inventory:
    """Remembers the folders of checkpoints, so that a save does not list all of them.

    Only committed and damaged checkpoints are remembered: these never change, but they may go, and
    another process may write a DAMAGED.json. So before something is deleted, `forget_all` has all
    looked at again where that is cheap.

    Args:
        files: The folder that holds the run's folder.
        run: The name of the run's folder.
    """

    def __init__(self, files: Files, run: str) -> None:
        self._files = files
        self._run = run
        self._places: list[Place] = []
        self._is_current = False
        self._inside: dict[str, frozenset[str]] = {}
        self.verified: dict[str, tuple[Shard, ...]] = {}  # checkpoints that were, with their files

    def refresh(self) -> list[Place]:
        """Lists the run's folder: one request. What has gone is forgotten."""
        self._is_current = False
        self._places = layout.places(self._files, self._run)
        for name in self._inside.keys() - {place.name for place in self._places}:
            self.forget(name)
        return self._places

    def distrust(self) -> None:
        """Makes `inside` look at all intact checkpoints again, which after a failed save may hold
        leftovers of other attempts."""
        self._inside = {k: names for k, names in self._inside.items() if not is_whole(names)}

    def current(self) -> list[Place]:
        """Returns the listing of the save that was just committed, or else lists again."""
        places = self._places if self._is_current else self.refresh()
        self._is_current = False
        return places

    def inside(self, names: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Returns what the folders hold. Those that are not remembered are looked at, in an object
        store by one recursive listing of the run if there are several."""
        names = list(names)
        unknown = [name for name in names if name not in self._inside]
        below = list_recursively(self._files, self._run) if len(unknown) > 1 else None
        found = {
            name: self._note(name, self._listed(name) if below is None else _inside(below, name))
            for name in unknown
        }
        return {name: found.get(name, self._inside.get(name, _NOTHING)) for name in names}

    def look_again(self, name: str) -> frozenset[str]:
        """Returns what a folder holds now: one request, which in an object store also gives the
        sizes of its files."""
        below = list_recursively(self._files, f"{self._run}/{name}")
        return self._note(name, self._listed(name) if below is None else map(_first, below))

    def forget_all(self) -> None:
        """Forgets all folders if looking at them again takes at most one request.

        A server that is asked folder by folder keeps its entries, so that a save does not take
        longer the more checkpoints there are.
        """
        if self._files.traits.is_near or is_object_store(self._files):
            self._inside.clear()

    def remembers(self, name: str) -> bool:
        """Whether the folder is that of a committed or damaged checkpoint."""
        return name in self._inside

    def note_committed(self, name: str, inside: Iterable[str] | None) -> None:
        """Notes that a checkpoint was committed now.

        Args:
            name: Its name.
            inside: What its folder holds, if that is known.
        """
        self.forget(name)
        if inside is not None:
            self._note(name, inside)
        place = layout.place_of(name)
        assert place is not None, name
        self._places = sorted({*self._places, place})
        self._is_current = True

    def note_damaged(self, name: str) -> None:
        """Notes a damaged checkpoint, even if no DAMAGED.json could be written."""
        self._inside[name] = self._inside.get(name, _NOTHING) | {layout.DAMAGED}
        self.verified.pop(name, None)

    def forget(self, name: str) -> None:
        """Forgets a checkpoint."""
        self._inside.pop(name, None)
        self.verified.pop(name, None)

    def _listed(self, name: str) -> Iterable[str]:
        return layout.inside(self._files, f"{self._run}/{name}")

    def _note(self, name: str, inside: Iterable[str]) -> frozenset[str]:
        found = frozenset(inside)
        if found & {layout.MANIFEST, layout.DAMAGED}:
            self._inside[name] = found
        else:
            self.forget(name)
        return found


def is_whole(inside: frozenset[str]) -> bool:
    """Whether a folder holds a committed checkpoint that is not known to be damaged."""
    return layout.MANIFEST in inside and layout.DAMAGED not in inside


def _inside(below: Iterable[str], name: str) -> Iterable[str]:
    start = f"{name}/"
    return (_first(path.removeprefix(start)) for path in below if path.startswith(start))


def _first(path: str) -> str:
    return path.partition("/")[0]
