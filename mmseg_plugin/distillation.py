"""Distillation: a trained segmentor teaches the one that is being gated

The natural teacher is the dense network whose weights the gated one starts from. A budget or L0 closes filters, and the
logits of the teacher tell the network, pixel by pixel, what it should have computed with all of them.

Paper: Distilling the Knowledge in a Neural Network (https://arxiv.org/abs/1503.02531)
"""
from typing import Any, Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.runner import load_checkpoint
from mmseg.registry import MODELS

from timm_gated.loss import Step
from timm_gated.utils import check_number, explained

from .losses import GateLoss

__all__ = ['DistillationLoss', 'pixel_distillation_loss']


def pixel_distillation_loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.) -> torch.Tensor:
    """KL divergence from the teacher's class probabilities to the student's, mean over pixels, times temperature².

    Args:
        student: Logits [N, C, H, W].
        teacher: Logits [N, C, h, w], resized to those of the student.
        temperature: Divisor of all logits.
    """
    if teacher.shape[2:] != student.shape[2:]:
        teacher = F.interpolate(teacher, student.shape[2:], mode='bilinear', align_corners=False)
    log_student = F.log_softmax(student / temperature, dim=1)
    log_teacher = F.log_softmax(teacher / temperature, dim=1)
    return F.kl_div(log_student, log_teacher, reduction='none', log_target=True).sum(1).mean() * temperature ** 2


@MODELS.register_module()
class DistillationLoss(GateLoss):
    """Distillation from a trained segmentor of the same classes, of any architecture.

    The teacher is built and loaded at the first training step: validation and tests do not need it. It is no part of
    the model's parameters and checkpoints.

    Args:
        teacher_config: Config of the teacher, as a path or in parsed form.
        teacher_ckpt: Path of its checkpoint.
        temperature: Divisor of the logits of both networks.
        loss_weight: Weight of the loss.
        loss_name: Key in the log.
    """

    needs_logits = True

    def __init__(
            self,
            teacher_config: Union[str, Config],
            teacher_ckpt: str,
            temperature: float = 1.,
            loss_weight: float = 1.,
            loss_name: str = 'loss_distillation',
    ) -> None:
        super().__init__(loss_weight, loss_name)
        self.teacher_config = teacher_config
        self.teacher_ckpt = teacher_ckpt
        self.temperature = check_number(temperature, 'temperature', above=0)
        self._teacher = _Apart()

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        assert step is not None
        teacher = self._teacher.module
        if teacher is None:
            teacher = self._teacher.module = self._load(model)
        teacher.to(step.input.device)
        with torch.no_grad():
            logits = teacher(step.input)
        return pixel_distillation_loss(step.output.float(), logits.float(), self.temperature)

    def _load(self, student: Any) -> nn.Module:
        config = self.teacher_config
        cfg = Config.fromfile(config) if isinstance(config, str) else config
        teacher: Any = MODELS.build(cfg.model).eval().requires_grad_(False)
        with explained(f'teacher_ckpt {self.teacher_ckpt} does not load into the model of teacher_config'):
            load_checkpoint(teacher, self.teacher_ckpt, map_location='cpu', strict=True)
        if teacher.decode_head.out_channels != student.decode_head.out_channels:
            raise ValueError(
                f'the teacher must have the classes of the student, got {teacher.decode_head.out_channels} and '
                f'{student.decode_head.out_channels} outputs.')
        own, other = (_normalisation(m.data_preprocessor) for m in (student, teacher))
        if own != other:
            raise ValueError(
                f'the teacher must normalise images as the student does, got {other} and {own}. Set '
                f'data_preprocessor in one of the configs.')
        return teacher


class _Apart:
    """Holds a module that is no child of its owner: not trained, not saved, and shared by copies of the owner."""

    module: Optional[nn.Module] = None

    def __deepcopy__(self, memo: Any) -> '_Apart':
        return self


def _normalisation(preprocessor: Any) -> Any:
    mean, std = ([round(float(x), 4) for x in getattr(preprocessor, name, ())] for name in ('mean', 'std'))
    return dict(mean=mean, std=std, channel_conversion=preprocessor.channel_conversion)
