"""One, two and four processes do the same mathematics: same images, same assignments, same weights.

Batch norms are frozen (each process has its own batch statistics on the CPU), everything else is the recipe: initialisation,
augmentation, sizes, SGD with momentum, clipping, average, weak-augmentation epochs and change of assigner.
"""

import pytest
from dist import run_ranks
from dist_train import BATCH, EPOCHS, IMAGES, distance, make_data, run_many

BOUNDS = {True: 1e-12, False: 5e-5}  # largest difference of any weight: float64, float32
STEPS = 3  # of an epoch
PPYOLOE = {"name": "ppyoloe_s"}
# Without normalisation by batch this net's first layer is so steep that at its recipe's rate a difference of one rounding grows
# fifty-fold in each step. So: norms as they are made; or settled ones, a tenth of the rate and float64.
YOLOX = {"name": "yolox_nano", "settled": False}
YOLOX_SETTLED = {"name": "yolox_nano", "words": (f"basic_lr_per_img={0.001 / 64}",)}


def train_on(ranks, folder, jobs):
    """The results of ``jobs``, each a list by rank."""
    limit = 900 if len(jobs) > 1 else 300
    results = run_ranks(ranks, run_many, limit, [{**job, "folder": str(folder / f"{ranks}_{i}")} for i, job in enumerate(jobs)])
    return list(zip(*results))


def prepare(folder, ranks, jobs):
    for n in ranks:
        for i in range(len(jobs)):
            (folder / f"{n}_{i}").mkdir()
            (folder / f"{n}_{i}" / "data").symlink_to(folder / "data")
    make_data(folder / "data")


def rows_of(by_rank):
    """(step, position) -> (image, its pixels, its assignment), over ranks that must not share any."""
    merged = {}
    for result in by_rank:
        assert not merged.keys() & result["rows"].keys()
        merged |= result["rows"]
    return merged


def assert_same(alone, by_rank, bound):
    """``alone`` (one process) against the results of several, by rank."""
    one = alone[0]
    rows, expected = rows_of(by_rank), one["rows"]
    assert {k: v[:2] for k, v in rows.items()} == {k: v[:2] for k, v in expected.items()}, "other images"
    different = [k for k in expected if rows[k][2] != expected[k][2]]
    assert not different, f"other assignments at (step, position) {different}"
    for result in by_rank:
        assert (result["steps"], result["updates"]) == (one["steps"], one["updates"])
        for key in ("start", "model", "ema"):
            assert distance(result[key], by_rank[0][key]) == 0, "ranks differ"
    assert distance(by_rank[0]["start"], one["start"]) == 0
    assert distance(by_rank[0]["model"], one["model"]) <= bound
    assert distance(by_rank[0]["ema"], one["ema"]) <= bound


def assert_epochs_complete(rows, epochs):
    """Every image once an epoch, then those that complete the last batch."""
    for epoch in range(epochs):
        ids = [rows[epoch * STEPS + i // BATCH, i % BATCH][0] for i in range(STEPS * BATCH)]
        assert sorted(ids[:IMAGES]) == list(range(1, IMAGES + 1))
        assert len(set(ids[IMAGES:])) == STEPS * BATCH - IMAGES


def compare(folder, jobs, ranks, epochs):
    prepare(folder, (1, *ranks), jobs)
    alone = train_on(1, folder, jobs)
    for one in alone:
        assert one[0]["steps"] == epochs * STEPS and one[0]["updates"] == epochs * STEPS
        assert distance(one[0]["start"], one[0]["model"]) > 1e-4  # it did learn
        assert_epochs_complete(one[0]["rows"], epochs)
    for n in ranks:
        several = train_on(n, folder, jobs)
        for job, one, by_rank in zip(jobs, alone, several, strict=True):
            assert_same(one, by_rank, BOUNDS[job["double"]])
        idle = any(0 in result["positives"] for by_rank in several for result in by_rank)
        assert idle or "yolox" not in jobs[0]["name"]  # a rank without any positive


def test_two_processes_are_one(tmp_path):
    """Six steps, small."""
    words = ("max_epoch=2", "eval_interval=2", "no_aug_epochs=1", "input_size=64", "multiscale=(1,1)")
    compare(tmp_path, [{**YOLOX, "words": words, "double": True}], (2,), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "doubles"),
    [(PPYOLOE, (True, False)), (YOLOX, (True, False)), (YOLOX_SETTLED, (True,))],
    ids=["ppyoloe_s", "yolox_nano", "yolox_nano_settled"],
)
def test_two_and_four_processes_are_one(tmp_path, job, doubles):
    compare(tmp_path, [{**job, "double": double} for double in doubles], (2, 4), EPOCHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcos_r50", "ppyolo_r18vd"])
def test_so_are_they_for_the_other_families(tmp_path, name):
    words = ("max_epoch=3", "eval_interval=3", "milestones=(2,)")
    compare(tmp_path, [{"name": name, "words": words, "double": True}], (2,), 3)


@pytest.mark.slow
@pytest.mark.parametrize("double", [True, False])
def test_resumed_with_other_numbers_of_processes(tmp_path, double):
    """Four processes, then two, one, and four again; each but the last ends inside an epoch, after the step that it saved."""
    job = {**YOLOX, "double": double, "words": ("save_interval_steps=2",)}
    prepare(tmp_path, (1,), [job])
    alone = train_on(1, tmp_path, [job])[0]
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "data").symlink_to(tmp_path / "data")
    rows, first = {}, 0
    for ranks, stop_at, saved in ((4, 5, 4), (2, 9, 8), (1, 12, 11), (4, 0, 0)):
        words = ("save_interval_steps=2",) if saved != 11 else ("save_interval_steps=1",)
        resume = "" if first else None
        part = {**job, "words": words, "folder": str(cut), "resume": resume, "stop_at": stop_at}
        by_rank = [answer[0] for answer in run_ranks(ranks, run_many, 300, [part])]
        assert all(result["first"] == first for result in by_rank)
        for key, row in rows_of(by_rank).items():
            assert rows.setdefault(key, row) == row  # a step that is done again
        first = saved
    assert rows == alone[0]["rows"]
    assert by_rank[0]["steps"] == alone[0]["steps"]
    for key in ("model", "ema"):
        assert distance(by_rank[0][key], alone[0][key]) <= BOUNDS[double]
        assert all(distance(by_rank[0][key], result[key]) == 0 for result in by_rank)
