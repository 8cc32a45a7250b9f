"""Sampling of an epoch: ST-12."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmdet.families.siamese.pairs import FixedPairs, PairPipeline, PairSettings
from mmdet.families.siamese.readers import GOT10kFolder
from mmdet.families.siamese.sampler import EpochPairSampler, PairSource, pair_loader
from mmdet.families.siamese.shapes import MovingShapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("videos")
    for name, videos in (("first", 5), ("second", 3)):
        MovingShapes(videos=videos, frames=6, size=(120, 90), seed=videos).write(root / name / "train")
    return root


@pytest.fixture
def source(folder):
    first = GOT10kFolder(folder / "first", "train", pairs_per_epoch=12, template="mix")
    return PairSource([first, GOT10kFolder(folder / "second", "train", pairs_per_epoch=7)])


def loader(source, workers=0, rank=0, world=1, **seeds):
    return pair_loader(source, PairPipeline(PairSettings(64, 128)), 4, workers, rank, world, **seeds)


def tensors(batch):
    return (batch.templates, batch.searches, batch.boxes, batch.positive, batch.distractors, batch.positions)


def assert_same(one, other):
    assert one.image_ids == other.image_ids and one.epoch == other.epoch and one.step == other.step
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def take(stream, count):
    return [next(stream) for _ in range(count)]


def test_every_epoch_has_exactly_each_data_sets_quota(source):
    sampler = EpochPairSampler(source, seed=3)
    orders = [sampler.order(epoch, 20) for epoch in range(4)]
    for order in orders:
        epoch = order[:19]
        assert (np.isin(epoch, source.members(0)).sum(), np.isin(epoch, source.members(1)).sum()) == (12, 7)
        counts = np.bincount(epoch, minlength=8)
        # Without replacement as far as there are videos: 12 of 5 are each twice or three times, 7 of 3 likewise.
        assert set(counts[:5]) <= {2, 3} and set(counts[5:]) <= {2, 3}
    assert not (orders[0] == orders[1]).all()


def test_the_epoch_does_not_depend_on_how_much_is_asked_for(source):
    sampler = EpochPairSampler(source, seed=3)
    assert (sampler.order(2, 60)[:19] == sampler.order(2, 19)).all()


def test_seeds_change_the_order(source):
    order = EpochPairSampler(source, seed=3).order(0, 19)
    assert not (order == EpochPairSampler(source, seed=4).order(0, 19)).all()
    assert not (order == EpochPairSampler(source, seed=3, data_seed=1).order(0, 19)).all()


ROOT = Path(__file__).resolve().parents[3]  # where the package lies when it is not installed


def test_an_epoch_is_the_same_in_a_fresh_process(source, folder):
    code = (
        "import sys; from mmdet.families.siamese.readers import GOT10kFolder\n"
        "from mmdet.families.siamese.sampler import EpochPairSampler, PairSource\n"
        f"a = GOT10kFolder({str(folder / 'first')!r}, 'train', pairs_per_epoch=12)\n"
        f"b = GOT10kFolder({str(folder / 'second')!r}, 'train', pairs_per_epoch=7)\n"
        "print(EpochPairSampler(PairSource([a, b]), seed=3).order(5, 19).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(EpochPairSampler(source, seed=3).order(5, 19).tolist())


def test_two_ranks_share_the_epoch(source):
    whole = [pair for batch in take(loader(source).batches(0), 5) for pair in zip(batch.image_ids, batch.positions.tolist())]
    shares = [take(loader(source, rank=rank, world=2).batches(0), 5) for rank in range(2)]
    halves = [[p for b in share for p in zip(b.image_ids, b.positions.tolist())] for share in shares]
    assert not {p for _, p in halves[0]} & {p for _, p in halves[1]}
    assert sorted(halves[0] + halves[1], key=lambda p: p[1]) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_batches_with_and_without_workers(source, workers):
    other = loader(source, workers=workers)
    try:
        for one, two in zip(take(loader(source).batches(0), 6), take(other.batches(0), 6), strict=True):
            assert_same(one, two)
    finally:
        other.close()


def test_the_same_batches_after_a_resume_across_the_epochs_border(source):
    straight = take(loader(source).batches(0), 9)
    assert_same(straight[7], next(loader(source).batches(7)))
    assert straight[4].epoch == 0 and straight[5].epoch == 1


def test_another_data_seed_gives_other_pairs(source):
    one, other = next(loader(source).batches(0)), next(loader(source, data_seed=1).batches(0))
    assert one.image_ids != other.image_ids


def test_positions_are_those_of_the_epoch(source):
    batches = take(loader(source).batches(0), 6)
    assert [b.positions.tolist() for b in batches] == [list(range(4 * i, 4 * i + 4)) for i in range(5)] + [[0, 1, 2, 3]]


def test_templates_come_from_where_the_options_say(folder):
    rng = np.random.default_rng(0)
    for template, share in (("init", 1.0), ("all", 1 / 6), ("mix", 0.5 + 0.5 / 6)):
        source = PairSource([GOT10kFolder(folder / "first", "train", template=template, mix_prob=0.5)])
        clear = [i for i in range(source.num_videos) if (source.video(i)[1].cover >= 5).all()]
        drawn = [source.draw_frames(rng, clear[0]).template == 0 for _ in range(3000)]
        assert np.mean(drawn) == pytest.approx(share, abs=0.04)


def test_templates_show_most_of_the_target(folder):
    path = folder / "first" / "train" / "shapes_0000" / "cover.label"
    before = path.read_text()
    path.write_text("2\n8\n4\n5\n1\n1\n")
    try:
        source = PairSource([GOT10kFolder(folder / "first", "train", template="init")])
        assert source.draw_frames(np.random.default_rng(0), 0).template == 1
        source.sources[0].options.template = "all"
        drawn = {source.draw_frames(np.random.default_rng(i), 0).template for i in range(50)}
        assert drawn == {1, 3}
    finally:
        path.write_text(before)


def test_fixed_pairs_are_always_the_same_and_shared_by_ranks(source):
    pairs = FixedPairs(source, PairSettings(64, 128), 10)
    whole = list(pairs.batches(10))
    assert len(whole) == 1 and len(whole[0]) == 10
    again = FixedPairs(source, PairSettings(64, 128), 10)
    assert_same(whole[0], next(again.batches(10)))
    names = [name for rank in range(3) for batch in pairs.batches(2, rank, 3) for name in batch.image_ids]
    assert sorted(names) == sorted(whole[0].image_ids)
