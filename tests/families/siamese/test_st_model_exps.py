"""The two shipped exps: they train a step and track, without images that hold a target too."""

import pytest
import torch

from mmdet.data.structures import LossOutput
from mmdet.exp import get_exp
from mmdet.families.siamese.structures import PairBatch, PairSample, collate_pairs

NAMES = ("siamese_tiny", "siamese_repvgg_a0")


def batch_of(exp, positive=(True, False), epoch=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = (
        torch.randint(0, 256, (2, 3, n, n), dtype=torch.uint8, generator=generator) for n in (exp.exemplar_size, exp.search_size)
    )
    middle = torch.tensor([3 / 8, 3 / 8, 5 / 8, 5 / 8]) * exp.search_size
    others = torch.tensor([[1.0, 1, 40, 30]]).repeat(2, 1, 1)
    return PairBatch(*images, middle.repeat(2, 1), torch.tensor(positive), others, others[..., 0] > 0, ["a", "b"], epoch=epoch)


@pytest.fixture(params=NAMES)
def exp(request):
    words = ["exemplar_size=64", "search_size=128", "channels=32"] if request.param == "siamese_repvgg_a0" else []
    return get_exp(request.param, words)


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("positive", [(True, False), (False, False)])
def test_it_trains(exp, positive, amp):
    torch.manual_seed(0)
    model = exp.get_model().train()
    optimizer = exp.get_optimizer(model)
    grouped = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == len(list(model.parameters()))
    for epoch in (0, exp.self_epoch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp == "bf16"):
            out = model(batch_of(exp, positive, epoch))
        assert isinstance(out, LossOutput) and out.total.shape == () and out.total.dtype == torch.float32
        assert all(v.shape == () and v.isfinite() for v in {**out.losses, **out.stats}.values())
        assert out.losses["loss_neg"] > 0 and (any(positive) or out.losses["loss_iou"] == out.losses["loss_pos"] == 0)
        model.zero_grad()
        out.total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    exp.get_parallel().clip(model)
    optimizer.step()


def test_it_tracks(exp):
    """What the tracker asks of a model, with the promised shapes."""
    torch.manual_seed(0)
    model = exp.get_model().eval()
    batch, points = batch_of(exp), exp.search_size // 8
    with torch.no_grad():
        state = model.encode_template(batch.templates)
        score, ltrb = model.search(state, batch.searches)
        again = model(batch)
        one = model.search(state[:1], batch.searches)
    assert score.shape == (2, points, points) and ltrb.shape == (2, 4, points, points)
    assert score.dtype == ltrb.dtype == torch.float32 and score.min() >= 0 and score.max() <= 1 and ltrb.min() > 0
    assert torch.equal(again[0], score) and torch.equal(again[1], ltrb)
    torch.testing.assert_close(one[0][0], score[0], rtol=1e-4, atol=1e-5)
    assert (model.exemplar_size, model.search_size, model.stride) == (exp.exemplar_size, exp.search_size, 8)


def test_the_recipe():
    exp = get_exp("siamese_repvgg_a0")
    assert (exp.max_epoch, exp.self_epoch, exp.batch_size, exp.exemplar_size, exp.search_size) == (40, 32, 8, 128, 256)
    assert exp.learning_rate == pytest.approx(1e-4) and exp.clip_norm == 10 and exp.best_metric == "AUC" and not exp.ema


def test_largest_batch_and_pictures_of_operations(exp):
    batch = exp.largest_batch(type("Loader", (), {"world": 2}))
    assert len(batch) == exp.batch_size // 2 and batch.facts()["images"] == exp.batch_size // 2
    with torch.device("meta"):
        model = exp.get_model()
    forward, text = exp.summary_input()
    assert forward(model.eval())[1].shape[1] == 4 and str(exp.search_size) in text


# -- batches ------------------------------------------------------------------------------------------------------------------


def sample_of(value, distractors=0, position=-1):
    import numpy as np

    image = np.full((8, 8, 3), value, np.uint8)
    image[0, 1] = (1, 2, 3)
    return PairSample(image, image.repeat(2, 0).repeat(2, 1), np.arange(4), True, np.ones((distractors, 4)), f"{value}", position)


def test_pairs_are_collated_contiguously():
    batch = collate_pairs([sample_of(7), sample_of(9, 2)], epoch=3, step=5)
    assert batch.templates.is_contiguous() and batch.searches.is_contiguous() and batch.templates.dtype == torch.uint8
    assert batch.templates.shape == (2, 3, 8, 8) and batch.searches.shape == (2, 3, 16, 16)
    assert batch.templates[0, :, 0, 1].tolist() == [1, 2, 3] and batch.templates[1, 0, 5, 5] == 9
    assert batch.distractors.shape == (2, 2, 4) and batch.distractor_valid.tolist() == [[False, False], [True, True]]
    assert batch.positions.tolist() == [0, 1] and (batch.epoch, batch.step) == (3, 5) and batch.image_ids == ["7", "9"]
    assert collate_pairs([sample_of(1, position=11)]).positions.tolist() == [11]
    assert batch.facts() == {"size": "16x16", "images": 2}


def test_parts_of_a_batch():
    batch = collate_pairs([sample_of(i, i % 3) for i in range(4)])
    first, second = batch.split(2)
    assert second.positions.tolist() == [2, 3] and second.image_ids == ["2", "3"] and len(first) == 2
    assert second.distractors.shape == (2, 2, 4) and torch.equal(second.searches, batch.searches[2:])
    with pytest.raises(ValueError, match="4 pairs cannot be split into 3"):
        batch.split(3)


def test_wrong_batches_are_refused():
    with pytest.raises(ValueError, match="at least one pair"):
        collate_pairs([])
    other = sample_of(2)
    other.template = other.template[:4]
    with pytest.raises(ValueError, match=r"the template of pair '2' is uint8 \(4, 8, 3\)"):
        collate_pairs([sample_of(1), other])
    with pytest.raises(ValueError, match=r"templates must be \(B, 3"):
        PairBatch(torch.zeros(1, 4, 4), *[torch.zeros(1, 3, 4, 4)] * 5, [""])
