"""Thousands of damaged checkpoints: each ends in a named error or a correct load, runs nothing, and changes no file."""

import copy
import encodings.cp437  # noqa: F401  (imported by zipfile when a name is no ASCII; it is not the file's doing)
import encodings.latin_1  # noqa: F401
import encodings.raw_unicode_escape  # noqa: F401
import io
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from toy_task import line_exp

from mmdet.core import RunOptions, Trainer
from mmdet.core.checkpoint import load_pretrained
from mmdet.core.files import checksum, read_checkpoint, save_atomic
from mmdet.core.resume import Resumption, choice_of, read_full_state, restore
from mmdet.core.state import training_state
from mmdet.errors import UserError
from mmdet.exp import exp_of_checkpoint

SAMPLES = [pytest.param(200, 1, id="200"), pytest.param(2000, 2, id="2000", marks=pytest.mark.slow)]
WATCHED = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "import",
    "exec",
)
_events: list[str] | None = None


def _watch(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if _events is not None and (writes or event in WATCHED):
        _events.append(f"{event} {args!r:.80}")


sys.addaudithook(_watch)


@pytest.fixture
def watched():
    """Names of everything that was run, imported or opened for writing while the given function was at work."""

    def call(function):
        global _events
        _events = []
        try:
            return function(), list(_events)
        except UserError as error:
            return error, list(_events)
        finally:
            _events = None

    return call


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = Trainer(line_exp(tmp_path_factory.mktemp("fuzz")), RunOptions(device="cpu", workers=0, progress=False))
    batches = trainer.batches = trainer._open_batches()
    trainer._start_epoch()
    for _ in range(2):
        trainer._train_step()
    assert batches is trainer.batches
    return trainer


def damaged(data, draw):
    """``data`` cut short, with bits flipped, or with a stretch overwritten."""
    kind = draw.choice(("cut", "bits", "bits", "stretch"))
    if kind == "cut":
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    if kind == "bits":
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        start, length = draw.randrange(len(data)), draw.choice((1, 4, 64))
        changed[start : start + length] = draw.randbytes(len(changed[start : start + length]))
    return bytes(changed)


JUNK = (
    None,
    True,
    -1,
    3,
    1.5,
    float("nan"),
    2**70,
    "x",
    "",
    b"x",
    [],
    [1],
    (),
    {},
    {"a": 1},
    {1: 2},
    torch.zeros(2),
    torch.ones(()),
)


def with_junk(value, draw):
    """``value`` with one entry, at any depth, of another type or missing."""
    inside = [k for k in value if isinstance(value[k], dict) and value[k]] if isinstance(value, dict) else []
    changed = dict(value)
    if inside and draw.random() < 0.7:
        key = draw.choice(inside)
        changed[key] = with_junk(value[key], draw)
    elif draw.random() < 0.1:
        del changed[draw.choice(list(value))]
    else:
        changed[draw.choice(list(value))] = copy.deepcopy(draw.choice(JUNK))
    return changed


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def check(result, events, path):
    """A message that names the file or what is wrong in it, in few words; nothing run."""
    assert events == []
    if isinstance(result, UserError):
        assert result.exit_code == 2 and str(path) in str(result) and len(str(result)) < 4000
        return False
    return True


@pytest.mark.parametrize(("count", "seed"), SAMPLES)
def test_bytes_of_a_checkpoint(tmp_path, trainer, watched, count, seed):
    path = tmp_path / "last.pth"
    state = training_state(trainer)
    save_atomic(state, path)
    data, right, draw = path.read_bytes(), checksum(state), random.Random(seed)
    model = trainer.exp.get_model()
    good = 0
    watched(lambda: load_pretrained(model, path))  # what torch imports on first use
    for _ in range(count):
        path.write_bytes(damaged(data, draw))
        before = files_of(tmp_path)
        loaded, events = watched(lambda: read_full_state(path))
        if check(loaded, events, path):
            assert checksum(loaded) == right
            good += 1
        report, events = watched(lambda: load_pretrained(model, path, strict=True))
        if check(report, events, path):
            assert checksum(dict(model.state_dict())) == checksum(dict(state["ema"]["model"]))
        assert files_of(tmp_path) == before
    assert good < 0.6 * count  # what a zip file holds between its parts does not count


class Arrays(pickle.Unpickler):
    """Another reader of the same files, to compare with."""

    def find_class(self, module, name):
        if module.split(".")[0] in ("numpy", "_codecs") and name in ("_reconstruct", "ndarray", "dtype", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(name)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # the standard library's, of damaged text
@pytest.mark.parametrize(("count", "seed"), SAMPLES)
@pytest.mark.parametrize("protocol", [2, 4])
def test_bytes_of_arrays(tmp_path, trainer, watched, count, seed, protocol):
    path = tmp_path / "x.pdparams"
    model = trainer.exp.get_model()
    original = {k: v.numpy().copy() for k, v in model.state_dict().items()}
    data, draw = pickle.dumps({**original, "StructuredToParameterName@@": {}}, protocol=protocol), random.Random(seed)
    path.write_bytes(data)
    watched(lambda: load_pretrained(model, path, strict=True))
    alone = 0
    for _ in range(count // 2):
        path.write_bytes(damaged(data, draw))
        before = files_of(tmp_path)
        result, events = watched(lambda: load_pretrained(model, path, strict=True))
        assert files_of(tmp_path) == before
        if check(result, events, path):
            try:
                other = Arrays(io.BytesIO(path.read_bytes())).load()
            except Exception:  # damage that the other reader minds (a frame's length, say) and this one need not
                alone += 1
                continue
            assert all(np.array_equal(v.numpy(), other[k], equal_nan=True) for k, v in model.state_dict().items())
    assert alone <= 0.03 * count


@pytest.mark.parametrize(("count", "seed"), SAMPLES)
def test_wrong_entries_of_a_checkpoint(tmp_path, trainer, watched, count, seed):
    """With a right checksum, or with none, so that nothing but the entries themselves can be found wrong."""
    path, draw = tmp_path / "last.pth", random.Random(seed)
    state = training_state(trainer)
    save_atomic(state, path)
    state, model = read_checkpoint(path), trainer.exp.get_model()
    watched(lambda: (repr(torch.ones(())), exp_of_checkpoint(state)))  # what Python and torch import on first use
    restore(trainer, Resumption(path, read_full_state(path), choice_of(path)))
    for _ in range(count):
        content = with_junk(state, draw)
        save_atomic(content, path) if draw.random() < 0.5 else torch.save(content, path)
        before = files_of(tmp_path)
        restored, events = watched(lambda: restore(trainer, Resumption(path, read_full_state(path), choice_of(path))))
        if check(restored, events, path):
            assert checksum(dict(trainer.model.state_dict())) == checksum(dict(content["model"]))
            assert trainer.step == content["step"]
        _, events = watched(lambda: load_pretrained(model, path))
        assert events == []
        _, events = watched(lambda: exp_of_checkpoint(read_checkpoint(path)))
        assert events == [] and files_of(tmp_path) == before
