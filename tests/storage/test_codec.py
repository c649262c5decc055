"""Arrays as bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from keras_distplug.core.errors import CorruptCheckpointError
from keras_distplug.core.manifest import VariableSpec
from keras_distplug.storage import codec

# What `keras.Variable` takes, and what TensorFlow has besides.
PLAIN = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
]
OTHERS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "int4", "uint4"]


def any_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Every pattern of bits, NaNs with a payload among them; for bool, 0 and 1."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return data.view(dtype).reshape(shape)


def there_and_back(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    contents = codec.decode(codec.encode(arrays), "here")
    return codec.arrays_of(contents, codec.specs_of(arrays), "here")


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype.newbyteorder("=")
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.astype(actual.dtype).tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (17, 16), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", PLAIN + OTHERS)
def test_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    """An array of each type and shape comes back bit for bit."""
    array = any_bits(dtype, shape)
    back = there_and_back({"x": array})["x"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", PLAIN + OTHERS)
def test_non_contiguous(dtype: str) -> None:
    """Transposed, strided and reversed arrays come back with their values."""
    array = any_bits(dtype, (6, 4))
    views = {"transposed": array.T, "strided": array[::2, 1::2], "reversed": array[::-1]}
    for key, back in there_and_back(views).items():
        assert_same(back, np.ascontiguousarray(views[key]))


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">f2", ">f4", ">f8", ">c8", ">c16"])
def test_big_endian(dtype: str) -> None:
    """An array in the other order of bytes comes back with the same values."""
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = there_and_back({"x": array})["x"]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert (back == array).all()


def test_read_only() -> None:
    """An array that must not be written to is taken, and stays as it is."""
    array = np.arange(4, dtype=np.complex64)
    array.flags.writeable = False
    assert_same(there_and_back({"x": array})["x"], array)


def test_input_untouched() -> None:
    """Encoding changes nothing in the array it was given."""
    array = np.arange(4, dtype=">c8")
    codec.encode({"x": array})
    assert (array == [0, 1, 2, 3]).all()
    assert array.dtype == np.dtype(">c8")


def test_array_like() -> None:
    """Whatever `numpy.asarray` takes is taken."""
    back = there_and_back({"list": [[1.5, 2.5]], "number": 3, "scalar": ml_dtypes.bfloat16(1.5)})
    assert {key: (str(value.dtype), value.tolist()) for key, value in back.items()} == {
        "list": ("float64", [[1.5, 2.5]]),
        "number": ("int64", 3),
        "scalar": ("bfloat16", 1.5),
    }


def test_order() -> None:
    """Arrays come back in the order in which they were given."""
    keys = ["z", "a/b", "m_10", "m_9", "é"]
    arrays = {key: np.array(i, "int8" if i % 2 else "float64") for i, key in enumerate(keys)}
    assert list(there_and_back(arrays)) == keys
    assert [spec.key for spec in codec.specs_of(arrays)] == keys


def test_nothing() -> None:
    """No arrays at all can be written and read."""
    assert there_and_back({}) == {}


def test_specs() -> None:
    """A spec names the shape and the type, whatever the order of the bytes."""
    specs = codec.specs_of({"a": np.zeros((2, 3), ">f4"), "b": any_bits("bfloat16", ())})
    assert specs == (VariableSpec("a", (2, 3), "float32"), VariableSpec("b", (), "bfloat16"))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([b"a"]), np.array([{}])], ids=str)
def test_no_numbers(array: np.ndarray) -> None:
    """Text and objects are refused by name when they are written, not when they are read."""
    with pytest.raises(TypeError, match="`model/vocabulary`"):
        codec.encode({"model/vocabulary": array})


def test_open_format() -> None:
    """safetensors alone reads what was written."""
    arrays = {dtype: any_bits(dtype, (2, 3)) for dtype in PLAIN}
    loaded = safetensors.numpy.load(codec.encode(arrays))
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert_same(loaded[key], array)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")],
)
def test_open_format_of_small_floats(dtype: str, name: str) -> None:
    """Types that safetensors knows and NumPy does not carry their name and shape in the file."""
    # `safetensors.numpy.load` has no word for them; those for TensorFlow and PyTorch do.
    array = any_bits(dtype, (2, 3))
    [(_, entry)] = safetensors.deserialize(codec.encode({"x": array}))
    assert (entry["dtype"], entry["shape"], entry["data"]) == (name, [2, 3], array.tobytes())


def test_open_format_of_other_types() -> None:
    """A type that safetensors does not know is there as its bytes."""
    array = any_bits("complex64", (2, 3))
    loaded = safetensors.numpy.load(codec.encode({"x": array}))["x"]
    assert loaded.dtype == np.uint8
    assert loaded.tobytes() == array.tobytes()


def test_truncation() -> None:
    """A file that was cut off anywhere is refused, by name."""
    data = codec.encode({"x": any_bits("float32", (4,)), "y": any_bits("int8", (3,))})
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match=r"^over/there is no safetensors file"):
            codec.decode(data[:length], "over/there")


@pytest.mark.parametrize(
    "spec",
    [
        VariableSpec("missing", (2,), "float32"),
        VariableSpec("x", (3,), "float32"),
        VariableSpec("x", (2,), "float64"),
        VariableSpec("x", (2,), "no_type"),
        VariableSpec("x", (5,), "bfloat16"),
    ],
    ids=str,
)
def test_unfit(spec: VariableSpec) -> None:
    """Contents that are missing or do not fit their spec are refused; both are named."""
    contents = codec.decode(codec.encode({"x": np.zeros(2, np.float32)}), "here")
    with pytest.raises(CorruptCheckpointError, match=f"over/there.*`{spec.key}"):
        codec.arrays_of(contents, [spec], "over/there")


def test_xxh3() -> None:
    """The checksum is XXH3 with 128 bits, in hexadecimal."""
    assert codec.xxh3_128(b"") == "99aa06d3014798d86001c324468d497f"
