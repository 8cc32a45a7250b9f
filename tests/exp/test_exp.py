"""Fields are typed, overrides strict, origins known; errors name what is wrong."""

import textwrap

import pytest

from mmdet.errors import CheckpointError, UsageError
from mmdet.exp import Exp, Size, exp_of_checkpoint, exp_state, get_exp
from mmdet.exp.fields import check, parse, split_overrides
from mmdet.exp.load import shipped_names


def write(tmp_path, body, name="mine.py"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(body))
    return path


MINE = """
    from mmdet.exp import Exp, Size
    class Mine(Exp):
        max_epoch = 7
        side: Size = 320
        label: str = "a"
        rate: float = 1
        many: tuple[float, ...] = (1, 2)
"""


def test_file_overrides_and_origins(tmp_path):
    path = write(tmp_path, MINE)
    exp = get_exp(path, ["max_epoch=10", "side=(512, 640)", "ema=False", "label=b c"])
    assert (exp.max_epoch, exp.side, exp.ema, exp.label, exp.rate, exp.many) == (10, (512, 640), False, "b c", 1.0, (1.0, 2.0))
    assert exp.exp_name == "mine" and exp.override_words == ["max_epoch=10", "side=(512, 640)", "ema=False", "label=b c"]
    assert exp.origin("max_epoch") == "command line" and exp.origin("rate") == str(path) and exp.origin("seed") == "default"
    assert exp.is_users("rate") and exp.is_users("ema") and not exp.is_users("seed")
    assert set(exp.changed()) == {"max_epoch", "ema", "side", "label"}


def test_pairs_and_squares(tmp_path):
    exp = get_exp(write(tmp_path, MINE), ["max_epoch", "10", "side", "96"])
    assert exp.max_epoch == 10 and exp.side == (96, 96)


@pytest.mark.parametrize(
    "word, message",
    [
        ("max_epochs=10", "unknown field 'max_epochs'.*Did you mean 'max_epoch'"),
        ("max_epoch=abc", "max_epoch=abc: expected int"),
        ("max_epoch=1.5", "max_epoch=1.5: expected int"),
        ("max_epoch=True", "max_epoch=True: expected int"),
        ("ema=maybe", "ema=maybe: expected bool"),
        ("side=(1,2,3)", r"side=\(1,2,3\): expected \(H, W\) or one integer"),
        ("amp=fp8", "amp='fp8': expected off | bf16 | fp16"),
        ("max_epoch=0", "max_epoch=0.*command line.*at least 1"),
        ("basic_lr_per_img=nan", "basic_lr_per_img=nan: expected float"),
        ("ema_decay=1.0", "ema_decay=1.0"),
        ("--x", "expected key=value"),
        ("max_epoch=__import__('os')", "expected int"),
        ("get_model=3", "unknown field 'get_model'"),
    ],
)
def test_wrong_words(tmp_path, word, message):
    with pytest.raises(UsageError, match=message):
        get_exp(write(tmp_path, MINE), [word])


def test_bool_words():
    assert [parse("x", w, bool) for w in ("True", "false", "on", "0", "1")] == [True, False, True, False, True]


def test_text_fields_keep_their_words():
    assert parse("x", "123", str) == "123" and parse("x", "'quoted'", str) == "quoted" and parse("x", "none", str) == "none"
    assert parse("x", "None", str | None) is None
    assert check("x", [1, 2], tuple[int, int]) == (1, 2)
    assert check("x", 3, Size) == (3, 3)


def test_split_overrides_keeps_equal_signs_in_values():
    assert split_overrides(["a=b=c", "d", "e"]) == [("a", "b=c"), ("d", "e")]
    with pytest.raises(UsageError, match="'lonely'"):
        split_overrides(["lonely"])


def test_misspelt_attribute_is_an_error_when_the_class_is_made():
    with pytest.raises(UsageError, match="'max_epohc' is no known field.*max_epoch"):
        type("Wrong", (Exp,), {"max_epohc": 3, "__annotations__": {}})
    with pytest.raises(UsageError, match="Wrong.max_epoch='3'"):
        type("Wrong", (Exp,), {"max_epoch": "3"})


def test_assignment_on_an_instance_is_refused():
    with pytest.raises(AttributeError, match="exp.set"):
        Exp().max_epoch = 3


def test_errors_inside_an_exp_file_keep_their_traceback(tmp_path):
    path = write(tmp_path, "from mmdet.exp import Exp\nvalue = 1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        get_exp(path)
    assert caught.traceback[-1].path.name == "mine.py"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        get_exp(write(tmp_path, "import no_such_module\n"))


def test_files_and_names_that_do_not_exist(tmp_path):
    with pytest.raises(UsageError, match="exp file .*absent.py.* does not exist"):
        get_exp(tmp_path / "absent.py")
    with pytest.raises(UsageError, match="no shipped exp is called 'ppyoloe_z'.*ppyoloe_"):
        get_exp("ppyoloe_z")
    with pytest.raises(UsageError, match="expected one class derived from"):
        get_exp(write(tmp_path, "x = 1\n"))
    assert "ppyoloe_s" in shipped_names()


def test_a_shipped_exp_never_stands_in_for_a_persons_own_file_of_the_same_name(tmp_path, monkeypatch):
    path = write(tmp_path, "from mmdet.families.ppyoloe.exp import PPYOLOEExp\nclass Exp(PPYOLOEExp): ...\n", "ppyoloe_s.py")
    monkeypatch.chdir(tmp_path)
    own = {"exp": exp_state(get_exp("ppyoloe_s.py"))}
    assert exp_of_checkpoint(own).exp_file == "ppyoloe_s.py"
    path.unlink()
    with pytest.raises(CheckpointError, match="made by exp file 'ppyoloe_s.py', which is not here: give the exp file with -f"):
        exp_of_checkpoint(own)
    shipped = {"exp": {**exp_state(get_exp("ppyoloe_s")), "file": "/elsewhere/exps/ppyoloe_s.py"}}
    assert exp_of_checkpoint(shipped).exp_name == "ppyoloe_s"
