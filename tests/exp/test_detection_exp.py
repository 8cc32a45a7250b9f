"""Classes from the annotations, sizes from the step, and labels matched by name."""

import numpy as np
import pytest
from toy import make_toy

from mmdet.data.errors import DataError
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.exp.detection import DetectionExp


def toy_exp(tmp_path, words=(), **toy):
    data = make_toy(tmp_path / "toy", 6, 3, **toy)
    return get_exp("ppyoloe_s", [f"data_dir={data}", *words])


def test_classes_come_from_the_annotations(tmp_path):
    exp = toy_exp(tmp_path)
    exp.prepare()
    assert exp.num_classes == 3 and exp.class_names == ("c1", "c2", "c3") and exp.origin("num_classes") == "training annotations"
    assert exp.get_model().head.num_classes == 3


@pytest.mark.parametrize("number", [2, 80])
def test_a_number_that_a_person_gave_must_agree(tmp_path, number):
    """Case D02, with the number on the command line or in an own exp file."""
    exp = toy_exp(tmp_path, [f"num_classes={number}"])
    with pytest.raises(UsageError, match=rf"num_classes={number} .*command line.*3 categories \(1: c1, 2: c2, 3: c3\)"):
        exp.prepare()
    path = tmp_path / "mine.py"
    path.write_text(f"from mmdet.families.ppyoloe.exp import PPYOLOEExp\nclass Mine(PPYOLOEExp):\n    num_classes = {number}\n")
    exp = get_exp(path, [f"data_dir={tmp_path / 'toy'}"])
    with pytest.raises(UsageError, match=f"num_classes={number} .*mine.py"):
        exp.prepare()


def test_names_that_a_person_gave_must_agree(tmp_path):
    exp = toy_exp(tmp_path, ["num_classes=3", "class_names=('c1', 'c2', 'x')"])
    with pytest.raises(UsageError, match="class_names"):
        exp.prepare()


def test_missing_data_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="data directory 'data/coco' .*--data DIR"):
        get_exp("ppyoloe_s").prepare()


def test_sizes_are_a_function_of_the_step():
    exp = get_exp("ppyoloe_s", ["seed=3"])
    sizes = [exp.size_at(step) for step in range(300)]
    assert {s[0] for s in sizes} == set(range(320, 769, 32)) and all(h == w for h, w in sizes)
    assert sizes == [get_exp("ppyoloe_s", ["seed=3"]).size_at(step) for step in range(300)]
    assert sizes != [get_exp("ppyoloe_s", ["seed=4"]).size_at(step) for step in range(300)]
    held = get_exp("ppyoloe_s", ["multiscale_interval=10"])
    assert all(len({held.size_at(s + i) for i in range(10)}) == 1 for s in range(0, 100, 10))
    wide = get_exp("ppyoloe_s", ["input_size=(320, 640)", "multiscale=(0.5, 1.5)"])
    assert wide.train_sizes()[0] == (160, 320) and wide.train_sizes()[-1] == (480, 960)


@pytest.mark.parametrize(
    "word", ["input_size=100", "test_size=(64, 70)", "multiscale=(1.2, 0.8)", "multiscale=(1.01, 1.02)", "nms_threshold=0"]
)
def test_sizes_that_cannot_work(word):
    with pytest.raises(UsageError, match=word.split("=")[0]):
        get_exp("ppyoloe_s", [word])


def test_judging_follows_the_models_class_order(tmp_path):
    """The same classes under other ids and in another order: boxes get the model's labels, results the file's ids."""
    exp = toy_exp(tmp_path, category_ids=[7, 13, 42], names=["b", "c", "a"])
    exp.set("num_classes", 4, "checkpoint")
    exp.set("class_names", ("a", "absent", "b", "c"), "checkpoint")
    source = exp.get_eval_loader(workers=0).source
    assert [source.annotation(k).labels.tolist() for k in range(3)] == [[2], [3], [0]]
    assert [source.categories.id_of(i) for i in (0, 2, 3)] == [42, 7, 13] and source.categories.id_of(1) not in (7, 13, 42)
    exp.set("class_names", ("a", "x", "y", "z"), "checkpoint")
    with pytest.raises(DataError, match="'b', 'c'.*'x'"):
        exp.get_eval_loader(workers=0)


def test_train_and_val_must_agree(tmp_path):
    """Case D01, second part."""
    import json

    exp = toy_exp(tmp_path, category_ids=[7, 13, 42], names=["c1", "c2", "c3"])
    file = tmp_path / "toy/annotations/instances_val.json"
    content = json.loads(file.read_text())
    for category in content["categories"]:
        category["name"] = {"c1": "c2", "c2": "c1"}.get(category["name"], category["name"])
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="id 7 is 'c1'.*'c2'.*id 13 is 'c2'.*'c1'"):
        exp.prepare()


def test_the_loader_hands_out_the_asked_sizes(tmp_path):
    exp = toy_exp(tmp_path, ["batch_size=2", "input_size=96", "multiscale=(0.6, 1.4)"])
    exp.prepare()
    loader = exp.get_train_loader(workers=0)
    assert loader.steps_per_epoch == 3
    batches = loader.batches(0)
    for step, batch in zip(range(5), batches, strict=False):
        assert batch.step == step and batch.epoch == step // 3 and tuple(batch.images.shape[2:]) == exp.size_at(step)
    pictures = exp.training_pictures(batch)
    assert len(pictures) == 1 and pictures[0].dtype == np.uint8 and pictures[0].shape[1] == 2 * batch.images.shape[3]
    loader.close()


def test_what_a_detection_exp_lacks_is_said():
    class Bare(DetectionExp):
        pass

    for method in ("get_model", "train_pipeline", "eval_transform"):
        with pytest.raises(NotImplementedError, match=f"Bare must say.*{method}"):
            getattr(Bare(), method)()
