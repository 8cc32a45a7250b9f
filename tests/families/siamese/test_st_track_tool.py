"""``tools/track.py`` on generated videos and frame folders (ST-21): its files, and its errors."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from track_toy import COLOUR_EXP, ColourModel, red_frames, red_palette, straight_boxes

from mmdet.core.cli import run_command
from mmdet.core.run import versions
from mmdet.data.errors import DataError
from mmdet.data.frames import FrameReader, VideoFile
from mmdet.exp import exp_state, get_exp
from mmdet.families.siamese.track_metrics import overlaps
from tools import track as track_tool

FRAMES = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A video and a folder of the same frames, a checkpoint, and a video of one frame."""
    root = tmp_path_factory.mktemp("track")
    (root / "colours.py").write_text(COLOUR_EXP, encoding="utf-8")
    exp = get_exp(root / "colours.py")
    about = {"exp": exp_state(exp), "overrides": [], "class_names": [], "versions": versions(), "step": 12}
    torch.save({"model": ColourModel().state_dict(), **about}, root / "best.pth")
    boxes = straight_boxes(FRAMES)
    frames = [red_palette()[frame] for frame in red_frames(boxes)]
    video, single = VideoFile(root / "in.mp4", 30), VideoFile(root / "one.mp4", 30)
    (root / "frames").mkdir()
    for number, frame in enumerate(frames):
        video.add(frame)
        cv2.imwrite(str(root / "frames" / f"{number + 1}.png"), frame[..., ::-1])  # 10.png sorts before 2.png as text
    single.add(frames[0])
    video.close()
    single.close()
    return root, boxes


@pytest.fixture
def work(made, monkeypatch, tmp_path):
    monkeypatch.chdir(made[0])
    return tmp_path


def call(capsys, *words):
    code = run_command(track_tool.run, [*map(str, words), "--device", "cpu"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("video", ["in.mp4", "frames"])
def test_a_box_for_every_frame(made, work, capsys, video):
    target = ("--init", "20,30,24,24", "-c", "best.pth")
    code, err = call(capsys, video, *target, "--save", work / "out.mp4", "--json", work / "boxes.json")
    assert code == 0, err
    saved = json.loads((work / "boxes.json").read_text())
    rows = np.array([frame["box_xywh"] for frame in saved["frames"]])
    assert len(rows) == FRAMES and saved["size"] == [160, 120] and saved["weights"] == "deployed raw"
    rows[:, 2:] += rows[:, :2]
    assert overlaps(rows, made[1]).mean() > 0.75 and all(0 <= frame["score"] <= 1 for frame in saved["frames"])
    shown = list(FrameReader(work / "out.mp4"))
    assert len(shown) == FRAMES and shown[0].shape == (120, 160, 3)
    assert np.abs(shown[5].astype(int) - list(FrameReader("in.mp4"))[5]).max() > 60  # a box was drawn


def test_a_video_of_one_frame(made, work, capsys):
    code, err = call(capsys, "one.mp4", "--init", "20,30,24,24", "-c", "best.pth", "--json", work / "boxes.json")
    assert code == 0, err
    frames = json.loads((work / "boxes.json").read_text())["frames"]
    assert [f["box_xywh"] for f in frames] == [[20, 30, 24, 24]]


TARGET = ("--init", "20,30,24,24", "-c", "best.pth")
ERRORS = [
    (("absent.mp4", *TARGET), "no such file or folder: absent.mp4"),
    (("colours.py", *TARGET), "video colours.py cannot be read"),
    (("empty", *TARGET), "folder empty holds no image"),
    (("in.mp4", "--init", "500,30,24,24", "-c", "best.pth"), "no area inside the first frame of 160x120 px"),
    (("in.mp4", "--init", "20,30,0,24", "-c", "best.pth"), "no area inside the first frame"),
    (("in.mp4", "--init", "20,30,24", "-c", "best.pth"), "expected four numbers X,Y,W,H"),
    (("in.mp4", "--init", "a,b,c,d", "-c", "best.pth"), "expected four numbers X,Y,W,H"),
    (("in.mp4", "-c", "best.pth"), "with --init X,Y,W,H, or with --select"),
    (("in.mp4", *TARGET, "--select"), "with --init X,Y,W,H, or with --select"),
    (("in.mp4", "--select", "-c", "best.pth"), "there is no screen here"),
    (("in.mp4", "--init", "20,30,24,24", "-c", "absent.pth"), "absent.pth"),
    (("in.mp4", *TARGET, "--save", "out.gif"), "ends in .mp4 or .avi"),
    (("in.mp4", *TARGET, "--save", "in.mp4"), "would overwrite the video"),
    (("in.mp4", *TARGET, "--json", "nowhere/b.json"), "the folder 'nowhere' does not exist"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_are_named(made, work, capsys, monkeypatch, words, message):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    Path("empty").mkdir(exist_ok=True)
    code, err = call(capsys, *words)
    assert code == 2 and message in err.splitlines()[-1]


def test_a_detectors_checkpoint_is_refused(made, work, capsys):
    exp = get_exp("yolox_nano")
    about = {"exp": exp_state(exp), "overrides": [], "class_names": [], "versions": versions(), "step": 1}
    torch.save({"model": {"x": torch.zeros(1)}, **about}, work / "detector.pth")
    code, err = call(capsys, "in.mp4", "--init", "20,30,24,24", "-c", work / "detector.pth")
    assert code == 2 and "yolox_nano is no tracker" in err.splitlines()[-1]


def test_an_exp_that_is_no_tracker_is_refused(made, work, capsys):
    code, err = call(capsys, "in.mp4", *TARGET, "-n", "yolox_nano")
    assert code == 2 and "-f yolox_nano: yolox_nano is no tracker" in err.splitlines()[-1]


def test_a_target_may_begin_left_of_the_frame(made, work, capsys):
    for words in (("--init", "-5,30,24,24"), ("--init=-5,30,24,24",)):
        code, err = call(capsys, "one.mp4", *words, "-c", "best.pth", "--json", work / "boxes.json")
        assert code == 0, err
    assert call(capsys, "one.mp4", "--init", "-c", "best.pth")[0] == 2


def test_frames_of_several_sizes_make_no_video(made, work, capsys):
    (work / "mixed").mkdir()
    for number, height in enumerate((120, 120, 60), start=1):
        cv2.imwrite(str(work / "mixed" / f"{number}.png"), np.full((height, 160, 3), 90, np.uint8))
    code, err = call(capsys, work / "mixed", *TARGET, "--save", work / "out.mp4")
    assert code == 2 and "frame 3" in err and "160x60 px, those before it 160x120" in err.splitlines()[-1]
    code, err = call(capsys, work / "mixed", *TARGET, "--json", work / "boxes.json")
    assert code == 0, err


def test_a_broken_image_of_a_folder_is_named(tmp_path):
    cv2.imwrite(str(tmp_path / "1.png"), np.zeros((8, 8, 3), np.uint8))
    (tmp_path / "2.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="2.png"):
        list(FrameReader(tmp_path))


def test_frames_of_another_size_do_not_fit_into_a_video(tmp_path):
    video = VideoFile(tmp_path / "v.avi", 10)
    video.add(np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="does not fit"):
        video.add(np.zeros((32, 48, 3), np.uint8))
    video.close()
