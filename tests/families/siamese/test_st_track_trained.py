"""ST-21 with the tracker of ST-20: ``tools/track.py`` and ``tools/eval.py`` on a trained checkpoint, and the speed."""

import json
import statistics
import time

import cv2
import numpy as np
import pytest

from mmdet.core.cli import run_command
from mmdet.data.frames import VideoFile
from mmdet.families.siamese.shapes import MovingShapes
from mmdet.families.siamese.track_metrics import overlaps
from mmdet.families.siamese.tracker import Tracker
from mmdet.models.repvgg import deploy
from tools import eval as eval_tool
from tools import track as track_tool

pytestmark = pytest.mark.slow
CLIPS = MovingShapes(videos=4, frames=60, seed=4242)  # neither trained on nor judged with


def test_tracks_of_videos_and_frame_folders(trained_tiny, tmp_path):
    """N boxes for N frames, and mean IoU at least 0.5 over the clips."""
    found = []
    for number in range(CLIPS.videos):
        clip = CLIPS.video(number)
        place = tmp_path / (f"{number}.mp4" if number % 2 else f"frames{number}")
        if number % 2:
            video = VideoFile(place, 25)
            for frame in clip.frames():
                video.add(frame)
            video.close()
        else:
            place.mkdir()
            for index, frame in enumerate(clip.frames()):
                cv2.imwrite(str(place / f"{index:04d}.jpg"), frame[..., ::-1])
        x1, y1, x2, y2 = clip.boxes[0]
        target = ("--init", f"{x1},{y1},{x2 - x1},{y2 - y1}", "-c", str(trained_tiny.run_dir / "best.pth"))
        files = ("--save", str(tmp_path / f"out{number}.mp4"), "--json", str(tmp_path / f"{number}.json"))
        assert run_command(track_tool.run, [str(place), *target, *files, "--device", "cpu"]) == 0
        rows = np.array([f["box_xywh"] for f in json.loads((tmp_path / f"{number}.json").read_text())["frames"]])
        assert len(rows) == CLIPS.frames
        rows[:, 2:] += rows[:, :2]
        found.append(overlaps(rows, clip.boxes).mean())
    assert np.mean(found) >= 0.5, found


def test_eval_says_what_training_said(trained_tiny, tmp_path):
    """The logged metrics, from the checkpoint, with the demo data by name."""
    path = tmp_path / "m.json"
    words = ["-c", str(trained_tiny.run_dir / "weights.pth"), "--json", str(path), "--device", "cpu"]
    assert run_command(eval_tool.run, words) == 0
    lines = map(json.loads, (trained_tiny.run_dir / "metrics.jsonl").read_text().splitlines())
    logged = [line for line in lines if line["kind"] == "eval"][-1]["metrics"]
    assert json.loads(path.read_text())["metrics"] == pytest.approx(logged, abs=1e-6)


def test_at_least_40_frames_a_second(trained_tiny):
    """In the deployed form. The bound is for a core of one's own: the fastest of five passes is the least disturbed one."""
    clip = CLIPS.video(0)
    frames = list(clip.frames())
    model = deploy(trained_tiny.trainer.judged_model().eval())
    tracker, rates = Tracker(model.eval(), trained_tiny.exp.tracker_settings()), []
    for _ in range(5):
        state = tracker.start(frames[0], clip.boxes[0])
        begin = time.perf_counter()
        for frame in frames[1:]:
            state = tracker.follow(state, frame)
        rates.append((len(frames) - 1) / (time.perf_counter() - begin))
    assert max(rates) >= 40, f"median {statistics.median(rates):.1f}"
