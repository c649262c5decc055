"""Checks that a checkpoint was made with the same data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from keras_distplug.checkpoint.same_run import first_difference
from keras_distplug.checkpoint.settings import Resuming
from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import OtherRunError
from keras_distplug.core.log import announce
from keras_distplug.data.contents import CONTENTS, ORDER
from keras_distplug.data.position import Source
from keras_distplug.data.progress import Progress
from keras_distplug.data.sources import BATCH_SIZE, SEEDS
from keras_distplug.storage.manifest import Manifest

OLD_SEEDS = (
    "the seeds of the data have changed since the checkpoint; the checkpoint's are used, so every "
    "epoch sees its samples in the order the run started with"
)
NEW_SEEDS = (
    "the seeds of the data have changed since the checkpoint, so samples come in another order: "
    "the interrupted epoch sees some of them twice and others not at all"
)
_BATCH_REMEDY = "allow_batch_change=True to continue with the next sample in batches of this size, "
OTHER_ORDER = (
    "the samples are in a different order than at the checkpoint, so the interrupted epoch sees "
    "some of them twice and others not at all. Set the seed of whatever shuffles them before `fit`"
)
_OF_KERAS, _ARRAYS = "ArrayDataAdapter", "arrays"  # the same data, with and without a seed
_IS_OTHER = "other"  # sent by a worker instead of an error


@dataclass(frozen=True)
class DataComparison:
    """The data of a `fit`, compared with that of a checkpoint.

    Args:
        is_other: True if the data differs.
        seeds: The seeds of the checkpoint's data, if they differ.
        has_other_seeds: True if the seeds differ.
        has_other_order: True if the same samples come in another order.
    """

    is_other: bool = False
    seeds: str | None = None
    has_other_seeds: bool = False
    has_other_order: bool = False


def compare(
    manifest: Manifest,
    source: Source,
    where: str,
    allowed: Resuming,
    agreement: Channel,
    *,
    is_chief: bool,
    ends: bool,
) -> DataComparison:
    """Compares the data with that of a checkpoint. All workers must call this together.

    Args:
        manifest: The checkpoint's manifest.
        source: The data.
        where: The run's location, for errors.
        allowed: Which changes of the script are allowed.
        agreement: The channel between the workers.
        is_chief: True if the checkpoint describes this process's data: other workers may have
            other parts of it.
        ends: True if the run ends there, and reads no more data.

    Raises:
        OtherRunError: If the data differs in a way that is not allowed.
    """
    there = _Fingerprint.of(manifest.data["fingerprint"])
    here = _Fingerprint.of(json.loads(json.dumps(source.fingerprint())))
    other_values = _other_values(there.contents, here.contents) if is_chief else None
    if other_values is not None and source.holds_state and not ends:
        announce(
            f"{other_values} since the checkpoint. This is expected if reading the data changes "
            "its values; to train on different data, pass resume=False"
        )
        other_values = None
    if ends:
        is_known = bool(there.contents and here.contents)
        there, here = (each.only_samples(is_known=is_known) for each in (there, here))
    is_within = "read" in (manifest.data.get("train") or {}) and not ends
    why_not = source.why_not_by_samples if is_within else None
    verdict = None
    try:
        if _is_other(
            there.described, here.described, where, why_not, allowed, other_values, ends=ends
        ):
            verdict = _IS_OTHER
    except OtherRunError as error:
        verdict = str(error)
    verdict = agreement.first_error("data", verdict)
    if verdict not in (None, _IS_OTHER):
        raise OtherRunError(verdict)
    if verdict is not None or ends:
        return DataComparison(is_other=verdict is not None)
    orders = (there.order, here.order)
    is_order_known = is_chief and not source.holds_state and None not in orders
    return DataComparison(
        seeds=there.seeds,
        has_other_seeds=there.seeds != here.seeds,
        has_other_order=is_order_known and there.order != here.order,
    )


def use_chiefs_seeds(source: Source, agreement: Channel) -> None:
    """Lets all workers use the chief's shuffling orders, of which every worker takes its part. All
    workers must call this together."""
    own = source.fingerprint().get(SEEDS)
    chiefs = json.loads(agreement.broadcast("seeds", json.dumps(own)))
    if chiefs is not None and chiefs != own:
        source.use_seeds(chiefs)


def has_same_size(manifest: Manifest, data: Progress | None, world_size: int) -> bool:
    """Returns True if a checkpoint was made with the same number of workers and global batch size.
    A script may scale its learning rate with these."""
    fingerprint = manifest.data.get("fingerprint", {})
    here = None if data is None else data.data.source.batch_size
    return manifest.world_size == world_size and fingerprint.get(BATCH_SIZE, here) == here


@dataclass(frozen=True)
class _Fingerprint:
    """A data fingerprint, split into its parts."""

    described: dict[str, Any]
    contents: Mapping[str, str]
    seeds: str | None
    order: str | None

    @classmethod
    def of(cls, whole: Mapping[str, Any]) -> Self:
        held = {name: each for name, each in whole.items() if name.startswith(CONTENTS)}
        others = {name: each for name, each in whole.items() if name not in (*held, SEEDS, ORDER)}
        return cls(others, held, whole.get(SEEDS), whole.get(ORDER))

    def only_samples(self, *, is_known: bool) -> Self:
        """Returns a copy without the parts that only matter while data is read.

        Args:
            is_known: True if the contents of the samples are known.
        """
        ignored = {BATCH_SIZE, "shuffle", "batches"}
        if is_known:
            ignored |= {name for name in self.described if name.startswith("step ")}
        described = {name: each for name, each in self.described.items() if name not in ignored}
        if described.get("kind") == _OF_KERAS:
            described["kind"] = _ARRAYS
        return replace(self, described=described)


def _seeds_set(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Describes a changed seed: whether there is one decides who shuffles arrays."""
    kinds = there.get("kind"), here.get("kind")
    if kinds == (_OF_KERAS, _ARRAYS):
        return "`keras.utils.set_random_seed` was called when the run started, and now is not"
    if kinds == (_ARRAYS, _OF_KERAS):
        return "`keras.utils.set_random_seed` was not called when the run started, and now is"
    return None


def _other_values(there: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Describes the data whose values differ; None for checkpoints of earlier versions."""
    other = [name for name in there if name in here and there[name] != here[name]]
    if not other:
        return None
    parts = [f"`{name.split()[-1]}`" for name in other if name != CONTENTS]
    return f"the values of {' and '.join(parts) or 'the samples'} have changed"


def _is_other(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    where: str,
    why_not_by_samples: str | None,
    allowed: Resuming,
    other_values: str | None,
    *,
    ends: bool,
) -> bool:
    """Compares the fingerprints of the data.

    Args:
        there: The checkpoint's fingerprint.
        here: The fingerprint of this `fit`.
        where: The run's location, for errors.
        why_not_by_samples: The reason why the data cannot be continued at a sample, if it cannot
            and the checkpoint was made mid-epoch.
        allowed: Which changes of the script are allowed.
        other_values: Description of the data with different values, if any.
        ends: True if the run ends there.

    Raises:
        OtherRunError: If the data differs in a way that is not allowed.
    """
    sizes = {each.get(BATCH_SIZE) for each in (there, here)}
    is_batch_other = len(sizes) == 2 and None not in sizes
    if allowed.allow_batch_change and is_batch_other:
        if why_not_by_samples is None:
            there = {**there, BATCH_SIZE: here[BATCH_SIZE]}
        elif not allowed.allow_data_change:
            raise OtherRunError(
                f"{where} was trained on global batches of {there[BATCH_SIZE]} samples, and "
                f"cannot continue mid-epoch with {here[BATCH_SIZE]}: {why_not_by_samples}. Use "
                "the same global batch size, or pass allow_data_change=True to restart the epoch. "
                "Nothing was changed."
            )
    difference = _seeds_set(there, here) or first_difference(there, here) or other_values
    if difference is not None and not allowed.allow_data_change:
        remedy = (
            "allow_data_change=True to get the finished run's History and weights"
            if ends
            else "allow_data_change=True to continue with the new data from the start of the epoch"
        )
        may_change_batch = why_not_by_samples is None and not allowed.allow_batch_change
        has_batch_remedy = is_batch_other and may_change_batch
        raise OtherRunError(
            f"{where} was trained on other data, or on the same data read in another way. First "
            f"difference: {difference}. Undo that change, or pass "
            f"{_BATCH_REMEDY if has_batch_remedy else ''}{remedy}, or resume=False to start a new "
            "run. Nothing was changed."
        )
    return difference is not None
