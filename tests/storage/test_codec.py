"""Encoding and decoding of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash

from keras_distplug.core.errors import CorruptCheckpointError
from keras_distplug.storage import codec
from keras_distplug.storage.manifest import VariableSpec

# The types of `keras.Variable`, and those that only TensorFlow has.
PLAIN = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "int4", "uint4"]


def any_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns arbitrary bit patterns, including NaNs with a payload; for bool, 0 and 1."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return data.view(dtype).reshape(shape)


def encoded(arrays: Mapping[str, np.ndarray], rank: int = 0, world_size: int = 1) -> bytes:
    """Returns the file of one of `world_size` workers."""
    return b"".join(codec.encode(codec.share(codec.make_specs(arrays), rank, world_size), arrays))


def read(files: Iterable[bytes], specs: Iterable[VariableSpec]) -> dict[str, np.ndarray]:
    """Decodes the files of all workers, passing every part on unchanged."""
    buffers = codec.Buffers(specs, None, "the/checkpoint")
    found = {}
    for data in files:

        def read_into(offset: int, buffer: memoryview, data: bytes = data) -> int:
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            return len(part)

        assert b"".join(map(bytes, codec.read(read_into, len(data), buffers, "over/there"))) == data
        found.update(buffers.take())
    buffers.require_all_taken()
    return found


def there_and_back(arrays: Mapping[str, np.ndarray], world_size: int = 1) -> dict[str, np.ndarray]:
    files = [encoded(arrays, rank, world_size) for rank in range(world_size)]
    return read(files, codec.make_specs(arrays))


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype.newbyteorder("=")
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.astype(actual.dtype).tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (17, 16), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", PLAIN + OTHERS)
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    """An array of any type and shape is restored bit for bit."""
    array = any_bits(dtype, shape)
    back = there_and_back({"x": array})["x"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", PLAIN + OTHERS)
def test_non_contiguous(dtype: str) -> None:
    """Transposed, strided and reversed arrays are restored with their values."""
    array = any_bits(dtype, (6, 4))
    views = {"transposed": array.T, "strided": array[::2, 1::2], "reversed": array[::-1]}
    for key, back in there_and_back(views).items():
        assert_same(back, np.ascontiguousarray(views[key]))


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">f2", ">f4", ">f8", ">c8", ">c16"])
def test_big_endian(dtype: str) -> None:
    """An array in the other byte order is restored with the same values."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = there_and_back({"x": array})["x"]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert (back == array).all()


def test_read_only() -> None:
    """A read-only array is accepted and not changed."""
    array = np.arange(4, dtype=np.complex64)
    array.flags.writeable = False
    assert_same(there_and_back({"x": array})["x"], array)


def test_input_untouched() -> None:
    """Encoding does not change its input."""
    array = np.arange(4, dtype=">c8")
    encoded({"x": array})
    assert (array == [0, 1, 2, 3]).all()
    assert array.dtype == np.dtype(">c8")


def test_order() -> None:
    """Arrays are restored in their original order."""
    keys = ["z", "a/b", "m_10", "m_9", "é"]
    arrays = {key: np.array(i, "int8" if i % 2 else "float64") for i, key in enumerate(keys)}
    assert list(there_and_back(arrays)) == keys
    assert [spec.key for spec in codec.make_specs(arrays)] == keys


def test_nothing() -> None:
    """An empty set of arrays can be written and read."""
    assert there_and_back({}) == {}


def test_specs() -> None:
    """A spec contains the shape and the type, regardless of byte order."""
    specs = codec.make_specs({"a": np.zeros((2, 3), ">f4"), "b": any_bits("bfloat16", ())})
    assert specs == (VariableSpec("a", (2, 3), "float32"), VariableSpec("b", (), "bfloat16"))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"ab"]), np.array([{}])], ids=str)
def test_not_numeric(array: np.ndarray) -> None:
    """Strings and objects are rejected by name when they are written, not only when they are
    read."""
    with pytest.raises(TypeError, match="`model/vocabulary`"):
        encoded({"model/vocabulary": array})


def test_open_format() -> None:
    """safetensors alone can read the files."""
    arrays = {dtype: any_bits(dtype, (2, 3)) for dtype in PLAIN}
    loaded = safetensors.numpy.load(encoded(arrays))
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert_same(loaded[key], array)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")],
)
def test_open_format_of_small_floats(dtype: str, name: str) -> None:
    """Types that safetensors has and NumPy does not are stored with their names and shapes."""
    # `safetensors.numpy.load` does not support them; those for TensorFlow and PyTorch do.
    array = any_bits(dtype, (2, 3))
    [(_, entry)] = safetensors.deserialize(encoded({"x": array}))
    assert (entry["dtype"], entry["shape"], entry["data"]) == (name, [2, 3], array.tobytes())


def test_open_format_of_other_types() -> None:
    """A type that safetensors does not have is stored as bytes."""
    array = any_bits("complex64", (2, 3))
    loaded = safetensors.numpy.load(encoded({"x": array}))["x"]
    assert loaded.dtype == np.uint8
    assert loaded.tobytes() == array.tobytes()


def test_truncation() -> None:
    """If a file is truncated at any point, only existing bytes are passed on, and it is rejected;
    by its name, if it is truncated in the header."""
    arrays = {"x": any_bits("float32", (4,)), "y": any_bits("int8", (3,))}
    data = encoded(arrays)
    header = 8 + int.from_bytes(data[:8], "little")
    for length in range(len(data)):
        # Missing blanks at the end of a header are not detected.
        match = "^over/there is not a safetensors" if length < header - 63 else "."
        with pytest.raises(CorruptCheckpointError, match=match):
            read([data[:length]], codec.make_specs(arrays))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (
            VariableSpec("y", (2,), "float32"),
            "over/there.*: x is not one of the checkpoint's variables",
        ),
        (
            VariableSpec("x", (3,), "float32"),
            "over/there.*: expected x at bytes 0 to 12, not 0 to 8",
        ),
        (
            VariableSpec("x", (2,), "float64"),
            "over/there.*: expected x at bytes 0 to 16, not 0 to 8",
        ),
        (
            VariableSpec("x", (5,), "bfloat16"),
            "over/there.*: expected x at bytes 0 to 10, not 0 to 8",
        ),
        (VariableSpec("x", (2,), "no_type"), "the/checkpoint: `x.*` cannot be read"),
    ],
    ids=str,
)
def test_mismatched_spec(spec: VariableSpec, match: str) -> None:
    """Contents that do not match their spec are rejected; the message names file and reason."""
    with pytest.raises(CorruptCheckpointError, match=match):
        read([encoded({"x": np.zeros(2, np.float32)})], [spec])


def test_missing() -> None:
    """A variable that is missing from the files, or incomplete, is named."""
    arrays = {"x": np.arange(8.0), "y": np.arange(3)}
    specs = [*codec.make_specs(arrays), VariableSpec("z", (2,), "int8")]
    with pytest.raises(
        CorruptCheckpointError, match="the/checkpoint does not hold the variable `z`"
    ):
        read([encoded(arrays)], specs)
    with pytest.raises(CorruptCheckpointError, match="does not hold the variable `x`"):
        read([encoded(arrays, 1, 2)], codec.make_specs(arrays))


def test_many_sizes() -> None:
    """Small and large variables in any order, on any number of workers, are restored as a whole."""
    random_ = np.random.default_rng(0)
    sizes = random_.choice([0, 1, 7, 1000, 2**18, 3 * 2**20, 2**23 + 5], 40)
    arrays = {f"v{i}": random_.integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    for world_size in (1, 3):
        for key, value in there_and_back(arrays, world_size).items():
            assert np.array_equal(value, arrays[key]), key


def test_name_that_looks_like_a_piece() -> None:
    """A variable whose name looks like a piece of another one is not confused with it."""
    arrays = {"x": np.arange(6.0), "x[0:3]": np.arange(4.0)}
    for world_size in (1, 2, 3):
        back = there_and_back(arrays, world_size)
        assert {key: value.tolist() for key, value in back.items()} == {
            key: value.tolist() for key, value in arrays.items()
        }


def test_hashed() -> None:
    """Parts are passed on unchanged; the checksum is XXH3 with 128 bits, in hexadecimal."""
    nothing = codec.Hashed([])
    assert list(nothing) == []
    assert (nothing.bytes, nothing.xxh3_128) == (0, "99aa06d3014798d86001c324468d497f")
    data = bytes(range(256)) * 1000
    parts = codec.Hashed(memoryview(data)[at : at + 999] for at in range(0, len(data), 999))
    assert b"".join(parts) == data
    assert parts.bytes == len(data)
    assert parts.xxh3_128 == xxhash.xxh3_128_hexdigest(data)


def test_hashed_through_one_buffer() -> None:
    """A part may be overwritten once the next one is requested."""
    data = np.random.default_rng(0).integers(0, 256, 5 * 2**20, np.uint8)
    buffer = bytearray(2**20)

    def parts() -> Iterator[memoryview]:
        for at in range(0, len(data), 2**20):
            buffer[:] = data[at : at + 2**20].tobytes()
            yield memoryview(buffer)

    hashed = codec.Hashed(parts())
    for _ in hashed:
        pass
    assert hashed.xxh3_128 == xxhash.xxh3_128_hexdigest(data)


# Shares

SHAPES = [(7,), (), (0, 3), (3, 5), (100, 3), (1,), (0,), (2, 2, 2)]
KINDS = ["float32", "int8", "float64", "bfloat16", "complex64", "bool", "float32", "complex128"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64, 3000])
def test_shares(world_size: int) -> None:
    """All shares together are complete, bit for bit; their sizes differ by at most 16 bytes."""
    arrays = {
        f"model/{place}": any_bits(dtype, shape)
        for place, (dtype, shape) in enumerate(zip(KINDS, SHAPES, strict=True))
    }
    for key, back in there_and_back(arrays, world_size).items():
        assert_same(back, arrays[key])
    shares = [codec.share(codec.make_specs(arrays), rank, world_size) for rank in range(world_size)]
    names = [piece.name for share in shares for piece in share]
    assert len(names) == len(set(names))
    total = sum(array.nbytes for array in arrays.values())
    for share in shares:
        assert abs(sum(piece.bytes for piece in share) - total / world_size) <= 16


def test_split_variables() -> None:
    """Only variables at the borders of shares are split, and their names say so."""
    arrays = {name: np.zeros((4, 2), np.float32) for name in "abc"}
    specs = codec.make_specs(arrays)
    assert [[p.name for p in codec.share(specs, rank, 2)] for rank in range(2)] == [
        ["a", "b[0:4]"],
        ["b[4:8]", "c"],
    ]
    half = safetensors.numpy.load(encoded(arrays, 0, 2))
    assert {name: array.shape for name, array in half.items()} == {"a": (4, 2), "b[0:4]": (4,)}


def test_value_with_another_shape() -> None:
    """A value that does not match its spec is rejected by name."""
    pieces = codec.share(codec.make_specs({"x": np.zeros(3)}), 0, 1)
    with pytest.raises(
        ValueError, match=r"shape \[3\] and dtype float64 for `x`. Received: shape \[4\]"
    ):
        list(codec.encode(pieces, {"x": np.zeros(4)}))
