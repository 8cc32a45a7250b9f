"""Trains an experiment: ``python tools/train.py -f exps/ppyoloe_s.py --data DIR``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

if __name__ == "__main__":  # works from any folder, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loguru import logger

from mmdet.core.cli import Parser, add_exp_arguments, exp_from_arguments, run_command
from mmdet.core.launch import relaunch, script_path
from mmdet.core.run import RunOptions
from mmdet.core.trainer import Trainer
from mmdet.errors import UsageError
from mmdet.exp import Exp


def make_parser() -> Parser:
    parser = Parser(prog="train.py", description="Train a detector. Fields of the exp are overridden by key=value words.")
    add_exp_arguments(parser)
    parser.add_argument("-c", "--ckpt", default="", help="fine-tune from this checkpoint")
    parser.add_argument(
        "--resume", nargs="?", const="", help="continue a run: a checkpoint file; without one the newest run of the exp"
    )
    parser.add_argument("-b", "--batch-size", type=int, help="images per step over all devices")
    parser.add_argument("--eval-batch-size", type=int, default=8, help="images per step in evaluation")
    parser.add_argument("-d", "--devices", type=int, default=1, help="processes, one per device")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], help="precision of the forward pass")
    parser.add_argument("--fp16", action="store_true", help="the same as --amp fp16")
    parser.add_argument("--data", default="", help="COCO-format folder, or 'demo' for generated data")
    parser.add_argument("--demo", action="store_true", help="generated data and a schedule of minutes on two CPU cores")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data")
    parser.add_argument("--seed", type=int)
    parser.add_argument("-expn", "--experiment-name", default="", help="name of the run folder; default: a time stamp")
    parser.add_argument("--output", default="", help="run folders are made in OUTPUT/<exp>/")
    parser.add_argument("--dry-run", action="store_true", help="build everything, do one step, write nothing")
    return parser


def build_exp(args) -> Exp:
    """The exp with everything that flags and words say; flags and words are both the user's."""
    exp = exp_from_arguments(args)
    if args.demo:
        for name, value in {"data_dir": "demo", **exp.demo_settings()}.items():
            exp.set(name, value, "--demo")
    if args.fp16 and args.amp not in (None, "fp16"):
        raise UsageError(f"--fp16 and --amp {args.amp} contradict each other")
    flags = {
        "batch_size": args.batch_size,
        "seed": args.seed,
        "amp": "fp16" if args.fp16 else args.amp,
        "data_dir": args.data or None,
        "output_dir": args.output or None,
    }
    for name, value in flags.items():
        if value is not None:
            exp.set(name, value, "command line")
    exp.override(args.overrides)
    exp.validate()
    return exp


def run(argv: list[str]) -> int:
    args = make_parser().parse_intermixed_args(argv)
    if args.workers < 0 or args.eval_batch_size < 1 or args.devices < 1:
        raise UsageError("--workers must be 0 or more, --eval-batch-size and --devices at least 1")
    exp = build_exp(args)
    if relaunch(args.devices, script_path(), argv):
        return 0
    resume, ckpt = args.resume, args.ckpt
    if resume == "" and ckpt:  # the lineage's spelling: --resume -c FILE
        resume, ckpt = ckpt, ""
    options = RunOptions(
        device=args.device,
        workers=args.workers,
        eval_batch_size=args.eval_batch_size,
        experiment_name=args.experiment_name,
        ckpt=ckpt,
        resume=resume,
        command=shlex.join([Path(sys.argv[0]).name, *argv]),
    )
    trainer = Trainer(exp, options)
    if args.dry_run:
        losses = trainer.dry_run()
        logger.info("dry run: one step done, nothing written. " + ", ".join(f"{k} {v:.4g}" for k, v in losses.items()))
        return 0
    trainer.train()
    return 0


def main() -> int:
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
