"""The batches of a source do not depend on its reader, on the number of reads, or on the position
from which it is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import UserList
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cluster import environment

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from data import inputs  # noqa: E402
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter  # noqa: E402

from keras_distplug.backend.tensorflow.input import pipeline  # noqa: E402
from keras_distplug.backend.tensorflow.input.earlier_passes import walk_upstream  # noqa: E402
from keras_distplug.core.errors import DataError  # noqa: E402
from keras_distplug.data import python_sources, sources  # noqa: E402
from keras_distplug.data.position import Positioned  # noqa: E402

ENDLESS = 25  # number of batches that are inspected if the data is endless
STRATEGIES = {
    "one device": tf.distribute.get_strategy,
    "two replicas": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
}


def positioned(name: str, strategy: tf.distribute.Strategy) -> Positioned:
    made = Positioned(inputs.SOURCES[name]())
    made.use(strategy)
    return made


def a_pass(data: Positioned, strategy: tf.distribute.Strategy, most: int = ENDLESS) -> list[Any]:
    """Returns global batches as bytes, combined from those of the replicas."""
    found: list[Any] = []
    batches = iter(data)
    while len(found) < most:
        try:
            batch = next(batches)
        except StopIteration:
            break
        parts = [
            [part.numpy() for part in strategy.experimental_local_results(value)]
            for value in tf.nest.flatten(batch)
        ]
        found.append([np.concatenate(each).tobytes() for each in parts])
    if found:
        data.note_read()
    return found


@pytest.mark.parametrize("name", inputs.SOURCES)
def test_continues_as_if_uninterrupted(name: str) -> None:
    """From any batch of any pass on, this pass and later ones are those of a run that was never
    interrupted, regardless of earlier reads."""
    strategy = tf.distribute.get_strategy()
    whole = positioned(name, strategy)
    expected = [a_pass(whole, strategy) for _ in range(4)]
    last = len(expected[0]) - 1
    assert last > 2
    for passed, start in [(0, 0), (0, 1), (0, last), (1, 0), (1, 3), (2, last), (2, last + 1)]:
        if name == "generator object" and passed > 0:
            continue
        data = positioned(name, strategy)
        data.begin_at(passed, start)
        most = ENDLESS - start if len(expected[0]) == ENDLESS else ENDLESS
        found = a_pass(data, strategy, most) if most else []
        assert found == expected[passed][start:], (passed, start)
        if name not in ("generator object",) and most:
            assert a_pass(data, strategy) == expected[passed + 1], (passed, start)
            assert data.passes == passed + 2


@pytest.mark.parametrize("name", inputs.CHANGING)
def test_variables_of_a_pipeline(name: str) -> None:
    """Variables changed by functions of a pipeline continue from pass to pass as in plain
    TensorFlow, and are restored with the position in the data; every variable counts."""
    strategy = tf.distribute.get_strategy()

    def made() -> Positioned:
        return Positioned(sources.TfData(inputs.CHANGING[name](), seed=5))

    whole = made()
    expected, started_with = [], []
    for _ in range(3):
        started_with.append(whole.variables(in_pass=False))
        expected.append(a_pass(whole, strategy))
        assert whole.variables(in_pass=True) == started_with[-1] != whole.variables(in_pass=False)
    plain = inputs.CHANGING[name]()
    for each in expected:
        batches = [tf.nest.flatten(batch) for batch in plain.as_numpy_iterator()]
        assert [[part.tobytes() for part in batch] for batch in batches] == each
    for passed, start in [(0, 0), (0, 2), (1, 0), (1, 3), (2, len(expected[2]) - 1)]:
        data = made()
        data.begin_at(passed, start, variables=json.loads(json.dumps(started_with[passed])))
        assert a_pass(data, strategy) == expected[passed][start:], (passed, start)
        if passed < 2:
            assert a_pass(data, strategy) == expected[passed + 1], (passed, start)
    for forgotten in range(len(started_with[1]) - 1):  # the last one is the number of the pass
        data, values = made(), list(started_with[1])
        values[forgotten] = made().variables(in_pass=False)[forgotten]
        data.begin_at(1, 3, variables=values)
        assert a_pass(data, strategy) != expected[1][3:], forgotten


@pytest.mark.parametrize("name", inputs.SHUFFLED)
def test_passes_have_different_orders(name: str) -> None:
    """Shuffled passes hold the same samples, every pass in another order."""
    strategy = tf.distribute.get_strategy()
    data = positioned(name, strategy)
    orders = [[ids for ids, *_ in a_pass(data, strategy)] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    samples = [sorted(np.frombuffer(b"".join(order), "int64").tolist()) for order in orders]
    assert samples[0] == samples[1] == samples[2] == list(range(inputs.SAMPLES))


@pytest.mark.parametrize("name", inputs.BY_PASS + inputs.BY_READING)
def test_passes_after_passes_that_were_not_read(name: str) -> None:
    """The third pass after two that were read, and after two that were only started, is the same if
    a pass is drawn by its number, and otherwise that of plain tf.data."""
    strategy = tf.distribute.get_strategy()
    read, started = positioned(name, strategy), positioned(name, strategy)
    plain_read, plain_started = (inputs.SOURCES[name]().whole for _ in range(2))
    for _ in range(2):
        a_pass(read, strategy)
        iter(started)
        list(plain_read.take(ENDLESS))
        iter(plain_started)
    ours = [a_pass(data, strategy) for data in (read, started)]
    plain = [inputs.ids(data, ENDLESS) for data in (plain_read, plain_started)]
    assert plain[0] != plain[1]
    if name in inputs.BY_PASS:
        assert ours[0] == ours[1]
    else:
        numbers = [[np.frombuffer(batch[0], "int64").tolist() for batch in each] for each in ours]
        assert numbers == plain


@pytest.mark.parametrize("name", ["arrays", "shuffle", "PyDataset", "generator function"])
def test_replicas_see_the_batches_of_one_device(name: str) -> None:
    """Two replicas have the global batches of one device, even if started mid-pass."""
    one, two = STRATEGIES["one device"](), STRATEGIES["two replicas"]()
    for passed, start in [(0, 0), (1, 2)]:
        found = []
        for strategy in (one, two):
            data = positioned(name, strategy)
            data.begin_at(passed, start)
            found.append([a_pass(data, strategy), a_pass(data, strategy)])
        assert found[0] == found[1]


@pytest.mark.parametrize("name", inputs.SEEDED)
def test_orders_are_those_of_tf_data(name: str) -> None:
    """A pipeline with seeds yields the same as without us."""
    strategy = tf.distribute.get_strategy()
    data = positioned(name, strategy)
    plain = inputs.SOURCES[name]().whole
    for _ in range(3):
        ids = [np.frombuffer(batch[0], "int64").tolist() for batch in a_pass(data, strategy)]
        assert ids == inputs.ids(plain, ENDLESS)


def test_wrong_position_is_detected() -> None:
    """Control: these tests fail if a position is off by one batch, or one pass."""
    strategy = tf.distribute.get_strategy()
    for name in inputs.SHUFFLED:
        whole = positioned(name, strategy)
        expected = [a_pass(whole, strategy) for _ in range(3)]
        for passed, start in [(1, 3), (2, 2), (0, 2)]:
            data = positioned(name, strategy)
            data.begin_at(passed, start)
            assert a_pass(data, strategy) != expected[1][2:], name


def test_dataset_read_before_fit() -> None:
    """A dataset that was trained on in this process continues with later orders, as in tf.data."""
    strategy = tf.distribute.get_strategy()
    dataset = inputs.SOURCES["shuffle"]().whole
    other = Positioned(inputs.SOURCES["shuffle"]())
    expected = [a_pass(other, strategy) for _ in range(4)]
    first, second = (Positioned(sources.TfData(dataset)) for _ in range(2))
    assert [a_pass(first, strategy) for _ in range(2)] == expected[:2]
    assert [a_pass(second, strategy) for _ in range(2)] == expected[2:]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int32", "bool", "complex64"])
def test_large_tensors_are_held_once(dtype: str) -> None:
    """The tensors of a pipeline are shared with it, not copied."""
    numbers, others = (tf.cast(tf.range(first, first + 2000), dtype) for first in (0, 1))
    dataset = tf.data.Dataset.from_tensor_slices((numbers, others)).batch(8)
    parts = pipeline.read(dataset)
    given = next(d for d in walk_upstream(dataset) if hasattr(d, "_tensors"))._tensors
    assert len(given) == 2
    assert {id(each) for each in given} == {id(each) for each in parts._held.values()}
    assert len(parts._graph.SerializeToString()) < 4000
    remade = parts.make_rebuilder([], frozenset())([], 2, 0)
    for ours, theirs in zip(remade, dataset.skip(2), strict=True):
        assert all(map(lambda a, b: bool(tf.reduce_all(a == b)), ours, theirs))


def test_dataset_that_cannot_be_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that cannot be inspected continues by its own seeds, and warns if it was read
    before."""
    strategy = tf.distribute.get_strategy()
    whole = positioned("shuffle of tensors", strategy)
    expected = [a_pass(whole, strategy) for _ in range(2)]
    monkeypatch.setattr("keras_distplug.backend.tensorflow.input.pipeline._MOST_BYTES", 0)
    source = inputs.SOURCES["shuffle of tensors"]()
    assert "holds" in source.warnings()[0]
    data = Positioned(source)
    data.begin_at(1, 2)
    assert a_pass(data, strategy) == expected[1][2:]
    with pytest.warns(UserWarning, match="already iterated over in this process"):
        a_pass(Positioned(sources.TfData(source.whole)), strategy)


def test_beyond_the_end() -> None:
    """A position after the last batch is refused."""
    data = positioned("arrays", tf.distribute.get_strategy())
    with pytest.raises(DataError, match="only 8 batches"):
        data.begin_at(1, 9)


def test_fingerprints_of_two_processes() -> None:
    """The same script has the same fingerprint under any strategy and in any process."""
    code = (
        "import json; from data import inputs;"
        "print('FOUND' + json.dumps({n: m().fingerprint() for n, m in inputs.SOURCES.items()}))"
    )
    found = []
    for _ in range(2):
        env = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        [line] = [each for each in done.stdout.splitlines() if each.startswith("FOUND")]
        found.append(json.loads(line.removeprefix("FOUND")))
    assert found[0] == found[1]
    here = {name: make().fingerprint() for name, make in inputs.SOURCES.items()}
    assert json.loads(json.dumps(here)) == found[0]
    for value in (value for each in here.values() for value in each.values()):
        assert value is None or isinstance(value, str | int | bool)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (lambda d: d.shuffle(10, seed=1), lambda d: d.shuffle(10, seed=2), "seeds"),
        (lambda d: d.shuffle(10, seed=1), lambda d: d.shuffle(11, seed=1), "step 1"),
        (lambda d: d, lambda d: d.take(20), "step 1"),
        (lambda d: d.map(lambda i: (i, i)), lambda d: d.map(lambda i: (i, 0)), "elements"),
    ],
)
def test_fingerprints_distinguish_pipelines(
    one: Callable[[Any], Any], other: Callable[[Any], Any], name: str
) -> None:
    """A change of the samples or their order changes a named entry of the fingerprint."""
    first, second = (
        sources.TfData(change(tf.data.Dataset.range(30)).batch(4)).fingerprint()
        for change in (one, other)
    )
    assert name in {key for key in {**first, **second} if first.get(key) != second.get(key)}


def test_fingerprints_without_irrelevant_settings() -> None:
    """Prefetching, threads and options do not affect a fingerprint."""
    made = [
        tf.data.Dataset.range(30).map(lambda i: i + 1).batch(4),
        tf.data.Dataset.range(30).map(lambda i: i + 1, num_parallel_calls=3).batch(4).prefetch(2),
        tf.data.Dataset.range(30).map(lambda i: i + 1).batch(4).with_options(tf.data.Options()),
    ]
    prints = [sources.TfData(each).fingerprint() for each in made]
    assert prints[0] == prints[1] == prints[2]


class Counted(keras.utils.PyDataset):
    """Records which batches were requested, in a list that does not count as state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asked: UserList[int] = UserList()
        self.epochs: list[str] = []

    @property
    def num_batches(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(index)
        return np.full([4, 1], index), np.full([4, 1], index)


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_batches_are_not_requested(workers: int) -> None:
    """Batches before the position from which it continues are not requested."""
    given = Counted(workers=workers)
    data = Positioned(python_sources.PyData(given, shuffle=False, seed=0))
    given.asked.clear()
    data.begin_at(1, 990)
    found = [int(batch[0][0, 0]) for batch in data]
    assert found == sorted(given.asked) == list(range(990, 1000))


def test_workers_end_with_their_iterator() -> None:
    """Python workers of an iterator that is not read completely stop when it is deleted."""
    data = Positioned(python_sources.PyData(Counted(workers=2), shuffle=True, seed=0))
    batches = iter(data)
    next(batches)
    workers = [each for each in threading.enumerate() if each.name.startswith("Worker_")]
    assert workers
    del batches
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


@pytest.mark.parametrize("start", [2, 3])
def test_skipped_batches_are_not_computed(start: int) -> None:
    """Maps before a shuffle are not called for the samples of skipped batches."""

    def of_late_samples(number: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_greater_equal(number, tf.constant(12, tf.int64))
        return number

    mapped = tf.data.Dataset.range(30).map(of_late_samples).shuffle(1, seed=1).repeat(1).batch(4)
    rest = sources.TfData(mapped).batches(1, start)
    if start == 3:
        assert inputs.ids(rest, 1) == [[12, 13, 14, 15]]
    else:
        with pytest.raises(tf.errors.InvalidArgumentError):
            inputs.ids(rest, 1)


def read_by_worker(source: Any, worker: int, *seed: int, batches: int) -> list[np.ndarray]:
    """Returns the first batches that one of two workers of a ParameterServerStrategy reads."""
    specs: list[Any] = []

    @tf.function
    def made(worker: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        dataset = source.build_for_worker(worker, 2, seed).repeat()
        specs[:] = [dataset.element_spec]
        return tf.data.experimental.to_variant(dataset)

    with tf.device("CPU:0"):
        variant = made(tf.constant(worker, tf.int64), tf.constant(seed, tf.int64))
    dataset = tf.data.experimental.from_variant(variant, specs[0])
    return [np.array(batch[0]) for batch in dataset.take(batches)]


NUMBERS = np.arange(24)


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((NUMBERS,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: sources.Arrays((NUMBERS,), 4, seed=3),
        lambda: sources.TfData(numbers().shuffle(24).batch(4)),
        lambda: sources.TfData(numbers().shuffle(24, 1).batch(4)),
    ],
    ids=["arrays", "unseeded", "seeded"],
)
def test_orders_of_workers(make: Callable[[], Any]) -> None:
    """Every worker reads all samples in every pass, in its own orders; the same ones for the same
    seed, and others after a restart."""
    source = make()
    passes = {
        seed: np.concatenate(read_by_worker(source, seed[0], *seed, batches=12)).reshape(2, 24)
        for seed in [(0, 0), (1, 0), (0, 1)]
    }
    orders = [order for both in passes.values() for order in both]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), NUMBERS)
    assert len({tuple(order) for order in orders}) == 6
    again = np.concatenate(read_by_worker(source, 0, 0, 0, batches=12)).reshape(2, 24)
    np.testing.assert_array_equal(again, passes[0, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: sources.Arrays((NUMBERS,), 4, seed=None),
        lambda: sources.TfData(numbers().batch(4)),
    ],
    ids=["arrays", "tf.data"],
)
def test_shares_of_workers(make: Callable[[], Any]) -> None:
    """If no order is drawn, workers share the batches."""
    source = make()
    first, second = (read_by_worker(source, n, n, 0, batches=3) for n in (0, 1))
    np.testing.assert_array_equal(np.sort(np.concatenate(first + second).ravel()), NUMBERS)


def test_fixed_split_stays_fixed() -> None:
    """A shuffle that the user has fixed, such as that of a split by `take`, is fixed on workers."""
    fixed = numbers().shuffle(24, 1, False).take(8)
    expected = {int(number) for (number,) in fixed}
    source = sources.TfData(fixed.shuffle(8).batch(4))
    for worker in (0, 1):
        seen = np.concatenate(read_by_worker(source, worker, worker, 0, batches=2))
        assert set(seen.ravel().tolist()) == expected


def test_prefetches() -> None:
    """The next batch is prepared before it is requested, which does not affect the position from
    which training resumes."""
    made: list[int] = []
    is_ahead = threading.Event()

    def note(number: Any) -> Any:
        made.append(int(number))
        if len(made) > 1:
            is_ahead.set()
        return number

    options = tf.data.Options()
    options.autotune.enabled = False  # TensorFlow would prefetch automatically

    def data(fetches_ahead: bool) -> Positioned:
        dataset = tf.data.Dataset.range(6).shuffle(6, seed=3)
        dataset = dataset.map(lambda i: tf.numpy_function(note, [i], tf.int64))
        dataset = dataset.map(lambda i: tf.ensure_shape(i, []))
        return Positioned(
            sources.TfData(dataset.with_options(options)), fetches_ahead=fetches_ahead
        )

    plain, ahead = data(False), data(True)
    next(iter(plain))
    assert len(made) == 1
    made.clear()
    iterator = iter(ahead)
    first = next(iterator)
    assert is_ahead.wait(30)
    expected = [[int(each) for each in pass_] for pass_ in (iter(data(False)), plain)]
    assert [int(first), *map(int, iterator)] == expected[0]
    assert [int(each) for each in ahead] == expected[1]
    ahead.begin_at(1, 4, variables=ahead.variables(in_pass=True))
    assert [int(each) for each in ahead] == expected[1][4:]


@pytest.mark.parametrize("name", inputs.PIPELINES)
def test_orders_of_plain_tf_data(name: str) -> None:
    """Passes are those of plain tf.data, with an iterator between them that is not read, as Keras
    makes one; or the source reports that they are not."""
    plain = inputs.PIPELINES[name]()
    source = sources.TfData(inputs.PIPELINES[name](), seed=5)
    data = Positioned(source)
    if source.num_batches is None or source.warnings() or source.seeded_by_run:
        pytest.skip("its passes cannot be compared")
    same = []
    for _ in range(3):
        found = a_pass(data, tf.distribute.get_strategy())
        batches = [tf.nest.flatten(batch) for batch in plain.as_numpy_iterator()]
        same.append(found == [[part.tobytes() for part in batch] for batch in batches])
        iter(data), iter(plain)
    assert all(same) != bool(source.reordered)


@pytest.mark.parametrize("samples", [12, 13])
def test_sizes_of_batches(samples: int) -> None:
    """The static batch size is that of plain Keras, for equally fast steps. No sample is lost when
    a pass resumes in the middle of a batch."""
    x, y = np.arange(samples), np.ones(samples, "float32")
    source = sources.Arrays((x, y), 4, seed=3)
    adapter = ArrayDataAdapter(x, y, batch_size=4, shuffle=True)
    assert source.whole.element_spec == adapter.get_tf_dataset().element_spec
    left = [len(ids) for ids, _ in source.batches(0, 1, behind=2)]
    assert left == ([4, 2] if samples == 12 else [4, 3])
