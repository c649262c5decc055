"""A cache of the contents of a run's checkpoint folders, in the process that writes the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, is_object_store, list_recursively
from keras_distplug.storage.layout import Place
from keras_distplug.storage.manifest import Shard

_NOTHING: frozenset[str] = frozenset()


class Inventory:
    """Caches the contents of checkpoint folders, so that a save does not list all of them.

    Only committed and damaged checkpoints are cached: these never change, but they may be deleted,
    or another process may add a DAMAGED.json. So `forget_all` is called before something is
    deleted, to list all of them again if that is cheap.

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
        self.verified: dict[str, tuple[Shard, ...]] = {}  # by name: their files

    def refresh(self) -> list[Place]:
        """Lists the run's folder, in one request, and forgets checkpoints that were deleted."""
        self._is_current = False
        self._places = layout.places(self._files, self._run)
        for name in self._inside.keys() - {place.name for place in self._places}:
            self.forget(name)
        return self._places

    def distrust(self) -> None:
        """Makes `inside` list all intact checkpoints again: after a failed save they may contain
        leftovers of other attempts."""
        self._inside = {k: names for k, names in self._inside.items() if not is_whole(names)}

    def current(self) -> list[Place]:
        """Returns the listing made for the save just committed, or lists the folder again."""
        places = self._places if self._is_current else self.refresh()
        self._is_current = False
        return places

    def inside(self, names: Iterable[str]) -> Mapping[str, frozenset[str]]:
        """Returns the contents of folders. Those not in the cache are listed; in an object store,
        several of them with one recursive listing of the run."""
        names = list(names)
        unknown = [name for name in names if name not in self._inside]
        below = list_recursively(self._files, self._run) if len(unknown) > 1 else None
        found = {
            name: self._note(name, self._listed(name) if below is None else _inside(below, name))
            for name in unknown
        }
        return {name: found.get(name, self._inside.get(name, _NOTHING)) for name in names}

    def refresh_folder(self, name: str) -> frozenset[str]:
        """Lists a folder in one request, which in an object store also returns the sizes of its
        files."""
        below = list_recursively(self._files, f"{self._run}/{name}")
        return self._note(name, self._listed(name) if below is None else map(_first, below))

    def forget_all(self) -> None:
        """Forgets all folders, if at most one remote request lists all of them again.

        On a server that must be asked for every folder, the cache is kept, so that the time of a
        save does not grow with the number of checkpoints.
        """
        if self._files.traits.is_near or is_object_store(self._files):
            self._inside.clear()

    def is_cached(self, name: str) -> bool:
        """True if the folder is cached as a committed or damaged checkpoint."""
        return name in self._inside

    def record_committed(self, name: str, inside: Iterable[str] | None) -> None:
        """Records that a checkpoint was just committed.

        Args:
            name: Its name.
            inside: The contents of its folder, or `None` if they are not known.
        """
        self.forget(name)
        if inside is not None:
            self._note(name, inside)
        place = layout.parse_place(name)
        assert place is not None, name
        self._places = sorted({*self._places, place})
        self._is_current = True

    def record_damaged(self, name: str) -> None:
        """Records a damaged checkpoint, even if DAMAGED.json could not be written."""
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
    """True if a folder holds a committed checkpoint that is not known to be damaged."""
    return layout.MANIFEST in inside and layout.DAMAGED not in inside


def _inside(below: Iterable[str], name: str) -> Iterable[str]:
    start = f"{name}/"
    return (_first(path.removeprefix(start)) for path in below if path.startswith(start))


def _first(path: str) -> str:
    return path.partition("/")[0]
