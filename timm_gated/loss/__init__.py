"""Losses on gates and features, their priors and schedules"""
from .beta import beta_cdf
from .budget import MacBudget, budget_loss
from .feature_shaping import FeatureShaping, gate_prior, shape_features
from .gate_losses import BatchShapingLoss, L0Loss, batch_shaping_loss, check_reduction, l0_loss
from .objective import GateLosses, Objective, Step, Term, find_objectives, objectives
from .priors import Beta, Mixture, Normal, Prior, RelaxedBernoulli, Uniform, create_prior
from .schedules import Epochs, Scheduled, check_epochs, linear_anneal, linear_warmup, scale_epochs
from .snapshots import GateSnapshots, Snapshots, histograms, load_snapshots

__all__ = [
    'BatchShapingLoss',
    'Beta',
    'Epochs',
    'FeatureShaping',
    'GateLosses',
    'GateSnapshots',
    'L0Loss',
    'MacBudget',
    'Mixture',
    'Normal',
    'Objective',
    'Prior',
    'RelaxedBernoulli',
    'Scheduled',
    'Snapshots',
    'Step',
    'Term',
    'Uniform',
    'batch_shaping_loss',
    'beta_cdf',
    'budget_loss',
    'check_epochs',
    'check_reduction',
    'create_prior',
    'find_objectives',
    'gate_prior',
    'histograms',
    'l0_loss',
    'linear_anneal',
    'linear_warmup',
    'load_snapshots',
    'objectives',
    'scale_epochs',
    'shape_features',
]
