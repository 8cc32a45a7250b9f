"""Fields of a multi-task experiment, the tasks as an exp file lists them, and what must hold of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from mmdet.errors import UsageError
from mmdet.exp.base import EXP_FILE, Exp
from mmdet.exp.fields import Size
from mmdet.families.multitask.evaluator import metrics_of
from mmdet.families.multitask.task import COMPONENTS, TaskSpec, check_specs

Curve = Literal["step", "cosine", "linear", "hold_cosine", "dual_cosine", "warmup_cosine", "warmup_poly"]


class MultiTaskSettings(Exp):
    """What an exp file may set. Iterations count; epochs and the total batch, which the Trainer asks for, follow from them."""

    max_iter: int = 300  # iterations of the whole run
    eval_interval = 100  # iterations between evaluations; a divisor of max_iter, or at least max_iter: once, at the end
    save_interval: int = 0  # iterations between files that are kept (iter_NNNNNN.pth); 0: the newest, the best and the final only
    lr_schedule: Curve = "cosine"  # the curve of the learning rate over the iterations
    warmup_iters: int = 0  # iterations of warm-up
    warmup_start: float = 0.01  # factor of the learning rate at the start of the warm-up
    lr_end: float = 0.0  # factor of the learning rate at the end of cosine and linear curves
    lr_steps: tuple[int, ...] = ()  # iterations at which the learning rate of "step" falls
    lr_mults: tuple[float, ...] = ()  # by which factor, at each of them
    poly_power: float = 0.9  # exponent of "warmup_poly"
    freeze_iters: int = 0  # first iterations in which frozen_components are not trained; whole evaluation intervals
    frozen_components: tuple[str, ...] = ()  # some of backbone, neck, head
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr_mult: dict[str, float] = {}  # factor of the learning rate of backbone, neck, head
    clip: dict[str, float] = {}  # largest gradient norm of each backbone, neck, head (clip_mode "component"); absent or 0: none
    clip_mode: Literal["component", "global"] = "component"  # each component by itself, or all together by clip_norm
    norms: dict[str, str] = {}  # batch norms of backbone, neck, head: local (default), frozen, sync
    normalize_weights: bool = True  # task weights add up to 1
    metric_weights: dict[str, float] = {}  # metric -> factor: gives the metric "weighted"
    train_tasks: tuple[str, ...] = ()  # train and judge these tasks alone, as if the file listed no others; empty: all
    task: str = ""  # judge this task alone, by its plain metrics; empty: all
    group_timeout: float = 1800.0  # seconds after which a process that waits for a dead one gives up
    alert_url: str = ""  # gets news of the run by HTTP POST; empty: off
    alert_command: tuple[str, ...] = ()  # program and arguments that get them on standard input; empty: off

    data_dir: str = "data"  # the tasks' folders lie in it; "demo": generated data
    input_size: Size = (192, 192)  # (H, W) px of training images, where a task says nothing
    test_size: Size = (192, 192)  # (H, W) px of evaluation images, where a task says nothing
    multiscale: tuple[float, float] = (1.0, 1.0)  # range of the side in training, as factors; detection tasks
    size_divisor: int = 32  # px; sides are multiples of it
    pixel_mean: tuple[float, float, float] = (0.485, 0.456, 0.406)  # of RGB in [0, 1]
    pixel_std: tuple[float, float, float] = (0.229, 0.224, 0.225)  # of RGB in [0, 1]
    score_threshold: float = 0.01  # detections below are dropped, where a task says nothing
    nms_threshold: float = 0.6  # IoU above which the weaker box of a class is dropped, where a task says nothing
    keep_top_k: int = 100  # detections kept per image, where a task says nothing
    max_dets: int = 100  # detections per image and class that the judge counts

    best_metric = "AP_mean"
    sync_bn = False  # norms={"backbone": "sync"} says it by component
    warmup_epochs = 0.0

    _listed: ClassVar[tuple[TaskSpec, ...]] = ()

    def __init_subclass__(cls, **kwargs) -> None:
        listed = vars(cls).get("tasks")
        if isinstance(listed, list | tuple):  # no field: builders are no plain data
            cls._listed = tuple(listed)
            del cls.tasks
        super().__init_subclass__(**kwargs)

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        """The tasks, made once."""
        cache = self.__dict__
        key = tuple(sorted((k, repr(v)) for k, v in self.values().items() if k not in ("max_epoch", "batch_size")))
        if cache.get("_tasks_key") != key:
            listed = tuple(self.get_tasks())
            unknown = [name for name in self.train_tasks if name not in [spec.name for spec in listed]]
            if unknown:
                raise UsageError(f"train_tasks: {unknown[0]!r}: expected some of {', '.join(spec.name for spec in listed)}")
            kept = [spec for spec in listed if spec.name in self.train_tasks] if self.train_tasks else listed
            cache["_tasks"], cache["_tasks_key"] = tuple(kept), key
        return cache["_tasks"]

    def get_tasks(self) -> Sequence[TaskSpec]:
        """The tasks that the exp file lists."""
        return self._listed

    def task_number(self, name: str) -> int:
        names = [spec.name for spec in self.tasks]
        if name not in names:
            raise UsageError(f"task {name!r}: expected one of {', '.join(names)}")
        return names.index(name)

    # -- checks -----------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        check_specs(self.tasks)
        self._derive()
        super().validate()
        for name in ("max_iter", "group_timeout", "size_divisor", "max_dets", "keep_top_k"):
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        for name in ("save_interval", "warmup_iters", "freeze_iters"):
            self._expect(name, getattr(self, name) >= 0, "0 or more")
        self._expect("warmup_iters", self.warmup_iters <= self.max_iter, f"at most max_iter={self.max_iter}")
        self._expect("eval_interval", self.max_iter % self.round_length == 0, f"a divisor of max_iter={self.max_iter}")
        self._expect("freeze_iters", self.freeze_iters % self.round_length == 0, "a multiple of eval_interval")
        self._expect("lr_mults", len(self.lr_mults) == len(self.lr_steps), "one for each of lr_steps")
        self._expect("lr_end", 0 <= self.lr_end <= 1, "0 to 1")
        self._expect("warmup_start", 0 <= self.warmup_start <= 1, "0 to 1")
        self._expect("grad_accum", self.grad_accum == 1, "1: give the tasks more shards")
        self._expect("sync_bn", not self.sync_bn, 'False: norms={"backbone": "sync"} says it by component')
        self._expect("pixel_std", min(self.pixel_std) > 0, "positive numbers")
        self._expect("alert_url", self.alert_url.startswith(("http://", "https://")) or not self.alert_url, "http:// or https://")
        self._expect("frozen_components", set(self.frozen_components) <= set(COMPONENTS), f"some of {', '.join(COMPONENTS)}")
        self._expect_components()
        self._expect_sizes()
        if self.task:
            self.task_number(self.task)

    def _expect_components(self) -> None:
        for name, fits, wanted in (
            ("lr_mult", lambda v: v > 0, "positive factors"),
            ("clip", lambda v: v >= 0, "norms, 0 or more,"),
            ("norms", lambda v: v in ("local", "frozen", "sync"), "local, frozen or sync"),
        ):
            value = getattr(self, name)
            right = set(value) <= set(COMPONENTS) and all(map(fits, value.values()))
            self._expect(name, right, f"{wanted} of {', '.join(COMPONENTS)}")
        if self.clip and self.clip_mode == "global":
            raise UsageError(f"clip={self.clip} is for each component by itself: clip_mode=global takes clip_norm")
        if self.clip_norm and self.clip_mode == "component":
            raise UsageError(f"clip_norm={self.clip_norm} is for all together: say clip_mode=global, or use clip")
        if self.metric_weights:
            known = metrics_of(self.tasks, self.max_dets, weighted=False)
            right = set(self.metric_weights) <= set(known) and sum(self.metric_weights.values()) > 0
            self._expect("metric_weights", right, f"factors, with a positive sum, of {', '.join(known)}")

    def _expect_sizes(self) -> None:
        low, high = self.multiscale
        self._expect("multiscale", 0 < low <= high, "0 < smallest factor <= largest factor")
        for name in ("input_size", "test_size"):
            right = all(s >= self.size_divisor and s % self.size_divisor == 0 for s in getattr(self, name))
            self._expect(name, right, f"multiples of {self.size_divisor}")
        for spec in self.tasks:
            for size in (spec.input_size, spec.test_size):
                if size is not None and any(s % self.size_divisor or s < self.size_divisor for s in size):
                    raise UsageError(f"task {spec.name!r}: size {size}: expected multiples of size_divisor={self.size_divisor}")

    def _derive(self) -> None:
        """What the Trainer asks for and follows from the tasks and iterations; nobody may give it another value."""
        total = sum(spec.shards * spec.batch_size for spec in self.tasks)
        rounds = max(self.max_iter // self.round_length, 1)
        reasons = {
            "batch_size": (total, "it is the sum over the tasks of shards x batch_size: change those"),
            "max_epoch": (rounds, f"training goes by iterations: give max_iter (now {self.max_iter}) and eval_interval"),
            "save_interval_steps": (self.save_interval, "give save_interval"),
        }
        for name, (value, reason) in reasons.items():
            if self.is_users(name) and getattr(self, name) != value:
                raise UsageError(f"{name}={getattr(self, name)} (set by {self.origin(name)}): {reason}")
            if getattr(self, name) != value:
                self.set(name, value, EXP_FILE)

    @property
    def round_length(self) -> int:
        """Iterations between evaluations: what the Trainer calls an epoch."""
        return min(max(self.eval_interval, 1), max(self.max_iter, 1))

    def eval_interval_at(self, epoch: int) -> int:
        return 1

    def metric_names(self) -> Sequence[str]:
        return metrics_of(self.tasks, self.max_dets, bool(self.metric_weights))
