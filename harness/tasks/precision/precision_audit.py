"""``task=precision_audit``: the dtype and the float64 error of every tensor of a training step.

The model is the transformer, on random tokens; ``task=precision_audit_toy`` audits the CS336
text's ToyModel. Nothing is timed. Errors and overflows are the result, and no case is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note
from harness.cases.precision import DTYPE_BYTES
from harness.cases.requirements import require_one_process
from harness.cases.task import Task, Work, task
from harness.tasks import batch
from harness.tasks.precision import audit
from kernels import Attention, AttentionProblem, AttentionSpec
from kernels.backends import naive
from models import accounting, transformer
from models.accounting import num_parameters
from models.config import ModelConfig
from models.memory import TrainingStep
from models.variants import PLAIN

_FLOAT64_BYTES = 8


AUDIT = CaseColumn(name="audit", read=note("audit"))


@task("precision_audit")
@dataclass(kw_only=True, slots=True)
class PrecisionAudit(Task):
    """One step of AdamW on random tokens, compared tensor by tensor with float64."""

    takes_masks: ClassVar[bool] = False
    uses: ClassVar[frozenset[str]] = frozenset({"model"})
    columns: ClassVar[tuple[CaseColumn, ...]] = (AUDIT,)

    def validate(self, case: Case) -> None:
        require_one_process(case)
        if case.attention_variant != PLAIN:
            raise ValueError(
                f"{case.attention_variant.words()}: task=precision_audit compares a causal mask "
                "alone with float64; leave it out"
            )

    def num_passes(self) -> int:
        return 2

    def attention_problem(self, case: Case) -> AttentionProblem:
        model = _model(case)
        return AttentionProblem(
            batch_size=case.batch_size,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_heads,
            q_len=case.seq_len,
            kv_len=case.seq_len,
            head_dim=model.head_dim,
            dtype=case.precision.compute,
            device=case.device,
            causal=True,
            needs_grad=True,
        )

    def work(self, case: Case) -> dict[str, Work]:
        flops = accounting.train_step_flops(_model(case), case.batch_size, case.seq_len)
        return {"step": Work(flops=flops, tokens=case.batch_size * case.seq_len)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """The float64 model, its gradients and all compared tensors stay during the step.

        The step ends with gradients and optimizer state, or begins with more activations than
        are compared.
        """
        model = _model(case)
        step = TrainingStep(
            config=model,
            batch_size=case.batch_size,
            seq_len=case.seq_len,
            mode="train_step",
            attention_saves_scores=case.attention.keeps_scores(self.attention_problem(case)),
            param_bytes=DTYPE_BYTES[case.precision.parameters],
            activation_bytes=DTYPE_BYTES[case.precision.compute],
            autocast=case.precision.autocast is not None,
        ).predict_memory()
        float64_bytes = 2 * _FLOAT64_BYTES * num_parameters(model)
        compared = float(_compared_elements(model) * case.batch_size * case.seq_len)
        own = compared * DTYPE_BYTES[case.precision.compute]
        return {
            "float64": float(float64_bytes),
            "compared": compared * _FLOAT64_BYTES + own,
            "parameters": step.parameters,
            "step": max(step.gradients + step.optimizer_state, step.activations - own),
        }

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        bench.release_memory()
        torch.manual_seed(case.seed)
        config, device = _model(case), bench.device
        attention = case.attention.role(Attention)
        model = transformer.Transformer(config, attention, device=device, dtype=torch.float32)
        exact = transformer.Transformer(
            config, _Float64Attention(), device=device, dtype=torch.float64
        )
        exact.load_state_dict(model.state_dict())
        model.to(getattr(torch, case.precision.parameters))
        data = batch.whole_batch(case, device, bench.rank)

        def audited(network: transformer.Transformer) -> audit.AuditedModel:
            def loss() -> torch.Tensor:
                logits = network(data.tokens, data.positions)
                return transformer.cross_entropy(logits, data.targets)

            return audit.AuditedModel(model=network, head="head", loss=loss)

        bench.outcome.notes["audit"] = audit.audit(case, bench, audited(model), audited(exact))
        bench.note_memory()


class _Float64Attention:
    """Attention by its definition, in the dtype of its inputs."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, /
    ) -> torch.Tensor:
        return naive.explicit_softmax_attention(q, k, v, spec)


def _model(case: Case) -> ModelConfig:
    assert case.model is not None, "precision_audit uses a model"
    return case.model


def _compared_elements(model: ModelConfig) -> int:
    """Elements per token of what layers, blocks and attention calls give, and of its gradients.

    Values, and their gradients, are those that the layer before attention gives; and a block's
    gradient is that of its last layer, whose output it adds.
    """
    d_kv = model.kv_heads * model.head_dim
    # Two norms, q and k before and after RoPE, v, attention, o_proj, w1, w3, w2, the block.
    outputs = 8 * model.d_model + 3 * d_kv + 2 * model.d_ff
    gradients = outputs - model.d_model
    return model.num_layers * (outputs + gradients) + 2 * (2 * model.d_model + model.vocab_size)
