"""Conditional channel gated networks for timm

Importing this package registers the gated models with timm. The first of them that is built lets timm's training tasks
add gate losses; models without gates are trained and loaded as before.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
from . import batch_shaped as _batch_shaped  # noqa: F401  (registers its entry point)
from . import dgnet as _dgnet  # noqa: F401  (likewise)
from . import slim_resnet as _slim_resnet  # noqa: F401  (likewise)
from .beta import beta_cdf
from .blocks import GatedBasicBlock, GatedBottleneck
from .budget import MacBudget, budget_loss, mac_formula
from .card import model_card
from .cifar_resnet import CifarResNet
from .convnet_aig import TargetRate, target_rate_loss
from .cut_checkpoints import protect_timm_checkpoints
from .export import export_onnx, export_program
from .fbs import Suppression
from .gate import ChannelGate, Gate, GatePool, Gating, force_gates, gates
from .gated_cifar_resnet import GatedCifarResNet
from .gated_net import GatedNet, checkpoint_filter_fn, list_gated_models
from .gated_resnet import GatedResNet
from .gaternet import GateSparsity
from .hub import check_pretrained, pull_from_hub, push_to_hub, save_pretrained
from .inference import accelerate, instruction_sets
from .losses import BatchShapingLoss, L0Loss, batch_shaping_loss, l0_loss
from .macs import MacCounter, MacFormula, Macs, count_macs
from .objective import GateLosses, Objective, Step, Term, objectives, shape_features
from .priors import Beta, Mixture, Normal, Prior, RelaxedBernoulli, Uniform, create_prior
from .pruning import Pruned, prune_static, specialize
from .schedules import linear_anneal, linear_warmup
from .skipnet import Skipping, reinforce_loss
from .statistics import GateCounts, GateStatistics
from .task import ObjectiveTask, extend_timm_tasks
from .version import __version__

__all__ = [
    'BatchShapingLoss',
    'Beta',
    'ChannelGate',
    'CifarResNet',
    'Gate',
    'GateCounts',
    'GateLosses',
    'GatePool',
    'GateSparsity',
    'GateStatistics',
    'GatedBasicBlock',
    'GatedBottleneck',
    'GatedCifarResNet',
    'GatedNet',
    'GatedResNet',
    'Gating',
    'L0Loss',
    'MacBudget',
    'MacCounter',
    'MacFormula',
    'Macs',
    'Mixture',
    'Normal',
    'Objective',
    'ObjectiveTask',
    'Prior',
    'Pruned',
    'RelaxedBernoulli',
    'Skipping',
    'Step',
    'Suppression',
    'TargetRate',
    'Term',
    'Uniform',
    '__version__',
    'accelerate',
    'batch_shaping_loss',
    'beta_cdf',
    'budget_loss',
    'check_pretrained',
    'checkpoint_filter_fn',
    'count_macs',
    'create_prior',
    'export_onnx',
    'export_program',
    'extend_timm_tasks',
    'force_gates',
    'gates',
    'instruction_sets',
    'l0_loss',
    'linear_anneal',
    'linear_warmup',
    'list_gated_models',
    'mac_formula',
    'model_card',
    'objectives',
    'protect_timm_checkpoints',
    'prune_static',
    'pull_from_hub',
    'push_to_hub',
    'reinforce_loss',
    'save_pretrained',
    'shape_features',
    'specialize',
    'target_rate_loss',
]
