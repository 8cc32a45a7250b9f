"""The data side of a tracker's exp: where its videos come from, what it checks, and what it records."""

from pathlib import Path

import numpy as np
import pytest
from track_toy import COLOUR_EXP, write_red_videos

from mmdet.data.errors import DataError
from mmdet.errors import UsageError
from mmdet.exp import get_exp
from mmdet.families.siamese.readers import GOT10kFolder

TWO_SOURCES = (
    COLOUR_EXP
    + """
    def train_sources(self):
        from mmdet.families.siamese.readers import GOT10kFolder

        return [GOT10kFolder("one", "train", pairs_per_epoch=9), GOT10kFolder("two", "train", pairs_per_epoch=5)]
"""
)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("colours.py").write_text(COLOUR_EXP, encoding="utf-8")
    for split in ("train", "val"):
        write_red_videos(tmp_path / "data", lengths=(6, 4), split=split)
    return tmp_path


def make(*words, file="colours.py"):
    return get_exp(file, list(words))


def test_a_folder_is_checked_read_and_remembered(work):
    exp = make("data_dir=data", "pairs_per_epoch=12", "batch_size=4")
    exp.check_sources()
    exp.prepare()
    assert Path(exp.data_dir).is_absolute()
    facts = exp.data_facts()
    assert set(facts) == {"train", "val"} and "2 videos, 10 frames, digest" in facts["train"]
    loader = exp.get_train_loader(workers=0)
    batch = next(loader.batches(0))
    assert loader.steps_per_epoch == 3 and batch.templates.shape == (4, 3, 64, 64) and batch.searches.shape == (4, 3, 128, 128)
    assert len(exp.training_pictures(batch)) == 1
    (work / "data/train/red_1/groundtruth.txt").write_text("1,2,30,40\n" * 4)
    assert make("data_dir=data").data_facts()["train"] != facts["train"]


@pytest.mark.parametrize(
    ("data", "message"),
    [("nowhere", "'nowhere' .set by command line. does not exist"), ("colours.py", "is a file"), ("empty", "holds no videos")],
)
def test_wrong_folders_stop_before_anything_is_built(work, data, message):
    Path("empty").mkdir()
    with pytest.raises(DataError, match=message):
        make(f"data_dir={data}").check_sources()


def test_no_frame_to_train_on(work):
    for name in ("red_0", "red_1"):
        lines = (work / "data/train" / name / "groundtruth.txt").read_text().splitlines()
        (work / "data/train" / name / "groundtruth.txt").write_text("5,5,2,2\n" * len(lines))
    with pytest.raises(DataError, match="no frame with a target to train on"):
        make("data_dir=data").prepare()


def test_an_exp_may_list_several_data_sets_with_quotas(work):
    for name in ("one", "two"):
        write_red_videos(work / name, lengths=(3, 3, 3), split="train")
    Path("two_sources.py").write_text(TWO_SOURCES, encoding="utf-8")
    exp = make("data_dir=data", "batch_size=7", file="two_sources.py")
    exp.check_sources()
    exp.prepare()
    loader = exp.get_train_loader(workers=0)
    assert loader.steps_per_epoch == 2
    counts = np.bincount(loader.plan.order(0, 14), minlength=6)
    assert counts[:3].tolist() == [3, 3, 3] and sorted(counts[3:].tolist()) == [1, 2, 2]
    assert exp.data_facts()["train"].count("3 videos, 9 frames") == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("search_size=64", "search_size=64 .*more than exemplar_size=64"),
        ("negatives=(0.5,0.5,0.5,0)", "negatives=.*1 at most in sum"),
        ("template_frame=last", "init | all | mix"),
        ("mix_prob=1.5", "mix_prob=1.5 .*0 to 1"),
        ("frame_range=-1", "0 or more"),
        ("best_metric=AP", "one of AUC, P20, NP20, AO, SR50, SR75"),
    ],
)
def test_wrong_values_are_named(work, word, message):
    with pytest.raises(UsageError, match=message):
        make(word)


def test_an_empty_split_is_skipped_in_evaluation(work):
    (work / "data/val/list.txt").write_text("")
    assert make("data_dir=data").get_evaluator("val") is None
    assert len(GOT10kFolder("data", "val")) == 0
