"""Full trainings whose figures the documents quote: ``python tools/reproduce.py NAME`` (minutes to hours; by hand).

Prints date, machine, commands and figures, ready to be quoted.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Recipe:
    """``train`` and ``judge``: words behind tools/train.py and tools/eval.py, with ``{data}`` and ``{ckpt}`` from the flags."""

    what: str
    train: str
    judge: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    needs_data: bool = False
    needs_ckpt: bool = False
    judged: tuple[str, ...] = ("best.pth",)


_BCCD_SCRATCH = (
    "-b 8 recipe_batch_size=8 basic_lr_per_img=0.00125 clip_norm=5 input_size=320 test_size=320 multiscale=(0.8,1.2) "
    "max_epoch=15 warmup_epochs=1 static_assigner_epoch=3 eval_interval=1 random_crop=False expand_prob=0.25 channels_last=True"
)

_BCCD_FINE_TUNING = (
    "-b 16 input_size=320 test_size=320 multiscale=(1,1) max_epoch=20 warmup_epochs=1 no_aug_epochs=5 eval_interval=20 "
    "channels_last=True --workers 1"
)

RECIPES = {
    "demo": Recipe("the README's demo, from scratch", "-f exps/ppyoloe_s.py --demo", ("-b 1", "-b 5")),
    "bccd_yolox_nano": Recipe(
        "blood cells from COCO weights: 20 epochs at 320 px, the best and the last weights judged",
        f"-f exps/yolox_nano.py -c {{ckpt}} --data {{data}} {_BCCD_FINE_TUNING}",
        ("--data {data} --split val", "--data {data} --split test"),
        seeds=(0, 1),
        needs_data=True,
        needs_ckpt=True,
        judged=("best.pth", "last.pth"),
    ),
    "bccd_ppyoloe_s": Recipe(
        "blood cells from scratch: 205 photographs, 15 epochs at 320 px",
        f"-f exps/ppyoloe_s.py --data {{data}} {_BCCD_SCRATCH}",
        ("--data {data} --split val", "--data {data} --split test"),
        needs_data=True,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(RECIPES), help="; ".join(f"{k}: {r.what}" for k, r in sorted(RECIPES.items())))
    parser.add_argument("--data", default="", help="the data set, for recipes that need one")
    parser.add_argument("--ckpt", default="", help="the checkpoint to fine-tune from, for recipes that need one")
    parser.add_argument("--output", default="outputs/reproduce", help="where the runs go")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="other seeds than the recipe's own")
    args = parser.parse_args()
    recipe = RECIPES[args.name]
    if recipe.needs_data and not args.data:
        parser.error(f"{args.name} needs its data set: --data DIR")
    if recipe.needs_ckpt and not args.ckpt:
        parser.error(f"{args.name} fine-tunes: --ckpt FILE")
    say(f"{args.name}: {recipe.what}")
    say(f"{datetime.date.today()}, {platform.machine()}, python {platform.python_version()}, commit {commit()}")
    seeds = args.seeds or recipe.seeds
    runs = [reproduce(recipe, seed, args) for seed in seeds]
    for judged in runs[0]:
        say(summary(judged, [run[judged] for run in runs], seeds))
    return 0


def reproduce(recipe: Recipe, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One training; returns the AP of each thing that was judged."""
    output = Path(args.output).resolve() / args.name
    name = f"seed{seed}_{datetime.datetime.now():%Y%m%d_%H%M%S}"
    words = fill(recipe.train, args)
    start = time.perf_counter()
    run("train.py", [*words, "--seed", str(seed), "--output", str(output), "-expn", name])
    say(f"  trained in {(time.perf_counter() - start) / 60:.1f} minutes")
    run_dir = next(output.glob(f"*/{name}"))
    ap = {}
    for judge, file in itertools.product(recipe.judge, recipe.judged):
        report = run_dir / "judged.json"
        run("eval.py", ["-c", str(run_dir / file), *fill(judge, args), "--json", str(report)])
        metrics = json.loads(report.read_text(encoding="utf-8"))["metrics"]
        say(f"  AP {metrics['AP']:.4f}, AP50 {metrics['AP50']:.4f}, AP75 {metrics['AP75']:.4f}")
        ap[" ".join([file, *fill(judge, args)])] = metrics["AP"]
    return ap


def summary(judged: str, ap: list[float], seeds: Sequence[int]) -> str:
    each = ", ".join(f"{value:.4f}" for value in ap)
    spread = f", mean {statistics.mean(ap):.4f}, standard deviation {statistics.stdev(ap):.4f}" if len(ap) > 1 else ""
    return f"{judged}: AP {each} with --seed {', '.join(map(str, seeds))}{spread}"


def fill(line: str, args: argparse.Namespace) -> list[str]:
    return [word.replace("{data}", args.data).replace("{ckpt}", args.ckpt) for word in line.split()]


def run(script: str, words: list[str]) -> None:
    say(f"  $ python tools/{script} {' '.join(words)}")
    code = subprocess.run([sys.executable, str(ROOT / "tools" / script), *words], cwd=ROOT).returncode
    if code:  # it has said what was wrong
        sys.exit(code)


def commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
