"""Judging a tracker on videos: the loop, its sharing among ranks, and the command line (``tools/eval.py``)."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from track_toy import COLOUR_EXP, ColourModel, red_frames, red_palette, write_red_videos

from mmdet.core.cli import run_command
from mmdet.core.run import versions
from mmdet.data.errors import DataError
from mmdet.exp import exp_state, get_exp
from mmdet.families.siamese.pictures import draw_tracks
from mmdet.families.siamese.readers import GOT10kFolder
from mmdet.families.siamese.shapes import encode_png, write_video
from mmdet.families.siamese.track_evaluator import METRICS, TrackEvaluator, reset_video, share_of, table, track_video
from mmdet.families.siamese.track_metrics import overlaps
from mmdet.families.siamese.track_results import save_got10k, save_otb
from mmdet.families.siamese.tracker import Tracker
from tools import eval as eval_tool


@pytest.fixture
def source(tmp_path):
    write_red_videos(tmp_path)
    return GOT10kFolder(tmp_path, "val")


def test_a_good_tracker_scores_high_and_a_video_of_one_frame_is_fine(source):
    evaluation = TrackEvaluator(source).evaluate(ColourModel())
    assert tuple(evaluation.metrics) == METRICS
    assert evaluation.metrics["AUC"] > 0.75 and evaluation.metrics["P20"] == 1 and evaluation.metrics["SR50"] == 1
    assert set(evaluation.per_class) == {"red_0", "red_1", "red_2"}
    assert evaluation.per_class["red_2"]["AUC"] == pytest.approx(20 / 21) and np.isnan(evaluation.per_class["red_2"]["AO"])
    assert len(draw_tracks(evaluation.samples)) == 1
    text = table(evaluation)
    assert "all videos" in text and "red_1" in text and f"{evaluation.metrics['AUC']:.4f}" in text


def test_the_model_is_left_as_it_was_and_works_without_gradients(source):
    model = ColourModel().train()
    model.norm.eval()  # as a frozen norm
    TrackEvaluator(source).evaluate(model)
    assert model.training and not model.norm.training
    assert set(model.calls) == {(False, False)}
    state = TrackEvaluator(source).evaluate(model)
    assert state.metrics["AUC"] > 0


def test_a_model_may_keep_tensors_that_it_made_in_an_evaluation(source):
    """So no inference mode here: a kept tensor must work in later training steps."""

    class Keeping(ColourModel):
        def search(self, state, searches):
            self.kept = searches.new_ones(1, dtype=torch.float32)
            return super().search(state, searches)

    model = Keeping()
    TrackEvaluator(source).evaluate(model)
    (model.kept * model.gain).sum().backward()


def test_float32_even_inside_an_autocast(source):
    class Watching(ColourModel):
        def search(self, state, searches):
            assert not torch.is_autocast_enabled("cpu")
            return super().search(state, searches)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        TrackEvaluator(source).evaluate(Watching())


def test_shares_are_disjoint_complete_and_balanced():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 500, 40).tolist()
    for world in (1, 2, 3, 7):
        shares = [share_of(range(40), lengths, rank, world) for rank in range(world)]
        assert sorted(sum(shares, [])) == list(range(40))
        loads = [sum(lengths[i] for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)
    assert share_of([4], [9], 1, 2) == []


def test_two_ranks_get_the_metrics_of_one(source, monkeypatch):
    """Both ranks in threads, with a gathering that waits for both."""
    alone = TrackEvaluator(source).evaluate(ColourModel())
    barrier, values = threading.Barrier(2), {}

    def gather(work):
        rank = int(threading.current_thread().name)
        values[rank] = work()
        barrier.wait(60)
        return [values[0], values[1]]

    monkeypatch.setattr("mmdet.families.siamese.track_evaluator.gather_from_ranks", gather)
    results = {}

    def run(rank):
        results[rank] = TrackEvaluator(source, rank=rank, world=2).evaluate(ColourModel())

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not set(values[0]) & set(values[1])
    for rank in range(2):
        assert results[rank].metrics == alone.metrics and results[rank].per_class.keys() == alone.per_class.keys()
    assert results[0].samples and not results[1].samples


def test_absent_and_missing_frames(tmp_path):
    boxes = write_red_videos(tmp_path, lengths=(12,))[0]
    folder = tmp_path / "val" / "red_0"
    (folder / "absence.label").write_text("\n".join(["0"] * 6 + ["1"] + ["0"] * 5))
    (folder / "00000004.png").unlink()
    source = GOT10kFolder(tmp_path, "val")
    evaluator = TrackEvaluator(source)
    evaluation = evaluator.evaluate(ColourModel())
    assert evaluation.metrics["AUC"] > 0.75
    track = evaluator.tracks["red_0"]
    assert (track.boxes[3] == track.boxes[2]).all() and len(track.boxes) == len(boxes)


def test_a_video_whose_target_comes_later_starts_there(tmp_path):
    boxes = write_red_videos(tmp_path, lengths=(12,))[0]
    (tmp_path / "val" / "red_0" / "absence.label").write_text("\n".join(["1", "1"] + ["0"] * 10))
    source = GOT10kFolder(tmp_path, "val")
    track = track_video(Tracker(ColourModel().eval()), source, 0)
    assert np.isnan(track.boxes[:2]).all() and overlaps(track.boxes[2:], boxes[2:]).min() > 0.7


def test_a_broken_frame_is_named(tmp_path):
    write_red_videos(tmp_path, lengths=(5,))
    (tmp_path / "val" / "red_0" / "00000003.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="00000003.png"):
        TrackEvaluator(GOT10kFolder(tmp_path, "val")).evaluate(ColourModel())


def test_a_limit_takes_videos_evenly(tmp_path):
    write_red_videos(tmp_path, lengths=(3,) * 6)
    evaluator = TrackEvaluator(GOT10kFolder(tmp_path, "val"), limit=3)
    assert evaluator.videos == [0, 2, 4] and evaluator.subject()["frames"] == 9


def test_results_in_the_forms_of_both_toolkits(source, tmp_path):
    evaluator = TrackEvaluator(source)
    evaluator.evaluate(ColourModel())
    save_got10k(evaluator.tracks, tmp_path / "results", "toy")
    save_otb(evaluator.tracks, tmp_path / "otb", "toy")
    place = tmp_path / "results" / "toy" / "red_1"
    rows = np.loadtxt(place / "red_1_001.txt", delimiter=",")
    track = evaluator.tracks["red_1"]
    assert rows.shape == (20, 4) and rows[:, :2] == pytest.approx(track.boxes[:, :2], abs=5e-5)
    assert rows[:, 2:] == pytest.approx(track.boxes[:, 2:] - track.boxes[:, :2], abs=5e-5)
    assert np.loadtxt(place / "red_1_time.txt").shape == (20,)
    assert (np.loadtxt(tmp_path / "otb" / "toy" / "red_1.txt", delimiter=",") == rows).all()


# -- the command line ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_red_videos(tmp_path / "data")
    write_red_videos(tmp_path / "data", lengths=(4,), split="train")
    Path("colours.py").write_text(COLOUR_EXP, encoding="utf-8")
    exp = get_exp("colours.py", ["data_dir=data"])
    about = {"exp": exp_state(exp), "overrides": [], "class_names": [], "versions": versions(), "step": 12}
    torch.save({"model": ColourModel().state_dict(), **about}, "best.pth")
    return tmp_path


def call(capsys, *words):
    code = run_command(eval_tool.run, [*map(str, words), "--device", "cpu"])
    out, err = capsys.readouterr()
    return code, out, err


def test_eval_judges_a_tracker(work, capsys):
    code, out, err = call(capsys, "-c", "best.pth", "--json", "m.json", "--save-tracks", "tracks")
    assert code == 0, err
    assert "judging the raw weights of step 12 of best.pth in float32 on cpu" in out and "3 videos, 33 frames" in out
    assert "all videos" in out and "AUC" in out
    saved = json.loads(Path("m.json").read_text())
    assert saved["metrics"]["AUC"] > 0.75 and saved["about"]["videos"] == 3 and saved["per_class"]["red_2"]["AO"] is None
    assert Path("tracks/got10k/colours/red_0/red_0_001.txt").is_file() and Path("tracks/otb/colours/red_0.txt").is_file()


def test_eval_without_a_checkpoint_and_on_other_data(work, capsys):
    write_red_videos(work / "other", lengths=(6, 6), split="test")
    code, out, err = call(capsys, "-f", "colours.py", "--data", "other", "--split", "test")
    assert code == 0 and "2 videos, 12 frames" in out and "freshly initialised" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-c", "best.pth", "--conf", "0.3"), "--conf 0.3: colours has no score_threshold"),
        (("-c", "best.pth", "--save-detections", "d.json"), "the evaluation of colours gives none"),
        (("-c", "best.pth", "--split", "absent"), "holds no videos of split 'absent'"),
        (("-c", "best.pth", "--data", "nowhere"), "data directory 'nowhere'"),
    ],
)
def test_eval_says_what_does_not_fit_a_tracker(work, capsys, words, message):
    code, _, err = call(capsys, *words)
    assert code == 2 and message in err.splitlines()[-1]


def test_runs_with_resets(tmp_path):
    """Red jumps away in frame 12 of 30: one failure there, a new start five frames later."""
    boxes = np.tile([20.0, 30, 44, 54], (30, 1))
    boxes[12:] += 60
    (tmp_path / "val").mkdir()
    images = [encode_png(frame, red_palette()) for frame in red_frames(boxes)]
    write_video(tmp_path / "val" / "jump", images, boxes, np.full(30, 8), (160, 120))
    (tmp_path / "val" / "list.txt").write_text("jump\n")
    source = GOT10kFolder(tmp_path, "val")
    run = reset_video(Tracker(ColourModel().eval()), source, 0)
    assert run.starts == [0, 17] and run.failures == [12]
    evaluation = TrackEvaluator(source, resets=True).evaluate(ColourModel())
    assert evaluation.metrics["failures"] == 1 and evaluation.metrics["accuracy"] > 0.8
    assert evaluation.metrics["failures_per_100"] == pytest.approx(100 / 30) and "failures 1.0000" in table(evaluation)
