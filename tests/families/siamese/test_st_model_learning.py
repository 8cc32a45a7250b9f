"""ST-20: the smallest tracker learns to follow shapes that it has never seen, in 300 iterations on one thread."""

import numpy as np
import pytest
import torch
from loguru import logger

from mmdet.families.siamese.track_metrics import one_pass
from mmdet.models.repvgg import deploy

STEPS = 300


def static_auc(source) -> float:
    """Of a tracker that never moves its first box."""
    values = []
    for index in range(len(source)):
        video = source.video(index)
        first = video.boxes[int(np.argmax(video.present))]
        values.append(one_pass(np.tile(first, (len(video), 1)), video.boxes, video.present).auc)
    return float(np.mean(values))


@pytest.mark.slow
def test_300_iterations_teach_to_follow(trained_tiny):
    """AUC at least 0.40 and three times that of a box that stays, P20 at least 0.70, on ten unseen clips. The deployed form says
    the same of every crop; over a whole clip rounding may still tip the scales between two peaks."""
    exp, trainer = trained_tiny.exp, trained_tiny.trainer
    assert trainer.total_steps == STEPS
    logger.info("{:.0f} s, {:.0f} s of this process, evaluation included".format(*trained_tiny.seconds))
    model, evaluator = trainer.judged_model(), trainer.evaluator
    metrics = evaluator.evaluate(model).metrics
    source = exp.sources("val")[0]
    static = static_auc(source)
    seconds = np.concatenate([track.seconds[1:] for track in evaluator.tracks.values()])
    logger.info(f"{metrics}; static box {static:.3f}; {1 / np.median(seconds):.0f} frames/s in training form")
    deployed = evaluator.evaluate(deploy(model)).metrics
    seconds = np.concatenate([track.seconds[1:] for track in evaluator.tracks.values()])
    logger.info(f"deployed: {deployed}; {1 / np.median(seconds):.0f} frames/s")
    assert len(source) == 10 and metrics["AUC"] >= 0.40 and metrics["P20"] >= 0.70 and metrics["AUC"] >= 3 * static
    assert abs(deployed["AUC"] - metrics["AUC"]) <= 0.05
    batch = next(exp.fixed_pairs().batches(16))
    with torch.no_grad():
        pairs = zip(model.eval()(batch), deploy(model)(batch), strict=True)
        assert all((a - b).abs().max() <= 1e-4 * a.abs().max() for a, b in pairs)
