"""Trains an experiment: ``python tools/train.py -f exps/ppyoloe_s.py --data DIR``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

if __name__ == "__main__":  # works from any folder, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loguru import logger

from mmdet.core.checkpoint import require_file
from mmdet.core.cli import Parser, add_exp_arguments, exp_from_arguments, exp_source, run_command
from mmdet.core.launch import relaunch, script_path
from mmdet.core.run import AUTO, RunOptions, read_record
from mmdet.core.trainer import Trainer
from mmdet.errors import UsageError
from mmdet.exp import Exp, get_exp
from mmdet.exp.fields import split_overrides
from mmdet.exp.load import exp_of_record


def make_parser() -> Parser:
    parser = Parser(prog="train.py", description="Train a detector. Fields of the exp are overridden by key=value words.")
    add_exp_arguments(parser)
    parser.add_argument("-c", "--ckpt", default="", help="fine-tune from this checkpoint")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE|RUN|auto",
        help="continue a run: a checkpoint file or run folder; without one the newest run of the exp; auto: also past damaged "
        "files, and a new run where there is none (for jobs that are stopped and started again)",
    )
    add_load_arguments(parser)
    parser.add_argument("-b", "--batch-size", type=int, help="images per step over all devices")
    parser.add_argument("--eval-batch-size", type=int, default=8, help="images per step in evaluation")
    parser.add_argument("-d", "--devices", type=int, default=1, help="processes, one per device")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], help="precision of the forward pass")
    parser.add_argument("--fp16", action="store_true", help="the same as --amp fp16")
    parser.add_argument("--data", help="COCO-format folder, or 'demo' for generated data")
    parser.add_argument("--demo", action="store_true", help="generated data and a schedule of minutes on two CPU cores")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data")
    parser.add_argument("--seed", type=int)
    parser.add_argument("-expn", "--experiment-name", default="", help="name of the run folder; default: a time stamp")
    parser.add_argument("--output", default="", help="run folders are made in OUTPUT/<exp>/")
    parser.add_argument(
        "--rerun", default="", metavar="RUN", help="a new run with the exp, values, data and seed of this run folder"
    )
    parser.add_argument(
        "--occupy", action="store_true", help="take the memory of the largest batch at the start and keep it (CUDA)"
    )
    parser.add_argument("--dry-run", action="store_true", help="build everything, do one step, write nothing")
    return parser


def add_load_arguments(parser: Parser) -> None:
    """What is taken of the file that -c names."""
    parser.add_argument("--raw", action="store_true", help="its raw weights, not their moving average (EMA)")
    parser.add_argument(
        "--load-map",
        action="append",
        default=[],
        metavar="PATTERN=REPLACEMENT",
        help="replace this regular expression in its tensors' names; can be given again",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave out tensors with this regular expression in their name; can be given again",
    )
    parser.add_argument(
        "--trust-checkpoint", action="store_true", help="read files that hold more than tensors: can run code in them"
    )


def check_numbers(args: argparse.Namespace) -> None:
    limits = (("--workers", args.workers, 0), ("--eval-batch-size", args.eval_batch_size, 1), ("-d", args.devices, 1))
    for flag, value, least in limits:
        if value < least:
            raise UsageError(f"{flag} {value}: expected at least {least}")


def build_exp(args: argparse.Namespace) -> Exp:
    """The exp with everything that flags and words say; flags and words are both the user's."""
    if args.data is not None and not args.data.strip():
        raise UsageError("--data '': expected a folder or 'demo'")
    named = args.resume not in (None, "", AUTO) and not exp_source(args)
    exp = get_exp(source_of_resumed(args)) if named else exp_from_arguments(args)
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
    words = dict(split_overrides(args.overrides))
    for name, value in flags.items():
        if value is not None:
            if name in words:
                raise UsageError(f"{name} is given twice, by a flag ({value}) and by {name}={words[name]}: leave one out")
            exp.set(name, value, "command line")
    exp.override(args.overrides)
    exp.validate()
    return exp


def source_of_resumed(args: argparse.Namespace) -> str:
    """The exp file of the run that --resume names, so that -f need not be given again."""
    path = Path(args.resume)
    try:
        return read_record(path if path.is_dir() else path.parent)["exp"]["file"]
    except UsageError as error:
        raise UsageError(f"--resume {path} without an exp: {error}. Give the run's exp with -f") from error


def options_of(args: argparse.Namespace, argv: list[str]) -> RunOptions:
    """What the flags say of the run itself."""
    resume, ckpt = args.resume, args.ckpt
    if resume == "" and ckpt:  # the lineage's spelling: --resume -c FILE
        resume, ckpt = ckpt, ""
    if resume and ckpt and resume != AUTO:  # auto starts from the weights where there is no run to go on with
        raise UsageError(f"--resume {resume} goes on with a run, -c {ckpt} starts a new one from its weights: give one of them")
    if ckpt:
        require_file(ckpt, "-c")
    patterns = [f"--load-map {word}" for word in args.load_map] + [f"--ignore {word}" for word in args.ignore]
    if resume not in (None, AUTO) and (args.raw or patterns):
        raise UsageError(f"--resume takes the whole state of a run: leave out {(patterns + ['--raw'])[0]}")
    if resume not in (None, "", AUTO) and args.output:
        logger.warning(f"--output {args.output} is not used: --resume {resume} goes on in the run's own folder")
    options = RunOptions(
        devices=args.devices,
        device=args.device,
        workers=args.workers,
        eval_batch_size=args.eval_batch_size,
        experiment_name=args.experiment_name,
        ckpt=ckpt,
        resume=resume,
        raw=args.raw,
        trust_checkpoint=args.trust_checkpoint,
        load_map=args.load_map,
        ignore=args.ignore,
        occupy=args.occupy,
        command=command_of(argv),
    )
    options.load_options()  # a wrong pattern stops here
    return options


def rerun_of(args: argparse.Namespace, argv: list[str]) -> tuple[Exp, RunOptions]:
    """The exp and the options of an earlier run, for a new one."""
    free = {"rerun", "experiment_name", "output", "dry_run", "data", "overrides"}
    defaults = vars(make_parser().parse_args([]))
    given = [f"--{name.replace('_', '-')}" for name, value in vars(args).items() if name not in free and value != defaults[name]]
    given += args.overrides
    if given:
        allowed = "-expn, --output, --dry-run, and --data for data that was moved"
        raise UsageError(f"--rerun repeats a run as it was: leave out {', '.join(given)} (allowed: {allowed})")
    record = read_record(args.rerun)
    exp = exp_of_record(record, f"rerun of {args.rerun}")
    if args.output:
        exp.set("output_dir", args.output, "command line")
    if args.data:
        exp.set("data_dir", args.data, "command line")
    options = RunOptions(**{**record["options"], "experiment_name": args.experiment_name, "command": command_of(argv)})
    return exp, options


def command_of(argv: list[str]) -> str:
    return shlex.join([Path(sys.argv[0]).name, *argv])


def run(argv: list[str]) -> int:
    args = make_parser().parse_intermixed_args(argv)
    if "=" in (args.resume or "") and not Path(args.resume).exists():  # argparse took the first field for the optional FILE
        args.overrides, args.resume = [args.resume, *args.overrides], ""
    check_numbers(args)
    exp, options = rerun_of(args, argv) if args.rerun else (build_exp(args), options_of(args, argv))
    code = relaunch(options.devices, script_path(), argv)
    if code is not None:
        return code
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
