"""Moving shapes: exact boxes, the same bytes everywhere, and a demo set that mends itself."""

import hashlib
import json

import cv2
import numpy as np
import pytest

from mmdet.data.errors import DataError
from mmdet.families.siamese.shapes import MARKER, MovingShapes, encode_png, make_shapes


def test_the_same_bytes_on_every_machine(tmp_path):
    """The digest was made on x86-64 Linux; neither zlib nor NumPy's distributions have a part in it."""
    MovingShapes(videos=2, frames=3, size=(80, 60), seed=7).write(tmp_path / "train")
    total = hashlib.sha256()
    for path in sorted((tmp_path / "train").rglob("*")):
        if path.is_file():
            total.update(path.relative_to(tmp_path).as_posix().encode() + path.read_bytes())
    assert total.hexdigest()[:16] == "7b79b05bf1430e9f"


def test_pngs_are_read_back_exactly():
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (60, 80), (700, 401)):
        pixels, palette = rng.integers(0, 16, shape, dtype=np.uint8), rng.integers(0, 256, (16, 3), dtype=np.uint8)
        decoded = cv2.imdecode(np.frombuffer(encode_png(pixels, palette), np.uint8), cv2.IMREAD_COLOR)
        assert (decoded[..., ::-1] == palette[pixels]).all()


def test_boxes_fit_the_visible_pixels_and_stay_in_the_image():
    shapes = MovingShapes(videos=12, frames=40, seed=3)
    fully_seen = 0
    for number in range(shapes.videos):
        video = shapes.video(number)
        assert (video.boxes[:, :2] >= -1e-9).all() and (video.boxes[:, 2:] <= np.array([240, 180]) + 1e-9).all()
        assert ((video.cover >= 0) & (video.cover <= 8)).all()
        for frame in np.flatnonzero(video.cover == 8):
            target = (video.pixels[frame] == 12) | (video.pixels[frame] == 13)
            rows, columns = np.flatnonzero(target.any(1)), np.flatnonzero(target.any(0))
            around = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            if target.sum() > 0 and np.abs(around - video.boxes[frame]).max() <= 1.0:
                fully_seen += 1
    assert fully_seen > 0.75 * 12 * 40  # eighths are rounded up: some of cover 8 are touched by what passes above


def test_things_move_and_change_their_size_slowly():
    moved, grown = [], []
    for number in range(10):
        boxes = MovingShapes(frames=60, seed=5).video(number).boxes
        centers, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        moved.append(np.abs(np.diff(centers, axis=0)).max())
        grown.append(np.ptp(sides[:, 0]) / sides[0, 0])
        assert (np.abs(np.diff(np.log(sides), axis=0)) < 0.02).all()
    assert 2 < max(moved) <= 5.1 and np.median(grown) > 0.15  # px; a bounce adds half of the growth


def test_the_target_is_seen_whole_in_the_first_frame():
    shapes = MovingShapes(frames=1, seed=9)
    for number in range(40):
        video = shapes.video(number)
        around = np.isin(video.pixels[0], (12, 13))
        rows, columns = np.flatnonzero(around.any(1)), np.flatnonzero(around.any(0))
        corners = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert video.cover[0] == 8 and np.abs(corners - video.boxes[0]).max() <= 1


def test_videos_differ_and_repeat():
    shapes = MovingShapes(videos=3, frames=2)
    assert (shapes.video(1).pixels == shapes.video(1).pixels).all()
    assert not (shapes.video(1).pixels == shapes.video(2).pixels).all()
    assert not (MovingShapes(seed=1).video(1).palette == shapes.video(1).palette).all()


def test_the_demo_set_is_kept_mended_and_never_put_over_other_files(tmp_path):
    folder = make_shapes(tmp_path / "demo", train=(2, 2), val=(1, 3))
    marker = (folder / MARKER).stat().st_mtime_ns
    assert make_shapes(folder, train=(2, 2), val=(1, 3)) == folder and (folder / MARKER).stat().st_mtime_ns == marker
    (folder / "train" / "shapes_0001" / "00000002.png").unlink()
    make_shapes(folder, train=(2, 2), val=(1, 3))
    assert (folder / "train" / "shapes_0001" / "00000002.png").is_file()
    assert json.loads((folder / MARKER).read_text())["train"] == [2, 2]
    assert not list(tmp_path.glob("*.tmp"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="holds files that are not the generated videos"):
        make_shapes(tmp_path / "mine", train=(1, 1), val=(1, 1))
