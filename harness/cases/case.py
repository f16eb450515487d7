"""A case: one point of a sweep, typed, validated and named, before anything runs.

A case says what to measure; where and how it runs is up to the run
(:mod:`harness.request.compose`). Two commands that ask for the same measurement make the same
case, so its id finds the record that an earlier command wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, cast

from harness.cases.checkpoint import Checkpoint
from harness.cases.compilation import Compile
from harness.cases.precision import Precision
from harness.cases.profiler import PROFILERS, Profiler
from harness.cases.requirements import require_at_least, require_choice
from harness.cases.task import TASKS, Task
from kernels import BACKENDS, Attention, AttentionBackend, AttentionProblem
from kernels.caches import CACHES, CacheChoice
from kernels.registry import JOINED_LATER, Registry
from models.config import ModelConfig
from models.variants import PLAIN, AttentionVariant
from parallel import STRATEGIES, Strategy
from parallel.context.attention import SequenceParallelAttention

DEVICES = ("cpu", "cuda")


@dataclass(kw_only=True, slots=True)
class Case:
    """One measurement to make. Parts that the task does not use are None.

    ``checkpoint`` and ``profile`` are None as well where nothing is checkpointed or profiled.
    """

    task: Task
    attention: AttentionBackend
    precision: Precision
    parallel: Strategy
    seq_len: int
    batch_size: int
    seed: int
    device: str
    model: ModelConfig | None = None
    compile: Compile | None = None
    checkpoint: Checkpoint | None = field(default=None, metadata={JOINED_LATER: True})
    profile: Profiler | None = field(default=None, metadata={JOINED_LATER: True})
    cache: CacheChoice | None = field(default=None, metadata={JOINED_LATER: True})

    def __post_init__(self) -> None:
        require_at_least("seq_len", self.seq_len, 1)
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("seed", self.seed, 0)
        require_choice("device", self.device, DEVICES)
        if self.parallel.cp > 1 and not isinstance(self.attention, SequenceParallelAttention):
            raise ValueError(
                f"parallel.cp={self.parallel.cp}: attention={self.attention.name} runs on whole "
                f"sequences; choose one that splits them, {', '.join(_that_split_sequences())}"
            )
        if isinstance(self.attention, Attention):
            self.attention.check_mask_options()
            self._require_no_mask_in_vain(self.attention)
        if "model" not in self.task.uses:
            self.model = None
        if "compile" not in self.task.uses:
            self.compile = None
        if self.model is not None and self.model.kv_lora_rank and not self.task.takes_latents:
            raise ValueError(
                f"model.kv_lora_rank={self.model.kv_lora_rank}: task={self.task.name} knows no "
                "latent attention; use task=generate, or leave it out"
            )
        if self.model is not None and self.model.full_attention_every is not None:
            self._require_window()
        if "cache" not in self.task.uses:
            self.cache = None
        self._drop_what_does_nothing()
        self.task.validate(self)
        if self.profile is not None:
            self.profile.validate(self)

    def _require_window(self) -> None:
        """Raise ValueError for layers without a window where no layer has one."""
        assert self.model is not None, "a model has layers"
        if self.attention_variant.window is None:
            raise ValueError(
                f"model.full_attention_every={self.model.full_attention_every}: leaves the window "
                "out of some layers, and there is none; set attention.window, or leave it out"
            )

    def _drop_what_does_nothing(self) -> None:
        if "checkpoint" not in self.task.uses or (
            self.checkpoint is not None and self.checkpoint.scope == "none"
        ):
            self.checkpoint = None
        if "profile" not in self.task.uses or (
            self.profile is not None and self.profile.name == "none"
        ):
            self.profile = None

    @property
    def compiles(self) -> bool:
        """Whether torch.compile compiles any part of it."""
        return self.task.compiles(self) or (self.task.attends and self.attention.compiles)

    @property
    def uses_dynamo(self) -> bool:
        """Whether it compiles or has a model: optimizers and checkpointing import Dynamo too."""
        return self.compiles or self.model is not None

    @property
    def attention_variant(self) -> AttentionVariant:
        """What its attention does beside a causal mask, in layers that have all of it."""
        if not isinstance(self.attention, Attention):
            return PLAIN
        return AttentionVariant(**self.attention.mask_options())

    @property
    def world_size(self) -> int:
        return self.task.world_size(self)

    def has_sequences_on_one_host(self, ranks_on_host: int) -> bool:
        """Whether the ranks of each sequence are on one host, of hosts of so many ranks.

        Those of one sequence are parallel.tp apart, with the ranks of the same weights in between.
        """
        span = self.parallel.cp * self.parallel.tp
        return (
            self.parallel.cp == 1 or self.world_size <= ranks_on_host or ranks_on_host % span == 0
        )

    @property
    def attention_problem(self) -> AttentionProblem:
        return self.task.attention_problem(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` inverts it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Rebuild a case from a record or from a worker's input."""
        return cls(**{key: _restored(key, value) for key, value in values.items()})

    @property
    def id(self) -> str:
        """A slug that a person can read and a hash of everything that defines the case."""
        return f"{self.slug}-{_digest(_defining(self))}"

    def _require_no_mask_in_vain(self, attention: Attention) -> None:
        """Raise ValueError for a window or its like where the task would not use it."""
        if not self.task.attends or self.task.takes_masks:
            return
        usual = type(attention)(name=attention.name).mask_options()
        for key, value in attention.mask_options().items():
            if value != usual[key]:
                raise ValueError(
                    f"attention.{key}={json.dumps(value)}: task={self.task.name} takes no "
                    f"{key}; leave it out, or use task=attention"
                )

    @property
    def slug(self) -> str:
        """The case in a few words that are safe in a file name."""
        parts = [self.task.name, getattr(self.task, "mode", None)]
        parts += [self.model.name if self.model else None]
        parts += [label(self.attention)] if self.task.attends else []
        parts += [self.precision.name]
        parts += [f"b{self.batch_size}", f"s{self.seq_len}"] if self.task.attends else []
        if self.compile is not None and self.compile.scope != "none":
            parts.append(f"compile_{self.compile.scope}")
        if self.checkpoint is not None:
            parts.append(f"checkpoint_{self.checkpoint.label}")
        parts += [self.cache.label] if self.cache is not None else []
        parts += self.task.words()
        if self.parallel.world_size > 1:
            parts.append(_ranks(self.parallel))
        if self.profile is not None:
            parts.append(f"profile_{self.profile.name}")
        parts.append(self.device)
        text = "-".join(part for part in parts if part)
        return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:120]

    @property
    def title(self) -> str:
        """The case in a few words, for progress lines."""
        if not self.task.attends:
            # Some of these have dtypes of their own, and no use for a precision.
            precision = [self.precision.name] if self.precision.name != "fp32" else []
            return " ".join([self.task.name, *precision, *self.task.words()])
        words = [self.model.name if self.model else None, label(self.attention)]
        words += [self.precision.name, getattr(self.task, "mode", None)]
        if self.compile is not None and self.compile.scope != "none":
            words.append(f"compile={self.compile.label}")
        if self.checkpoint is not None:
            words.append(f"checkpoint={self.checkpoint.label}")
        words.append(f"batch {self.batch_size} x seq {self.seq_len}")
        if self.model is None:
            problem = self.attention_problem
            heads = str(problem.num_heads)
            if problem.num_kv_heads != problem.num_heads:
                heads += f":{problem.num_kv_heads}"
            words.append(f"x {heads} heads of {problem.head_dim}")
        words += [f"{self.cache.label} cache"] if self.cache is not None else []
        words += self.task.words()
        if self.world_size > 1:
            words.append(f"{_ranks(self.parallel)} on {self.world_size} ranks")
        if self.profile is not None:
            words.append(f"profile={self.profile.name}")
        return " ".join(word for word in words if word)


_CHOICES: dict[str, Registry[Any]] = {
    "task": TASKS,
    "attention": BACKENDS,
    "parallel": STRATEGIES,
    "profile": PROFILERS,
    "cache": CACHES,
}
_OPTIONS: dict[str, type[Any]] = {
    "precision": Precision,
    "model": ModelConfig,
    "compile": Compile,
    "checkpoint": Checkpoint,
}


def _restored(key: str, value: Any) -> Any:
    """One of a case's fields from its JSON value."""
    if not isinstance(value, dict):
        return value
    return _kind(key, value)(**value)


def _kind(key: str, value: dict[str, Any]) -> type[Any]:
    """The type of one of a case's fields, from its JSON value."""
    return _CHOICES[key][value["name"]].target if key in _CHOICES else _OPTIONS[key]


def digest_of(values: dict[str, Any]) -> str:
    """The hash at the end of the id of a recorded case, without building the case.

    Of values that a case would change or refuse it is no case's hash. Raises KeyError,
    AttributeError and :class:`kernels.registry.RegistryError` for choices that there are not.
    """
    defining = _without_defaults(values, Case)
    for key, value in defining.items():
        if isinstance(value, dict):
            defining[key] = _without_defaults(value, _kind(key, value))
    return _digest(defining)


def _digest(defining: dict[str, Any]) -> str:
    canonical = json.dumps(defining, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def _without_defaults(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Plain values as :func:`_defining` has them."""
    later = _joined_later(cast(Hashable, kind))
    return {key: value for key, value in values.items() if key not in later or value != later[key]}


@cache
def _joined_later(kind: Hashable) -> dict[str, Any]:
    """The options of a dataclass that joined later, and their defaults."""
    return {
        item.name: item.default for item in fields(cast(Any, kind)) if JOINED_LATER in item.metadata
    }


def _that_split_sequences() -> list[str]:
    return [entry.name for entry in BACKENDS if issubclass(entry.target, SequenceParallelAttention)]


def _ranks(parallel: Strategy) -> str:
    """Name and size of each mesh axis: ``ddp_torch2-cp4``, ``tp2``, ``zero_1x2``."""
    times = "x" if parallel.name[-1].isdigit() else ""
    names = {"dp": parallel.name + times}
    return "-".join(f"{names.get(axis, axis)}{ranks}" for axis, ranks in parallel.axes.items())


def _defining(value: Any) -> Any:
    """A dataclass as plain values, without options that joined later and have their default.

    So a record that was written before an option existed keeps the id of its case.
    """
    if not is_dataclass(value):
        return value
    values = _without_defaults(options_of(value), type(value))
    return {key: _defining(item) for key, item in values.items()}


def options_of(part: Any) -> dict[str, Any]:
    """The name and the options of one part of a case: the fields of its dataclass, not copied."""
    return {item.name: getattr(part, item.name) for item in fields(part)}


def label(choice: AttentionBackend | Strategy) -> str:
    """The choice's name, and the options that differ from those that its registration presets."""
    registry = BACKENDS if isinstance(choice, AttentionBackend) else STRATEGIES
    entry = registry[choice.name]
    preset = options_of(entry.target(name=choice.name, **entry.preset))
    changed = {key: value for key, value in options_of(choice).items() if value != preset[key]}
    if not changed:
        return choice.name
    return f"{choice.name}({', '.join(f'{key}={value}' for key, value in changed.items())})"
