"""Going on with a run: the file is found and read before anything is built, and its state restored at the end.

Between the two stands :mod:`mmdet.core.continuation`, which refuses whatever would not be the same run. Which file it is, rank 0
decides for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from mmdet.core import run
from mmdet.core.continuation import LOCAL, check_continuation
from mmdet.core.distributed import all_gather_objects, broadcast_object, get_rank, get_world_size
from mmdet.core.entries import OPTIONAL, TRAINING, check_entries, is_count
from mmdet.core.failure import compute_on_main, gather_from_ranks
from mmdet.core.files import read_checkpoint, read_heading
from mmdet.core.guard import first_non_finite, named_tensors
from mmdet.core.lock import RunLock
from mmdet.errors import CheckpointError, UsageError
from mmdet.exp.base import Exp

if TYPE_CHECKING:
    from mmdet.core.trainer import Trainer

_FULL_STATE = ("model", "optimizer", "epoch", "step")
Print = tuple[int, int]  # size, time of the last change in ns


@dataclass(frozen=True)
class Choice:
    """What rank 0 chose to go on from."""

    path: Path
    fingerprint: Print
    newer: tuple[Path, ...]  # checkpoints of later steps, which the user leaves aside by naming an earlier one
    folder: dict[Path, Print]  # all checkpoints of the run folder when they were looked at


@dataclass(frozen=True)
class Resumption:
    """A checkpoint to go on from; its entries have been checked."""

    path: Path
    saved: dict[str, Any]
    choice: Choice

    @property
    def is_last(self) -> bool:
        """Whether this is what the run saved last, so that the next save keeps it as the epoch before."""
        return self.path.name == "last.pth"

    @property
    def is_step_back(self) -> bool:
        """Whether the best of the run folder is left aside too, since it came later."""
        return any(path.name == "best.pth" for path in self.choice.newer)


def open_resume(exp: Exp, options: run.RunOptions) -> Resumption | None:
    """The checkpoint that ``options`` name; None when no resume is asked for, or ``auto`` finds nothing. Gives the exp the values
    of the run's command line.

    Only ``auto`` takes an earlier checkpoint in place of a damaged one, and names both in the log. All ranks call it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is another exp's.
        UsageError: the run is alive.
    """
    if options.resume is None:
        return None
    found: dict[str, Any] = {}

    def choose() -> Choice | None:
        choice, found["saved"] = _choose(exp, options)
        return choice

    choice = compute_on_main(choose)
    if choice is None:
        logger.info(f"--resume auto: no checkpoint in {_auto_place(exp, options)}: a fresh start")
        return None
    found = Resumption(choice.path, _read_on_all(choice, found.get("saved"), options.trust_checkpoint), choice)
    name = found.saved["exp"]["name"]
    if name != exp.exp_name:
        raise CheckpointError(
            f"--resume {found.path}: the file was made by exp {name!r}, this is {exp.exp_name!r}. Give that run's exp with -f, "
            f"or fine-tune from its weights with -c {found.path}"
        )
    _adopt_values(exp, found)
    return found


def read_full_state(path: Path, trust: bool = False) -> dict[str, Any]:
    """The content of a file that can be resumed, every entry of the right type, every tensor finite.

    Raises:
        CheckpointError: the file cannot be read, holds weights only, or an entry is not what it must be.
    """
    saved = read_checkpoint(path, trust)
    lacking = [key for key in _FULL_STATE if key not in saved]
    if lacking:
        raise CheckpointError(
            f"--resume {path}: the file has no {', '.join(lacking)}, it holds weights only. Fine-tune from it with -c {path}"
        )
    check_entries(saved, TRAINING, f"checkpoint {str(path)!r}", complete=True)
    check_entries(saved, OPTIONAL, f"checkpoint {str(path)!r}")
    bad = first_non_finite(dict(named_tensors(saved)))
    if bad:
        raise CheckpointError(f"checkpoint {str(path)!r} holds NaN or infinity in {bad}")
    return saved


# -- which file -------------------------------------------------------------------------------------------------------------


def _auto_place(exp: Exp, options: run.RunOptions) -> Path:
    exp_dir = Path(exp.output_dir) / exp.exp_name
    return run.named_dir(exp_dir, options.experiment_name) if options.experiment_name else exp_dir


def _choose(exp: Exp, options: run.RunOptions) -> tuple[Choice | None, dict[str, Any] | None]:
    """On rank 0: what to go on from, and its content."""
    auto, trust = options.resume == run.AUTO, options.trust_checkpoint
    given = Path(options.resume) if options.resume and not auto else None
    if given is not None and not given.is_dir():
        RunLock(given.parent).require_free()
        return _named_file(given, trust)
    folder = given
    if folder is None:
        find = run.find_run if auto else run.newest_run
        folder = find(Path(exp.output_dir) / exp.exp_name, options.experiment_name)
    if folder is None:
        return None, None
    RunLock(folder).require_free(wait=auto)
    return _newest_good(folder, trust, auto)


def _named_file(path: Path, trust: bool) -> tuple[Choice, dict[str, Any]]:
    """A file that was named must be good."""
    try:
        saved = read_full_state(path, trust)
    except CheckpointError as error:
        others = [p for p in _by_step(path.parent, trust) if p != path]
        good = next((p for p in others if _is_good(p, trust)), None)
        hint = f". The newest good checkpoint beside it is {good}: --resume {good}" if good else ""
        raise CheckpointError(f"{error}{hint}") from error
    newer = () if path.name == "last.pth" else tuple(p for p, s in _steps(path.parent, trust).items() if s > saved["step"])
    return choice_of(path, newer), saved


def _newest_good(folder: Path, trust: bool, auto: bool) -> tuple[Choice, dict[str, Any]]:
    faults: list[CheckpointError] = []
    known = _by_step(folder, trust)
    unreadable = [p for p in run.checkpoint_candidates(folder) if p not in known]
    for path in [*unreadable, *known]:
        try:
            saved = read_full_state(path, trust)
        except CheckpointError as error:
            faults.append(error)
            continue
        could_be_newer = faults and (path.name != "last.pth" or len(faults) > len(unreadable))
        if could_be_newer and not auto:
            raise CheckpointError(
                f"{faults[0]}. The newest good checkpoint is {path}, {saved['step']} steps done: go on from it with --resume "
                f"auto, or --resume {path}"
            ) from faults[0]
        for fault in faults:
            logger.warning(str(fault))
        if could_be_newer:
            logger.warning(f"going on from {path}, {saved['step']} steps done; later steps are done again")
        return choice_of(path), saved
    raise CheckpointError(
        f"--resume: no checkpoint in {str(folder)!r} can be resumed: "
        + ("; ".join(map(str, faults)) or "there is none")
        + ". Nothing was started; a new run needs the same command without --resume, and another folder"
    )


def _by_step(folder: Path, trust: bool) -> list[Path]:
    """Checkpoints of a run folder by the step that they say, latest first: clocks may have been set back. Of the same step the
    one after its evaluation, then last.pth, then the later one. Files that cannot be opened are not among them."""
    keys = {}
    for path in run.checkpoint_candidates(folder):
        head = read_heading(path, ("step", "evaluation_due"), trust)
        if head is not None and is_count(head.get("step")):
            due = head.get("evaluation_due") is True
            keys[path] = (head["step"], not due, path.name == "last.pth", path.stat().st_mtime)
    return sorted(keys, key=keys.get, reverse=True)


def _steps(folder: Path, trust: bool) -> dict[Path, int]:
    heads = {p: read_heading(p, ("step",), trust) for p in run.checkpoint_candidates(folder)}
    return {p: head["step"] for p, head in heads.items() if head is not None and is_count(head.get("step"))}


def _is_good(path: Path, trust: bool) -> bool:
    try:
        read_full_state(path, trust)
    except CheckpointError:
        return False
    return True


def choice_of(path: Path, newer: tuple[Path, ...] = ()) -> Choice:
    return Choice(path, _fingerprint(path), newer, _folder_state(path.parent))


def _folder_state(folder: Path) -> dict[Path, Print]:
    return {p: _fingerprint(p) for p in run.checkpoint_candidates(folder)}


def _fingerprint(path: Path) -> Print:
    """What tells whether a file is still, or on another machine, the same one."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_size, found.st_mtime_ns)


def _read_on_all(choice: Choice, saved: dict[str, Any] | None, trust: bool) -> dict[str, Any]:
    """The content on every rank. A machine that does not see rank 0's file gets it from rank 0."""
    if get_world_size() == 1:
        return saved
    same = all_gather_objects(_fingerprint(choice.path) == choice.fingerprint)
    if not all(same):
        ranks = ", ".join(str(rank) for rank, is_same in enumerate(same) if not is_same)
        logger.info(f"{choice.path} is not to be seen from ranks {ranks}: rank 0 sends it")
        return broadcast_object(saved)
    box = [saved]

    def read() -> None:
        if get_rank() > 0:
            box[0] = read_full_state(choice.path, trust)

    gather_from_ranks(read)
    return box[0]


# -- the run folder ---------------------------------------------------------------------------------------------------------


def enter_folder(found: Resumption) -> None:
    """On rank 0, with the folder's lock held: checkpoints of later steps than the one that was named are renamed
    ``NAME.before_resume.pth``, so that what comes now overwrites none of them and no resume takes them for this run's.

    Raises:
        UsageError: another run wrote there since the checkpoint was read.
    """
    if _folder_state(found.path.parent) != found.choice.folder:
        raise UsageError(
            f"run folder {found.path.parent}: its checkpoints changed while this run was being built, since another run was "
            "alive there. Start again"
        )
    moved = []
    for path in found.choice.newer:
        for name in _aside_names(path):
            if not name.exists():
                path.rename(name)
                moved.append(name)
                break
    if moved:
        logger.warning(
            f"{found.path} is older than what the run saved last. Its later checkpoints are kept as "
            f"{', '.join(name.name for name in moved)}; remove them when they are not needed"
        )


def _aside_names(path: Path) -> Iterator[Path]:
    yield path.with_name(f"{path.stem}.before_resume.pth")
    for i in range(2, 1000):
        yield path.with_name(f"{path.stem}.before_resume.{i}.pth")


# -- its state --------------------------------------------------------------------------------------------------------------


def _adopt_values(exp: Exp, found: Resumption) -> None:
    """The run's own command line counts where this one says nothing, so that it need not be typed again."""
    state, taken = found.saved["exp"], []
    now = exp.given()
    for name in state.get("given", {}):
        if name in LOCAL or name in now or name not in exp.field_names():
            continue
        before = getattr(exp, name)
        exp.set(name, state["values"][name], f"command line of {found.path.parent.name}")
        if getattr(exp, name) != before:
            taken.append(f"{name}={getattr(exp, name)}")
    if taken:
        logger.info(f"as on the command line that started {found.path.parent}: {', '.join(taken)}")
    exp.validate()


def restore(trainer: Trainer, found: Resumption) -> None:
    """Puts a built Trainer where the checkpoint was, once all that it says has been found to continue the same run."""
    saved, where = found.saved, f"--resume {found.path}"
    check_continuation(trainer, saved, where)
    rates = [{k: group[k] for k in ("lr", "base_lr")} for group in trainer.optimizer.param_groups]
    try:
        trainer.model.load_state_dict(saved["model"])
        trainer.optimizer.load_state_dict(saved["optimizer"])
        trainer.scaler.load_state_dict(saved["scaler"])
        if trainer.ema is not None:
            trainer.ema.load_state_dict(saved["ema"])
        if "guard" in saved:
            trainer.guard.load_state_dict(saved["guard"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: the state does not fit this run: {str(error).splitlines()[0]}") from error
    for group, own in zip(trainer.optimizer.param_groups, rates):  # the exp decides the rates, the file holds the buffers
        group.update(own)
    trainer.step, trainer.best = saved["step"], dict(saved["best"])
    trainer.evaluation_due = saved["evaluation_due"]
    if found.is_step_back and trainer.best["value"] is not None:
        logger.warning("the best weights of the run came later than this checkpoint: from here on the best is looked for anew")
        trainer.best = {**trainer.best, "value": None, "epoch": None}
    done, steps = divmod(trainer.step, trainer.loader.steps_per_epoch)
    logger.info(f"resumed from {found.path}: {done} epochs and {steps} steps done, best {trainer.best}")
    if trainer.evaluation_due:
        logger.info(f"the evaluation after epoch {done} had not ended: it comes first")
    elif trainer.step == trainer.total_steps:
        logger.info(f"nothing is left to do: all {done} epochs are done (max_epoch={done + 1} would add one)")
