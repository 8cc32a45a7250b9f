"""Readers of videos: ST-18, ST-18b and case D12."""

import json
import math

import cv2
import numpy as np
import pytest
from track_toy import red_frames, red_palette, straight_boxes

from mmdet.data.errors import DataError
from mmdet.families.siamese.pairs import PairPipeline, PairSettings
from mmdet.families.siamese.readers import Crop511Json, GOT10kFolder, OTBFolder, find_layout, open_source, read_boxes
from mmdet.families.siamese.sampler import EpochPairSampler, PairSource, pair_loader
from mmdet.families.siamese.shapes import MovingShapes, encode_png, write_video

# -- GOT-10k ------------------------------------------------------------------------------------------------------------------


def test_got10k_layout_from_writer_to_reader(tmp_path):
    shapes = MovingShapes(videos=3, frames=5, size=(96, 72), seed=4)
    shapes.write(tmp_path / "train")
    source = GOT10kFolder(tmp_path, "train")
    assert len(source) == 3 and source.report() == f"{tmp_path / 'train'}: 3 videos, 15 of 15 frames usable, 3 pairs per epoch"
    for number in range(3):
        made, video = shapes.video(number), source.video(number)
        assert np.abs(video.boxes - made.boxes).max() <= 5e-5 + 5e-5  # x and w are rounded to 4 decimals, x2 is their sum
        assert np.abs(video.boxes[:, :2] - made.boxes[:, :2]).max() <= 5e-5
        assert (video.cover == made.cover).all()
        for frame, image in enumerate(made.frames()):
            assert (source.load(number, frame) == image).all()


def test_got10k_without_labels_and_with_absent_targets(tmp_path):
    MovingShapes(videos=2, frames=6, size=(96, 72)).write(tmp_path / "val")
    for name in ("cover.label", "absence.label", "cut_by_image.label", "meta_info.ini"):
        (tmp_path / "val" / "shapes_0000" / name).unlink()
    (tmp_path / "val" / "shapes_0001" / "absence.label").write_text("0\n0\n1\n0\n0\n0\n")
    source = GOT10kFolder(tmp_path, "val")
    assert (source.video(0).cover == 8).all() and source.video(0).usable.all()
    assert source.video(1).usable.tolist() == [True, True, False, True, True, True] and source.video(1).cover[2] == 0


def test_got10k_test_split_has_one_box_per_video(tmp_path):
    MovingShapes(videos=1, frames=4, size=(96, 72)).write(tmp_path / "test")
    truth = tmp_path / "test" / "shapes_0000" / "groundtruth.txt"
    truth.write_text(truth.read_text().splitlines()[0])
    for name in ("cover.label", "absence.label"):
        (truth.parent / name).unlink()
    video = GOT10kFolder(tmp_path, "test").video(0)
    assert len(video) == 4 and video.usable.tolist() == [True, False, False, False] and np.isnan(video.boxes[1:]).all()


def test_got10k_missing_frames_are_counted(tmp_path):
    MovingShapes(videos=2, frames=5, size=(96, 72)).write(tmp_path / "train")
    for number in (2, 5):
        (tmp_path / "train" / "shapes_0001" / f"{number:08d}.png").unlink()
    source = GOT10kFolder(tmp_path, "train")
    assert source.report().endswith("8 of 10 frames usable, 2 pairs per epoch (left out: frames without a file: 2)")
    assert source.video(1).usable.tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [("1,2,3\n", "line 1: expected four numbers"), ("1,2,3,4\n1,2,x,4\n", "line 2"), ("", "holds no box")],
)
def test_malformed_annotations_are_named(tmp_path, text, message):
    MovingShapes(videos=1, frames=2, size=(96, 72)).write(tmp_path / "train")
    (tmp_path / "train" / "shapes_0000" / "groundtruth.txt").write_text(text)
    with pytest.raises(DataError, match=f"groundtruth.txt.*{message}"):
        GOT10kFolder(tmp_path, "train")


def test_a_listed_video_that_is_not_there_is_named(tmp_path):
    MovingShapes(videos=1, frames=2, size=(96, 72)).write(tmp_path / "train")
    (tmp_path / "train" / "list.txt").write_text("shapes_0000\nabsent\n")
    with pytest.raises(DataError, match="absent.*groundtruth.txt: there is no such file.*take 'absent' out of .*list.txt"):
        GOT10kFolder(tmp_path, "train")


# -- OTB ----------------------------------------------------------------------------------------------------------------------


def otb_video(root, name, boxes, first=1, extra=0, separator=",", truth="groundtruth_rect.txt"):
    folder = root / name / "img"
    folder.mkdir(parents=True, exist_ok=True)
    padded = np.concatenate([np.tile(boxes[:1], (first - 1, 1)), boxes, np.tile(boxes[-1:], (extra, 1))])
    for number, frame in enumerate(red_frames(padded), start=1):
        (folder / f"{number:04d}.jpg").write_bytes(encode_png(frame, red_palette()))
    rows = np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    (root / name / truth).write_text("\r\n".join(separator.join(f"{v:g}" for v in row) for row in rows) + "\r\n")


def test_otb_with_every_separator_several_targets_and_late_starts(tmp_path):
    boxes = straight_boxes(6)
    otb_video(tmp_path, "Car", boxes, separator=",")
    otb_video(tmp_path, "Dog", boxes, separator="\t", extra=3)
    otb_video(tmp_path, "Jogging", boxes, separator=" ", truth="groundtruth_rect.1.txt")
    otb_video(tmp_path, "Jogging", boxes + 4, separator=" ", truth="groundtruth_rect.2.txt")
    otb_video(tmp_path, "David", boxes, first=300)
    source = OTBFolder(tmp_path)
    assert source.names == ["Car", "David", "Dog", "Jogging.1", "Jogging.2"]
    assert all(np.allclose(source.video(i).boxes, boxes) for i in range(4)) and np.allclose(source.video(4).boxes, boxes + 4)
    assert source.path(1, 0).name == "0300.jpg" and source.path(2, 5).name == "0006.jpg"
    assert source.report().startswith(f"{tmp_path}: 5 videos, 30 of 30 frames usable")


def test_boxes_are_read_whatever_separates_them(tmp_path):
    (tmp_path / "b.txt").write_text("1,2,3,4\n1\t2\t3\t4\n 1 2 3 4 \n1, 2, 3, 4\n\n")
    assert (read_boxes(tmp_path / "b.txt") == [1, 2, 4, 6]).all() and len(read_boxes(tmp_path / "b.txt")) == 4


# -- pysot's crops ------------------------------------------------------------------------------------------------------------


def write_crops(root, content, size, missing=()):
    """A crop file for every frame of ``content`` but the ``missing`` (video, track, frame)."""
    for video, tracks in content.items():
        for track, frames in tracks.items():
            (root / video).mkdir(parents=True, exist_ok=True)
            for frame in frames:
                if (video, track, frame) not in missing:
                    image = np.full((size, size, 3), int(frame) % 200 + 20, np.uint8)
                    cv2.imwrite(str(root / video / f"{int(frame):06d}.{int(track):02d}.x.jpg"), image)


def test_box_sides_in_a_511_crop(tmp_path):
    """Centre (255, 255) counted from the first pixel's centre is 255.5 in continuous px; size = wh * 127 / s(w, h)."""
    content = {"v": {"00": {"000000": [10, 20, 50, 50], "000003": [7.5, 60]}}}
    write_crops(tmp_path / "crop511", content, 511)
    (tmp_path / "train.json").write_text(json.dumps(content))
    video = Crop511Json(tmp_path / "crop511", tmp_path / "train.json").video(0)
    for box, (width, height) in zip(video.boxes, ((40, 30), (7.5, 60)), strict=True):
        side = math.sqrt((width + (width + height) / 2) * (height + (width + height) / 2))
        assert (box[:2] + box[2:]) / 2 == pytest.approx([255, 255], abs=0.5)
        assert box[2:] - box[:2] == pytest.approx([width * 127 / side, height * 127 / side], abs=1e-6)
    assert video.numbers.tolist() == [0, 3]


def test_boxes_without_area_and_empty_tracks_are_dropped(tmp_path):
    content = {
        "v": {"00": {"000000": [10, 20, 50, 50], "000001": [10, 20, 10, 50]}, "01": {}},
        "w": {"00": {"000000": [0, 0, 9, 0]}},
    }
    write_crops(tmp_path, content, 255)
    (tmp_path / "train.json").write_text(json.dumps(content))
    source = Crop511Json(tmp_path, tmp_path / "train.json")
    assert (
        source.names == ["v/00", "w/00"]
        and source.train_videos.tolist() == [0]
        and source.video(0).usable.tolist() == [True, False]
    )
    assert "videos without a usable frame: 1" in source.report()


def test_other_tracks_of_the_same_frame_are_known(tmp_path):
    content = {
        "v": {"00": {"000000": [100, 100, 140, 130], "000001": [100, 100, 140, 130]}, "01": {"000001": [150, 100, 190, 130]}}
    }
    write_crops(tmp_path, content, 511)
    (tmp_path / "train.json").write_text(json.dumps(content))
    source = Crop511Json(tmp_path, tmp_path / "train.json")
    assert source.others(0, 0).shape == (0, 4)
    own, (other,) = source.video(0).boxes[1], source.others(0, 1)
    scale = (own[2] - own[0]) / 40
    assert other == pytest.approx(own + np.array([50 * scale, 0, 50 * scale, 0]))


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"v": {"00": {"0": [1, 2, 3]}}}', '{"v": [1]}', '{"v": {"00": {"x": [1, 2, 3, 4]}}}']
)
def test_malformed_json_is_named(tmp_path, content):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(DataError, match="train.json: expected"):
        Crop511Json(tmp_path, tmp_path / "train.json")


def d12(root):
    """Video A: 8 frames with a moving box; B: one frame; C: one good frame, two without a file, one without area."""
    content = {
        "A": {"00": {f"{i:06d}": [20 + 5 * i, 20, 60 + 5 * i, 50] for i in range(8)}},
        "B": {"00": {"000000": [20, 20, 60, 50]}},
        "C": {"00": {"000000": [20, 20, 60, 50], "000001": [20, 20, 60, 50], "000002": [20, 20, 0, 15]}},
    }
    write_crops(root / "crop511", content, 255, missing={("C", "00", "000001")})
    (root / "train.json").write_text(json.dumps(content))


def test_case_d12(tmp_path):
    d12(tmp_path)
    source = open_source(tmp_path, "train", pairs_per_epoch=100, frame_range=3)
    line = source.report()
    assert "3 videos, 10 of 12 frames usable, 100 pairs per epoch" in line
    assert "left out: frames without a file: 1, frames without a visible target of at least 3 px: 1" in line
    pairs = PairSource([source])
    assert len(pairs) == 100
    order = EpochPairSampler(pairs, seed=0).order(0, 100)
    assert len(order) == 100
    rng = np.random.default_rng(0)
    for index in order:
        frames = pairs.draw_frames(rng, int(index))
        video = pairs.video(frames.video)[1]
        assert abs(video.numbers[frames.template] - video.numbers[frames.search]) <= 3
        assert video.usable[frames.template] and video.usable[frames.search]
        if video.name == "B/00":
            assert frames.template == frames.search == 0


def test_case_d12_gives_finite_pairs_of_the_same_video(tmp_path):
    d12(tmp_path)
    source = PairSource([open_source(tmp_path, "train", pairs_per_epoch=100, frame_range=3)])
    loader = pair_loader(source, PairPipeline(PairSettings(64, 128)), 10, workers=0)
    assert loader.steps_per_epoch == 10
    batches = loader.batches(0)
    names = []
    for _ in range(10):
        batch = next(batches)
        assert np.isfinite(batch.boxes.numpy()).all() and (batch.boxes[:, 2:] > batch.boxes[:, :2]).all()
        names += batch.image_ids
    assert len(names) == 100 and {name.split("/")[0] for name in names} == {"A", "B", "C"}
    assert all(name.startswith("B/00:0>0") for name in names if name.startswith("B"))


# -- what a folder is, and broken files ---------------------------------------------------------------------------------------


def test_a_folder_without_videos_says_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match="list.txt .GOT-10k.*crop511.*groundtruth_rect.txt .OTB"):
        find_layout(tmp_path, "train")


def test_a_broken_image_is_replaced_by_another_video_and_all_broken_ones_are_an_error(tmp_path):
    boxes = straight_boxes(4)
    (tmp_path / "train").mkdir()
    images = [encode_png(frame, red_palette()) for frame in red_frames(boxes)]
    for name, files in (("broken", [b"no image"] * 4), ("good", images)):
        write_video(tmp_path / "train" / name, files, boxes, np.full(4, 8), (160, 120))
    (tmp_path / "train" / "list.txt").write_text("broken\ngood\n")
    source = PairSource([GOT10kFolder(tmp_path, "train", pairs_per_epoch=40)])
    batches = pair_loader(
        source, PairPipeline(PairSettings(64, 128, negatives=(0, 0, 0, 0), pastes=(0, 0), distractor_prob=0)), 8, 0
    )
    stream = batches.batches(0)
    assert {name.split(":")[0] for _ in range(5) for name in next(stream).image_ids} == {"good"}
    (tmp_path / "train" / "list.txt").write_text("broken\n")
    source = PairSource([GOT10kFolder(tmp_path, "train")])
    with pytest.raises(DataError, match="10 videos in turn could not be read.*0000000"):
        next(pair_loader(source, PairPipeline(PairSettings(64, 128)), 1, 0).batches(0))
