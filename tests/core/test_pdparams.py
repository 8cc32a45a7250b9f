"""PaddlePaddle's files: a pickle of arrays is read, and nothing in it is ever called."""

import builtins
import collections
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from mmdet.core.checkpoint import load_pretrained, read_checkpoint
from mmdet.errors import CheckpointError

ARRAYS = {
    "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "by_columns": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "big_endian": np.arange(3, dtype=">i4"),
    "half": np.ones(2, np.float16),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3.5, np.float32),
}


def write(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("spelling", [b"numpy._core", b"numpy.core"])
def test_arrays_of_every_protocol_and_numpy(tmp_path, protocol, spelling):
    path = write(tmp_path / "x.pdparams", ARRAYS, protocol)
    data = path.read_bytes()
    if protocol < 4:  # names are lines there, so that their length may change
        path.write_bytes(data.replace(b"numpy._core", spelling).replace(b"numpy.core", spelling))
    content = read_checkpoint(path)
    for name, array in ARRAYS.items():
        assert torch.equal(content[name], torch.from_numpy(array.astype(array.dtype.newbyteorder("="))))


@pytest.mark.parametrize("name", ["x.pdparams", "x.pth", "weights"])
def test_told_by_content_not_by_name(tmp_path, name):
    assert read_checkpoint(write(tmp_path / name, ARRAYS))["half"].tolist() == [1, 1]


def test_containers_around_the_arrays(tmp_path):
    content = {
        "StructuredToParameterName@@": {"a": "conv2d_0.w_0"},
        "a": ("conv2d_0.w_0", np.ones(2, np.float32)),  # how paddle.save writes tensors of nested data
        "model": collections.OrderedDict(b=np.zeros(1, np.float32)),
        "more": [1, 2.5, None, True, "text", 10**12, np.float32(1.5), (np.arange(2),)],
    }
    read = read_checkpoint(write(tmp_path / "x.pdparams", content))
    assert read["a"].tolist() == [1, 1] and read["model"]["b"].tolist() == [0]
    assert read["more"][:7] == [1, 2.5, None, True, "text", 10**12, 1.5] and read["more"][7][0].tolist() == [0, 1]


def test_it_loads_into_a_model(tmp_path):
    model = torch.nn.Linear(3, 2)
    state = {k: np.full(v.shape, 7, np.float32) for k, v in model.state_dict().items()}
    load_pretrained(model, write(tmp_path / "x.pdparams", {**state, "StructuredToParameterName@@": {}}), strict=True)
    assert all((v == 7).all() for v in model.state_dict().values())


class Call:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function",
    [os.system, builtins.eval, builtins.exec, builtins.open, builtins.getattr, os.remove, np.load, np.fromfile, pickle.loads],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_called(tmp_path, function, protocol):
    victim = tmp_path / "victim"
    victim.write_text("here")
    path = write(tmp_path / "x.pdparams", {"a": Call(function, str(victim))}, protocol)
    with pytest.raises(CheckpointError, match="x.pdparams' holds more than plain values.*it names .*--trust-checkpoint"):
        read_checkpoint(path)
    assert victim.read_text() == "here"


def test_trust_unpickles_all(tmp_path):
    path = write(tmp_path / "x.pdparams", {"a": Call(collections.Counter, "aab")})
    with pytest.raises(CheckpointError, match="collections.Counter"):
        read_checkpoint(path)
    assert read_checkpoint(path, trust=True)["a"]["a"] == 2


@pytest.mark.parametrize("value", [np.array([{}], object), np.array(["text"]), np.array([(1, 2.0)], "i4,f4"), np.array([1j])])
def test_arrays_of_other_things_than_numbers_are_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="more than plain values and tensors"):
        read_checkpoint(write(tmp_path / "x.pdparams", {"a": value}))


def array_pickle(shape, data, code="f4"):
    """A pickle of one array with any claim about its shape."""

    class Array:
        def __reduce__(self):
            return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, shape, np.dtype(code), False, data)

    return pickle.dumps({"a": Array()}, protocol=2)


@pytest.mark.parametrize(
    "content",
    [
        array_pickle((2**40,), b"1234"),
        array_pickle((2**62, 2**62), b"1234"),
        array_pickle((-1,), b"1234"),
        array_pickle((1,) * 65, b"1234"),
        b"\x80\x02\x8e" + struct.pack("<Q", 2**40) + b"ab.",  # BINBYTES8 that is not there
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"ab.",  # BYTEARRAY8
        b"\x80\x02}r" + struct.pack("<I", 2**32 - 2) + b".",  # a memo of four billion entries
        b"\x80\x02]" + b"q\x01h\x01\x86" * 60 + b".",  # pairs of pairs: 2 ** 60 leaves
        b"\x80\x02}" + b"(" * 1000 + b".",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",  # a dictionary that holds itself
        b"\x80\x02.",
        b"\x80\x02u.",
        b"\x80",
    ],
)
def test_hostile_pickles_end_in_an_error_and_little_memory(tmp_path, content):
    path = tmp_path / "x.pdparams"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        assert "x.pdparams" in str(error)
    else:
        assert content.startswith(b"\x80\x02}r")  # its number is that of an entry, not of a list's length
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40_000_000


@pytest.mark.parametrize("suffix", [".pdopt", ".pdmodel", ".pdiparams"])
def test_files_without_weights_are_refused_with_advice(tmp_path, suffix):
    with pytest.raises(CheckpointError, match="give the training checkpoint|the weights are in the .pdparams"):
        read_checkpoint(write(tmp_path / f"x{suffix}", ARRAYS))
